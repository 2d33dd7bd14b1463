"""Convolution as an implicit GEMM: out[o, q] = Σ_k w[k, o]·x[pixel q, tap k].

1. The main loop gathers and multiplies (`main_loop`).
2. The epilogue adds bias and residual, applies ReLU and stores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.conv.main_loop import build_main_loop, build_places
from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build(tile: Tile, storage: Any) -> Any:
    """The kernel for a storage format.

    w, taps: as of `build_main_loop`. bias (padded outputs) float32. fused: bit 1 adds the residual,
    bit 2 applies ReLU.
    """
    m, rows, columns = tile.m, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    across, down = tile.n // columns, m // rows
    row_gap = row_vector * down
    registers = rows * columns
    main_loop, places = build_main_loop(tile, f32), build_places(tile)

    @kernel(tile.registers)
    def implicit_gemm(  # type: ignore[no-untyped-def]
        x, w, taps, bias, residual, out,
        channels, height, width, outputs, padded_outputs, out_height, out_width,
        stride_h, stride_w, pad_h, pad_w, pixels, steps, fused,
    ):  # fmt: skip
        sums = cuda.local.array(registers, f32)
        row_at = cuda.local.array(rows, index)
        column_at = cuda.local.array(columns, index)
        # NOTE: the mask shows the compiler that no index is negative, which would count from the
        # end. Without it, loads from shared memory are not vectorized.
        thread = cuda.threadIdx.x & 1023
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
            shift = bias[np.uint64(o)]
            for j in range(columns):
                sums[i * columns + j] += shift
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
