"""Operands of tensor cores from float32: fp16x3 halves and tf32 rounding.

The host side of kernels/mma/split.cuh and of `round_operand` in kernels/mma/mma.cuh.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.graph.precision import round_to_tf32

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


__all__ = ["LOW_SCALE", "round_to_tf32", "split"]
