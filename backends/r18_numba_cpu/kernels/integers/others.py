"""Quantised ops other than convolution and linear. Activations are flat, channels last."""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.integers.bands import PIXEL_VALUES
from r18_numba_cpu.kernels.integers.bytes import load_bytes
from r18_numba_cpu.kernels.integers.quantize import quantize_run, scale_of
from r18_numba_cpu.kernels.integers.requantize import (
    add_bytes,
    load_number,
    store_quantized,
)
from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.vector import LANES, broadcast, fetch_add


@kernel
def mean(x, multiplier, out, sums, samples, pixels, channels, signed, low, high):
    """out[n, c] = Σ_p x[n, p, c], requantised. x, out: bytes, int8 if `signed`.

    sums: scratch, int32, whole vectors for each sample.
    """
    vectors = (channels + LANES - 1) // LANES
    scale = broadcast(multiplier[0])
    for n in prange(samples):
        here = n * vectors * LANES
        for v in range(vectors * LANES):
            sums[here + v] = np.int32(0)
        for p in range(pixels):
            source = (n * pixels + p) * channels
            for c in range(0, channels, LANES):
                read = load_bytes(x, source + c, min(LANES, channels - c))
                add_bytes(sums, here + c, read, signed)
        for c in range(0, channels, LANES):
            number = load_number(sums, here + c) * scale
            store_quantized(number, out, n * channels + c, min(LANES, channels - c), low, high)


@kernel
def quantize(x, scale, out, rows, samples, channels, pixels, counters, span):
    """out (N, P, C) = fl(x / scale), rounded and saturated, of x (N, C, P).

    rows: scratch, `span` pixels for each worker.
    """
    spans = (pixels + span - 1) // span
    items = samples * spans
    workers = begin_count(counters)
    for worker in prange(workers):
        row = rows[worker * span : (worker + 1) * span]
        divisor = scale_of(scale[0])
        item = fetch_add(counters, 0)
        while item < items:
            sample, first = item // spans, item % spans * span
            count = min(span, pixels - first)
            for c in range(channels):
                source = (sample * channels + c) * pixels + first
                quantize_run(x, source, divisor, row, 0, count)
                to, step = np.uintp((sample * pixels + first) * channels + c), np.uintp(channels)
                for p in range(np.uintp(count)):
                    out[to + p * step] = row[p]
            item = fetch_add(counters, 0)


@kernel
def look_up(x, table, out, pixels, channels, span):
    """out[p, c] = table[c, x[p, c]] of bytes x. span: pixels."""
    for item in prange((pixels + span - 1) // span):
        for p in range(item * span, min(pixels, (item + 1) * span)):
            for c in range(channels):
                at = p * channels + c
                out[at] = table[c * PIXEL_VALUES + x[at]]
