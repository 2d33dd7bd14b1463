"""Quantised ops other than convolution and linear. Activations are flat, channels last."""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.jit import function, kernel


@function
def requantized(number, low, high):
    """Step 4: the nearest integer, ties to even, saturated. See `requantize.store_quantized`."""
    return np.rint(min(max(number, low), high))


@kernel
def maxpool(x, out, shape, low):
    """Maxima over the part of each window that is inside the image. shape: as of a convolution.

    low: the least value of the format. x, out: of it.
    """
    height, width, channels = shape.height, shape.width, shape.channels
    for line in prange(shape.samples * shape.out_h):
        sample, top = line // shape.out_h, line % shape.out_h * shape.stride_h - shape.pad_h
        for j in range(shape.out_w):
            left = j * shape.stride_w - shape.pad_w
            to = (line * shape.out_w + j) * channels
            out[to : to + channels] = low
            for row in range(max(0, top), min(height, top + shape.kernel_h)):
                for column in range(max(0, left), min(width, left + shape.kernel_w)):
                    at = ((sample * height + row) * width + column) * channels
                    for c in range(channels):
                        out[to + c] = max(out[to + c], x[at + c])


@kernel
def mean(x, multiplier, out, sums, samples, pixels, channels, low, high):
    """out[n, c] = Σ_p x[n, p, c], requantised. sums: scratch, int32, of out's shape."""
    for n in prange(samples):
        here = n * channels
        sums[here : here + channels] = 0
        for p in range(pixels):
            for c in range(channels):
                sums[here + c] += np.int32(x[(n * pixels + p) * channels + c])
        for c in range(channels):
            number = np.float32(sums[here + c]) * multiplier[0]
            out[here + c] = requantized(number, low, high)


@kernel
def quantize(x, scale, out, samples, channels, pixels, span):
    """out (N, P, C) = fl(x / scale), rounded and saturated, of x (N, C, P). span: pixels."""
    spans = (pixels + span - 1) // span
    low, high = np.float32(-128), np.float32(127)
    for item in prange(samples * spans):
        sample, first = item // spans, item % spans * span
        for c in range(channels):
            source = (sample * channels + c) * pixels
            to = sample * pixels * channels + c
            for p in range(first, min(pixels, first + span)):
                number = x[source + p] / scale[0]
                out[to + p * channels] = requantized(number, low, high)


@kernel
def look_up(x, table, out, pixels, channels, span):
    """out[p, c] = table[c, x[p, c]] of bytes x. span: pixels."""
    for item in prange((pixels + span - 1) // span):
        for p in range(item * span, min(pixels, (item + 1) * span)):
            for c in range(channels):
                at = p * channels + c
                out[at] = table[c * 256 + x[at]]
