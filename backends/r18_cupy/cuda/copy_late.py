"""A delayed copy, with which the oracle checks that kernels wait for the launch before them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X

NANOSECONDS = 300_000
"""The delay before the copy: many times what the host takes to enqueue the next launch."""
BLOCKS, THREADS = 32, 256
ENTRY = Entry("common/copy_late", "copy_late")


@lru_cache(maxsize=256)
def late_copy(nbytes: int) -> GridLaunch:
    """The launch that copies its input to its output; see kernels/common/copy_late.cu. Pure."""
    sizes = np.uint64(nbytes), np.uint32(NANOSECONDS)
    return GridLaunch(ENTRY, (BLOCKS, 1, 1), (THREADS, 1, 1), (X, OUT, *sizes))
