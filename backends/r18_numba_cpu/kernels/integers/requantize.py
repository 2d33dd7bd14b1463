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

from r18_numba_cpu.kernels.integers.bytes import BYTES, INT32, byte_vector, store_bytes
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    VECTOR,
    address,
    broadcast,
    intrinsic,
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
    """Bytes, or int8 where the bit `signed` is set, as int32."""
    return builder.select(signed, builder.sext(value, INTEGERS), builder.zext(value, INTEGERS))


def widen(builder: Any, value: Any, signed: Any) -> Any:
    """The same as float32."""
    return to_numbers(builder, extend(builder, value, signed))


def round_saturated(builder: Any, number: Any, low: Any, high: Any) -> Any:
    """The nearest integers, ties to even, saturated to low … high, as bytes.

    They are saturated first: the limits are integers, so the order does not matter, and int32 then
    holds every number.
    """
    number = builder.select(builder.fcmp_ordered(">", number, low), number, low)
    number = builder.select(builder.fcmp_ordered("<", number, high), number, high)
    kind = ir.FunctionType(INTEGERS, [VECTOR])
    name = f"llvm.lrint.v{LANES}i32.v{LANES}f32"
    lrint = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.trunc(builder.call(lrint, [number]), BYTES)


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
