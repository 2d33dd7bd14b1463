"""The base of convolutions of images with few channels, with or without max-pooling.

A block computes some columns of the output from a patch of the image in shared memory: two rows of
the convolution per turn, turn after turn down a strip. 3×3 pooling with stride 2 needs one more row
and column than its pairs: a strip begins with the row that its first windows share with the strip
above, and adjacent blocks both compute one column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, MaxPool2d, Problem, parts_of
from r18_cupy.conv.base import bias_and_residual, conv_shape, output_format
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSOR_NBYTES, MULTIPROCESSORS, RESERVED_NBYTES
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel

STRIDE = 2  # of the convolution, along a row
ROWS = 2  # of the convolution, per turn
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))  # the only supported pooling windows and stride
MAX_SHARED_NBYTES = 99 * 1024  # per block on sm_86, sm_89 and sm_120, the least from sm_80 on
MAX_REACH = 2**30  # of padded images: device coordinates exceed them slightly

# Mirrors `Task` in kernels/stem/strips.cuh.
TASK = np.dtype([(name, np.int32) for name in ("rows", "columns", "ph", "pw", "strip")])


def conv_of(problem: Problem) -> Problem:
    """The convolution without its pooling."""
    return parts_of(problem)[0] if isinstance(problem.op, ConvMaxPool) else problem


def conv_op(problem: Problem) -> Conv2d:
    return cast(Conv2d, conv_of(problem).op)


def is_pooled(problem: Problem) -> bool:
    return isinstance(problem.op, ConvMaxPool)


def pool_padding(problem: Problem) -> tuple[int, int]:
    """Padding of rows and columns; (0, 0) without pooling."""
    return problem.op.pool.padding if isinstance(problem.op, ConvMaxPool) else (0, 0)


def patch_rows(op: Conv2d) -> int:
    """Image rows under the windows of one turn."""
    return (ROWS - 1) * op.stride[0] + op.kernel_size[0]


def turns_of(problem: Problem) -> int:
    """Turns down a whole image, without the turn before a strip."""
    rows = problem.output[2]
    return rows if is_pooled(problem) else ceil_div(rows, ROWS)


@dataclass(frozen=True)
class FewChannelsTile(TileConfig, ABC):
    """`m` outputs of the convolution, in two rows, by `n` channels per block and turn.

    blocks: resident blocks per SM; limits registers.

    Legal tiles: the static_asserts at the top of each kernel in kernels/stem; `shared_nbytes` at
    most `shared_limit`.
    """

    blocks: int

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    def shared_limit(self) -> int:
        """The shared memory that a block may use, in bytes."""
        return MAX_SHARED_NBYTES

    def suits(self, problem: Problem) -> bool:
        """Whether the tile is meant for the problem, if it fits in shared memory."""
        return True

    @abstractmethod
    def column_tiles(self, problem: Problem) -> int:
        """Blocks along an output row."""

    @abstractmethod
    def shared_nbytes(self, problem: Problem) -> int: ...

    @abstractmethod
    def turn_cycles(self, problem: Problem) -> float:
        """Cycles of an SM for one turn of a block."""


@dataclass(frozen=True)
class Blocking:
    """How a problem is computed: tile, and turns per block."""

    tile: FewChannelsTile
    strip: int

    def blocks(self, problem: Problem) -> int:
        n, o, _, _ = problem.output
        strips = ceil_div(turns_of(problem), self.strip)
        return n * strips * self.tile.column_tiles(problem) * ceil_div(o, self.tile.n)


# -- choosing ----------------------------------------------------------------------------------

# For an H200; another device computes the same results, possibly with a worse balance.
ALONE = 1.25  # slowdown of a turn when a block has the SM to itself
TURN_LATENCY = 700  # cycles per turn in which a block's arithmetic waits
BLOCK_LATENCY = 3000  # cycles until the first patch and the weights have arrived
BLOCK_CYCLES = 800  # of these, cycles in which the SM's other blocks wait too
MAX_STRIPS = 256  # per image that are considered


def estimate(problem: Problem, blocking: Blocking) -> float:
    """Rough cycles of the busiest SM: the maximum of throughput and latency."""
    tile = blocking.tile
    share = ceil_div(blocking.blocks(problem), MULTIPROCESSORS)
    needed = tile.shared_nbytes(problem) + RESERVED_NBYTES
    resident = min(tile.blocks, MULTIPROCESSOR_NBYTES // needed)
    turns = blocking.strip + (0.5 if is_pooled(problem) else 0.0)
    work = tile.turn_cycles(problem)
    busy = share * (turns * work + BLOCK_CYCLES)
    waiting = BLOCK_LATENCY + turns * (work * ALONE + TURN_LATENCY)
    return max(busy, ceil_div(share, resident) * waiting)


def possible_blockings(
    problem: Problem, tiles: tuple[FewChannelsTile, ...]
) -> tuple[Blocking, ...]:
    """The tiles that fit in shared memory, with the strips that divide an image most evenly."""
    turns = turns_of(problem)
    strips = sorted({ceil_div(turns, count) for count in range(1, min(turns, MAX_STRIPS) + 1)})
    fitting = (
        tile
        for tile in tiles
        if tile.suits(problem) and tile.shared_nbytes(problem) <= tile.shared_limit
    )
    return tuple(Blocking(tile, strip) for tile in fitting for strip in strips)


@lru_cache(maxsize=4096)
def choose(problem: Problem, tiles: tuple[FewChannelsTile, ...]) -> Blocking:
    """The tile and strip with the lowest estimate. Pure."""
    blockings = possible_blockings(problem, tiles)
    return min(blockings, key=lambda blocking: estimate(problem, blocking))


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FewChannels(CudaKernel):
    """One tile for every problem, or the best of all tiles. The bits do not depend on the batch."""

    reads: ClassVar[Layout] = Layout.NCHW
    minimum_capability: ClassVar[tuple[int, int]] = (8, 0)  # cp.async
    truncates: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False  # see GridLaunch

    config: FewChannelsTile | None = None

    @property
    @abstractmethod
    def all_tiles(self) -> tuple[FewChannelsTile, ...]: ...

    @property
    def tiles(self) -> tuple[FewChannelsTile, ...]:
        return (self.config,) if self.config else self.all_tiles

    @property
    def tile(self) -> str:
        return self.config.name if self.config else ""

    @property
    def pooled(self) -> bool:
        return self.op is ConvMaxPool

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        return RoundingContract("sum", p.accumulate, output_format(p), truncates=self.truncates)

    @abstractmethod
    def entry(self, tile: FewChannelsTile) -> Entry: ...

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.entry(tile) for tile in self.tiles)

    def refuses(self, problem: Problem) -> str | None:
        op = conv_op(problem)
        _, _, h, w = problem.inputs[0]
        if op.stride[1] != STRIDE:
            return f"takes windows with a horizontal stride of {STRIDE}, not {op.stride[1]}"
        if op.residual:
            return "adds no residual"
        if (reason := self.refuses_window(op)) is not None:
            return reason
        if isinstance(problem.op, ConvMaxPool):
            pool = problem.op.pool
            if (pool.kernel_size, pool.stride) != (POOL.kernel_size, POOL.stride):
                return "pools windows of 3×3 with a stride of 2 and no others"
        if max(h + 2 * op.padding[0], w + 2 * op.padding[1]) > MAX_REACH:
            return f"indexes with 32 bits; the padded image has over {MAX_REACH} rows or columns"
        if not possible_blockings(problem, self.tiles):
            most = max(tile.shared_limit for tile in self.tiles)
            return (
                "its weights and the image under a turn's windows do not fit in the "
                f"{most} bytes of shared memory that a block has"
            )
        if self.packed_size(op) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    @abstractmethod
    def refuses_window(self, op: Conv2d) -> str | None:
        """Why the convolution's window is rejected, or None. Pure."""

    @abstractmethod
    def depth(self, op: Conv2d) -> int:
        """Elements of one channel's packed weights."""

    def packed_size(self, op: Conv2d) -> int:
        """Elements of the packed weights."""
        n = self.all_tiles[0].n
        return ceil_div(op.out_channels, n) * n * self.depth(op)

    @abstractmethod
    def pack_weight(self, weight: Array, op: Conv2d, n: int) -> Array:
        """OIHW to the device's order, in tiles of n channels."""

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        packed = self.pack_weight(weights[0], conv_op(problem), self.blocking(problem).tile.n)
        return (packed, *(np.ascontiguousarray(bias, np.float32) for bias in weights[1:]))

    def sizes(self, problem: Problem, tile: FewChannelsTile) -> tuple[np.int32, ...]:
        """Further arguments of the device function, at the end. Pure."""
        return ()

    def blocking(self, problem: Problem) -> Blocking:
        return choose(problem, self.tiles)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        blocking = self.blocking(problem)
        tile = blocking.tile
        bias, _ = bias_and_residual(conv_op(problem))
        fields = (*problem.output[2:], *pool_padding(problem), blocking.strip)
        shape, task = conv_shape(conv_of(problem)), struct(np.array([fields], TASK))
        return (
            GridLaunch(
                self.entry(tile),
                (blocking.blocks(problem), 1, 1),
                (tile.threads, 1, 1),
                (X, Pointer(Role.WEIGHT), bias, OUT, shape, task, *self.sizes(problem, tile)),
                tile.shared_nbytes(problem),
                overlaps=self.overlaps,
            ),
        )
