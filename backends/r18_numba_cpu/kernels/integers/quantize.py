"""Numbers into int8, a vector at a time: `Quantize` of `r18.graph.quantized`, to the bit.

The integer of y = fl(x / s) comes from a product with r = fl(1 / s), because a division takes
longer than all else together. Only a vector with a number close to a tie is divided: of random
numbers, one vector of 16 in 1,000.

1. t = fl(x · r + 768.5), limited to the t of −128 … 127. As t is between 512 and 1024, its bits are
   a fixed-point number: the low byte above `FRACTION` bits is the integer.
2. A fraction of 0 means that x · r is close to a tie: within 2⁻¹⁵, half a unit of t.

Any other t is on the same side of each tie as y. It is at least a unit from the tie, so x · r, also
if it is rounded before the sum, is 2⁻¹⁵ from it or more, and y is closer to x · r than that. For
|x / s| < 128.5 each rounding, of r, of the product and of y, adds at most 2⁻²⁴ · 128.5, which is
less than 1.6 · 2⁻¹⁶ in total. Where r is subnormal, its error is up to 2⁻²² of itself, but then
s > 2¹²⁶ and |x / s| < 4. Subnormal products and quotients are off by 2⁻¹⁵⁰.

Larger quotients and infinities are limited to the same integers either way, and NaN is −128. If r
is infinite, with s ≤ 2⁻¹²⁸, every vector is divided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from r18_numba_cpu.kernels.integers.bytes import BYTES, byte_vector, store_bytes, store_whole
from r18_numba_cpu.kernels.integers.requantize import INTEGERS, rounded
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    VECTOR,
    broadcast,
    intrinsic,
    load,
    load_lanes,
    splat,
    vector,
)

LOWEST, HIGHEST = np.float32(-128), np.float32(127)
"""The ends of int8."""
ONE, INFINITY = np.float32(1), np.float32(np.inf)

FRACTION = 14
"""The bits of a float32 between 512 and 1024 that are its fraction."""
ZERO = 768.5
"""t of x = 0. NOTE: 768 is a multiple of 256, so that the low byte is the integer, and half a unit
more rounds to nearest, where the fraction is cut off."""


class Scale(NamedTuple):
    """A scale, and what replaces division by it.

    inverse: fl(1 / value). fraction: the mask of t's fraction; 0 if every vector is divided.
    """

    value: np.float32
    inverse: np.float32
    fraction: np.int32


@function
def scale_of(value):
    """The `Scale` of a float32, positive and finite."""
    inverse = ONE / value
    return Scale(value, inverse, np.int32((1 << FRACTION) - 1 if inverse < INFINITY else 0))


@intrinsic
def fixed_point(typing: Any, x: Any, inverse: Any) -> Any:
    """t of x, with the integer of x · inverse. NaN has the t of −128."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def constant(number: float) -> Any:
            return ir.Constant(VECTOR, [number] * LANES)

        fused = ("contract",)
        t = builder.fadd(builder.fmul(*values, flags=fused), constant(ZERO), flags=fused)
        low, high = constant(ZERO + float(LOWEST)), constant(ZERO + float(HIGHEST))
        t = builder.select(builder.fcmp_ordered(">", t, low), t, low)
        return builder.select(builder.fcmp_ordered("<", t, high), t, high)

    return vector(vector, vector), generate


@intrinsic
def any_zero(typing: Any, t: Any, mask: Any) -> Any:
    """Whether any lane has none of the bits of `mask`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.and_(builder.bitcast(values[0], INTEGERS), splat(builder, values[1]))
        lanes = builder.icmp_unsigned("==", found, ir.Constant(INTEGERS, None))
        bits = ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(lanes, bits), bits(0))

    return types.boolean(vector, types.int32), generate


@intrinsic
def integers(typing: Any, t: Any) -> Any:
    """The bytes above the fraction of t."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        fraction = ir.Constant(INTEGERS, [FRACTION] * LANES)
        whole = builder.lshr(builder.bitcast(values[0], INTEGERS), fraction)
        return builder.trunc(whole, BYTES)

    return byte_vector(vector), generate


@function
def quantized(x, scale):
    """fl(x / scale), rounded and saturated to int8. scale: `Scale`."""
    t = fixed_point(x, broadcast(scale.inverse))
    if any_zero(t, scale.fraction):
        return rounded(x / broadcast(scale.value), broadcast(LOWEST), broadcast(HIGHEST))
    return integers(t)


@function
def quantize_run(x, source, scale, out, to, count):
    """out[to : to + count] = the int8 of x[source : source + count]. scale: `Scale`."""
    whole = count - count % LANES
    for at in range(0, whole, LANES):
        store_whole(out, to + at, quantized(load(x, source + at), scale))
    if whole < count:
        last = load_lanes(x, source + whole, count - whole)
        store_bytes(out, to + whole, quantized(last, scale), count - whole)
