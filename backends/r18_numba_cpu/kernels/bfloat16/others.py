"""Ops of bfloat16 whose kernels in `kernels.others` read or write single elements."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.others import SPAN
from r18_numba_cpu.kernels.vector import LANES, broadcast, load_lanes, store_lanes


@kernel
def softmax(x, out, terms, samples, classes):
    """exp(x − max) / Σ exp(x − max) of each row. terms: scratch, two rows of float32 for each."""
    for n in prange(samples):
        first, wide = n * classes, 2 * n * classes
        exps = wide + classes
        largest = np.float32(-np.inf)
        for c in range(0, classes, LANES):
            lanes = min(LANES, classes - c)
            store_lanes(terms, wide + c, load_lanes(x, first + c, lanes), lanes)
        for k in range(classes):
            value = terms[wide + k]
            if value > largest or math.isnan(value):
                largest = value
        total = np.float32(0)
        for k in range(classes):
            value = np.exp(terms[wide + k] - largest)
            terms[exps + k] = value
            total += value
        for c in range(0, classes, LANES):
            lanes = min(LANES, classes - c)
            share = load_lanes(terms, exps + c, lanes) / broadcast(total)
            store_lanes(out, first + c, share, lanes)


@kernel
def normalize(x, scale, shift, out, terms, pixels, channels, spans):
    """out[p, c] = x[p, c]·scale[c] + shift[c], of bytes x.

    terms: scratch, a float32 for each output.
    """
    for span in prange(spans):
        begin, end = span * SPAN * channels, min(pixels, (span + 1) * SPAN) * channels
        for at in range(begin, end):
            c = at % channels
            terms[at] = x[at] * scale[c] + shift[c]
        for at in range(begin, end, LANES):
            lanes = min(LANES, end - at)
            store_lanes(out, at, load_lanes(terms, at, lanes), lanes)
