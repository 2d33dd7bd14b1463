"""From int32 sums to bytes, a vector at a time: the steps of `r18.graph.quantized`.

Each float32 operation is an instruction of its own. NOTE: LLVM fuses a product and a sum only where
the IR says that it may (`llvm.fmuladd`, or the flag `contract`); `*` and `+` of `kernels.vector`
are plain `fmul` and `fadd`, so they stay apart.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.integers.bytes import BYTE, BYTES, INT32, byte_vector, store_bytes
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    VECTOR,
    address,
    broadcast,
    intrinsic,
    splat,
    vector,
)

INTEGERS = ir.VectorType(INT32, LANES)
INT_ALIGNMENT = 4  # bytes: a vector may begin at any int32


# -- LLVM's instructions -----------------------------------------------------------------------


def load_integers(builder: Any, pointer: Any) -> Any:
    """LANES int32 from a pointer to the first."""
    return builder.load(builder.bitcast(pointer, INTEGERS.as_pointer()), align=INT_ALIGNMENT)


def to_numbers(builder: Any, integers: Any) -> Any:
    """int32 rounded to float32."""
    return builder.sitofp(integers, VECTOR)


def extend(builder: Any, value: Any, signed: Any) -> Any:
    """Bytes, or int8 where the bit `signed` is set, as int32.

    NOTE: of two ways to widen, chosen by `signed`, LLVM makes a branch for each vector.
    """
    flip = builder.shl(builder.zext(signed, BYTE), ir.Constant(BYTE, 7))
    found = builder.zext(builder.xor(value, splat(builder, flip)), INTEGERS)
    return builder.sub(found, splat(builder, builder.zext(flip, INT32)))


def widen(builder: Any, value: Any, signed: Any) -> Any:
    """The same as float32."""
    return to_numbers(builder, extend(builder, value, signed))


def round_saturated(builder: Any, number: Any, low: Any, high: Any) -> Any:
    """The nearest integers, ties to even, saturated to low … high, as bytes. NaN becomes low.

    They are saturated first: the limits are integers, so the order does not matter, and int32 then
    holds every number.
    """
    number = builder.select(builder.fcmp_ordered(">", number, low), number, low)
    number = builder.select(builder.fcmp_ordered("<", number, high), number, high)
    rounded = _call(builder, f"llvm.lrint.v{LANES}i32.v{LANES}f32", INTEGERS, [number])
    return builder.trunc(rounded, BYTES)


SHORT = ir.IntType(16)
SHORTS, ALL_BYTES = ir.VectorType(SHORT, 2 * LANES), ir.VectorType(BYTE, 4 * LANES)
PACKS = "llvm.x86.avx512.{}.512" if LANES == 16 else "llvm.x86.avx2.{}"


def round_packed(builder: Any, pairs: Any, low: Any, high: Any) -> list[Any]:
    """`round_saturated` of two pairs of vectors: a vector of bytes, twice as long, for each pair.

    low, high: float32, the ends of uint8 or of int8. What is too low for int16, or for a byte, is
    saturated when it is narrowed. int8 are uint8 in between, 128 more. Needs AVX2, or AVX-512 BW.
    """
    lowest, highest = builder.fptosi(low, INT32), splat(builder, high)
    above = splat(builder, builder.trunc(builder.neg(lowest), SHORT), 2 * LANES)
    shorts = []
    for pair in pairs:
        whole = [_nearest(builder, number, highest) for number in pair]
        narrow = _call(builder, PACKS.format("packssdw"), SHORTS, whole)
        shorts.append(_call(builder, f"llvm.sadd.sat.v{2 * LANES}i16", SHORTS, [narrow, above]))
    packed = _call(builder, PACKS.format("packuswb"), ALL_BYTES, shorts)
    packed = builder.add(packed, splat(builder, builder.trunc(lowest, BYTE), 4 * LANES))
    # The instructions narrow 128 bits of each register at a time: a word of each of the four
    # vectors, then the next word of each.
    words = builder.bitcast(packed, INTEGERS)
    found = []
    for first in (0, 2):
        order = [4 * part + v for v in (first, first + 1) for part in range(LANES // 4)]
        mask = ir.Constant(ir.VectorType(INT32, len(order)), order)
        chosen = builder.shuffle_vector(words, words, mask)
        found.append(builder.bitcast(chosen, ir.VectorType(BYTE, 2 * LANES)))
    return found


def _nearest(builder: Any, number: Any, high: Any) -> Any:
    """The nearest int32, ties to even, of at most `high`. What int32 does not hold, and NaN, is the
    lowest.

    NOTE: by the CPU's own instruction. What LLVM's `lrint` makes of such numbers is not specified.
    """
    number = builder.select(builder.fcmp_ordered("<", high, number), high, number)
    if LANES == 16:
        all_lanes, rounding = ir.Constant(SHORT, -1), ir.Constant(INT32, 4)  # that of MXCSR
        given = [number, ir.Constant(INTEGERS, None), all_lanes, rounding]
        return _call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", INTEGERS, given)
    return _call(builder, "llvm.x86.avx.cvt.ps2dq.256", INTEGERS, [number])


def _call(builder: Any, name: str, kind: Any, values: Any) -> Any:
    """What LLVM's function `name` makes of the values."""
    found = ir.FunctionType(kind, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, found, name), values)


# -- as functions of kernels -------------------------------------------------------------------


@intrinsic
def load_sum(typing: Any, sums: Any, at: Any, bias: Any, channel: Any) -> Any:
    """sums[at : at + LANES] + bias[channel : channel + LANES] in int32, rounded to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        total = load_integers(builder, address(context, builder, kinds[0], *values[:2]))
        added = load_integers(builder, address(context, builder, kinds[2], *values[2:]))
        return to_numbers(builder, builder.add(total, added))

    return vector(sums, types.int64, bias, types.int64), generate


@intrinsic
def load_number(typing: Any, sums: Any, at: Any) -> Any:
    """sums[at : at + LANES] in int32, rounded to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values)
        return to_numbers(builder, load_integers(builder, pointer))

    return vector(sums, types.int64), generate


@intrinsic
def add_bytes(typing: Any, sums: Any, at: Any, value: Any, signed: Any) -> Any:
    """sums[at : at + LANES] += the bytes, or int8 if `signed`, in int32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values[:2])
        is_signed = context.is_true(builder, types.boolean, values[3])
        total = builder.add(load_integers(builder, pointer), extend(builder, values[2], is_signed))
        place = builder.bitcast(pointer, INTEGERS.as_pointer())
        builder.store(total, place, align=INT_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(sums, types.int64, byte_vector, types.boolean), generate


@intrinsic
def widened(typing: Any, value: Any, signed: Any) -> Any:
    """Bytes, or int8 if `signed`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return widen(builder, values[0], context.is_true(builder, types.boolean, values[1]))

    return vector(byte_vector, types.boolean), generate


@intrinsic
def rounded(typing: Any, number: Any, low: Any, high: Any) -> Any:
    """The nearest integers, ties to even, saturated to low … high, as bytes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return round_saturated(builder, *values)

    return byte_vector(vector, vector, vector), generate


@function
def store_quantized(number, out, at, lanes, low, high):
    """Steps 3 and 4 of `lanes` numbers: out[at : at + lanes].

    Step 3 is part of step 4, because what has a ReLU is stored as uint8.
    """
    store_bytes(out, at, rounded(number, broadcast(low), broadcast(high)), lanes)
