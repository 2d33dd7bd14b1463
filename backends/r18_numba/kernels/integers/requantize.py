"""From int32 sums to bytes: the steps of `r18.graph.quantized`, each with its own rounding.

NOTE: of `a * b + c`, the compiler makes one fused multiply-add, also with `fastmath` off. It leaves
the functions below apart, because libdevice defines them by their rounding: to nearest, ties to
even. The simulator has no libdevice; there NumPy rounds each operation on float32 scalars.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from r18_numba.kernels.jit import SIMULATED, function

f32, i32 = np.float32, np.int32

product: Any
total: Any
quotient: Any
nearest: Any

if SIMULATED:

    def product(a: Any, b: Any) -> Any:
        return f32(a) * f32(b)

    def total(a: Any, b: Any) -> Any:
        return f32(a) + f32(b)

    def quotient(a: Any, b: Any) -> Any:
        return f32(a) / f32(b)

    nearest = np.rint
else:
    libdevice: Any = import_module("numba.cuda.libdevice")
    product, total = libdevice.fmul_rn, libdevice.fadd_rn
    quotient, nearest = libdevice.fdiv_rn, libdevice.rintf


@function()
def saturated(number, low, high):  # type: ignore[no-untyped-def]
    """Step 4, as int32: the nearest integer, ties to even, in low … high.

    It is saturated first. The limits are integers, so the order does not matter, and int32 then
    holds every number. Step 3 is part of it, because what has a ReLU is stored as uint8.
    """
    return i32(nearest(min(max(number, f32(low)), f32(high))))
