"""Bands of the padded image in the form that products take: bytes, uint16 or float32.

A band's bytes are unsigned for every micro-kernel but AMX's. Signed ones get 128 added as they are
copied, padding included: they are `flip`ped.

Rows of an `Image` can be stacked: a band's row is then `stack` rows of the image side by side, and
the bytes of a pixel are in the order (C, stack). See `integers.tiles.stacked`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from r18_numba_cpu.kernels.arguments import RGB
from r18_numba_cpu.kernels.integers.bytes import (
    byte_vector,
    flipped,
    load_bytes,
    repeated,
    store_bytes,
)
from r18_numba_cpu.kernels.integers.quantize import quantize_run, scale_of
from r18_numba_cpu.kernels.integers.requantize import widened
from r18_numba_cpu.kernels.jit import function, overload
from r18_numba_cpu.kernels.vector import LANES, intrinsic, shuffled, store_lanes, woven_part

TWO = 2
"""How many rows are stacked at most."""

PIXEL_VALUES = 256


class Bytes(NamedTuple):
    """An image of bytes of either sign, (N, H, W, C). flip: 128 for signed ones, but for AMX 0."""

    x: Any
    flip: np.uint8


class Image(NamedTuple):
    """What the integers of a convolution are made of.

    x: bytes of either sign or float32, (N, C, H, W); or pixels, (N, H, W, C).
    maker: the scale of float32, (1,), or the table of pixels, (C, 256) as bytes; else not read.
    of_pixels: whether bytes are pixels. flip: of `Bytes`.
    stack: rows of the image in a row of a band. shift: which row begins the band's row 0.
    """

    x: Any
    maker: Any
    of_pixels: bool
    flip: np.uint8
    stack: int
    shift: int


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
def woven(typing: Any, red: Any, green: Any, blue: Any, size: Any, part: Any) -> Any:
    """Bytes part·LANES … (part + 1)·LANES − 1 of r₀g₀b₀r₁g₁b₁…, each of `size` bytes."""
    if not all(isinstance(value, types.IntegerLiteral) for value in (size, part)):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return woven_part(builder, values[:RGB], part.literal_value, size.literal_value)

    return byte_vector(byte_vector, byte_vector, byte_vector, size, part), generate


@intrinsic
def paired(typing: Any, a: Any, b: Any, half: Any) -> Any:
    """a₀b₀a₁b₁…, of half of the lanes of two vectors."""
    if not isinstance(half, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = half.literal_value * LANES // 2
        sources = [v * LANES + first + lane for lane in range(LANES // 2) for v in (0, 1)]
        return shuffled(builder, values[0], values[1], sources)

    return byte_vector(byte_vector, byte_vector, half), generate


@function
def put_first(scratch, at, value, lanes):
    """`put` of at most a vector, and of nothing if lanes ≤ 0."""
    if lanes > 0:
        put(scratch, at, value, min(LANES, lanes))


def putting(size: int) -> Any:
    """A function that puts three vectors of elements of `size` bytes as r₀g₀b₀r₁g₁b₁…."""

    @function
    def put_woven(scratch, to, red, green, blue, left):
        """left: the bytes that are left to be put."""
        put_first(scratch, to, woven(red, green, blue, size, 0), left)
        put_first(scratch, to + LANES, woven(red, green, blue, size, 1), left - LANES)
        put_first(scratch, to + 2 * LANES, woven(red, green, blue, size, 2), left - 2 * LANES)

    return put_woven


put_bytes, put_pairs = putting(1), putting(TWO)


@function
def load_plane(line, at, lanes, flip):
    """`load_bytes`, flipped."""
    return flipped(load_bytes(line, at, lanes), flip)


@function
def interleave(line, count, channels, stack, flip, scratch, to):
    """scratch[to + C·p + c] = line[count·c + p], flipped, for p < count and c < C = `channels`.

    `stack` planes that follow each other are one channel, of as many rows.
    """
    if channels != RGB * stack or stack > TWO:
        for c in range(channels):
            for p in range(count):
                scratch[to + p * channels + c] = line[c * count + p] ^ flip
        return
    green_at, blue_at = stack * count, 2 * stack * count
    for p in range(0, count, LANES):
        lanes, here, left = min(LANES, count - p), to + channels * p, channels * (count - p)
        red = load_plane(line, p, lanes, flip)
        green = load_plane(line, green_at + p, lanes, flip)
        blue = load_plane(line, blue_at + p, lanes, flip)
        if stack == 1:
            put_bytes(scratch, here, red, green, blue, left)
        else:
            second = count + p
            red_2 = load_plane(line, second, lanes, flip)
            green_2 = load_plane(line, green_at + second, lanes, flip)
            blue_2 = load_plane(line, blue_at + second, lanes, flip)
            put_pairs(
                scratch, here, paired(red, red_2, 0), paired(green, green_2, 0),
                paired(blue, blue_2, 0), left,
            )  # fmt: skip
            put_pairs(
                scratch, here + RGB * LANES, paired(red, red_2, 1), paired(green, green_2, 1),
                paired(blue, blue_2, 1), left - RGB * LANES,
            )  # fmt: skip


def put_row(image, sample, row, count, shape, line, scratch, to):
    """scratch[to:] = the integers of the first `count` pixels of a row of the image.

    row: the first of those that are stacked, if they are. line: scratch, bytes: as many as these
    integers, of an `Image`.
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

    def of_planes(image, sample, row, count, shape, line, scratch, to):
        channels = shape.channels // image.stack
        for c in range(channels):
            for r in range(image.stack):
                plane = (c * image.stack + r) * count
                if 0 <= row + r < shape.height:
                    put_plane(image, sample, c, channels, row + r, count, shape, line, plane)
                else:
                    fill(line, plane, count, np.uint8(0))
        interleave(line, count, shape.channels, image.stack, image.flip, scratch, to)

    return of_planes


