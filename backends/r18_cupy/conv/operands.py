"""Operands of tensor cores from float32: fp16x3 halves and tf32 rounding.

The host side of kernels/mma/split.cuh.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array

LOW_SCALE = np.float32(2**11)


def split(values: Array) -> tuple[Array, Array]:
    """float32 values as two float16 numbers: v ≈ high + low · 2⁻¹¹.

    `high` is the value rounded to nearest even. `low` is the remainder, which float32 holds
    exactly, times 2¹¹ and rounded the same way; NaN where `high` is infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        high = values.astype(np.float16)
        low = ((values - high.astype(np.float32)) * LOW_SCALE).astype(np.float16)
    return high, low


def round_to_tf32(values: Array) -> Array:
    """float32 rounded to 11 significand bits, to nearest, ties away from zero; NaN stays NaN.

    Matches `cvt.rna.tf32.f32`. A NaN whose payload is only in the dropped bits would become
    infinite, so NaNs are replaced.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    kept = np.where(np.isnan(values), np.uint32(0x7FC00000), rounded)

    return kept.view(np.float32)
