"""Where a timed program's inputs are: evicted from the device's caches, or still on the host."""
