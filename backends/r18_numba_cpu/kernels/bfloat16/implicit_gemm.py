"""Convolution and linear of bfloat16 as an implicit GEMM.

1. A worker copies a band of the padded image to its scratch, in the form that products take:
   bfloat16 for AMX and `vdpbf16ps`; float32 for the portable micro-kernel. AMX's has an even number
   of channels, so that kernel rows are whole pairs: one that ended in the next pixel would turn
   its infinities into NaN, although their weight is 0.
2. The micro-kernel multiplies neighbouring outputs of a row by a panel of filters into float32.
   Kernel rows that see only padding are left out.
3. The epilogue adds bias and residual, applies ReLU, and rounds once.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from r18_numba_cpu.kernels import amx
from r18_numba_cpu.kernels.arguments import (
    PAIRED_COVER,
    PAIRED_SLICE_STRIDE,
    PAIRED_SLICES,
    PAIRED_SUMS,
    RGB,
    SLICE,
    Blocks,
    ConvShape,
    Depth,
    Epilogue,
    Summed,
    Tile,
)
from r18_numba_cpu.kernels.bfloat16 import pairs
from r18_numba_cpu.kernels.bfloat16.epilogue import (
    store_flushed_sums,
    store_flushed_tile,
    store_tile,
)
from r18_numba_cpu.kernels.blocks import begin_count, rows_inside, take_block
from r18_numba_cpu.kernels.jit import function, kernel, overload
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, tile_rows
from r18_numba_cpu.kernels.micro_kernel import multiply as multiply_floats
from r18_numba_cpu.kernels.vector import interleave, put_run

WORD = 4
"""bfloat16 in 64 bits: the channels of an image of three, padded to an even number."""

amx_multiply_band, multiply_pairs = amx.banded(store_flushed_sums), pairs.multiply


def multiply_band(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
    """The outputs of a panel in `rows` rows, from tile.pixel on, of a band that begins at a_at.

    top: the first row of the image that the band has. By the type of `b`: uint32 are for AMX.
    """
    raise NotImplementedError("compiled only")


@overload(multiply_band)
def _multiply_band(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
    if b.dtype == types.uint32:

        def by_tiles(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
            in_pairs = Depth(depth.runs, depth.length // pairs.PAIR, depth.stride)
            amx_multiply_band(
                rows, a, a_at, shape, b, b_at, in_pairs, c, c_at, tile, terms, numbers,
                PAIRED_COVER,
            )  # fmt: skip

        return by_tiles

    def by_register_tiles(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
        pixel_stride = shape.stride_w * shape.channels
        run_size = b_size(b, depth)
        most = tile_rows(shape.out_w, ROWS)
        for row in range(rows):
            skipped, runs = rows_inside(top + row * shape.stride_h, depth.runs, shape.height)
            seen = Depth(runs, depth.length, depth.stride)
            start = a_at + (row * shape.stride_h + skipped) * depth.stride
            for column in range(0, shape.out_w, most):
                pixel = tile.pixel + row * shape.out_w + column
                multiply(
                    min(most, shape.out_w - column),
                    a, start + column * pixel_stride, pixel_stride,
                    b, b_at + skipped * run_size, seen, c, c_at,
                    Tile(pixel, tile.channel, tile.outputs), terms,
                )  # fmt: skip

    return by_register_tiles


@function
def b_size(b, depth):
    """The elements of a panel's kernel row."""
    pair = pairs.PAIR if b.itemsize == 2 else 1
    return (depth.length + pair - 1) // pair * pair * COLUMNS


def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    """A register tile, by the micro-kernel for the type of `a`, and its epilogue."""
    raise NotImplementedError("compiled only")


