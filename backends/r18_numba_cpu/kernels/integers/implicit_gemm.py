"""Convolution and linear of bytes as an implicit GEMM.

1. A worker copies a band of the padded image to its scratch, in the form that products take: uint8
   for VNNI, float32 for the portable micro-kernel. Signed bytes get 128 added there, padding
   included; the bias that the host packed takes 128·Σw away again.
2. The micro-kernel multiplies neighbouring outputs of a row by a panel of filters into int32.
3. The epilogue requantises the register tile, or scales it to float32 logits.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import overload

from r18_numba_cpu.kernels.arguments import (
    Bands,
    ConvShape,
    Depth,
    Requantization,
    Terms,
    Tile,
)
from r18_numba_cpu.kernels.integers import portable, vnni
from r18_numba_cpu.kernels.integers.bytes import flipped, load_bytes, repeated, store_bytes
from r18_numba_cpu.kernels.integers.requantize import load_sum, store_quantized, widened
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, tile_rows
from r18_numba_cpu.kernels.vector import (
    LANES,
    broadcast,
    fetch_add,
    load,
    store_lanes,
)

portable_multiply, vnni_multiply = portable.multiply, vnni.multiply


def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    """A register tile, by the micro-kernel for the type of `a`, and its epilogue."""
    raise NotImplementedError("compiled only")


@overload(multiply)
def _multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    if a.dtype == types.float32:

        def by_floats(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
            portable_multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at)
            store_tile(rows, c, c_at, tile, terms)

        return by_floats

    def by_bytes(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
        whole = tile.channel + COLUMNS <= tile.outputs
        vnni_multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, whole, tile, terms)
        if not whole:
            store_tile(rows, c, c_at, tile, terms)

    return by_bytes


@function
def store_tile(rows, sums, at, tile, terms):
    """The epilogue of `rows` pixels, COLUMNS channels or those that are left, of sums[at:]."""
    factor = broadcast(terms.residual_multiplier[0])
    for v in range(0, COLUMNS, LANES):
        channel = tile.channel + v
        if channel >= tile.outputs:
            break
        lanes = min(LANES, tile.outputs - channel)
        scale = load(terms.multiplier, channel)
        for p in range(rows):
            number = load_sum(sums, at + p * COLUMNS + v, terms.bias, channel) * scale
            to = (tile.pixel + p) * tile.outputs + channel
            if terms.how.residual:
                added = widened(load_bytes(terms.residual, to, lanes), terms.how.signed_residual)
                number = number + added * factor
            put_number(terms.out, to, number, lanes, terms.how)


def put_number(out, at, number, lanes, how):
    """out[at : at + lanes] = the numbers as logits, or requantised: by the type of `out`."""
    raise NotImplementedError("compiled only")


@overload(put_number)
def _put_number(out, at, number, lanes, how):
    if out.dtype == types.float32:
        return lambda out, at, number, lanes, how: store_lanes(out, at, number, lanes)
    return lambda out, at, number, lanes, how: store_quantized(
        number, out, at, lanes, how.low, how.high
    )


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

    x: (N, H, W, C) of bytes. flip: 128 if they are signed, else 0: it is added modulo 256, and to
    the padding's zeros. A row of the band has `row_length` elements, (pixels, channels). Rows that
    fall between two windows are skipped, because no tap reads them.
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


@kernel
def implicit_gemm(
    x, weight, bias, multiplier, residual, residual_multiplier, out, sums, scratch, numbers, workers
):  # fmt: skip
    """out (N, OH, OW, O) of x (N, H, W, C); all are flat, and bytes are uint8, of either sign.

    weight: panels (⌈O/COLUMNS⌉, kh, ⌈kw·C/group⌉, COLUMNS, group), float32 (a group has one) or
    int8 (of four). bias, multiplier: padded to whole panels. out: bytes, or float32 for logits.
    sums: int32, a register tile for each worker. scratch: a slot of `Bands` for each worker.
    numbers: `packed_numbers`, as int64.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    blocking = Bands(n[13], n[14], n[15])
    how = Requantization(
        np.uint8(n[16]), n[17] != 0, n[18] != 0, np.float32(n[19]), np.float32(n[20])
    )
    group = vnni.GROUP if scratch.itemsize == 1 else 1
    length = (shape.kernel_w * shape.channels + group - 1) // group
    row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
    depth = Depth(shape.kernel_h, length, row_length)
    panel_size = depth.runs * length * COLUMNS * group
    pixel_stride = shape.stride_w * shape.channels
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    splits = (panels + blocking.panels - 1) // blocking.panels
    bands = (shape.out_h + blocking.rows - 1) // blocking.rows
    blocks = shape.samples * bands * splits
    most = tile_rows(shape.out_w, ROWS)
    counter = np.zeros(1, np.int64)
    for worker in prange(workers):
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Terms(bias, multiplier, residual, residual_multiplier, out, how)
        part = scratch[worker * blocking.slot : (worker + 1) * blocking.slot]
        band = ROWS * COLUMNS
        block = fetch_add(counter)
        while block < blocks:
            split = block % splits
            first_row = block // splits % bands * blocking.rows
            sample = block // splits // bands
            rows = min(blocking.rows, shape.out_h - first_row)
            top = first_row * shape.stride_h - shape.pad_h
            seen = (rows - 1) * shape.stride_h + shape.kernel_h
            copy_band(x, how.flip, sample, top, seen, row_length, shape, part, band)
            last = min(panels, (split + 1) * blocking.panels)
            for panel in range(split * blocking.panels, last):
                for row in range(rows):
                    line = sample * shape.out_h + first_row + row
                    start = band + row * shape.stride_h * row_length
                    for column in range(0, shape.out_w, most):
                        pixel = line * shape.out_w + column
                        tile = Tile(pixel, panel * COLUMNS, shape.outputs)
                        multiply(
                            min(most, shape.out_w - column),
                            part, start + column * pixel_stride, pixel_stride,
                            weight, panel * panel_size, depth,
                            sums, worker * ROWS * COLUMNS, tile, terms,
                        )  # fmt: skip
            block = fetch_add(counter)
