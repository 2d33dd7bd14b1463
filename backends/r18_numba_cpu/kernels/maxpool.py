"""Max pooling of every format, channels last.

1. A row of outputs: the maxima over its windows' rows, element by element, go to a line of keys.
2. An output: the maximum over its window's columns in the line, made a value again.

A key is an unsigned integer as wide as the element, in the order of the values, so that one
instruction is enough for the maximum and NaN wins. After a window's first row or column, two are
taken at a time. Where the window ends earlier, or the image does, the last one is taken again.

Vectors are explicit. LLVM would take eight at a time and the rest element by element, and a pixel
of the network's stem has one or two.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.extending import models, register_model

from r18_numba_cpu.kernels.blocks import begin_count, take_block
from r18_numba_cpu.kernels.jit import function, kernel, overload
from r18_numba_cpu.kernels.vector import LANES, address, intrinsic, load_first, splat, store_first

INFINITY = {16: 0x7F80, 32: 0x7F800000}
"""The bits of ∞ in bfloat16 and in float32."""


class KeysType(types.Type):
    """A vector of unsigned integers: the bits of elements, or their keys."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(f"keys({dtype})")


@register_model(KeysType)
class KeysModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _vector(numba_type))


def _vector(numba_type: Any) -> Any:
    """LLVM's type of a `KeysType`, or of as many elements of an array: as wide as a register."""
    width = numba_type.dtype.bitwidth
    return ir.VectorType(ir.IntType(width), LANES * types.float32.bitwidth // width)


# -- memory ------------------------------------------------------------------------------------


def lanes_of(array):
    """The elements of an array in a vector."""
    raise NotImplementedError("compiled only")


@overload(lanes_of)
def _lanes_of(array):
    lanes = _vector(array).count
    return lambda array: lanes


@intrinsic
def load_whole(typing: Any, array: Any, at: Any) -> Any:
    """array[at : at + lanes], a whole vector."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, array, *values)
        place = builder.bitcast(place, _vector(array).as_pointer())
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return KeysType(array.dtype)(array, types.int64), generate


@intrinsic
def load_part(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count], and zeros in the other lanes. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, array, *values[:2])
        return load_first(builder, place, values[2], _vector(array), array.dtype.bitwidth // 8)

    return KeysType(array.dtype)(array, types.int64, types.int64), generate


@intrinsic
def store_whole(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + lanes] = value, a whole vector."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, array, *values[:2])
        place = builder.bitcast(place, values[2].type.as_pointer())
        builder.store(values[2], place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), generate


@intrinsic
def store_part(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """array[at : at + count] = the first lanes. Writes only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, array, *values[:2])
        store_first(builder, values[2], place, values[3], array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, value, types.int64), generate


@function
def load(array, at, count):
    """array[at : at + count] in the first lanes, zeros in the others."""
    if count == lanes_of(array):
        return load_whole(array, at)
    return load_part(array, at, count)


@function
def store(array, at, value, count):
    """array[at : at + count] = the first lanes."""
    if count == lanes_of(array):
        store_whole(array, at, value)
    else:
        store_part(array, at, value, count)


# -- keys --------------------------------------------------------------------------------------


@intrinsic
def key(typing: Any, bits: Any, flip: Any) -> Any:
    """The keys of elements. flip: 128 for int8, else 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if bits.dtype == types.uint8:
            return _flipped(builder, *values)
        # Then −∞ becomes 0, and NaN below it comes around to above ∞.
        return builder.add(_reordered(builder, values[0]), _above(bits))

    return bits(bits, bits.dtype), generate


@intrinsic
def element(typing: Any, keys: Any, flip: Any) -> Any:
    """The elements of keys."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if keys.dtype == types.uint8:
            return _flipped(builder, *values)
        return _reordered(builder, builder.sub(values[0], _above(keys)))

    return keys(keys, keys.dtype), generate


def _flipped(builder: Any, value: Any, flip: Any) -> Any:
    return builder.xor(value, splat(builder, flip, value.type.count))


def _reordered(builder: Any, number: Any) -> Any:
    """The bits of floats as signed integers in order: in negative ones, all bits but the sign are
    flipped. Twice gives the bits again.
    """
    kind, sign = number.type, number.type.element.width - 1
    negative = builder.ashr(number, ir.Constant(kind, [sign] * kind.count))
    others = ir.Constant(kind, [(1 << sign) - 1] * kind.count)
    return builder.xor(number, builder.and_(negative, others))


def _above(numba_type: Any) -> Any:
    """How much −∞ is below 0 after `_reordered`."""
    kind = _vector(numba_type)
    return ir.Constant(kind, [INFINITY[kind.element.width] + 1] * kind.count)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger key in each lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", *values), *values)

    return a(a, a), generate


# -- rows --------------------------------------------------------------------------------------


@function
def fill_line(line, x, first, last, length, flip):
    """line[i] = the largest key of x[first + i], x[first + length + i], …, x[last + i], for each i
    below length. flip: 128 if the bytes are int8, else 0.
    """
    for i in range(0, length, lanes_of(line)):
        lanes = min(lanes_of(line), length - i)
        at, end = first + i, last + i
        found = key(load(x, at, lanes), flip)
        while at < end:
            found = larger(found, key(load(x, at + length, lanes), flip))
            at = min(at + 2 * length, end)
            found = larger(found, key(load(x, at, lanes), flip))
        store(line, i, found, lanes)


@function
def store_outputs(out, to, line, flip, shape):
    """A row of outputs at out[to:]: the largest keys of each window's columns, as elements."""
    channels = shape.channels
    for channel in range(0, channels, lanes_of(line)):
        lanes = min(lanes_of(line), channels - channel)
        end = shape.width * channels + channel
        left, here = channel - shape.pad_w * channels, to + channel
        for _ in range(shape.out_w):
            at, last = max(channel, left), min(end, left + shape.kernel_w * channels) - channels
            found = load(line, at, lanes)
            while at < last:
                found = larger(found, load(line, at + channels, lanes))
                at = min(at + 2 * channels, last)
                found = larger(found, load(line, at, lanes))
            store(out, here, element(found, flip), lanes)
            left, here = left + shape.stride_w * channels, here + channels


@function
def pool_row(x, start, row, out, to, line, flip, shape):
    """Row `row` of an image's maxima at out[to:]. start: the row of x that is the image's first."""
    length = shape.width * shape.channels
    top = row * shape.stride_h - shape.pad_h
    first, last = max(0, top), min(shape.height, top + shape.kernel_h) - 1
    fill_line(line, x, (start + first) * length, (start + last) * length, length, flip)
    store_outputs(out, to, line, flip, shape)


@kernel
def maxpool(x, out, lines, flip, shape, counters):
    """Maxima over the part of each window that is inside the image. shape: as of a convolution.

    x, out: bytes, or the bits of floats. flip: 128 if they are int8, else 0. lines: scratch, a row
    of the image for each worker.
    """
    length = shape.width * shape.channels
    rows = shape.samples * shape.out_h
    workers = begin_count(counters)
    for worker in prange(workers):
        line = lines[worker * length : (worker + 1) * length]
        row = take_block(counters, worker, rows)
        while row < rows:
            start = row // shape.out_h * shape.height
            to = row * shape.out_w * shape.channels
            pool_row(x, start, row % shape.out_h, out, to, line, flip, shape)
            row = take_block(counters, worker, rows)
