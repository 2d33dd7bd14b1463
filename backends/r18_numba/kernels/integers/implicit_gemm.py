"""Convolution of integers as an implicit GEMM: as `kernels.conv.implicit_gemm`, in int32.

The epilogue adds the bias, requantises, adds the residual and stores bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.integers.requantize import product, saturated, total
from r18_numba.kernels.jit import ALIGNMENT, function, kernel
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64
LOW = 0xFFFFFFFF  # as an unsigned number, a negative coordinate exceeds every extent


@cache
def build_tile_product(tile: Tile) -> Any:
    """sums[i, j] += Σ_k a[stage, k, row i]·b[stage, k, column j]."""
    k_extent, rows, columns = tile.k, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    row_gap = row_vector * (tile.m // rows)
    column_gap = column_vector * (tile.n // columns)

    @function()
    def multiply(a, b, stage, row, column, sums):  # type: ignore[no-untyped-def]
        left = cuda.local.array(rows, i32)
        right = cuda.local.array(columns, i32)
        for k in range(k_extent):
            for i in range(rows):
                left[i] = a[stage, k, i // row_vector * row_gap + row + i % row_vector]
            for j in range(columns):
                right[j] = b[stage, k, j // column_vector * column_gap + column + j % column_vector]
            for i in range(rows):
                for j in range(columns):
                    # Numba multiplies two int32 in int64; the conversion keeps the low 32 bits.
                    sums[i * columns + j] += i32(left[i] * right[j])

    return multiply


@cache
def build(tile: Tile) -> Any:
    """The kernel for a tile.

    x: (N, C, H, W). w (steps·k, padded outputs) int8: zero beyond the taps and the outputs. taps:
    as of `kernels.conv.implicit_gemm`. bias int32 and multiplier float32, (padded outputs).
    residual, out: (N, O, OH, OW); residual_multiplier: (1). added: whether there is a residual.
    low, high: what it saturates at.
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
    def implicit_qgemm(  # type: ignore[no-untyped-def]
        x, w, taps, bias, multiplier, residual, residual_multiplier, out,
        channels, height, width, outputs, padded_outputs, out_height, out_width,
        stride_h, stride_w, pad_h, pad_w, pixels, steps, added, low, high,
    ):  # fmt: skip
        stage_a = cuda.shared.array((2, k_extent, m), i32, alignment=ALIGNMENT)
        stage_b = cuda.shared.array((2, k_extent, n), i32, alignment=ALIGNMENT)
        sums = cuda.local.array(registers, i32)
        numbers = cuda.local.array(registers, f32)
        next_a = cuda.local.array(loads_a, i32)
        next_b = cuda.local.array(loads_b, i32)
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
                sums[i * columns + j] = i32(0)

        # A stage is loaded into registers while the previous one is multiplied. With two stages,
        # one barrier for each suffices: a thread that refills a stage has passed the barrier that
        # all threads reach only after reading that stage.
        for step in range(steps + 1):
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    tap = step * k_extent + at // m
                    next_a[i] = i32(
                        w[np.uint64(index(tap) * padded_outputs + first_output + at % m)]
                    )
                for i in range(loads_b):
                    tap = step * k_extent + lane_row + i * row_step
                    offset, place = int(taps[np.uint64(2 * tap)]), int(taps[np.uint64(2 * tap + 1)])
                    h, v = corner_h + (place >> 16), corner_w + (place & 0xFFFF)
                    seen = inside & ((h & LOW) < height) & ((v & LOW) < width)
                    # Loads without a branch overlap. Outside the image, load the first pixel.
                    value = i32(x[np.uint64(corner + offset if seen else 0)])
                    next_b[i] = value if seen else i32(0)
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
            shift, factor = bias[np.uint64(o)], multiplier[np.uint64(o)]
            for j in range(columns):
                numbers[i * columns + j] = product(f32(i32(sums[i * columns + j] + shift)), factor)
            row_at[i] = index(o) * area if o < outputs else index(-1)
        for j in range(columns):
            q = first_pixel + j // column_vector * column_gap + column + j % column_vector
            sample = q // area
            at = index(sample) * outputs * area + (q - sample * area)
            column_at[j] = at if q < pixels else index(-1)
        if added:
            factor = residual_multiplier[0]
            for i in range(rows):
                for j in range(columns):
                    if row_at[i] >= 0 and column_at[j] >= 0:
                        other = f32(residual[np.uint64(row_at[i] + column_at[j])])
                        numbers[i * columns + j] = total(
                            numbers[i * columns + j], product(other, factor)
                        )
        for i in range(rows):
            for j in range(columns):
                if row_at[i] >= 0 and column_at[j] >= 0:
                    out[np.uint64(row_at[i] + column_at[j])] = saturated(
                        numbers[i * columns + j], low, high
                    )

    return implicit_qgemm
