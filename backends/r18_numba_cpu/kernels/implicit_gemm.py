"""Convolution as an implicit GEMM: a product whose left operand is read from the image itself.

1. A worker copies a band of the padded image to its scratch, so no tap has to check for the edge.
2. The micro-kernel multiplies neighbouring outputs of a row by a panel of filters: pixels × taps
   times taps × channels. The taps of one kernel row are contiguous in the band.
3. The epilogue adds bias and residual, applies ReLU and stores the register tile.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, multiply_folded, tile_rows
from r18_numba_cpu.kernels.vector import (
    LANES,
    copy_run,
    fetch_add,
    interleave,
    load,
    store_output,
)


@function
def copy_band(x, sample, top, rows, row_length, shape, scratch, band):
    """Copy `rows` rows of the padded image, from row `top` on, to scratch[band:].

    x is (N, H, W, C); a row of the band has `row_length` elements, (pixels, channels). Rows that
    fall between two windows are skipped, because no tap reads them.
    """
    left = min(shape.pad_w * shape.channels, row_length)  # a narrow window may see only padding
    right = left + min(shape.width * shape.channels, row_length - left)
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        if top + row < 0 or top + row >= shape.height:
            scratch[to : to + row_length] = np.float32(0)
            continue
        source = ((sample * shape.height + top + row) * shape.width) * shape.channels
        scratch[to : to + left] = np.float32(0)
        copy_run(x, source, scratch, to + left, right - left)
        scratch[to + right : to + row_length] = np.float32(0)


@function
def copy_band_from_nchw(x, sample, top, rows, row_length, shape, scratch, band):
    """The same as `copy_band`, from x (N, C, H, W)."""
    channels, plane = shape.channels, shape.height * shape.width
    left = min(shape.pad_w * channels, row_length)
    columns = min(shape.width, (row_length - left) // channels)
    for row in range(rows):
        if row % shape.stride_h >= shape.kernel_h:
            continue
        to = band + row * row_length
        seen = columns if 0 <= top + row < shape.height else 0
        source, first = sample * channels * plane + (top + row) * shape.width, to + left
        scratch[to:first] = np.float32(0)
        interleave(x, source, plane, channels, seen, scratch, first)
        scratch[first + seen * channels : to + row_length] = np.float32(0)


@function
def store_tile(scratch, sums, bias, residual, out, pixel, count, channel, outputs, epilogue):
    """Apply the epilogue to `count` pixels from `pixel` on, COLUMNS channels from `channel` on."""
    for p in range(count):
        for v in range(0, COLUMNS, LANES):
            first = channel + v
            if first >= outputs:
                break
            value, shift = load(scratch, sums + p * COLUMNS + v), load(bias, first)
            to, lanes = (pixel + p) * outputs + first, min(LANES, outputs - first)
            store_output(value, shift, residual, out, to, lanes, epilogue)


@kernel
def implicit_gemm(
    x, weight, bias, residual, out, scratch, counters, shape, blocking, epilogue, from_nchw
):  # fmt: skip
    """out (N, OH, OW, O) of x (N, H, W, C), or (N, C, H, W) with `from_nchw`; all are flat.

    weight: panels (⌈O/COLUMNS⌉, taps, COLUMNS). bias: padded to whole panels.
    blocking: `Bands`.
    """
    row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
    depth = Depth(shape.kernel_h, shape.kernel_w * shape.channels, row_length)
    panel_size = depth.runs * depth.length * COLUMNS
    pixel_stride = shape.stride_w * shape.channels
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    splits = (panels + blocking.panels - 1) // blocking.panels
    bands = (shape.out_h + blocking.rows - 1) // blocking.rows
    blocks = shape.samples * bands * splits
    most = tile_rows(shape.out_w, ROWS)
    lines = 2 if 2 * shape.out_w <= ROWS else 1  # rows of outputs in a register tile
    gap = shape.stride_h * row_length - shape.out_w * pixel_stride  # from a row to the next
    workers = begin_count(counters)
    for worker in prange(workers):
        sums = worker * blocking.slot
        band = sums + ROWS * COLUMNS
        block = fetch_add(counters, 0)
        while block < blocks:
            split = block % splits
            first_row = block // splits % bands * blocking.rows
            sample = block // splits // bands
            rows = min(blocking.rows, shape.out_h - first_row)
            top = first_row * shape.stride_h - shape.pad_h
            seen = (rows - 1) * shape.stride_h + shape.kernel_h
            if from_nchw:
                copy_band_from_nchw(x, sample, top, seen, row_length, shape, scratch, band)
            else:
                copy_band(x, sample, top, seen, row_length, shape, scratch, band)
            last = min(panels, (split + 1) * blocking.panels)
            for panel in range(split * blocking.panels, last):
                for row in range(0, rows, lines):
                    for column in range(0, shape.out_w, most):
                        count = min(most, shape.out_w - column) * min(lines, rows - row)
                        start = band + row * shape.stride_h * row_length + column * pixel_stride
                        multiply_folded(
                            count, shape.out_w, gap, scratch, start, pixel_stride,
                            weight, panel * panel_size, scratch, sums, COLUMNS, depth,
                        )  # fmt: skip
                        line = sample * shape.out_h + first_row + row
                        store_tile(
                            scratch, sums, bias, residual, out, line * shape.out_w + column,
                            count, panel * COLUMNS, shape.outputs, epilogue,
                        )  # fmt: skip
            block = fetch_add(counters, 0)
