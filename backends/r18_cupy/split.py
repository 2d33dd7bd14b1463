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
