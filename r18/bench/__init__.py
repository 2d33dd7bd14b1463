"""Speed: contenders timed in turns, limits of the hardware, tuning, profiles, and their records."""
