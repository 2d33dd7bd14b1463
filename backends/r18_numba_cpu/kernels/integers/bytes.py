"""Vectors of bytes as a Numba type: one byte for each float32 lane of a register."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    address,
    intrinsic,
    load_first,
    splat,
    store_first,
)

BYTE, INT32 = ir.IntType(8), ir.IntType(32)
BYTES = ir.VectorType(BYTE, LANES)


class BytesType(types.Type):
    """LANES bytes, of either sign."""

    def __init__(self) -> None:
        super().__init__(f"bytex{LANES}")


byte_vector = BytesType()


@register_model(BytesType)
class BytesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, BYTES)


def as_bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, BYTES.as_pointer())


@intrinsic
def load_whole(typing: Any, array: Any, at: Any) -> Any:
    """array[at : at + LANES], bytes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values)
        return builder.load(as_bytes(builder, place), align=1)

    return byte_vector(array, types.int64), generate


@intrinsic
def load_part(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count], and zeros in the other lanes. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        return load_first(builder, place, values[2], BYTES, 1)

    return byte_vector(array, types.int64, types.int64), generate


@intrinsic
def store_whole(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + LANES] = value; array: uint8, or uint16, which hold the same numbers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        wide = _as_elements(builder, values[2], signature.args[0])
        builder.store(wide, builder.bitcast(place, wide.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, byte_vector), generate


@intrinsic
def store_part(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """array[at : at + count] = the first lanes. Writes only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        wide = _as_elements(builder, values[2], signature.args[0])
        store_first(builder, wide, place, values[3], 1)
        return context.get_dummy_value()

    return types.void(array, types.int64, byte_vector, types.int64), generate


def _as_elements(builder: Any, value: Any, array: Any) -> Any:
    """Unsigned bytes as the elements of an array."""
    if array.dtype.bitwidth == BYTE.width:
        return value
    return builder.zext(value, ir.VectorType(ir.IntType(array.dtype.bitwidth), LANES))


@intrinsic
def flipped(typing: Any, value: Any, flip: Any) -> Any:
    """value ^ flip, a uint8: with 128, signed bytes become unsigned ones in the same order."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.xor(values[0], splat(builder, values[1]))

    return byte_vector(byte_vector, types.uint8), generate


@intrinsic
def repeated(typing: Any, byte: Any) -> Any:
    """A vector of one uint8."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return splat(builder, values[0])

    return byte_vector(types.uint8), generate


@function
def load_bytes(array, at, lanes):
    """array[at : at + lanes] in the first lanes, zeros in the others; lanes ≤ LANES."""
    if lanes == LANES:
        return load_whole(array, at)
    return load_part(array, at, lanes)


@function
def store_bytes(array, at, value, lanes):
    """array[at : at + lanes] = the first lanes, as `store_whole` does it; lanes ≤ LANES."""
    if lanes == LANES:
        store_whole(array, at, value)
    else:
        store_part(array, at, value, lanes)
