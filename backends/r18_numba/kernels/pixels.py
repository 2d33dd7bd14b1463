"""Pixels in bytes into what is stored: a thread for each element, on from there by the grid."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build_normalize(storage: Any) -> Any:
    """x·scale + shift of bytes x (N, area, C) into out (N, C, area) of `count` elements."""

    @kernel()
    def normalize(x, scale, shift, out, channels, area, count):  # type: ignore[no-untyped-def]
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            plane, pixel = at // area, at % area
            c = plane % channels
            value = f32(x[(plane // channels * area + pixel) * channels + c])
            out[at] = storage(value * scale[c] + shift[c])

    return normalize
