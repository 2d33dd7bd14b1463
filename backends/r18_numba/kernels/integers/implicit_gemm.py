"""Convolution of integers as an implicit GEMM: the main loop of floats, in int32.

The epilogue adds the bias, requantises, adds the residual and stores bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.conv.main_loop import build_main_loop, build_places
from r18_numba.kernels.integers.requantize import product, saturated, total
from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64


@cache
def build(tile: Tile) -> Any:
    """The kernel for a tile.

    x: (N, C, H, W). w (in int8), taps: as of `build_main_loop`. bias int32 and multiplier float32,
    (padded outputs). residual, out: (N, O, OH, OW); residual_multiplier: (1). added: whether there
    is a residual. low, high: the output's limits.
    """
    m, rows, columns = tile.m, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    across, down = tile.n // columns, m // rows
    row_gap = row_vector * down
    registers = rows * columns
    main_loop, places = build_main_loop(tile, i32), build_places(tile)

    @kernel(tile.registers)
    def implicit_qgemm(  # type: ignore[no-untyped-def]
        x, w, taps, bias, multiplier, residual, residual_multiplier, out,
        channels, height, width, outputs, padded_outputs, out_height, out_width,
        stride_h, stride_w, pad_h, pad_w, pixels, steps, added, low, high,
    ):  # fmt: skip
        sums = cuda.local.array(registers, i32)
        numbers = cuda.local.array(registers, f32)
        row_at = cuda.local.array(rows, index)
        column_at = cuda.local.array(columns, index)
        thread = cuda.threadIdx.x & 1023  # shows that no index is negative: see the one of floats
        row = thread // across * row_vector
        column = thread % across * column_vector
        main_loop(
            x, w, taps, channels, height, width, padded_outputs, out_height, out_width,
            stride_h, stride_w, pad_h, pad_w, pixels, steps, thread, row, column, sums,
        )  # fmt: skip
        places(row, column, outputs, out_height * out_width, pixels, row_at, column_at)

        # Keep these bodies short: if the compiler does not unroll the loops, `sums` spills.
        for i in range(rows):
            o = cuda.blockIdx.y * m + i // row_vector * row_gap + row + i % row_vector
            shift, factor = bias[np.uint64(o)], multiplier[np.uint64(o)]
            for j in range(columns):
                numbers[i * columns + j] = product(f32(i32(sums[i * columns + j] + shift)), factor)
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
