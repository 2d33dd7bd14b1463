"""Pixels in bytes, channels last, into floats."""

from __future__ import annotations

from numba import prange

from r18_numba.cpu.kernels.jit import kernel

SPAN = 4096
"""Pixels that a thread takes at a time."""


@kernel
def normalize(x, scale, shift, out, pixels, channels, spans):
    """out[p, c] = x[p, c]·scale[c] + shift[c]."""
    for span in prange(spans):
        for p in range(span * SPAN, min(pixels, (span + 1) * SPAN)):
            for c in range(channels):
                at = p * channels + c
                out[at] = x[at] * scale[c] + shift[c]
