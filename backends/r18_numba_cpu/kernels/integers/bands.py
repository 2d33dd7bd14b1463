"""Bands of the padded image in the form that products take: bytes, uint16 or float32.

A band's bytes are unsigned for every micro-kernel but AMX's. Signed ones get 128 added as they are
copied, padding included: they are `flip`ped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from r18_numba_cpu.kernels.integers.bytes import (
    BYTES,
    INT32,
    byte_vector,
    flipped,
    load_bytes,
    repeated,
    store_bytes,
)
from r18_numba_cpu.kernels.integers.requantize import store_quantized, widened
from r18_numba_cpu.kernels.jit import function, overload
from r18_numba_cpu.kernels.vector import LANES, broadcast, intrinsic, load_lanes, store_lanes

RGB = 3
"""The channels whose planes are interleaved a vector at a time."""

PIXEL_VALUES = 256

LOWEST, HIGHEST = np.float32(-128), np.float32(127)
"""The ends of int8."""


class Bytes(NamedTuple):
    """An image of bytes of either sign, (N, H, W, C). flip: 128 for signed ones, but for AMX 0."""

    x: Any
    flip: np.uint8


class Image(NamedTuple):
    """What the integers of a convolution are made of.

    x: bytes of either sign or float32, (N, C, H, W); or pixels, (N, H, W, C).
    maker: the scale of float32, (1,), or the table of pixels, (C, 256) as bytes; else not read.
    of_pixels: whether bytes are pixels. flip: of `Bytes`.
    """

    x: Any
    maker: Any
    of_pixels: bool
    flip: np.uint8


def put(scratch, at, value, lanes):
    """scratch[at : at + lanes] = the first lanes of a vector of bytes, in the type of scratch."""
    raise NotImplementedError("compiled only")


@overload(put)
def _put(scratch, at, value, lanes):
    if scratch.dtype == types.float32:
        return lambda scratch, at, value, lanes: store_lanes(
            scratch, at, widened(value, False), lanes
        )
    return lambda scratch, at, value, lanes: store_bytes(scratch, at, value, lanes)


@function
def fill(scratch, first, count, byte):
    """scratch[first : first + count] = byte."""
    value = repeated(byte)
    for at in range(0, count, LANES):
        put(scratch, first + at, value, min(LANES, count - at))


# -- rows of an image --------------------------------------------------------------------------


@intrinsic
def woven(typing: Any, red: Any, green: Any, blue: Any, part: Any) -> Any:
    """Bytes part·LANES … (part + 1)·LANES − 1 of r₀g₀b₀r₁g₁b₁…, of three vectors."""
    if not isinstance(part, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def shuffled(a: Any, b: Any, lanes: list[int]) -> Any:
            mask = ir.Constant(ir.VectorType(INT32, len(lanes)), lanes)
            return builder.shuffle_vector(a, b, mask)

        both = list(range(2 * LANES))
        two = shuffled(values[0], values[1], both)
        third = shuffled(values[2], ir.Constant(BYTES, None), both)
        first = part.literal_value * LANES
        sources = [divmod(first + at, RGB) for at in range(LANES)]  # a lane, of a plane
        return shuffled(two, third, [plane * LANES + lane for lane, plane in sources])

    return byte_vector(byte_vector, byte_vector, byte_vector, part), generate


@function
def put_first(scratch, at, value, lanes):
    """`put` of at most a vector, and of nothing if lanes ≤ 0."""
    if lanes > 0:
        put(scratch, at, value, min(LANES, lanes))


@function
def interleave(planes, at, pitch, count, channels, flip, scratch, to):
    """scratch[to + C·p + c] = planes[at + pitch·c + p], flipped, for p < count and c < C."""
    if channels != RGB:
        for c in range(channels):
            for p in range(count):
                scratch[to + p * channels + c] = planes[at + c * pitch + p] ^ flip
        return
    for p in range(0, count, LANES):
        lanes, here = min(LANES, count - p), to + RGB * p
        red = flipped(load_bytes(planes, at + p, lanes), flip)
        green = flipped(load_bytes(planes, at + pitch + p, lanes), flip)
        blue = flipped(load_bytes(planes, at + 2 * pitch + p, lanes), flip)
        left = RGB * lanes
        put_first(scratch, here, woven(red, green, blue, 0), left)
        put_first(scratch, here + LANES, woven(red, green, blue, 1), left - LANES)
        put_first(scratch, here + 2 * LANES, woven(red, green, blue, 2), left - 2 * LANES)


def put_row(image, sample, row, count, shape, line, scratch, to):
    """scratch[to:] = the integers of the first `count` pixels of a row of the image.

    line: scratch, bytes: as many as these integers, of an `Image` of float32.
    """
    raise NotImplementedError("compiled only")


@overload(put_row)
def _put_row(image, sample, row, count, shape, line, scratch, to):
    if image.instance_class is Bytes:

        def of_pixels_in_order(image, sample, row, count, shape, line, scratch, to):
            source = (sample * shape.height + row) * shape.width * shape.channels
            length = count * shape.channels
            for at in range(0, length, LANES):
                lanes = min(LANES, length - at)
                value = flipped(load_bytes(image.x, source + at, lanes), image.flip)
                put(scratch, to + at, value, lanes)

        return of_pixels_in_order
    if image.types[0].dtype == types.float32:

        def of_numbers(image, sample, row, count, shape, line, scratch, to):
            divisor = broadcast(image.maker[0])
            for c in range(shape.channels):
                source = ((sample * shape.channels + c) * shape.height + row) * shape.width
                for p in range(0, count, LANES):
                    lanes = min(LANES, count - p)
                    number = load_lanes(image.x, source + p, lanes) / divisor
                    store_quantized(number, line, c * count + p, lanes, LOWEST, HIGHEST)
            interleave(line, 0, count, count, shape.channels, image.flip, scratch, to)

        return of_numbers

    def of_bytes(image, sample, row, count, shape, line, scratch, to):
        if image.of_pixels:
            source = (sample * shape.height + row) * shape.width * shape.channels
            for p in range(count):
                for c in range(shape.channels):
                    at = p * shape.channels + c
                    value = image.maker[c * PIXEL_VALUES + image.x[source + at]]
                    scratch[to + at] = value ^ image.flip
        else:
            plane = shape.height * shape.width
            source = sample * shape.channels * plane + row * shape.width
            interleave(image.x, source, plane, count, shape.channels, image.flip, scratch, to)

    return of_bytes


@function
def copy_band(image, sample, top, rows, row_length, shape, line, scratch, band):
    """Copy `rows` rows of the padded image, from row `top` on, to scratch[band:].

    image: `Bytes` or an `Image`. line: see `put_row`. A row of the band has `row_length` elements,
    (pixels, channels). Rows that fall between two windows are skipped, because no tap reads them.
    """
    left = min(shape.pad_w, row_length // shape.channels)  # a narrow window may see only padding
    count = min(shape.width, row_length // shape.channels - left)
    first, end = left * shape.channels, (left + count) * shape.channels
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        if top + row < 0 or top + row >= shape.height:
            fill(scratch, to, row_length, image.flip)
            continue
        fill(scratch, to, first, image.flip)
        put_row(image, sample, top + row, count, shape, line, scratch, to + first)
        fill(scratch, to + end, row_length - end, image.flip)
