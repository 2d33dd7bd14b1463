"""float32 factors as two float16 numbers each: v ≈ high + low · 2⁻¹¹. The host's side of
kernels/split.cuh."""

from __future__ import annotations

import numpy as np

from r18.backend import Array

LOW_SCALE = np.float32(2**11)


def split(values: Array) -> tuple[Array, Array]:
    """High and low halves of float32 values, float16.

    `high` is a value rounded to nearest even. `low` is what that leaves, which float32 holds
    exactly, times 2¹¹ and rounded likewise; it is NaN where `high` is infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        high = values.astype(np.float16)
        low = ((values - high.astype(np.float32)) * LOW_SCALE).astype(np.float16)
    return high, low


def round_to_tf32(values: Array) -> Array:
    """float32 to its nearest value of 11 significand bits, ties away from zero; NaN stays NaN.

    What `cvt.rna.tf32.f32` computes. A NaN may have its only bits among those cut off, and would
    become infinite.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    kept = np.where(np.isnan(values), np.uint32(0x7FC00000), rounded)
    # An infinity has no low bits: rounding leaves it.
    return kept.view(np.float32)
