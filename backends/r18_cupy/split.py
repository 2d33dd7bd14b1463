"""float32 factors as pairs of float16 numbers, for precision `fp16x3`: v ≈ high + low·2⁻¹¹.

`kernels/split.cuh` does the same to what the device reads.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.precision import Precision

SCALE = np.float32(2.0**11)


def is_split(precision: Precision) -> bool:
    return precision.multiply == "fp16x2"


def factor_dtype(precision: Precision) -> np.dtype[np.generic]:
    """Of the numbers that are multiplied, as registers hold them."""
    return np.dtype(np.float16) if is_split(precision) else precision.dtype


def split(values: Array) -> Array:
    """[2, ...] float16: the nearest number, and 2¹¹ times what it misses, each to even.

    Where the first is infinite or NaN, the second is too.
    """
    given = np.asarray(values, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        high = given.astype(np.float16)
        low = ((given - high.astype(np.float32)) * SCALE).astype(np.float16)
    return np.stack([high, low])
