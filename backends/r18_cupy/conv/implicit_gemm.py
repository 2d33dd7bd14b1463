"""Implicit GEMM in float32 on CUDA cores: M = O, N = n·OH·OW, K = C·kh·kw. NCHW.

The column matrix exists one tile at a time, in shared memory; see kernels/conv/implicit_gemm.cu.
Split-K: where the output has too few tiles to fill a GPU, each split writes its sums to the
workspace, and a second launch adds them in order (kernels/conv/split_k_reduce_nchw.cu).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.sgemm import GemmTile, divisor_struct, gemm_shape, pack_rows
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import (
    NULL,
    OUT,
    WORKSPACE,
    GridLaunch,
    Pointer,
    Role,
    X,
    ceil_div,
)

REDUCE = Entry("conv/split_k_reduce_nchw", "split_k_reduce_nchw")
REDUCE_THREADS = 256
ITEMSIZE = 4


@dataclass(frozen=True)
class GatherTile(GemmTile):
    """A tile with gathered pixels.

    blocked: K runs over (block of `k` channels, r, s, channel within the block). A step then covers
    one window position, which makes gathering cheap; channels are padded to whole blocks. Otherwise
    K runs over (channel, r, s) without padding, and each row computes its own position.
    """

    blocked: bool = True

    @property
    def name(self) -> str:
        return super().name + ("" if self.blocked else "dense")

    @property
    def entry(self) -> Entry:
        return Entry("conv/implicit_gemm", "conv2d_implicit_gemm", self.defines)

    def k_tiles(self, op: Conv2d) -> int:
        """K steps."""
        if self.blocked:
            return ceil_div(op.in_channels, self.k) * math.prod(op.kernel_size)
        return ceil_div(op.depth, self.k)

    def pack(self, weight: Array) -> Array:
        """OIHW weights in K order, as `pack_rows` returns them."""
        if self.blocked:
            o, c, kh, kw = weight.shape
            blocks = np.pad(weight, ((0, 0), (0, -c % self.k), (0, 0), (0, 0)))
            blocks = blocks.reshape(o, -1, self.k, kh, kw).transpose(1, 3, 4, 2, 0)
            return pack_rows(blocks.reshape(-1, o), self)
        return pack_rows(weight.reshape(len(weight), -1).T, self)


TILES = (
    GatherTile(128, 128, 16, tm=8, tn=8, stages=3),
    GatherTile(64, 128, 16, tm=8, tn=8, stages=3),
    GatherTile(64, 128, 8, tm=8, tn=8, stages=3, blocked=False),
    GatherTile(64, 64, 16, tm=8, tn=4, stages=3),
    GatherTile(32, 64, 16, tm=4, tn=4, stages=4),
)


@dataclass(frozen=True)
class Tiling:
    """A tile, and the maximum number of splits of K."""

    tile: GatherTile
    splits: int = 1

    @property
    def name(self) -> str:
        return self.tile.name + (f"split{self.splits}" if self.splits > 1 else "")

    def split_tiles(self, op: Conv2d) -> int:
        """K steps per split; the last split may have fewer."""
        return ceil_div(self.tile.k_tiles(op), self.splits)

    def parts(self, op: Conv2d) -> int:
        """The number of non-empty splits. Does not depend on the batch."""
        return ceil_div(self.tile.k_tiles(op), self.split_tiles(op))


# -- the choice --------------------------------------------------------------------------------

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_PARTIAL_NBYTES = 64 * 2**20

# Estimated cycles of an SM: only the ratios matter.
MULTIPLIES = 128  # per cycle
START = 2500  # per block: first tiles from memory, and the epilogue
SECOND_LAUNCH = 4000
MEMORY_NBYTES = 1500  # per cycle of the whole GPU, for partial sums
LATENCY_WARPS = 3.0  # w warps keep w / (w + this) of the ALUs busy


@lru_cache(maxsize=4096)
def choose_tile(problem: Problem) -> Tiling:
    """The tile and split with the lowest estimated time. Pure."""
    candidates = (Tiling(tile, splits) for tile in TILES for splits in SPLITS)
    return min((t for t in candidates if _fits(problem, t)), key=lambda t: cycles(problem, t))


def _fits(problem: Problem, tiling: Tiling) -> bool:
    """Whether to consider a split: at least four steps each, and a bounded workspace."""
    if tiling.splits == 1:
        return True
    op = cast(Conv2d, problem.op)
    partial = tiling.splits * math.prod(problem.output) * ITEMSIZE
    return tiling.split_tiles(op) >= 4 and partial <= MAX_PARTIAL_NBYTES


def launch_cycles(problem: Problem, tiling: Tiling) -> float:
    """Estimated time of the busiest SM, until all splits have their sums.

    The rate of arithmetic grows with the number of resident warps and with a thread's square of
    accumulators: a smaller square reads more per product.
    """
    op, tile = cast(Conv2d, problem.op), tiling.tile
    n, o, oh, ow = problem.output
    parts = tiling.parts(op)
    blocks = ceil_div(o, tile.m) * ceil_div(n * oh * ow, tile.n) * parts
    busiest = ceil_div(blocks, MULTIPROCESSORS)
    warps = min(busiest, tile.resident) * tile.threads // 32
    reads = 1 / tile.tm + 1 / tile.tn
    gather = 1.0 if tile.blocked else 0.85
    rate = MULTIPLIES * gather * (warps / (warps + LATENCY_WARPS)) / (0.75 + reads)
    work = busiest * tiling.split_tiles(op) * tile.m * tile.n * tile.k
    return work / rate + START * ceil_div(busiest, tile.resident)


def cycles(problem: Problem, tiling: Tiling) -> float:
    """Estimated time, with that of the second launch if there are splits to add."""
    total, parts = launch_cycles(problem, tiling), tiling.parts(cast(Conv2d, problem.op))
    if parts > 1:
        total += SECOND_LAUNCH + 2 * parts * math.prod(problem.output) * ITEMSIZE / MEMORY_NBYTES
    return total


# -- the kernels -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImplicitGemm(ConvKernel):
    """One launch; with split-K a second one that adds the splits."""

    algorithm = "implicit_gemm"

    precision: Precision = FP32

    @abstractmethod
    def tiling(self, problem: Problem) -> Tiling:
        """The tile and split for the problem."""

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *bias = super().pack(problem, weights)
        return (self.tiling(problem).tile.pack(weight), *bias)

    def scratch(self, problem: Problem) -> int:
        parts = self.tiling(problem).parts(cast(Conv2d, problem.op))
        return parts * math.prod(problem.output) * ITEMSIZE if parts > 1 else 0

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, tiling = cast(Conv2d, problem.op), self.tiling(problem)
        tile, parts = tiling.tile, tiling.parts(op)
        n, o, oh, ow = problem.output
        shape, size = conv_shape(problem), math.prod(problem.output)
        gemm = gemm_shape(
            problem,
            tile,
            tile.k_tiles(op),
            split_tiles=tiling.split_tiles(op),
            split_size=size,
        )
        grid = (ceil_div(o, tile.m) * ceil_div(n * oh * ow, tile.n), 1, parts)
        block = (tile.threads, 1, 1)
        operands = (X, Pointer(Role.WEIGHT))
        bias, residual = bias_and_residual(op)
        if parts == 1:
            arguments = (*operands, bias, residual, OUT, shape, gemm)
            return (GridLaunch(tile.entry, grid, block, arguments, overlaps=True),)
        # The epilogue needs the complete sum: splits have no bias, residual or ReLU.
        bare = conv_shape(Problem(replace(op, relu=False), problem.inputs))
        partial = (*operands, NULL, NULL, WORKSPACE, bare, gemm)
        reduce = (WORKSPACE, bias, residual, OUT, shape, divisor_struct(oh * ow))
        return (
            GridLaunch(tile.entry, grid, block, partial, phase="gemm", overlaps=True),
            GridLaunch(
                REDUCE,
                (ceil_div(size, REDUCE_THREADS), 1, 1),
                (REDUCE_THREADS, 1, 1),
                (*reduce, np.uint64(size), np.int32(parts)),
                phase="reduce",
                overlaps=True,
            ),
        )


@dataclass(frozen=True, eq=False)
class ChosenImplicitGemm(ImplicitGemm):
    """Tile and split are chosen per problem; see `choose_tile`."""

    batch_invariant = False  # larger batches use fewer splits

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({size for tile in TILES for size in tile.edges}))

    def entries(self) -> tuple[Entry, ...]:
        return (*(tile.entry for tile in TILES), REDUCE)

    def tiling(self, problem: Problem) -> Tiling:
        return choose_tile(problem)


@dataclass(frozen=True, eq=False)
class TiledImplicitGemm(ImplicitGemm):
    """One tile and one split for all problems."""

    fixed: Tiling = Tiling(TILES[0])

    @property
    def tile(self) -> str:
        return self.fixed.name

    @property
    def edges(self) -> tuple[int, ...]:
        return self.fixed.tile.edges

    def entries(self) -> tuple[Entry, ...]:
        return (self.fixed.tile.entry, *((REDUCE,) if self.fixed.splits > 1 else ()))

    def tiling(self, problem: Problem) -> Tiling:
        return self.fixed


def implicit_gemm_kernels() -> tuple[ImplicitGemm, ...]:
    """The kernel that chooses, then one per tile, and one with a fixed split-K."""
    tilings = (*(Tiling(tile) for tile in TILES), Tiling(TILES[-2], splits=8))
    return (ChosenImplicitGemm(), *(TiledImplicitGemm(fixed=tiling) for tiling in tilings))
