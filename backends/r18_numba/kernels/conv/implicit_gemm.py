"""Convolution as an implicit GEMM: B is gathered from the image while it is multiplied.

out[o, q] = Σ_k w[k, o]·x[pixel q, tap k]. q counts the output pixels of all samples, k the taps
(channel, row, column).

1. Each thread loads its share of the next stage into registers: filters, and pixels by the table
   of taps.
2. Meanwhile the block multiplies the current stage from shared memory (`tile_product`).
3. The epilogue adds bias and residual, applies ReLU and stores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.conv.tile_product import build_tile_product
from r18_numba.kernels.jit import ALIGNMENT, kernel
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
f32, index = np.float32, np.int64
LOW = 0xFFFFFFFF  # as an unsigned number, a negative coordinate exceeds every extent


@cache
def build(tile: Tile, storage: Any) -> Any:
    """The kernel for a storage format.

    w (steps·k, padded outputs): zero beyond the taps and the outputs. taps (steps·k, 2) int32:
    the offset in a sample from the window's corner, and row << 16 | column. Rows beyond the taps
    are outside every image. bias (padded outputs) float32. fused: bit 1 adds the residual, bit 2
    applies ReLU.
    """
    m, n, k_extent, rows, columns = tile.m, tile.n, tile.k, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    across, down = n // columns, m // rows
    row_gap, column_gap = row_vector * down, column_vector * across
    threads, row_step = tile.threads, tile.row_step
    loads_a, loads_b = m * k_extent // threads, k_extent // row_step
    registers = rows * columns
    multiply = build_tile_product(tile)

    @kernel(tile.registers)
    def implicit_gemm(  # type: ignore[no-untyped-def]
        x, w, taps, bias, residual, out,
        channels, height, width, outputs, padded_outputs, out_height, out_width,
        stride_h, stride_w, pad_h, pad_w, pixels, steps, fused,
    ):  # fmt: skip
        stage_a = cuda.shared.array((2, k_extent, m), f32, alignment=ALIGNMENT)
        stage_b = cuda.shared.array((2, k_extent, n), f32, alignment=ALIGNMENT)
        sums = cuda.local.array(registers, f32)
        next_a = cuda.local.array(loads_a, f32)
        next_b = cuda.local.array(loads_b, f32)
        row_at = cuda.local.array(rows, index)
        column_at = cuda.local.array(columns, index)

        # NOTE: the mask shows the compiler that no index is negative, which would count from the
        # end. Without it, loads from shared memory are not vectorized.
        thread = cuda.threadIdx.x & 1023
        row = thread // across * row_vector
        column = thread % across * column_vector
        first_output = cuda.blockIdx.y * m
        first_pixel = cuda.blockIdx.x * n
        area = out_height * out_width

        # This thread gathers every `row_step`-th tap of one pixel.
        lane, lane_row = thread % n, thread // n
        q = first_pixel + lane
        sample = q // area
        y = (q - sample * area) // out_width
        corner_h = y * stride_h - pad_h
        corner_w = (q - sample * area - y * out_width) * stride_w - pad_w
        corner = (sample * channels * height + corner_h) * width + corner_w
        inside = q < pixels

        for i in range(rows):
            for j in range(columns):
                sums[i * columns + j] = f32(0)

        # A stage is loaded into registers while the previous one is multiplied. With two stages,
        # one barrier for each suffices: a thread that refills a stage has passed the barrier that
        # all threads reach only after reading that stage.
        for step in range(steps + 1):
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    tap = step * k_extent + at // m
                    next_a[i] = f32(
                        w[np.uint64(index(tap) * padded_outputs + first_output + at % m)]
                    )
                for i in range(loads_b):
                    tap = step * k_extent + lane_row + i * row_step
                    offset, place = int(taps[np.uint64(2 * tap)]), int(taps[np.uint64(2 * tap + 1)])
                    h, v = corner_h + (place >> 16), corner_w + (place & 0xFFFF)
                    seen = inside & ((h & LOW) < height) & ((v & LOW) < width)
                    # Loads without a branch overlap. Outside the image, load the first pixel.
                    value = f32(x[np.uint64(corner + offset if seen else 0)])
                    next_b[i] = value if seen else f32(0)
            if step > 0:
                multiply(stage_a, stage_b, (step - 1) & 1, row, column, sums)
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    stage_a[step & 1, at // m, at % m] = next_a[i]
                for i in range(loads_b):
                    stage_b[step & 1, lane_row + i * row_step, lane] = next_b[i]
                cuda.syncthreads()

        # Keep these bodies short: if the compiler does not unroll the loops, `sums` spills.
        for i in range(rows):
            o = first_output + i // row_vector * row_gap + row + i % row_vector
            shift = bias[np.uint64(o)]
            for j in range(columns):
                sums[i * columns + j] += shift
            row_at[i] = index(o) * area if o < outputs else index(-1)
        for j in range(columns):
            q = first_pixel + j // column_vector * column_gap + column + j % column_vector
            sample = q // area
            at = index(sample) * outputs * area + (q - sample * area)
            column_at[j] = at if q < pixels else index(-1)
        if fused & 1:
            for i in range(rows):
                for j in range(columns):
                    if row_at[i] >= 0 and column_at[j] >= 0:
                        sums[i * columns + j] += f32(residual[np.uint64(row_at[i] + column_at[j])])
        if fused & 2:
            for i in range(rows):
                for j in range(columns):
                    if sums[i * columns + j] <= f32(0):  # not NaN
                        sums[i * columns + j] = f32(0)
        for i in range(rows):
            for j in range(columns):
                if row_at[i] >= 0 and column_at[j] >= 0:
                    out[np.uint64(row_at[i] + column_at[j])] = storage(sums[i * columns + j])

    return implicit_gemm
