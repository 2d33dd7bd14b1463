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
from numba.extending import models, register_model

from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    MASK,
    VECTOR,
    address,
    broadcast,
    intrinsic,
    lane_mask,
    vector,
)

BYTE, INT32 = ir.IntType(8), ir.IntType(32)
BYTES = ir.VectorType(BYTE, LANES)
INTEGERS = ir.VectorType(INT32, LANES)
INT_ALIGNMENT = 4  # bytes: a vector may begin at any int32


class BytesType(types.Type):
    """LANES bytes, of either sign."""

    def __init__(self) -> None:
        super().__init__(f"bytex{LANES}")


lanes_of_bytes = BytesType()


@register_model(BytesType)
class BytesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, BYTES)


@intrinsic
def load_sum(typing: Any, sums: Any, at: Any, bias: Any, channel: Any) -> Any:
    """sums[at : at + LANES] + bias[channel : channel + LANES] in int32, rounded to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        terms = [
            builder.load(
                builder.bitcast(address(context, builder, kind, *place), INTEGERS.as_pointer()),
                align=INT_ALIGNMENT,
            )
            for kind, place in ((kinds[0], values[:2]), (kinds[2], values[2:]))
        ]
        return builder.sitofp(builder.add(*terms), VECTOR)

    return vector(sums, types.int64, bias, types.int64), generate


def as_bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, BYTES.as_pointer())


@intrinsic
def load_whole(typing: Any, array: Any, at: Any) -> Any:
    """array[at : at + LANES], bytes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values)
        return builder.load(as_bytes(builder, place), align=1)

    return lanes_of_bytes(array, types.int64), generate


@intrinsic
def load_part(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count], and zeros in the other lanes. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        kind = ir.FunctionType(BYTES, [BYTES.as_pointer(), INT32, MASK, BYTES])
        name = f"llvm.masked.load.v{LANES}i8.p0v{LANES}i8"
        load = cgutils.get_or_insert_function(builder.module, kind, name)
        mask = lane_mask(builder, values[2])
        zeros = ir.Constant(BYTES, None)
        return builder.call(load, [as_bytes(builder, place), ir.Constant(INT32, 1), mask, zeros])

    return lanes_of_bytes(array, types.int64, types.int64), generate


@intrinsic
def store_whole(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + LANES] = value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], as_bytes(builder, place), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes_of_bytes), generate


@intrinsic
def store_part(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """array[at : at + count] = the first lanes. Writes only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        kind = ir.FunctionType(ir.VoidType(), [BYTES, BYTES.as_pointer(), INT32, MASK])
        name = f"llvm.masked.store.v{LANES}i8.p0v{LANES}i8"
        store = cgutils.get_or_insert_function(builder.module, kind, name)
        mask = lane_mask(builder, values[3])
        place = as_bytes(builder, place)
        builder.call(store, [values[2], place, ir.Constant(INT32, 1), mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes_of_bytes, types.int64), generate


@intrinsic
def widened(typing: Any, value: Any, signed: Any) -> Any:
    """Bytes, or signed ones, as float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, signed = values
        wide = builder.select(
            context.is_true(builder, types.boolean, signed),
            builder.sext(value, INTEGERS),
            builder.zext(value, INTEGERS),
        )
        return builder.sitofp(wide, VECTOR)

    return vector(lanes_of_bytes, types.boolean), generate


@intrinsic
def rounded(typing: Any, value: Any) -> Any:
    """The nearest integers, ties to even, in the low byte of each lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
        whole = builder.fptosi(builder.call(rint, [values[0]]), INTEGERS)
        return builder.trunc(whole, BYTES)

    return lanes_of_bytes(vector), generate


@intrinsic
def clamp(typing: Any, value: Any, low: Any, high: Any) -> Any:
    """min(max(value, low), high) in each lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, low, high = values
        raised = builder.select(builder.fcmp_ordered(">", value, low), value, low)
        return builder.select(builder.fcmp_ordered("<", raised, high), raised, high)

    return vector(vector, vector, vector), generate


@function
def load_bytes(array, at, lanes, signed):
    """array[at : at + lanes], uint8 or as int8 if `signed`, in float32; lanes ≤ LANES."""
    if lanes == LANES:
        return widened(load_whole(array, at), signed)
    return widened(load_part(array, at, lanes), signed)


@function
def store_quantized(value, out, at, lanes, low, high):
    """Steps 3 and 4: out[at : at + lanes] = the numbers, rounded, ties to even, and saturated.

    They are saturated first: the limits are integers, so the order does not matter, and int32 then
    holds every number. Step 3 is part of it, because what has a ReLU is stored as uint8.
    """
    whole = rounded(clamp(value, broadcast(low), broadcast(high)))
    if lanes == LANES:
        store_whole(out, at, whole)
    else:
        store_part(out, at, whole, lanes)
