"""Convolution and linear of bytes as an implicit GEMM.

1. A worker copies a band of the padded image to its scratch, in the form that products take: uint8
   for VNNI, uint16 for AVX2, float32 for the portable micro-kernel. Signed bytes get 128 added
   there, padding included; the bias that the host packed takes 128·Σw away again. AMX takes bytes
   of either sign.
2. The micro-kernel multiplies neighbouring outputs of a row by a panel of filters into int32.
3. The epilogue requantises the register tile, or scales it to float32 logits.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from r18_numba_cpu.kernels import amx
from r18_numba_cpu.kernels.arguments import (
    COVER,
    SUMS,
    Blocks,
    ConvShape,
    Depth,
    Requantization,
    Terms,
    Tile,
)
from r18_numba_cpu.kernels.blocks import begin_count, rows_inside, take_block
from r18_numba_cpu.kernels.integers import portable, register_tile
from r18_numba_cpu.kernels.integers.bands import Bytes, copy_band
from r18_numba_cpu.kernels.integers.epilogue import store_sums, store_tile
from r18_numba_cpu.kernels.jit import kernel, overload
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, tile_rows

portable_multiply, tile_multiply = portable.multiply, register_tile.multiply
amx_multiply_band = amx.banded(store_sums)


def multiply_band(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
    """The outputs of a panel in `rows` rows, from tile.pixel on, of a band that begins at a_at.

    top: the first row of the image that the band has. By the type of `b`: int32 are for AMX.
    """
    raise NotImplementedError("compiled only")


@overload(multiply_band)
def _multiply_band(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
    if b.dtype == types.int32:

        def by_tiles(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
            amx_multiply_band(
                rows, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers, COVER
            )

        return by_tiles

    def by_register_tiles(rows, top, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers):
        pixel_stride = shape.stride_w * shape.channels
        run_size = depth.length * COLUMNS * (4 // b.itemsize)
        most = tile_rows(shape.out_w, ROWS)
        for row in range(rows):
            skipped, runs = 0, depth.runs
            # The padding of signed bytes is 128, and the bias takes away what it adds to a sum.
            if terms.how.flip == 0:
                skipped, runs = rows_inside(top + row * shape.stride_h, depth.runs, shape.height)
            seen = Depth(runs, depth.length, depth.stride)
            start = a_at + (row * shape.stride_h + skipped) * depth.stride
            for column in range(0, shape.out_w, most):
                pixel = tile.pixel + row * shape.out_w + column
                multiply(
                    min(most, shape.out_w - column),
                    a, start + column * pixel_stride, pixel_stride, b, b_at + skipped * run_size,
                    seen, c, c_at, Tile(pixel, tile.channel, tile.outputs), terms,
                )  # fmt: skip

    return by_register_tiles


def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    """A register tile, by the micro-kernel for the type of `a`, and its epilogue."""
    raise NotImplementedError("compiled only")


@overload(multiply, inline=True)
def _multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
    if a.dtype == types.float32:

        def by_floats(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
            portable_multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at)
            store_tile(rows, c, c_at, tile, terms)

        return by_floats

    def in_registers(rows, a, a_at, a_row, b, b_at, depth, c, c_at, tile, terms):
        whole = tile.channel + COLUMNS <= tile.outputs
        tile_multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, whole, tile, terms)
        if not whole:
            store_tile(rows, c, c_at, tile, terms)

    return in_registers


@kernel
def implicit_gemm(
    x, weight, bias, multiplier, residual, residual_multiplier, out, sums, scratch, numbers,
    counters,
):  # fmt: skip
    """out (N, OH, OW, O) of x (N, H, W, C); all are flat, and bytes are uint8, of either sign.

    weight: panels (⌈O/COLUMNS⌉, kh, ⌈kw·C/group⌉, COLUMNS, group), float32 (a group has one), int16
    (two) or int8 (four), or int32 (the four in one). bias, multiplier: padded to whole panels.
    out: bytes, or float32 for logits.
    sums: int32, `n[SUMS]` for each worker. scratch: a slot of `Blocks` for each worker.
    numbers: `packed_numbers`, as int64.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    blocking = Blocks(n[13], n[14], n[15], n[16], n[17])
    how = Requantization(
        np.uint8(n[18]), n[19] != 0, n[20] != 0, np.float32(n[21]), np.float32(n[22])
    )
    row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    panel_size = weight.size // panels
    group = 4 // weight.itemsize  # 32 bits of B, but for AMX
    depth = Depth(shape.kernel_h, panel_size // (shape.kernel_h * COLUMNS * group), row_length)
    splits = (panels + blocking.panels - 1) // blocking.panels
    bands = (shape.out_h + blocking.rows - 1) // blocking.rows
    sets = (shape.samples + blocking.samples - 1) // blocking.samples
    blocks = sets * bands * splits
    workers = begin_count(counters)
    for worker in prange(workers):
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        image = Bytes(x, how.flip)
        terms = Terms(bias, multiplier, residual, residual_multiplier, out, how)
        slot = scratch[worker * blocking.slot : (worker + 1) * blocking.slot]
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
                band = ROWS * COLUMNS + s * blocking.band
                copy_band(image, first + s, top, seen, row_length, shape, x, slot, band)
            copied = part
            last = min(panels, (split + 1) * blocking.panels)
            for panel in range(split * blocking.panels, last):
                for s in range(samples):
                    pixel = ((first + s) * shape.out_h + first_row) * shape.out_w
                    tile = Tile(pixel, panel * COLUMNS, shape.outputs)
                    multiply_band(
                        rows, top, slot, ROWS * COLUMNS + s * blocking.band, shape, weight,
                        panel * panel_size, depth, sums, worker * n[SUMS], tile, terms, numbers,
                    )  # fmt: skip
            block = take_block(counters, worker, blocks)
