"""Winograd convolution F(4×4, 3×3) in one launch. NCHW, float32.

The transforms, the filters and the error bound are those of conv/winograd.py. Neither transformed
tiles nor products leave the multiprocessor, so there is no workspace. See
kernels/hopper/winograd_one_launch.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.winograd import FILTER_TRANSFORMS, FLOAT_NBYTES
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig

OUTPUT_TILE = 4
POSITIONS = (OUTPUT_TILE + 2) ** 2
MULTIPLIER_WARPS = POSITIONS // 3
PRODUCER_WARPS = 4
WIDTHS = (4, 2, 1)  # pixels that a thread loads or stores at a time
SIDE = 8  # channels, and tiles, of a thread's sums
BARRIER_NBYTES = 128  # of a stage: a full/empty pair of mbarriers, aligned

# Mirrors `WinogradParts` in kernels/hopper/winograd_one_launch.cu.
PARTS = np.dtype(
    [(name, np.int32) for name in ("rows", "columns", "tiles", "blocks", "steps", "parts")]
)


@dataclass(frozen=True)
class WinogradTile(TileConfig):
    """`m` output channels by `n` output tiles of 4×4 per part, over `k` input channels per step.

    stages: steps in shared memory at a time.
    units: how many of a thread's 8 channels have their sums in shared memory at a time: those of
    two rounds of the epilogue.
    cluster: CTAs that compute parts of the same channels together, and read filters once.

    Legal tiles: k = 4, with m and n 32 and 32 or 64 and 16, which the device code is written for;
    at most 6 units, as each row of tiles of a round has a warp; as many stages as fit in shared
    memory.
    """

    stages: int
    units: int
    cluster: int = 1

    @property
    def name(self) -> str:
        """`m64n16k4s3u5c2` with three stages, five units and clusters of two."""
        return f"{super().name}s{self.stages}u{self.units}c{self.cluster}"

    @property
    def threads(self) -> int:
        """Producers, then multipliers."""
        return 32 * (PRODUCER_WARPS + MULTIPLIER_WARPS)

    @property
    def shared_nbytes(self) -> int:
        """Stages of filters and transformed pixels, the sums of two rounds, mbarriers."""
        stage = POSITIONS * self.k * (self.m + self.n) * FLOAT_NBYTES
        unit = POSITIONS * self.m // SIDE * self.n * FLOAT_NBYTES
        return self.stages * (stage + BARRIER_NBYTES) + self.units * unit


TILES = tuple(
    WinogradTile(m, n, 4, stages, units, cluster)
    for m, n, stages, units, cluster in (
        (64, 16, 3, 5, 2),
        (32, 32, 3, 6, 1),
        (64, 16, 3, 5, 1),
        (64, 16, 3, 4, 2),
        (32, 32, 4, 4, 1),
        (32, 32, 3, 6, 2),
    )
)
CHOSEN = TILES[:2]
"""Of these, `choose` takes one; the others are there to be measured."""

# Cycles of a step, by m, and of a part's epilogue. Of 32 channels a step has twice the transforms,
# which its multipliers wait for.
STEP_CYCLES = {32: 2300, 64: 1800}
PART_CYCLES = 4800


def parts_of(problem: Problem, tile: WinogradTile) -> int:
    """How many parts the clusters divide: each has `tile.n` tiles for each CTA."""
    n, o, oh, ow = problem.output
    tiles = n * ceil_div(oh, OUTPUT_TILE) * ceil_div(ow, OUTPUT_TILE)
    return ceil_div(tiles, tile.n * tile.cluster) * ceil_div(o, tile.m)


def estimate(problem: Problem, tile: WinogradTile) -> int:
    """Cycles of the multiprocessor that has most parts, whole waves of them."""
    steps = ceil_div(problem.inputs[0][1], tile.k)
    waves = ceil_div(parts_of(problem, tile), MULTIPROCESSORS // tile.cluster)
    return waves * (steps * STEP_CYCLES[tile.m] + PART_CYCLES)


def width_of(problem: Problem) -> int:
    """How many pixels are loaded and stored at a time: rows of the input from the second column of
    a tile on, and rows of the output, are aligned to as many.
    """
    op = cast(Conv2d, problem.op)
    extents = (problem.inputs[0][3], problem.output[3], 1 - op.padding[1])
    return next(width for width in WIDTHS if not any(extent % width for extent in extents))


@dataclass(frozen=True, eq=False)
class WinogradOneLaunch(ConvKernel):
    """F(4×4, 3×3). Each multiprocessor computes parts of 64 output channels of 16 tiles, or 32 of
    32, in turn, and keeps their sums at all 36 positions in registers.
    """

    algorithm = "winograd_f4x4_one_launch"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    tiles: ClassVar[tuple[WinogradTile, ...]] = TILES

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("winograd_f4x4", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {OUTPUT_TILE, OUTPUT_TILE + 2}
        return tuple(sorted(sizes.union(*(tile.edges for tile in self.tiles))))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Each width of loads and stores, with rows of tiles that end within a part."""
        found = []
        for shape, o, padding in (
            ((2, 5, 9, 12), 33, (1, 1)),
            ((3, 8, 14, 14), 64, (1, 1)),
            ((1, 9, 5, 16), 7, (2, 5)),
            ((2, 4, 11, 10), 34, (0, 3)),
            ((5, 6, 7, 7), 40, (1, 1)),
            ((1, 3, 18, 8), 31, (1, 0)),
        ):
            op = Conv2d(shape[1], o, (3, 3), (1, 1), padding, bias=True, relu=True)
            found.append(Problem(replace(op, residual=True), (shape, op.infer(shape))))
        return tuple(found)

    def entry(self, tile: WinogradTile, width: int) -> Entry:
        macros = (*tile.defines, ("WIDTH", width))
        return Entry("hopper/winograd_one_launch", "winograd_one_launch", macros, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.entry(tile, width) for tile in self.candidates for width in WIDTHS)

    @property
    def candidates(self) -> tuple[WinogradTile, ...]:
        """The tiles to choose from: a variant's own."""
        return tuple(tile for tile in self.tiles if tile in CHOSEN) or self.tiles

    def choose(self, problem: Problem) -> WinogradTile:
        """The tile whose estimate is least; of equals the first."""
        return min(self.candidates, key=lambda tile: estimate(problem, tile))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != (3, 3) or op.stride != (1, 1):
            return "Winograd takes 3×3 windows of stride 1"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters as G g Gᵀ, computed in float64 from float32 weights and rounded once.

        Returns (blocks of O, steps of C, positions, k, m), padded with zeros: each step's filters
        in the order in which they are in shared memory.
        """
        weight, *bias = super().pack(problem, weights)
        tile, g = self.choose(problem), FILTER_TRANSFORMS[OUTPUT_TILE]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite weights become NaN
            filters = (g @ weight.astype(np.float64) @ g.T).astype(np.float32)
        o, c = weight.shape[:2]
        padded = np.pad(filters, ((0, -o % tile.m), (0, -c % tile.k), (0, 0), (0, 0)))
        parts = padded.reshape(-1, tile.m, padded.shape[1] // tile.k, tile.k, POSITIONS)
        return (np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        tile = self.choose(problem)
        n, c = problem.inputs[0][:2]
        o, oh, ow = problem.output[1:]
        rows, columns = ceil_div(oh, OUTPUT_TILE), ceil_div(ow, OUTPUT_TILE)
        tiles, blocks, parts = n * rows * columns, ceil_div(o, tile.m), parts_of(problem, tile)
        fields = (rows, columns, tiles, blocks, ceil_div(c, tile.k), parts)
        return (
            GridLaunch(
                self.entry(tile, width_of(problem)),
                (min(parts, MULTIPROCESSORS // tile.cluster) * tile.cluster, 1, 1),
                (tile.threads, 1, 1),
                (
                    X,
                    Pointer(Role.WEIGHT),
                    *bias_and_residual(cast(Conv2d, problem.op)),
                    OUT,
                    conv_shape(problem),
                    struct(np.array([fields], PARTS)),
                ),
                shared_nbytes=tile.shared_nbytes,
                overlaps=True,
            ),
        )


def winograd_one_launch_kernels() -> tuple[WinogradOneLaunch, ...]:
    return (WinogradOneLaunch(FP32),)
