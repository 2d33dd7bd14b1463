"""BatchNorm, ReLU, Add and Normalize: grid-stride loops over the elements."""

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
    """(x − mean)·factor + bias. factor = weight / √(var + eps), mean and bias are float32.

    x (N, C, area) has `count` elements.
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
    """x where x > 0 or NaN, else +0. `out` may be `x`."""

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
    """a + b, with ReLU if `clamp` is not 0. `out` may be `a`."""

    @kernel()
    def add(a, b, out, clamp, count):  # type: ignore[no-untyped-def]
        for at in range(cuda.grid(1), index(count), cuda.gridsize(1)):
            value = f32(a[at]) + f32(b[at])
            if clamp and value <= f32(0):  # not NaN
                value = f32(0)
            out[at] = storage(value)

    return add


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
