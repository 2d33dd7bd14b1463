"""Every op that is not a convolution. Activations are flat, channels last."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from r18_numba.cpu.kernels.jit import kernel
from r18_numba.cpu.kernels.product import COLUMNS, ROWS, multiply
from r18_numba.cpu.kernels.vector import LANES, broadcast, maximum, read, relu, write

SPAN = 4096
"""Elements that a thread takes at a time where each stands for itself."""


@kernel
def rectify(x, out, spans):
    """out = ReLU(x), elementwise; `out` may be x."""
    for span in prange(spans):
        last = min(x.size, (span + 1) * SPAN)
        for at in range(span * SPAN, last, LANES):
            lanes = min(LANES, last - at)
            write(out, at, relu(read(x, at, lanes)), lanes)


@kernel
def add(a, b, out, spans, has_relu):
    """out = a + b, elementwise; `out` may be a."""
    for span in prange(spans):
        last = min(a.size, (span + 1) * SPAN)
        for at in range(span * SPAN, last, LANES):
            lanes = min(LANES, last - at)
            value = read(a, at, lanes) + read(b, at, lanes)
            write(out, at, relu(value) if has_relu else value, lanes)


@kernel
def scale_shift(x, scale, shift, out, pixels, channels):
    """out[p, c] = x[p, c]·scale[c] + shift[c]; `out` may be x."""
    for p in prange(pixels):
        for c in range(0, channels, LANES):
            lanes, at = min(LANES, channels - c), p * channels + c
            value = read(x, at, lanes) * read(scale, c, lanes) + read(shift, c, lanes)
            write(out, at, value, lanes)


@kernel
def maxpool(
    x, out, samples, channels, height, width, out_h, out_w,
    kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
):  # fmt: skip
    """Maxima over the part of each window that lies in the image."""
    for line in prange(samples * out_h):
        sample, top = line // out_h, line % out_h * stride_h - pad_h
        for j in range(out_w):
            left = j * stride_w - pad_w
            for c in range(0, channels, LANES):
                lanes = min(LANES, channels - c)
                best = broadcast(np.float32(-np.inf))
                for row in range(max(0, top), min(height, top + kernel_h)):
                    for column in range(max(0, left), min(width, left + kernel_w)):
                        at = ((sample * height + row) * width + column) * channels + c
                        best = maximum(best, read(x, at, lanes))
                write(out, (line * out_w + j) * channels + c, best, lanes)


@kernel
def mean(x, out, samples, pixels, channels):
    """out[n, c] = Σ_p x[n, p, c] / pixels, pixel after pixel."""
    vectors = (channels + LANES - 1) // LANES
    for item in prange(samples * vectors):
        sample, c = item // vectors, item % vectors * LANES
        lanes, first = min(LANES, channels - c), sample * pixels * channels + c
        total = broadcast(np.float32(0))
        for p in range(pixels):
            total = total + read(x, first + p * channels, lanes)
        write(out, sample * channels + c, total / broadcast(np.float32(pixels)), lanes)


@kernel
def linear(x, weight, bias, out, sums, samples, features, outputs):
    """out (N, O) = x (N, F)·weight + bias; weight in panels (⌈O/COLUMNS⌉, F, COLUMNS).

    sums: a scratch of a tile for each panel.
    """
    panels = (outputs + COLUMNS - 1) // COLUMNS
    for panel in prange(panels):
        here = panel * ROWS * COLUMNS
        for n in range(0, samples, ROWS):
            count = min(ROWS, samples - n)
            multiply(
                count, x, n * features, features, weight, panel * features * COLUMNS,
                sums, here, COLUMNS, 1, 1, features, 0, 0,
            )  # fmt: skip
            for p in range(count):
                for o in range(min(COLUMNS, outputs - panel * COLUMNS)):
                    to = panel * COLUMNS + o
                    out[(n + p) * outputs + to] = sums[here + p * COLUMNS + o] + bias[to]


@kernel
def softmax(x, out, samples, classes):
    """exp(x − max) / Σ exp(x − max) of each row."""
    for n in prange(samples):
        first = n * classes
        largest = x[first]
        for k in range(classes):
            value = x[first + k]
            if value > largest or math.isnan(value):
                largest = value
        total = np.float32(0)
        for k in range(classes):
            value = np.exp(x[first + k] - largest)
            out[first + k] = value
            total += value
        for k in range(classes):
            out[first + k] /= total


@kernel
def to_channels_last(x, out, samples, channels, height, width):
    """(N, C, H, W) to (N, H, W, C)."""
    for line in prange(samples * height):
        sample, row = line // height, line % height
        for c in range(channels):
            source = ((sample * channels + c) * height + row) * width
            for j in range(width):
                out[(line * width + j) * channels + c] = x[source + j]


@kernel
def to_channels_first(x, out, samples, channels, height, width):
    """(N, H, W, C) to (N, C, H, W)."""
    for line in prange(samples * height):
        sample, row = line // height, line % height
        for c in range(channels):
            to = ((sample * channels + c) * height + row) * width
            for j in range(width):
                out[to + j] = x[(line * width + j) * channels + c]
