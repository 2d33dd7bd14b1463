"""The tile product: multiplies one stage of shared memory into the registers of a thread."""

from __future__ import annotations

from functools import cache
from typing import Any

from r18_numba.kernels.jit import function
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()


@cache
def build_tile_product(tile: Tile, number: Any) -> Any:
    """sums[i, j] += Σ_k a[stage, k, row i]·b[stage, k, column j], in the order of k.

    number: float32 or int32, of factors and sums.
    """
    k_extent, rows, columns = tile.k, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    row_gap = row_vector * (tile.m // rows)
    column_gap = column_vector * (tile.n // columns)

    @function()
    def multiply(a, b, stage, row, column, sums):  # type: ignore[no-untyped-def]
        left = cuda.local.array(rows, number)
        right = cuda.local.array(columns, number)
        for k in range(k_extent):
            for i in range(rows):
                left[i] = a[stage, k, i // row_vector * row_gap + row + i % row_vector]
            for j in range(columns):
                right[j] = b[stage, k, j // column_vector * column_gap + column + j % column_vector]
            for i in range(rows):
                for j in range(columns):
                    # Numba multiplies two int32 in int64; the conversion keeps the low 32 bits.
                    sums[i * columns + j] += number(left[i] * right[j])

    return multiply
