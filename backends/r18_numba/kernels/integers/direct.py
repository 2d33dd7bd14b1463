"""Direct convolution of integers: one thread per output, a loop over channels and taps."""

from __future__ import annotations

import numpy as np

from r18_numba.kernels.integers.requantize import product, saturated, total
from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64


@kernel()
def direct_qconv(  # type: ignore[no-untyped-def]
    x, w, bias, multiplier, residual, residual_multiplier, out,
    channels, height, width, outputs, out_height, out_width, group_channels, group_outputs,
    kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    count, added, low, high,
):  # fmt: skip
    """x (N, C, H, W), w (O, C/groups, kh, kw), bias and multiplier (O), residual_multiplier (1).

    group_channels, group_outputs: of one group. count: number of outputs. added: whether there is a
    residual. low, high: the output's limits.
    """
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        line = at // out_width
        left = (at - line * out_width) * stride_w - pad_w
        plane = line // out_height
        top = (line - plane * out_height) * stride_h - pad_h
        sample = plane // outputs
        o = plane - sample * outputs
        first = sample * channels + o // group_outputs * group_channels
        acc = i32(bias[np.uint64(o)])
        for c in range(group_channels):
            for r in range(kernel_h):
                row = top + r * dilation_h
                source = ((first + c) * height + row) * width
                tap = ((o * group_channels + c) * kernel_h + r) * kernel_w
                for s in range(kernel_w):
                    column = left + s * dilation_w
                    if row >= 0 and row < height and column >= 0 and column < width:
                        pixel = i32(x[np.uint64(source + column)])
                        acc = i32(acc + i32(pixel * i32(w[np.uint64(tap + s)])))
        number = product(f32(acc), multiplier[np.uint64(o)])
        if added:
            number = total(number, product(f32(residual[np.uint64(at)]), residual_multiplier[0]))
        out[np.uint64(at)] = saturated(number, low, high)
