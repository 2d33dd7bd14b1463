"""im2col and a GEMM, in two launches that are timed separately. NCHW, float32.

The workspace holds the column matrix of a bounded run of output pixels at a time; the GEMM writes
directly to the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.sgemm import GemmTile, divisor_struct, gemm_shape, pack_rows
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import MAX_GRID, OUT, WORKSPACE, GridLaunch, Pointer, Role, X, ceil_div

TILE = GemmTile(64, 128, 8, tm=8, tn=8, stages=3)
IM2COL = Entry("conv/im2col", "im2col")
GEMM = Entry("conv/im2col_gemm", "sgemm_tiled", TILE.defines)
IM2COL_THREADS = 256
MAX_MATRIX_NBYTES = 256 * 2**20
ITEMSIZE = 4


def padded_depth(op: Conv2d) -> int:
    """Rows of the column matrix: K, padded to whole steps."""
    return ceil_div(op.depth, TILE.k) * TILE.k


def chunk_pixels(problem: Problem) -> int:
    """Columns of the matrix: output pixels per pair of launches, in whole tiles.

    As many as MAX_MATRIX_NBYTES holds, but at least one tile.
    """
    n, _, oh, ow = problem.output
    column = padded_depth(cast(Conv2d, problem.op)) * ITEMSIZE * TILE.n
    tiles = max(1, MAX_MATRIX_NBYTES // column)
    return min(tiles, ceil_div(n * oh * ow, TILE.n)) * TILE.n


@dataclass(frozen=True, eq=False)
class Im2col(ConvKernel):
    """Pairs of launches, one per run of pixels: phases "im2col" and "gemm"."""

    algorithm = "im2col"

    precision: Precision = FP32

    @property
    def edges(self) -> tuple[int, ...]:
        return TILE.edges

    def entries(self) -> tuple[Entry, ...]:
        return (IM2COL, GEMM)

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *bias = super().pack(problem, weights)
        return (pack_rows(weight.reshape(len(weight), -1).T, TILE), *bias)

    def scratch(self, problem: Problem) -> int:
        return padded_depth(cast(Conv2d, problem.op)) * chunk_pixels(problem) * ITEMSIZE

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, _, oh, ow = problem.output
        chunk = chunk_pixels(problem)
        starts = range(0, n * oh * ow, chunk)
        return tuple(launch for start in starts for launch in self._pair(problem, start, chunk))

    def _pair(self, problem: Problem, start: int, chunk: int) -> tuple[GridLaunch, ...]:
        """The launches for at most `chunk` pixels from `start` on."""
        op = cast(Conv2d, problem.op)
        n, o, oh, ow = problem.output
        rows, shape = padded_depth(op), conv_shape(problem)
        tiles = ceil_div(min(chunk, n * oh * ow - start), TILE.n)
        columns = np.int32(tiles * TILE.n)
        place = (divisor_struct(oh * ow), divisor_struct(ow), np.int32(start))
        gemm = gemm_shape(problem, TILE, rows // TILE.k, first_pixel=start)
        matrix = (X, WORKSPACE, shape, *place, columns, np.int32(rows))
        product = (WORKSPACE, Pointer(Role.WEIGHT), *bias_and_residual(op), OUT)
        im2col_grid = (
            ceil_div(int(columns), IM2COL_THREADS),
            min(op.in_channels, MAX_GRID[1]),
            1,
        )
        return (
            GridLaunch(
                IM2COL,
                im2col_grid,
                (IM2COL_THREADS, 1, 1),
                matrix,
                phase="im2col",
                overlaps=True,
            ),
            GridLaunch(
                GEMM,
                (ceil_div(o, TILE.m) * tiles, 1, 1),
                (TILE.threads, 1, 1),
                (*product, shape, gemm, columns),
                phase="gemm",
                overlaps=True,
            ),
        )


def im2col_kernels() -> tuple[Im2col, ...]:
    return (Im2col(),)
