"""Max-pooling, one thread per output, and the mean over an image, one block per plane."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import REDUCTION_THREADS, kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64
LOWEST = np.float32(-np.inf)


@cache
def build_maxpool(storage: Any) -> Any:
    """The largest pixel of each window, NaN if one is NaN; x (planes, H, W).

    Only pixels inside the image are read, so padding never wins. A window has at least one.
    """

    @kernel()
    def maxpool(  # type: ignore[no-untyped-def]
        x, out, height, width, out_height, out_width,
        kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, count,
    ):  # fmt: skip
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            line = at // out_width
            left = (at - line * out_width) * stride_w - pad_w
            plane = line // out_height
            top = (line - plane * out_height) * stride_h - pad_h
            best = LOWEST
            for h in range(max(top, 0), min(top + kernel_h, height)):
                for v in range(max(left, 0), min(left + kernel_w, width)):
                    value = f32(x[np.uint64((plane * height + h) * width + v)])
                    if value > best or value != value:
                        best = value  # NaN stays: nothing compares greater
            out[at] = storage(best)

    return maxpool


@cache
def build_gap(storage: Any) -> Any:
    """The mean of each plane's `area` elements: one block per plane, a tree over its threads."""

    @kernel()
    def gap(x, out, area):  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(REDUCTION_THREADS, f32)
        thread = cuda.threadIdx.x & 1023
        first = index(cuda.blockIdx.x) * area
        total = f32(0)
        for at in range(thread, area, cuda.blockDim.x):
            total += f32(x[np.uint64(first + at)])
        partial[thread] = total
        span = cuda.blockDim.x // 2
        while span > 0:
            cuda.syncthreads()
            if thread < span:
                partial[thread] += partial[thread + span]
            span //= 2
        if thread == 0:
            out[cuda.blockIdx.x] = storage(partial[0] / f32(area))

    return gap
