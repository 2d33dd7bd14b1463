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

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.integers import portable, vnni
from r18_numba_cpu.kernels.integers.bytes import flipped, load_bytes, repeated, store_bytes
from r18_numba_cpu.kernels.integers.requantize import load_sum, store_quantized, widened
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, tile_rows
from r18_numba_cpu.kernels.vector import (
    LANES,
    broadcast,
    fetch_add,
    load_lanes,
    store_lanes,
)

portable_multiply, vnni_multiply = portable.multiply, vnni.multiply


def multiply(rows, a, a_at, a_row, b, b_at, c, c_at, part, depth):
    """The micro-kernel for the type of `a`."""
    raise NotImplementedError("compiled only")


@overload(multiply)
def _multiply(rows, a, a_at, a_row, b, b_at, c, c_at, part, depth):
    if a.dtype == types.float32:
        return lambda rows, a, a_at, a_row, b, b_at, c, c_at, part, depth: portable_multiply(
            rows, a, a_at, a_row, b, b_at, c, c_at, part, depth
        )
    return lambda rows, a, a_at, a_row, b, b_at, c, c_at, part, depth: vnni_multiply(
        rows, a, a_at, a_row, b, b_at, c, c_at, depth
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


def store_tile(
    sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count, channel,
    outputs, requantization,
):  # fmt: skip
    """The epilogue of `count` pixels from `pixel` on, COLUMNS channels from `channel` on."""
    raise NotImplementedError("compiled only")


@function
def store_bytes_of(
    sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count, channel,
    outputs, requantization,
):  # fmt: skip
    how = requantization
    factor = broadcast(residual_multiplier[0])
    for v in range(0, COLUMNS, LANES):
        first = channel + v
        if first >= outputs:
            break
        lanes = min(LANES, outputs - first)
        scale = load_lanes(multiplier, first, LANES)
        for p in range(count):
            value = load_sum(sums, tile + p * COLUMNS + v, bias, first) * scale
            to = (pixel + p) * outputs + first
            if how.residual:
                value = (
                    value + widened(load_bytes(residual, to, lanes), how.signed_residual) * factor
                )
            store_quantized(value, out, to, lanes, how.low, how.high)


@function
def store_logits_of(sums, tile, bias, multiplier, out, pixel, count, channel, outputs):
    for v in range(0, COLUMNS, LANES):
        first = channel + v
        if first >= outputs:
            break
        lanes = min(LANES, outputs - first)
        scale = load_lanes(multiplier, first, LANES)
        for p in range(count):
            value = load_sum(sums, tile + p * COLUMNS + v, bias, first) * scale
            store_lanes(out, (pixel + p) * outputs + first, value, lanes)


@overload(store_tile)
def _store_tile(
    sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count, channel,
    outputs, requantization,
):  # fmt: skip
    if out.dtype == types.float32:

        def store(
            sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count,
            channel, outputs, requantization,
        ):  # fmt: skip
            store_logits_of(sums, tile, bias, multiplier, out, pixel, count, channel, outputs)
    else:

        def store(
            sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count,
            channel, outputs, requantization,
        ):  # fmt: skip
            store_bytes_of(
                sums, tile, bias, multiplier, residual, residual_multiplier, out, pixel, count,
                channel, outputs, requantization,
            )  # fmt: skip

    return store


@kernel
def implicit_gemm(
    x, weight, bias, multiplier, residual, residual_multiplier, out, sums, scratch, workers, shape,
    blocking, requantization,
):  # fmt: skip
    """out (N, OH, OW, O) of x (N, H, W, C); all are flat, and bytes are uint8, of either sign.

    weight: panels (⌈O/COLUMNS⌉, kh, ⌈kw·C/group⌉, COLUMNS, group), float32 (a group has one) or
    int8 (of four). bias, multiplier: padded to whole panels. out: bytes, or float32 for logits.
    sums: int32, a register tile for each worker. scratch: a slot of `blocking` for each worker.
    """
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
        tile = worker * ROWS * COLUMNS
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
            copy_band(x, requantization.flip, sample, top, seen, row_length, shape, part, band)
            last = min(panels, (split + 1) * blocking.panels)
            for panel in range(split * blocking.panels, last):
                for row in range(rows):
                    for column in range(0, shape.out_w, most):
                        count = min(most, shape.out_w - column)
                        start = band + row * shape.stride_h * row_length + column * pixel_stride
                        multiply(
                            count, part, start, pixel_stride,
                            weight, panel * panel_size, sums, tile, part, depth,
                        )  # fmt: skip
                        line = sample * shape.out_h + first_row + row
                        store_tile(
                            sums, tile, bias, multiplier, residual, residual_multiplier, out,
                            line * shape.out_w + column, count, panel * COLUMNS, shape.outputs,
                            requantization,
                        )  # fmt: skip
            block = fetch_add(counter)