@overload(multiply, inline=True)
def _multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    if a.dtype == types.float32:

        def by_floats(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
            multiply_floats(rows, a, a_at, a_row, b, b_at, c, c_at, COLUMNS, depth)
            store_tile(rows, c, c_at, tile, terms)

        return by_floats

    def by_pairs(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
        whole = tile.channel + COLUMNS <= tile.outputs
        multiply_pairs(rows, a, a_at, a_row, b, b_at, depth, c, c_at, whole, tile, terms)
        if not whole:
            store_flushed_tile(rows, c, c_at, tile, terms)

    return by_pairs


# -- a band ------------------------------------------------------------------------------------


def put(scratch, at, bits):
    """scratch[at] = a bfloat16 of these bits, in the type of scratch."""
    raise NotImplementedError("compiled only")


@overload(put)
def _put(scratch, at, bits):
    if scratch.dtype == types.float32:

        def widened(scratch, at, bits):
            scratch.view(np.uint32)[at] = np.uint32(bits) << np.uint32(16)

        return widened

    def same(scratch, at, bits):
        scratch[at] = bits

    return same


def slices_of(b, numbers):
    """The slices of a band's channels, and the elements from one to the next.

    By the type of `b`: only AMX's may be several.
    """
    raise NotImplementedError("compiled only")


@overload(slices_of)
def _slices_of(b, numbers):
    if b.dtype == types.uint32:
        return lambda b, numbers: (numbers[PAIRED_SLICES], numbers[PAIRED_SLICE_STRIDE])
    return lambda b, numbers: (1, 0)


@function
def put_pixels(x, source, stored, count, scratch, to, channels, slices, slice_stride):
    """`count` pixels of `channels` at scratch[to:], with zeros beyond those that are stored; of
    several slices, each slice's, `slice_stride` elements from one slice to the next.
    """
    if stored == channels:
        put_run(x, source, scratch, to, count * channels)
    elif slices > 1:
        for pixel in range(count):
            for piece in range(slices):
                here, there = source + pixel * stored + piece * SLICE, to + piece * slice_stride
                put_run(x, here, scratch, there + pixel * SLICE, SLICE)
    else:
        for pixel in range(count):
            here = to + pixel * channels
            scratch[here : here + channels] = 0
            put_run(x, source + pixel * stored, scratch, here, stored)


@function
def copy_band_from_nhwc(
    x, stored, sample, top, rows, row_length, shape, scratch, band, slices, slice_stride
):  # fmt: skip
    """Copy `rows` rows of the padded image, from row `top` on, to scratch[band:].

    x: (N, H, W, C) of bfloat16, with C `stored`; the band's pixels have shape.channels, zero beyond
    C. A row of the band has `row_length` elements, (pixels, channels). Rows that fall between two
    windows are skipped, because no tap reads them. slices, slice_stride: see `Cover`.
    """
    left = min(shape.pad_w * shape.channels, row_length)  # a narrow window may see only padding
    right = left + min(shape.width * shape.channels, row_length - left)
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        first, end = left, right
        if top + row < 0 or top + row >= shape.height:
            first = end = row_length
        for piece in range(slices):
            to = band + piece * slice_stride + row * row_length
            scratch[to : to + first] = 0
            scratch[to + end : to + row_length] = 0
        source = (sample * shape.height + top + row) * shape.width * stored
        to, count = band + row * row_length + first, (end - first) // shape.channels
        put_pixels(x, source, stored, count, scratch, to, shape.channels, slices, slice_stride)


def put_planes(x, source, plane, stored, count, scratch, to, shape):
    """Interleave `stored` planes into `count` pixels at scratch[to:]. Further channels are 0.

    The first plane begins at x[source], the next one `plane` elements further.
    """
    raise NotImplementedError("compiled only")


@overload(put_planes)
def _put_planes(x, source, plane, stored, count, scratch, to, shape):
    if scratch.dtype == types.float32:

        def widened(x, source, plane, stored, count, scratch, to, shape):
            for c in range(stored):
                for j in range(count):
                    put(scratch, to + j * shape.channels + c, x[source + c * plane + j])

        return widened

    def same(x, source, plane, stored, count, scratch, to, shape):
        if stored == RGB and shape.channels == WORD:
            put_words(x, source, plane, count, scratch, to)
        elif stored == shape.channels:
            interleave(x, source, plane, stored, count, scratch, to)
        else:
            for c in range(shape.channels):
                for j in range(count):
                    bits = x[source + c * plane + j] if c < stored else np.uint16(0)
                    scratch[to + j * shape.channels + c] = bits

    return same


@function
def put_words(x, source, plane, count, scratch, to):
    """`put_planes` of three planes as pixels of four channels."""
    # NOTE: a pixel is a word, and indices have no sign, or LLVM has no vectors.
    words, first = scratch.view(np.uint64), np.uint64(to // WORD)
    red = np.uint64(source)
    green, blue = red + np.uint64(plane), red + np.uint64(2 * plane)
    for j in range(np.uint64(count)):
        high = np.uint64(x[green + j]) << np.uint64(16) | np.uint64(x[blue + j]) << np.uint64(32)
        words[first + j] = np.uint64(x[red + j]) | high


@function
def copy_band_from_nchw(x, stored, sample, top, rows, row_length, shape, scratch, band):
    """The same as `copy_band_from_nhwc`, from x (N, C, H, W)."""
    plane = shape.height * shape.width
    left = min(shape.pad_w * shape.channels, row_length)  # a narrow window may see only padding
    columns = min(shape.width, (row_length - left) // shape.channels)
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        seen = columns if 0 <= top + row < shape.height else 0
        source = sample * stored * plane + (top + row) * shape.width
        put_planes(x, source, plane, stored, seen, scratch, to + left, shape)
        scratch[to : to + left] = 0
        scratch[to + left + seen * shape.channels : to + row_length] = 0


@function
def copy_band(
    from_nchw, x, stored, sample, top, rows, row_length, shape, scratch, band, slices, slice_stride
):  # fmt: skip
    """`copy_band_from_nchw`, which has one slice, or `copy_band_from_nhwc`."""
    if from_nchw:
        copy_band_from_nchw(x, stored, sample, top, rows, row_length, shape, scratch, band)
    else:
        copy_band_from_nhwc(
            x, stored, sample, top, rows, row_length, shape, scratch, band, slices, slice_stride
        )


@kernel
def implicit_gemm(x, weight, bias, residual, out, sums, scratch, numbers, counters):
    """out (N, OH, OW, O) of x (N, H, W, C), or (N, C, H, W); all are flat, bfloat16 as uint16.

    weight: panels (⌈O/COLUMNS⌉, kh, ⌈kw·C/pair⌉, COLUMNS, pair), float32 (a pair has one) or
    bfloat16 (of two), or uint32 (the two in one). bias: float32, padded to whole panels.
    sums: float32, `n[PAIRED_SUMS]` for each worker. scratch: a slot of `Blocks` for each worker.
    numbers: `paired_numbers`, as int64.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    blocking = Blocks(n[13], n[14], n[15], n[16], n[17])
    how = Epilogue(n[18] != 0, n[19] != 0)
    from_nchw, stored = n[20] != 0, n[21]
    row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    panel_size = weight.size // panels
    depth = Depth(shape.kernel_h, shape.kernel_w * shape.channels, row_length)
    slices, slice_stride = slices_of(weight, numbers)
    splits = (panels + blocking.panels - 1) // blocking.panels
    bands = (shape.out_h + blocking.rows - 1) // blocking.rows
    sets = (shape.samples + blocking.samples - 1) // blocking.samples
    blocks = sets * bands * splits
    workers = begin_count(counters)
    for worker in prange(workers):
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Summed(bias, residual, out, how)
        slot = worker * blocking.slot
        copied = -1
        block = take_block(counters, worker, blocks)
        while block < blocks:
            split, part = block % splits, block // splits
            first_row, first = part % bands * blocking.rows, part // bands * blocking.samples
            samples = min(blocking.samples, shape.samples - first)
            rows = min(blocking.rows, shape.out_h - first_row)
            top = first_row * shape.stride_h - shape.pad_h
            seen = (rows - 1) * shape.stride_h + shape.kernel_h
            for s in range(samples if part != copied else 0):
                band = slot + s * blocking.band
                copy_band(
                    from_nchw, x, stored, first + s, top, seen, row_length, shape, scratch, band,
                    slices, slice_stride,
                )  # fmt: skip
            copied = part
            last = min(panels, (split + 1) * blocking.panels)
            for panel in range(split * blocking.panels, last):
                for s in range(samples):
                    pixel = ((first + s) * shape.out_h + first_row) * shape.out_w
                    tile = Tile(pixel, panel * COLUMNS, shape.outputs)
                    multiply_band(
                        rows, top, scratch, slot + s * blocking.band, shape, weight,
                        panel * panel_size, depth, sums, worker * n[PAIRED_SUMS], tile, terms,
                        numbers,
                    )  # fmt: skip
            block = take_block(counters, worker, blocks)
