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
    channels, height, width, outputs, out_height, out_width,
    kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, count, added, low, high,
):  # fmt: skip
    """x (N, C, H, W), w (O, C, kh, kw), bias and multiplier (O), residual_multiplier (1).

    count: number of outputs. added: whether there is a residual. low, high: what it saturates at.
    """
    for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
        line = at // out_width
        left = (at - line * out_width) * stride_w - pad_w
        plane = line // out_height
        top = (line - plane * out_height) * stride_h - pad_h
        sample = plane // outputs
        o = plane - sample * outputs
        acc = i32(bias[np.uint64(o)])
        for c in range(channels):
            for r in range(max(0, -top), min(kernel_h, height - top)):
                source = ((sample * channels + c) * height + top + r) * width + left
                tap = ((o * channels + c) * kernel_h + r) * kernel_w
                for s in range(max(0, -left), min(kernel_w, width - left)):
                    pixel, weight = i32(x[np.uint64(source + s)]), i32(w[np.uint64(tap + s)])
                    acc = i32(acc + i32(pixel * weight))
        number = product(f32(acc), multiplier[np.uint64(o)])
        if added:
            number = total(number, product(f32(residual[np.uint64(at)]), residual_multiplier[0]))
        out[np.uint64(at)] = saturated(number, low, high)
