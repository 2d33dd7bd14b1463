"""Winograd convolution F(2×2, 3×3) in one launch, for small batches. NCHW, float32.

The transforms, the filters and the error bound are those of conv/winograd.py. The blocks of a
cluster divide the input channels, and neither transformed tiles nor products leave the
multiprocessor, so there is no workspace. See kernels/hopper/winograd_cluster.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.sgemm import FAST_DIVISOR, fast_divisor
from r18_cupy.conv.winograd import FILTER_TRANSFORMS, FLOAT_NBYTES
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig

OUTPUT_TILE = 2
POSITIONS = (OUTPUT_TILE + 2) ** 2
PRODUCERS, MULTIPLIERS = 128, 16 * POSITIONS  # threads
THREADS = PRODUCERS + MULTIPLIERS
SIDE = 4  # lanes of half a warp along the channels, and along the tiles
PRODUCTS = 128  # of a multiprocessor per cycle

# How many blocks run at once if clusters have four or more: all blocks of a cluster are in one GPC,
# and GPCs differ in their number of multiprocessors.
CLUSTERED = 112

# Mirrors `WinogradParts` in kernels/hopper/winograd_cluster.cu.
PARTS = np.dtype(
    [
        *((name, FAST_DIVISOR) for name in ("rows", "columns")),
        *((name, np.int32) for name in ("tiles", "steps", "part_steps")),
    ]
)


def row_places(values: int) -> tuple[int, ...]:
    """Where element e of a row of shared memory is, for each e: `Row<values>::place`."""
    whole = values // 4 * 4
    rest = 4 if values % 4 == 3 else values % 4

    def place(element: int) -> int:
        i, lane = divmod(element, SIDE)
        if i < whole:
            return i // 4 * 4 * SIDE + lane * 4 + i % 4
        return whole * SIDE + lane * rest + i - whole

    return tuple(map(place, range(SIDE * values)))


def row_floats(values: int) -> int:
    """The length of such a row, padded to whole vectors: `Row<values>::FLOATS`."""
    return SIDE * (values + (values % 4 == 3))


@dataclass(frozen=True)
class WinogradTile(TileConfig):
    """What a block computes.

    m: output channels.
    n: output tiles, at most 32.
    k: input channels of a step.
    parts: the blocks of a cluster, at most 8. One without input channels adds zeros.
    stages: steps whose operands are in shared memory.
    """

    parts: int = 1
    stages: int = 1

    @property
    def name(self) -> str:
        """`m32n28k8p4` with four parts."""
        return f"{super().name}p{self.parts}"

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.m, self.n, self.k, self.k * self.parts)

    @property
    def row(self) -> int:
        """Floats of a row of filters."""
        return row_floats(self.m // SIDE)

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory: the operands, then the sums where those were, and the outputs."""
        tiles = row_floats(self.n // SIDE)
        pitch = (tiles + 15) // 32 * 32 + 16
        operands = self.stages * self.k * POSITIONS * (self.row + tiles)
        sums = POSITIONS * self.m * pitch
        share = ceil_div(self.m * self.n, self.parts)
        outputs = self.parts * share * OUTPUT_TILE**2
        nbytes = (max(operands, sums) + outputs) * FLOAT_NBYTES + (2 * self.stages + 1) * 8
        return ceil_div(nbytes, 128) * 128

    @property
    def entry(self) -> Entry:
        return Entry("hopper/winograd_cluster", "winograd_cluster", self.defines)


TILES = (
    WinogradTile(32, 28, 8, parts=2, stages=4),
    WinogradTile(32, 28, 8, parts=4, stages=4),
    WinogradTile(40, 28, 8, parts=8, stages=4),
    WinogradTile(40, 16, 8, parts=8, stages=4),
)


@dataclass(frozen=True, eq=False)
class WinogradCluster(ConvKernel):
    """F(2×2, 3×3) with split-K across a cluster; the tile is chosen per problem."""

    algorithm = "winograd_f2x2_cluster"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    batch_invariant: ClassVar[bool] = False  # larger batches use other parts

    precision: Precision = FP32

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("winograd_f2x2", self.precision.accumulate, self.precision.storage)

    @property
    def tiles(self) -> tuple[WinogradTile, ...]:
        return TILES

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {size for tile in self.tiles for size in tile.edges}
        return tuple(sorted({OUTPUT_TILE, OUTPUT_TILE + 2} | sizes))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Parts with twice as many steps as stages, without any, and with a last that is short."""
        found = []
        for shape, o, padding in (
            ((1, 152, 6, 9), 33, (1, 1)),
            ((2, 300, 5, 6), 20, (1, 2)),
            ((1, 600, 4, 4), 41, (1, 1)),
            ((3, 17, 7, 7), 40, (1, 1)),
            ((1, 9, 12, 11), 65, (0, 2)),
        ):
            op = Conv2d(shape[1], o, (3, 3), (1, 1), padding, bias=True, relu=True)
            found.append(Problem(replace(op, residual=True), (shape, op.infer(shape))))
        return tuple(found)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(tile.entry for tile in self.tiles)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != (3, 3) or op.stride != (1, 1):
            return "Winograd takes 3×3 windows of stride 1"
        return None

    def tile_for(self, problem: Problem) -> WinogradTile:
        """The tile with the lowest estimate. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, tile))

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters as G g Gᵀ, computed in float64 from float32 weights and rounded once.

        Returns (blocks of O, steps of C, k, positions, row), padded with zeros: each step's filters
        in the order in which they are in shared memory.
        """
        weight, *bias = super().pack(problem, weights)
        tile, g = self.tile_for(problem), FILTER_TRANSFORMS[OUTPUT_TILE]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite weights become NaN
            filters = (g @ weight.astype(np.float64) @ g.T).astype(np.float32)
        o, c = weight.shape[:2]
        padded = np.pad(filters, ((0, -o % tile.m), (0, -c % tile.k), (0, 0), (0, 0)))
        blocks, steps = len(padded) // tile.m, padded.shape[1] // tile.k
        packed = np.zeros((blocks, steps, tile.k, POSITIONS, tile.row), np.float32)
        places = list(row_places(tile.m // SIDE))
        packed[..., places] = padded.reshape(blocks, tile.m, steps, tile.k, POSITIONS).transpose(
            0, 2, 3, 4, 1
        )
        return (packed, *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        tile, o = self.tile_for(problem), problem.output[1]
        parts = divide(problem, tile)
        return (
            GridLaunch(
                tile.entry,
                (ceil_div(int(parts["tiles"][0]), tile.n), ceil_div(o, tile.m), tile.parts),
                (THREADS, 1, 1),
                (
                    X,
                    Pointer(Role.WEIGHT),
                    *bias_and_residual(cast(Conv2d, problem.op)),
                    OUT,
                    conv_shape(problem),
                    struct(parts),
                ),
                shared_nbytes=tile.shared_nbytes,
                overlaps=True,
            ),
        )


def divide(problem: Problem, tile: WinogradTile) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """How the tile divides a problem, as the device's `WinogradParts`."""
    n, c = problem.inputs[0][:2]
    oh, ow = problem.output[2:]
    rows, columns, steps = ceil_div(oh, OUTPUT_TILE), ceil_div(ow, OUTPUT_TILE), ceil_div(c, tile.k)
    divisors = map(fast_divisor, (rows, columns))
    fields = (*divisors, n * rows * columns, steps, ceil_div(steps, tile.parts))
    return np.array([fields], PARTS)


def estimate(problem: Problem, tile: WinogradTile) -> float:
    """Rough cycles of the busiest multiprocessor."""
    parts = divide(problem, tile)
    blocks = ceil_div(int(parts["tiles"][0]), tile.n) * ceil_div(problem.output[1], tile.m)
    room = (CLUSTERED if tile.parts > 2 else MULTIPROCESSORS) // tile.parts
    waves = ceil_div(blocks, room)
    channels = int(parts["part_steps"][0]) * tile.k
    return waves * channels * POSITIONS * tile.m * tile.n / PRODUCTS


def winograd_cluster_kernels() -> tuple[WinogradCluster, ...]:
    return (WinogradCluster(),)
