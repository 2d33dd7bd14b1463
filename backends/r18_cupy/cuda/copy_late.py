"""A copy that ends late, by which the oracle asks whether kernels wait for what is before them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X

NANOSECONDS = 300_000
"""From the copy's launch to its begin: many times what the host takes to enqueue the next."""
BLOCKS, THREADS = 32, 256
ENTRY = Entry("common/copy_late", "copy_late")


@lru_cache(maxsize=256)
def late_copy(nbytes: int) -> GridLaunch:
    """The launch that copies its input to its output; see kernels/copy_late.cu. Pure."""
    sizes = np.uint64(nbytes), np.uint32(NANOSECONDS)
    return GridLaunch(ENTRY, (BLOCKS, 1, 1), (THREADS, 1, 1), (X, OUT, *sizes))
