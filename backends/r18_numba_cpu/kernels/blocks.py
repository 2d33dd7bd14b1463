"""How workers share the blocks of a kernel, and the rows of a window that an image has."""

from __future__ import annotations

from r18_numba_cpu.kernels.arguments import LINE
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import fetch_add


@function
def begin_count(counters):
    """Set all counters to 0, and return the number of workers. counters: int64, a cache line each.

    NOTE: they are an argument, because kernels cannot allocate; see `jit.UNCOUNTED`.
    """
    for at in range(counters.size):
        counters[at] = 0
    return counters.size // LINE


@function
def take_block(counters, worker, blocks):
    """The next block for a worker, or `blocks` if none is left. counters: see `begin_count`.

    Blocks are shared out in equal parts, so that a worker reads what the same part of the kernel
    before has left in its core's cache. A worker that has finished its part takes from the others'.
    """
    workers = counters.size // LINE
    for turn in range(workers):
        whose = (worker + turn) % workers
        first, end = whose * blocks // workers, (whose + 1) * blocks // workers
        block = first + fetch_add(counters, whose * LINE)
        if block < end:
            return block
    return blocks


@function
def rows_inside(first, count, height):
    """The rows of a window that an image has: how many come before them, and how many they are.

    The window has `count` rows from row `first` of the image on, which may be above it.
    """
    above = min(count, max(0, -first))
    return above, max(above, min(count, height - first)) - above
