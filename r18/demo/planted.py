"""A wrong kernel for the oracle to find, and the same one mended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def divides_by_one_less(x: Array, output_size: int = 1) -> Array:
    """The global average of (N, C, H, W) as (N, C, 1, 1), wrong: divided by H·W − 1."""
    height, width = x.shape[2:]
    with np.errstate(divide="ignore", invalid="ignore"):  # of one pixel
        return np.asarray(x.sum(axis=(2, 3), keepdims=True) / np.float32(height * width - 1))


def mended(x: Array, output_size: int = 1) -> Array:
    """The global average of (N, C, H, W) as (N, C, 1, 1): divided by H·W."""
    height, width = x.shape[2:]
    return np.asarray(x.sum(axis=(2, 3), keepdims=True) / np.float32(height * width))


__all__ = ["divides_by_one_less", "mended"]
