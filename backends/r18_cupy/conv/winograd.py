"""Winograd convolutions F(2×2, 3×3) and F(4×4, 3×3), each in three phases.

Input tiles are transformed, (m+2)² GEMMs multiply them with the filters position by position, and
the products are transformed back (Lavin and Gray, arXiv:1509.09308). The workspace holds the
transformed tiles (positions, channels, tiles) and the products (positions, output channels, tiles)
in float32, every extent padded to whole GEMM tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.sgemm import GemmTile, pack_rows
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import (
    MAX_GRID,
    OUT,
    WORKSPACE,
    GridLaunch,
    Pointer,
    Role,
    X,
    ceil_div,
    struct,
)
from r18_cupy.kernel import CudaKernel

WORKSPACE_NBYTES = 512 * 2**20
"""Problems with more tiles than this holds are computed in several rounds."""

FLOAT_NBYTES = 4
LANES, CHANNELS = 32, 4  # threads of a transform's block: along tiles, along channels

# Mirrors `WinogradSpan` in kernels/conv/winograd.cuh.
SPAN = np.dtype(
    [
        (name, np.int32)
        for name in ("rows", "columns", "first", "count", "width", "c_padded", "o_padded")
    ]
)


def _filter_transform() -> Array:
    """G of F(4×4, 3×3) for the points 0, ±11/16, ±3/2, ∞: rows (1, p, p²) over Π(p − q) of the
    other points q."""
    a, b = 11 / 16, 3 / 2
    of_a, of_b = 2 * a**2 * (a**2 - b**2), 2 * b**2 * (b**2 - a**2)
    rows = [[1 / (a * b) ** 2, 0, 0]]
    rows += [[1 / of_a, p / of_a, p**2 / of_a] for p in (a, -a)]
    rows += [[1 / of_b, p / of_b, p**2 / of_b] for p in (b, -b)]
    return np.array([*rows, [0, 0, 1]])


# G for both. With the Bᵀ and Aᵀ of kernels/conv/winograd.cuh, these are the matrices that the error
# bounds are derived for.
FILTER_TRANSFORMS = {
    2: np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float64),
    4: _filter_transform(),
}
"""Output tile m → G, (m+2, 3)."""


# Each adds channels in the same order, so the choice does not change an output's bits.
GEMM_TILES = (
    GemmTile(128, 128, 8, tm=8, tn=8, stages=3),
    GemmTile(64, 128, 8, tm=8, tn=8, stages=3),
    GemmTile(64, 64, 16, tm=8, tn=8, stages=3),
    GemmTile(64, 32, 16, tm=4, tn=4, stages=4),
)

# Threads that keep an SM busy, as `choose_tile` assumes.
BUSY_THREADS = 192
# Time per product relative to the first tile: smaller tiles read more per product.
READING = dict(zip(GEMM_TILES, (1.0, 1.05, 1.15, 1.6), strict=True))


def estimated_time(tile: GemmTile, positions: int, o: int, count: int) -> float:
    """Time of the GEMMs over o channels and `count` tiles, in products of one SM.

    Whole waves of resident blocks, then the rest: bounded by the SM with the most blocks, and by
    the time of a single block.
    """
    area = tile.m * tile.n
    blocks = positions * ceil_div(o, tile.m) * ceil_div(count, tile.n)
    waves, rest = divmod(blocks, MULTIPROCESSORS * tile.resident)
    least = area / tile.threads * BUSY_THREADS if rest else 0.0
    time = waves * tile.resident * area + max(ceil_div(rest, MULTIPROCESSORS) * area, least)
    return time * READING[tile]


def choose_tile(positions: int, o: int, count: int) -> GemmTile:
    """The tile with the lowest estimated time; ties go to the larger one."""
    return min(GEMM_TILES, key=lambda tile: estimated_time(tile, positions, o, count))


@dataclass(frozen=True)
class Tiling:
    """How a problem is laid out in the workspace.

    positions: (m+2)², the number of GEMMs.
    rows, columns: output tiles per image; `total` in the batch.
    width: tiles that the workspace holds, a multiple of `gemm.n`.
    c_padded, o_padded: channels, padded to whole GEMM steps and tiles.
    """

    gemm: GemmTile
    positions: int
    rows: int
    columns: int
    total: int
    width: int
    c_padded: int
    o_padded: int

    @property
    def transformed_nbytes(self) -> int:
        return self.positions * self.c_padded * self.width * FLOAT_NBYTES

    @property
    def product_nbytes(self) -> int:
        return self.positions * self.o_padded * self.width * FLOAT_NBYTES

    def spans(self) -> Iterator[np.ndarray[Any, np.dtype[np.void]]]:
        """The rounds in order, as one-element arrays of `SPAN`."""
        for first in range(0, self.total, self.width):
            count = min(self.width, self.total - first)
            width = round_up(count, self.gemm.n)
            fields = (self.rows, self.columns, first, count, width, self.c_padded, self.o_padded)
            yield np.array([fields], SPAN)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def tiling(problem: Problem, m: int, gemm: GemmTile | None, limit: int) -> Tiling:
    """The layout for output tiles of m×m in a workspace of `limit` bytes, or of one GEMM tile if
    that is more. `gemm` None: chosen by size.
    """
    n, c = problem.inputs[0][:2]
    o, oh, ow = problem.output[1:]
    rows, columns, positions = ceil_div(oh, m), ceil_div(ow, m), (m + 2) ** 2
    total = n * rows * columns

    def fitting(tile: GemmTile) -> int:
        channels = round_up(c, tile.k) + round_up(o, tile.m)
        return max(1, limit // (positions * channels * FLOAT_NBYTES * tile.n)) * tile.n

    if gemm is None:
        gemm = choose_tile(positions, o, min(total, fitting(GEMM_TILES[0])))
    rounds = ceil_div(total, fitting(gemm))
    width = round_up(ceil_div(total, rounds), gemm.n)
    return Tiling(
        gemm,
        positions,
        rows,
        columns,
        total,
        width,
        round_up(c, gemm.k),
        round_up(o, gemm.m),
    )


@dataclass(frozen=True, eq=False)
class Winograd(ConvKernel):
    """F(m×m, 3×3). NCHW, float32, stride 1.

    gemm:  the GEMM's tile; None chooses it by the problem's size.
    limit: bytes of workspace, unless one GEMM tile needs more.
    """

    output_tile: ClassVar[int]

    gemm: GemmTile | None = None
    limit: int = WORKSPACE_NBYTES

    @property
    def tile(self) -> str:
        return self.gemm.name if self.gemm else ""

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract(self.algorithm, self.precision.accumulate, self.precision.storage)

    @property
    def gemms(self) -> tuple[GemmTile, ...]:
        """The tiles that may be used."""
        return (self.gemm,) if self.gemm else GEMM_TILES

    @property
    def edges(self) -> tuple[int, ...]:
        m = self.output_tile
        return tuple(sorted({m, m + 2}.union(*(tile.edges for tile in self.gemms))))

    @property
    def _input_transform(self) -> Entry:
        return Entry("conv/winograd_input", "winograd_input", (("OUTPUT_TILE", self.output_tile),))

    @property
    def _output_transform(self) -> Entry:
        return Entry(
            "conv/winograd_output", "winograd_output", (("OUTPUT_TILE", self.output_tile),)
        )

    def entries(self) -> tuple[Entry, ...]:
        gemms = (_gemm(tile) for tile in self.gemms)
        return (self._input_transform, *gemms, self._output_transform)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != (3, 3) or op.stride != (1, 1):
            return "Winograd takes 3×3 windows of stride 1"
        return None

    def tiling(self, problem: Problem) -> Tiling:
        """The problem's layout in the workspace. Pure."""
        return tiling(problem, self.output_tile, self.gemm, self.limit)

    def scratch(self, problem: Problem) -> int:
        tiling = self.tiling(problem)
        return tiling.transformed_nbytes + tiling.product_nbytes

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters as G g Gᵀ, computed in float64 from float32 weights and rounded once.

        Returns (positions, tiles of O, C, m), zero-padded like the workspace; see `pack_rows`.
        """
        weight, *bias = super().pack(problem, weights)
        gemm, g = self.tiling(problem).gemm, FILTER_TRANSFORMS[self.output_tile]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite weights become NaN
            filters = (g @ weight.astype(np.float64) @ g.T).astype(np.float32)
        positions = filters.transpose(2, 3, 1, 0).reshape(-1, weight.shape[1], weight.shape[0])
        return (np.stack([pack_rows(matrix, gemm) for matrix in positions]), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        tiling, shape = self.tiling(problem), conv_shape(problem)
        o = problem.output[1]
        bias, residual = bias_and_residual(cast(Conv2d, problem.op))
        transformed = WORKSPACE
        product = Pointer(Role.WORKSPACE, offset=tiling.transformed_nbytes)
        gemm, launches = tiling.gemm, []
        for fields in tiling.spans():
            span = struct(fields)
            width, count = int(fields["width"][0]), int(fields["count"][0])
            launches += [
                GridLaunch(
                    self._input_transform,
                    _transform_grid(width, tiling.c_padded),
                    (LANES, CHANNELS, 1),
                    (X, transformed, shape, span),
                    phase="input transform",
                    overlaps=True,
                ),
                GridLaunch(
                    _gemm(gemm),
                    (tiling.o_padded // gemm.m * (width // gemm.n), tiling.positions, 1),
                    (gemm.threads, 1, 1),
                    (Pointer(Role.WEIGHT), transformed, product, span),
                    phase="gemm",
                    overlaps=True,
                ),
                GridLaunch(
                    self._output_transform,
                    _transform_grid(count, o),
                    (LANES, CHANNELS, 1),
                    (product, bias, residual, OUT, shape, span),
                    phase="output transform",
                    overlaps=True,
                ),
            ]
        return tuple(launches)


def _gemm(tile: GemmTile) -> Entry:
    return Entry("conv/winograd_gemm", "winograd_gemm", tile.defines)


def _transform_grid(tiles: int, channels: int) -> tuple[int, int, int]:
    """Grid of a transform; its threads stride over channels beyond the limit of grid y."""
    return ceil_div(tiles, LANES), min(MAX_GRID[1], ceil_div(channels, CHANNELS)), 1


@dataclass(frozen=True, eq=False)
class WinogradF2x2(Winograd):
    algorithm = "winograd_f2x2"
    output_tile = 2


@dataclass(frozen=True, eq=False)
class WinogradF4x4(Winograd):
    algorithm = "winograd_f4x4"
    output_tile = 4


def winograd_kernels() -> tuple[CudaKernel, ...]:
    """F(4×4) and F(2×2) with a chosen tile, then one kernel per tile."""
    kinds = (WinogradF4x4, WinogradF2x2)
    chosen = tuple(kind(FP32) for kind in kinds)
    return (*chosen, *(kind(FP32, gemm=tile) for kind in kinds for tile in GEMM_TILES))
