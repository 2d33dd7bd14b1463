"""The main loop of an implicit GEMM: B is gathered from the image while it is multiplied.

sums[o, q] = Σ_k w[k, o]·x[pixel q, tap k]. q counts the output pixels of all samples, k the taps
(channel, row, column). Factors and sums are float32 or int32: `number` says which.

1. Each thread loads its share of the next stage into registers: filters, and pixels by the table
   of taps.
2. At the same time the block multiplies the current stage from shared memory (`tile_product`).

The epilogue is the kernel's. `build_places` says where a thread's sums belong.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.conv.tile_product import build_tile_product
from r18_numba.kernels.jit import ALIGNMENT, function
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
index = np.int64
LOW = 0xFFFFFFFF  # as an unsigned number, a negative coordinate exceeds every extent


@cache
def build_main_loop(tile: Tile, number: Any) -> Any:
    """Σ of the products of a block's tile, in the register tile `sums` of each thread.

    w (steps·k, padded outputs): zero beyond the taps and the outputs. taps (steps·k, 2) int32:
    the offset in a sample from the window's corner, and row << 16 | column. Rows beyond the taps
    are outside every image. row, column: the thread's first ones in the tile of the block.
    """
    m, n, k_extent, rows, columns = tile.m, tile.n, tile.k, tile.rows, tile.columns
    threads, row_step = tile.threads, tile.row_step
    loads_a, loads_b = m * k_extent // threads, k_extent // row_step
    multiply = build_tile_product(tile, number)

    @function()
    def main_loop(  # type: ignore[no-untyped-def]
        x, w, taps, channels, height, width, padded_outputs, out_height, out_width,
        stride_h, stride_w, pad_h, pad_w, pixels, steps, thread, row, column, sums,
    ):  # fmt: skip
        stage_a = cuda.shared.array((2, k_extent, m), number, alignment=ALIGNMENT)
        stage_b = cuda.shared.array((2, k_extent, n), number, alignment=ALIGNMENT)
        next_a = cuda.local.array(loads_a, number)
        next_b = cuda.local.array(loads_b, number)
        first_output = cuda.blockIdx.y * m
        area = out_height * out_width

        # This thread gathers every `row_step`-th tap of one pixel.
        lane, lane_row = thread % n, thread // n
        q = cuda.blockIdx.x * n + lane
        sample = q // area
        y = (q - sample * area) // out_width
        corner_h = y * stride_h - pad_h
        corner_w = (q - sample * area - y * out_width) * stride_w - pad_w
        corner = (sample * channels * height + corner_h) * width + corner_w
        inside = q < pixels

        for i in range(rows):
            for j in range(columns):
                sums[i * columns + j] = number(0)

        # A stage is loaded into registers while the previous one is multiplied. With two stages,
        # one barrier for each suffices: a thread that refills a stage has passed the barrier that
        # all threads reach only after reading that stage.
        for step in range(steps + 1):
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    tap = step * k_extent + at // m
                    next_a[i] = number(
                        w[np.uint64(index(tap) * padded_outputs + first_output + at % m)]
                    )
                for i in range(loads_b):
                    tap = step * k_extent + lane_row + i * row_step
                    offset, place = int(taps[np.uint64(2 * tap)]), int(taps[np.uint64(2 * tap + 1)])
                    h, v = corner_h + (place >> 16), corner_w + (place & 0xFFFF)
                    seen = inside & ((h & LOW) < height) & ((v & LOW) < width)
                    # Loads without a branch overlap. Outside the image, load the first pixel.
                    value = number(x[np.uint64(corner + offset if seen else 0)])
                    next_b[i] = value if seen else number(0)
            if step > 0:
                multiply(stage_a, stage_b, (step - 1) & 1, row, column, sums)
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    stage_a[step & 1, at // m, at % m] = next_a[i]
                for i in range(loads_b):
                    stage_b[step & 1, lane_row + i * row_step, lane] = next_b[i]
                cuda.syncthreads()

    return main_loop


@cache
def build_places(tile: Tile) -> Any:
    """Where a thread's sums belong: `row_at[i] + column_at[j]` is the place of its sum (i, j).

    −1 is a row beyond the outputs, or a column beyond the pixels. area: pixels of an output image.
    """
    rows, columns = tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    row_gap = row_vector * (tile.m // rows)
    column_gap = column_vector * (tile.n // columns)
    m, n = tile.m, tile.n

    @function()
    def places(row, column, outputs, area, pixels, row_at, column_at):  # type: ignore[no-untyped-def]
        for i in range(rows):
            o = cuda.blockIdx.y * m + i // row_vector * row_gap + row + i % row_vector
            row_at[i] = index(o) * area if o < outputs else index(-1)
        for j in range(columns):
            first = cuda.blockIdx.x * n + column
            q = first + j // column_vector * column_gap + j % column_vector
            sample = q // area
            at = index(sample) * outputs * area + (q - sample * area)
            column_at[j] = at if q < pixels else index(-1)

    return places
