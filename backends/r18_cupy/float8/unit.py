"""Sums of e4m3 products as Hopper's tensor cores hold them in registers, for tests.

The contract of `wgmma` kernels says how many bits of fraction it keeps. The tests measure it, on
the device that they run on: see kernels/microbenchmarks/e4m3_sums.cu.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.graph.precision import E4M3
from r18_cupy.cuda import launch as launching
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X

ENTRY = Entry("microbenchmarks/e4m3_sums", "e4m3_sums", (), "sm_90a")
ROWS, DEPTH = 64, 128  # of either matrix
STEP = 32  # products of an instruction


def sums(a: Array, b: Array, steps: int = DEPTH // STEP) -> Array:
    """D = A·Bᵀ in float32 of two (ROWS, DEPTH) matrices in e4m3, over the first steps of K.

    On the current device, whose compute capability is 9.0.
    """
    from r18_cupy.cuda.device import CupyMemory, CupyStream

    memory, stream = CupyMemory(), CupyStream()
    given = [memory.empty(ROWS * DEPTH) for _ in range(2)]
    for buffer, matrix in zip(given, (a, b), strict=True):
        memory.upload(np.ascontiguousarray(matrix, E4M3).view(np.uint8), buffer)
    made = memory.empty(4 * ROWS * ROWS)
    arguments = (X, Pointer(Role.INPUT, 1), OUT, np.int32(steps))
    launch = GridLaunch(ENTRY, (1, 1, 1), (128, 1, 1), arguments)
    enqueue = launching.LAUNCHER.bind([launch], ())
    enqueue(tuple(one.address for one in given), made.address, made.address, stream.cuda.ptr)
    stream.synchronize()
    return memory.download(made, (ROWS, ROWS), np.dtype(np.float32))


__all__ = ["DEPTH", "ENTRY", "ROWS", "STEP", "sums"]
