"""Every op other than convolution. Activations are flat, channels last."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, multiply
from r18_numba_cpu.kernels.vector import (
    LANES,
    broadcast,
    load_lanes,
    relu,
    store_lanes,
)

SPAN = 4096
"""Elements, or pixels, that a thread processes at a time in elementwise kernels."""


@kernel
def rectify(x, out, spans):
    """out = ReLU(x), elementwise; `out` may be x."""
    for span in prange(spans):
        last = min(x.size, (span + 1) * SPAN)
        for at in range(span * SPAN, last, LANES):
            lanes = min(LANES, last - at)
            store_lanes(out, at, relu(load_lanes(x, at, lanes)), lanes)


@kernel
def add(a, b, out, spans, has_relu):
    """out = a + b, elementwise; `out` may be a."""
    for span in prange(spans):
        last = min(a.size, (span + 1) * SPAN)
        for at in range(span * SPAN, last, LANES):
            lanes = min(LANES, last - at)
            value = load_lanes(a, at, lanes) + load_lanes(b, at, lanes)
            store_lanes(out, at, relu(value) if has_relu else value, lanes)


@kernel
def scale_shift(x, scale, shift, out, pixels, channels):
    """out[p, c] = x[p, c]·scale[c] + shift[c]; `out` may be x."""
    for p in prange(pixels):
        for c in range(0, channels, LANES):
            lanes, at = min(LANES, channels - c), p * channels + c
            value = load_lanes(x, at, lanes) * load_lanes(scale, c, lanes) + load_lanes(
                shift, c, lanes
            )
            store_lanes(out, at, value, lanes)


@kernel
def mean(x, out, samples, pixels, channels):
    """out[n, c] = Σ_p x[n, p, c] / pixels, summed in the order of the pixels."""
    vectors = (channels + LANES - 1) // LANES
    for item in prange(samples * vectors):
        sample, c = item // vectors, item % vectors * LANES
        lanes, first = min(LANES, channels - c), sample * pixels * channels + c
        total = broadcast(np.float32(0))
        for p in range(pixels):
            total = total + load_lanes(x, first + p * channels, lanes)
        store_lanes(out, sample * channels + c, total / broadcast(np.float32(pixels)), lanes)


@kernel
def linear(x, weight, bias, out, sums, samples, features, outputs):
    """out (N, O) = x (N, F)·weight + bias; weight in panels (⌈O/COLUMNS⌉, F, COLUMNS).

    sums: scratch, a register tile for each panel.
    """
    panels = (outputs + COLUMNS - 1) // COLUMNS
    for panel in prange(panels):
        here = panel * ROWS * COLUMNS
        for n in range(0, samples, ROWS):
            count = min(ROWS, samples - n)
            multiply(
                count, x, n * features, features, weight, panel * features * COLUMNS,
                sums, here, COLUMNS, Depth(1, features, 0),
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
def normalize(x, scale, shift, out, pixels, channels, spans):
    """out[p, c] = x[p, c]·scale[c] + shift[c], of bytes x."""
    for span in prange(spans):
        for p in range(span * SPAN, min(pixels, (span + 1) * SPAN)):
            for c in range(channels):
                at = p * channels + c
                out[at] = x[at] * scale[c] + shift[c]


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
