"""Vectors of int16 and of int32 as Numba types, for Winograd's transforms.

`+` and `-` work lane by lane, modulo 2¹⁶ and 2³². A register holds SPAN int16 or LANES int32.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from r18_numba_cpu.kernels.integers.bytes import BYTE
from r18_numba_cpu.kernels.integers.requantize import INTEGERS
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    address,
    intrinsic,
    lanewise,
    load_first,
    splat,
)

SPAN = 2 * LANES
"""int16 lanes in a register."""

WORDS = ir.VectorType(ir.IntType(16), SPAN)
SPAN_OF_BYTES = ir.VectorType(BYTE, SPAN)
ALIGNMENT = 1  # bytes: a vector may begin anywhere


class LanesType(types.Type):
    """The lanes of a register: the type that LLVM gives them."""

    def __init__(self, lanes: Any) -> None:
        super().__init__(f"int{lanes.element.width}x{lanes.count}")
        self.lanes = lanes


words, integers = LanesType(WORDS), LanesType(INTEGERS)


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: LanesType) -> None:
        super().__init__(manager, numba_type, numba_type.lanes)


# -- memory ------------------------------------------------------------------------------------


def _load(builder: Any, kind: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=ALIGNMENT)


def _loads(kind: LanesType) -> Any:
    @intrinsic
    def load(typing: Any, array: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return _load(builder, kind.lanes, address(context, builder, signature.args[0], *values))

        return kind(array, types.int64), generate

    return load


load_words, load_integers = _loads(words), _loads(integers)
"""array[at : at + the lanes], of elements of their size."""


@intrinsic
def store_lanes(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + the lanes] = value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], builder.bitcast(place, value.lanes.as_pointer()), align=ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), generate


@intrinsic
def load_whole(typing: Any, array: Any, at: Any, flip: Any) -> Any:
    """array[at : at + SPAN] ^ flip of uint8, as words."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        return _widened(builder, _load(builder, SPAN_OF_BYTES, place), values[2])

    return words(array, types.int64, types.uint8), generate


@intrinsic
def load_part(typing: Any, array: Any, at: Any, count: Any, flip: Any) -> Any:
    """The same of array[at : at + count], and zeros ^ flip in the other lanes. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values[:2])
        found = load_first(builder, place, values[2], SPAN_OF_BYTES, ALIGNMENT)
        return _widened(builder, found, values[3])

    return words(array, types.int64, types.int64, types.uint8), generate


@intrinsic
def repeated(typing: Any, byte: Any) -> Any:
    """Words that are all the same uint8."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.zext(splat(builder, values[0], SPAN), WORDS)

    return words(types.uint8), generate


def _widened(builder: Any, found: Any, flip: Any) -> Any:
    return builder.zext(builder.xor(found, splat(builder, flip, SPAN)), WORDS)


@function
def load_pixel(x, at, inside, lanes, flip):
    """Channels of a pixel as words, at most SPAN; outside the image and beyond them, flip."""
    if not inside:
        return repeated(flip)
    if lanes == SPAN:
        return load_whole(x, at, flip)
    return load_part(x, at, lanes, flip)


# -- arithmetic --------------------------------------------------------------------------------


for _kind in (words, integers):
    lanewise(operator.add, "add", _kind)
    lanewise(operator.sub, "sub", _kind)


@intrinsic
def quarter(typing: Any, value: Any) -> Any:
    """A fourth of int32 lanes that are multiples of four."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ashr(values[0], ir.Constant(INTEGERS, [2] * LANES))

    return integers(integers), generate
