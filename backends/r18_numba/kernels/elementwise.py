"""BatchNorm, ReLU and Add: a thread for each element, and on from there by the grid's size."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build_batchnorm(storage: Any) -> Any:
    """(x − mean)·factor + bias, with factor = weight / √(var + eps) float32 as mean and bias.

    x (N, C, area) of `count` elements.
    """

    @kernel()
    def batchnorm(x, mean, factor, bias, out, channels, area, count):  # type: ignore[no-untyped-def]
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            c = at // area % channels
            value = (f32(x[at]) - mean[c]) * factor[c] + bias[c]
            out[at] = storage(value)

    return batchnorm


@cache
def build_relu(storage: Any) -> Any:
    """x where x > 0 or NaN, else +0; in place where `out` is `x`."""

    @kernel()
    def relu(x, out, count):  # type: ignore[no-untyped-def]
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            value = f32(x[at])
            if value <= f32(0):
                value = f32(0)
            out[at] = storage(value)

    return relu


@cache
def build_add(storage: Any) -> Any:
    """a + b, clamped at zero where `clamp` is not 0; in place where `out` is `a`."""

    @kernel()
    def add(a, b, out, clamp, count):  # type: ignore[no-untyped-def]
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            value = f32(a[at]) + f32(b[at])
            if clamp and value <= f32(0):  # not NaN
                value = f32(0)
            out[at] = storage(value)

    return add
