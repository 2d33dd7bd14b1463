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
    FEATURES,
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
    """The nearest integers, ties to even, saturated to low … high, as bytes.

    They are saturated first: the limits are integers, so the order does not matter, and int32 then
    holds every number.
    """
    number = builder.select(builder.fcmp_ordered(">", number, low), number, low)
    return builder.trunc(_nearest(builder, number, high), BYTES)


def _nearest(builder: Any, number: Any, high: Any) -> Any:
    """The nearest int32, ties to even, of at most `high`. What is too low becomes the lowest."""
    number = builder.select(builder.fcmp_ordered("<", number, high), number, high)
    kind = ir.FunctionType(INTEGERS, [VECTOR])
    name = f"llvm.lrint.v{LANES}i32.v{LANES}f32"
    lrint = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(lrint, [number])


WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
PACKS = "avx512.{}.512" if LANES == 16 else "avx2.{}"
CAN_PACK = bool(
    FEATURES.get("avx512bw") if LANES == 16 else FEATURES.get("avx2") if LANES == 8 else False
)
"""Whether the CPU has instructions that saturate registers of int32 to int16, and those to
bytes."""


def round_packed(builder: Any, pairs: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """`round_saturated` of two pairs of vectors: a vector of bytes, twice as long, for each pair.

    low, high: float32; high − low is 255. Two instructions saturate and narrow four registers,
    and work on 128 bits at a time: what they leave is in quarters of a register, or halves.
    """
    lowest = builder.fptosi(low, INT32)
    highest = splat(builder, high)
    above = splat(builder, builder.trunc(builder.neg(lowest), ir.IntType(16)), 2 * LANES)
    words = []
    for pair in pairs:
        whole = [_nearest(builder, number, highest) for number in pair]
        narrow = _packing(builder, "packssdw", WORDS, whole)
        kind = ir.FunctionType(WORDS, [WORDS, WORDS])
        add = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.sadd.sat.v{2 * LANES}i16"
        )  # fmt: skip
        words.append(builder.call(add, [narrow, above]))
    packed = _packing(builder, "packuswb", ir.VectorType(BYTE, 4 * LANES), words)
    lows = splat(builder, builder.trunc(lowest, BYTE), 4 * LANES)
    packed = builder.bitcast(builder.add(packed, lows), INTEGERS)
    parts = LANES // 4
    for_pair = [[4 * part + vector for vector in order for part in range(parts)]
                for order in ((0, 1), (2, 3))]  # fmt: skip
    found = []
    for order in for_pair:
        mask = ir.Constant(ir.VectorType(INT32, len(order)), order)
        chosen = builder.shuffle_vector(packed, packed, mask)
        found.append(builder.bitcast(chosen, ir.VectorType(BYTE, 2 * LANES)))
    return found[0], found[1]


def _packing(builder: Any, name: str, kind: Any, values: Any) -> Any:
    found = ir.FunctionType(kind, [value.type for value in values])
    called = f"llvm.x86.{PACKS.format(name)}"
    return builder.call(cgutils.get_or_insert_function(builder.module, found, called), values)


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
