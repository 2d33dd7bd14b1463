"""Softmax: one block per row, with tree reductions for the maximum and the sum."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import REDUCTION_THREADS, kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64
LOWEST = np.float32(-np.inf)


@cache
def build(storage: Any) -> Any:
    """exp(x − max) / Σ exp(x − max) over each row of x (rows, features).

    If a row has a NaN, its maximum and so the whole row is NaN. If it has +Inf, or only −Inf, a
    difference of infinities is NaN, which the sum spreads to the whole row.
    """

    @kernel()
    def softmax(x, out, features):  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(REDUCTION_THREADS, f32)
        thread = cuda.threadIdx.x & 1023
        first = index(cuda.blockIdx.x) * features
        largest = LOWEST
        for at in range(thread, features, cuda.blockDim.x):
            value = f32(x[np.uint64(first + at)])
            if value > largest or value != value:
                largest = value  # NaN stays: nothing compares greater
        partial[thread] = largest
        span = cuda.blockDim.x // 2
        while span > 0:
            cuda.syncthreads()
            if thread < span:
                value = partial[thread + span]
                if value > partial[thread] or value != value:
                    partial[thread] = value
            span //= 2
        cuda.syncthreads()
        largest = partial[0]
        cuda.syncthreads()  # all threads have read it before it is overwritten
        total = f32(0)
        for at in range(thread, features, cuda.blockDim.x):
            total += f32(math.exp(f32(x[np.uint64(first + at)]) - largest))
        partial[thread] = total
        span = cuda.blockDim.x // 2
        while span > 0:
            cuda.syncthreads()
            if thread < span:
                partial[thread] += partial[thread + span]
            span //= 2
        cuda.syncthreads()
        total = partial[0]
        for at in range(thread, features, cuda.blockDim.x):
            value = f32(math.exp(f32(x[np.uint64(first + at)]) - largest))
            out[np.uint64(first + at)] = storage(value / total)

    return softmax
