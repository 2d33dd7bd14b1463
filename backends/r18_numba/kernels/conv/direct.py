"""Direct convolution: one thread per output, a loop over channels and taps."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build(storage: Any) -> Any:
    """The kernel for a storage format.

    x (N, C, H, W), w (O, C/groups, kh, kw), bias (O) float32. group_channels, group_outputs: of one
    group. count: number of outputs. A tap outside the image counts as +0 times the weight. fused:
    bit 1 adds the residual, bit 2 applies ReLU.
    """

    @kernel()
    def direct_conv(  # type: ignore[no-untyped-def]
        x, w, bias, residual, out,
        channels, height, width, outputs, out_height, out_width, group_channels, group_outputs,
        kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, count, fused,
    ):  # fmt: skip
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            line = at // out_width
            left = (at - line * out_width) * stride_w - pad_w
            plane = line // out_height
            top = (line - plane * out_height) * stride_h - pad_h
            sample = plane // outputs
            o = plane - sample * outputs
            first = sample * channels + o // group_outputs * group_channels
            total = f32(0)
            for c in range(group_channels):
                for r in range(kernel_h):
                    row = top + r * dilation_h
                    source = ((first + c) * height + row) * width
                    tap = ((o * group_channels + c) * kernel_h + r) * kernel_w
                    for s in range(kernel_w):
                        column = left + s * dilation_w
                        pixel = f32(0)
                        if row >= 0 and row < height and column >= 0 and column < width:
                            pixel = f32(x[np.uint64(source + column)])
                        total += f32(w[np.uint64(tap + s)]) * pixel
            total += bias[np.uint64(o)]
            if fused & 1:
                total += f32(residual[np.uint64(at)])
            if fused & 2 and total <= f32(0):  # not NaN
                total = f32(0)
            out[np.uint64(at)] = storage(total)

    return direct_conv
