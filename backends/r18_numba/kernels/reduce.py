"""What the reductions over a block share."""

MOST_THREADS = 256
"""Of a block that reduces; a power of two, as the number that it is launched with."""