def put_plane(image, sample, c, channels, row, count, shape, line, to):
    """line[to:] = the integers of channel c of the first `count` pixels of a row of the image."""
    raise NotImplementedError("compiled only")


@overload(put_plane, inline=True)
def _put_plane(image, sample, c, channels, row, count, shape, line, to):
    if image.types[0].dtype == types.float32:

        def of_numbers(image, sample, c, channels, row, count, shape, line, to):
            source = ((sample * channels + c) * shape.height + row) * shape.width
            quantize_run(image.x, source, scale_of(image.maker[0]), line, to, count)

        return of_numbers

    def of_bytes(image, sample, c, channels, row, count, shape, line, to):
        if image.of_pixels:
            source = (sample * shape.height + row) * shape.width * channels + c
            for p in range(count):
                value = image.x[source + p * channels]
                line[to + p] = image.maker[c * PIXEL_VALUES + value]
        else:
            source = ((sample * channels + c) * shape.height + row) * shape.width
            for p in range(0, count, LANES):
                lanes = min(LANES, count - p)
                store_bytes(line, to + p, load_bytes(image.x, source + p, lanes), lanes)

    return of_bytes


def rows_of(image):
    """The rows of the image in a row of a band, and which begins the band's row 0."""
    raise NotImplementedError("compiled only")


@overload(rows_of)
def _rows_of(image):
    if image.instance_class is Bytes:
        return lambda image: (1, 0)
    return lambda image: (image.stack, image.shift)


@function
def copy_band(image, sample, top, rows, row_length, shape, line, scratch, band):
    """Make `rows` rows of the padded image, from row `top` on, in scratch[band:].

    image: `Bytes` or an `Image`. line: see `put_row`. A row of the band has `row_length` elements,
    (pixels, channels). Rows that fall between two windows are skipped, because no tap reads them.
    Of stacked rows, `top` and shape count each stack as one, but for the image's height.
    """
    stack, shift = rows_of(image)
    left = min(shape.pad_w, row_length // shape.channels)  # a narrow window may see only padding
    count = min(shape.width, row_length // shape.channels - left)
    first, end = left * shape.channels, (left + count) * shape.channels
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to, source = band + row * row_length, (top + row) * stack + shift
        if source + stack <= 0 or source >= shape.height:
            fill(scratch, to, row_length, image.flip)
            continue
        fill(scratch, to, first, image.flip)
        put_row(image, sample, source, count, shape, line, scratch, to + first)
        fill(scratch, to + end, row_length - end, image.flip)
