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


class Image(NamedTuple):
    """What the integers of a convolution are made of.

    x: int8 as bytes or float32, (N, C, H, W); or pixels, (N, H, W, C).
    maker: the scale of float32, (1,), or the table of pixels, (C, 256) as bytes; not read for int8.
    of_pixels: whether bytes are pixels. flip: 128, or 0 for AMX.
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


@function
def copy_band(x, flip, sample, top, rows, row_length, shape, scratch, band):
    """Copy `rows` rows of the padded image, from row `top` on, to scratch[band:].

    x: (N, H, W, C) of bytes. A row of the band has `row_length` elements, (pixels, channels). Rows
    that fall between two windows are skipped, because no tap reads them.
    """
    left = min(shape.pad_w * shape.channels, row_length)  # a narrow window may see only padding
    right = left + min(shape.width * shape.channels, row_length - left)
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        if top + row < 0 or top + row >= shape.height:
            fill(scratch, to, row_length, flip)
            continue
        source = ((sample * shape.height + top + row) * shape.width) * shape.channels
        fill(scratch, to, left, flip)
        for at in range(0, right - left, LANES):
            lanes = min(LANES, right - left - at)
            put(scratch, to + left + at, flipped(load_bytes(x, source + at, lanes), flip), lanes)
        fill(scratch, to + right, row_length - right, flip)


# -- an image that is quantised on its way -----------------------------------------------------


@intrinsic
def woven(typing: Any, red: Any, green: Any, blue: Any, part: Any) -> Any:
    """The bytes r₀g₀b₀r₁g₁b₁… of three vectors: of RGB·LANES, the LANES of number `part`."""
    if not isinstance(part, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def shuffled(a: Any, b: Any, lanes: list[int]) -> Any:
            mask = ir.Constant(ir.VectorType(INT32, len(lanes)), lanes)
            return builder.shuffle_vector(a, b, mask)

        planes, first = (2 * LANES, part.literal_value * LANES)
        two = shuffled(values[0], values[1], list(range(planes)))
        third = shuffled(values[2], ir.Constant(BYTES, None), list(range(planes)))
        bytes_of = [divmod(first + lane, RGB) for lane in range(LANES)]
        return shuffled(two, third, [plane * LANES + lane for lane, plane in bytes_of])

    return byte_vector(byte_vector, byte_vector, byte_vector, part), generate


@function
def interleave(planes, at, pitch, count, channels, flip, scratch, to):
    """scratch[to + C·p + c] = planes[at + pitch·c + p], flipped, for p < count and c < C."""
    if channels == RGB:
        for p in range(0, count, LANES):
            lanes, here = min(LANES, count - p), to + RGB * p
            red = flipped(load_bytes(planes, at + p, lanes), flip)
            green = flipped(load_bytes(planes, at + pitch + p, lanes), flip)
            blue = flipped(load_bytes(planes, at + 2 * pitch + p, lanes), flip)
            left = RGB * lanes
            put(scratch, here, woven(red, green, blue, 0), min(LANES, left))
            if left > LANES:
                put(
                    scratch, here + LANES, woven(red, green, blue, 1), min(LANES, left - LANES)
                )  # fmt: skip
            if left > 2 * LANES:
                put(scratch, here + 2 * LANES, woven(red, green, blue, 2), left - 2 * LANES)
        return
    for c in range(channels):
        for p in range(count):
            scratch[to + p * channels + c] = planes[at + c * pitch + p] ^ flip


def put_row(image, sample, row, count, shape, line, scratch, to):
    """scratch[to:] = the integers of the first `count` pixels of a row of the image.

    line: scratch, bytes: as many as these integers.
    """
    raise NotImplementedError("compiled only")


@overload(put_row)
def _put_row(image, sample, row, count, shape, line, scratch, to):
    if image.types[0].dtype == types.float32:

        def of_numbers(image, sample, row, count, shape, line, scratch, to):
            divisor = broadcast(image.maker[0])
            for c in range(shape.channels):
                source = ((sample * shape.channels + c) * shape.height + row) * shape.width
                for p in range(0, count, LANES):
                    lanes = min(LANES, count - p)
                    number = load_lanes(image.x, source + p, lanes) / divisor
                    store_quantized(
                        number, line, c * count + p, lanes, np.float32(-128), np.float32(127)
                    )
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
def copy_image(image, sample, top, rows, row_length, shape, line, scratch, band):
    """The same as `copy_band`, of an `Image`. line: see `put_row`."""
    left = min(shape.pad_w, row_length // shape.channels)
    count = min(shape.width, row_length // shape.channels - left)
    right = (left + count) * shape.channels
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        if top + row < 0 or top + row >= shape.height:
            fill(scratch, to, row_length, image.flip)
            continue
        fill(scratch, to, left * shape.channels, image.flip)
        put_row(
            image, sample, top + row, count, shape, line, scratch, to + left * shape.channels
        )  # fmt: skip
        fill(scratch, to + right, row_length - right, image.flip)
