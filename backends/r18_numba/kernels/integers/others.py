"""Quantised ops other than convolution and linear. `count`: number of outputs."""

from __future__ import annotations

import numpy as np

from r18_numba.kernels.integers.requantize import product, quotient, saturated
from r18_numba.kernels.jit import REDUCTION_THREADS, kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64


@kernel()
def qmaxpool(  # type: ignore[no-untyped-def]
    x, out, height, width, out_height, out_width,
    kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, count,
):  # fmt: skip
    """The largest pixel of each window; x (planes, H, W).

    Only pixels inside the image are read, so padding never wins. A window has at least one.
    """
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        line = at // out_width
        left = (at - line * out_width) * stride_w - pad_w
        plane = line // out_height
        top = (line - plane * out_height) * stride_h - pad_h
        best = i32(-128)  # no byte is less
        for h in range(max(top, 0), min(top + kernel_h, height)):
            for v in range(max(left, 0), min(left + kernel_w, width)):
                best = max(best, i32(x[np.uint64((plane * height + h) * width + v)]))
        out[np.uint64(at)] = best


@kernel()
def qgap(x, multiplier, out, area, low, high):  # type: ignore[no-untyped-def]
    """The requantised sum of each plane's `area` bytes: a block per plane, a tree over threads."""
    partial = cuda.shared.array(REDUCTION_THREADS, i32)
    thread = cuda.threadIdx.x & 1023
    first = index(cuda.blockIdx.x) * area
    acc = i32(0)
    for at in range(thread, area, cuda.blockDim.x):
        acc = i32(acc + i32(x[np.uint64(first + at)]))
    partial[thread] = acc
    span = cuda.blockDim.x // 2
    while span > 0:
        cuda.syncthreads()
        if thread < span:
            partial[thread] += partial[thread + span]
        span //= 2
    if thread == 0:
        out[cuda.blockIdx.x] = saturated(product(f32(partial[0]), multiplier[0]), low, high)


@kernel()
def quantize(x, scale, out, count):  # type: ignore[no-untyped-def]
    """fl(x / scale) in int8."""
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        out[np.uint64(at)] = saturated(quotient(x[np.uint64(at)], scale[0]), -128, 127)


@kernel()
def quantize_pixels(x, table, out, channels, area, count):  # type: ignore[no-untyped-def]
    """table[c, x] of bytes x (N, area, C) into out (N, C, area). table: (C, 256)."""
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        plane = at // area
        c = plane % channels
        source = (plane // channels * area + at - plane * area) * channels + c
        out[np.uint64(at)] = table[np.uint64(c * 256 + index(x[np.uint64(source)]))]


@kernel()
def transpose(x, out, rows, columns, count):  # type: ignore[no-untyped-def]
    """out (N, columns, rows) of x (N, rows, columns)."""
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        line = at // rows
        sample = line // columns
        source = (sample * rows + at - line * rows) * columns + line - sample * columns
        out[np.uint64(at)] = x[np.uint64(source)]
