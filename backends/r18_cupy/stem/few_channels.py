"""Convolutions of images with few channels in float32 on CUDA cores. NCHW.

A thread accumulates 14 adjacent outputs of some channels in registers, and loads the part of a line
(a window row in one channel) that their windows cover once. See kernels/stem/few_channels.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, ConvMaxPool, Problem
from r18.graph.precision import FP32, Precision
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import ceil_div
from r18_cupy.stem.strips import (
    ROWS,
    STRIDE,
    FewChannels,
    FewChannelsTile,
    conv_op,
    is_pooled,
    patch_rows,
    pool_padding,
)

LANES = 8  # of a warp along a row
GROUPS = 32 // LANES  # of channels per warp
ITEMSIZE = 4
PRODUCTS_PER_CYCLE = 128  # per SM


@dataclass(frozen=True)
class FewChannelsFp32Tile(FewChannelsTile):
    """k: columns of the window. channels: per thread."""

    channels: int

    @property
    def threads(self) -> int:
        return 32 * ROWS * self.n // (GROUPS * self.channels)

    @property
    def columns(self) -> int:
        """Columns of the convolution per block."""
        return self.m // ROWS

    def column_tiles(self, problem: Problem) -> int:
        """With pooling, blocks begin with a column that the block to the left computes too. The
        first one does not if padding takes that column's place; it then has one more window.
        """
        columns = problem.output[3]
        if not is_pooled(problem):
            return ceil_div(columns, self.columns)
        return max(ceil_div(columns - pool_padding(problem)[1], self.columns // 2 - 1), 1)

    @property
    def pitch(self) -> int:
        """Elements per line of the patch; whole 16 bytes for the last thread's part."""
        span = ceil_div((self.columns // LANES - 1) * STRIDE + self.k, 4) * 4
        return (self.columns - self.columns // LANES) * STRIDE + span

    def shared_nbytes(self, problem: Problem) -> int:
        """Bytes of weights, the patch, and two rows of maxima."""
        op = conv_op(problem)
        weights = op.in_channels * op.kernel_size[0] * self.k * self.n
        patch = op.in_channels * patch_rows(op) * self.pitch
        maxima = 2 * self.n * (self.columns // 2 + 1) if is_pooled(problem) else 0
        return (weights + patch + maxima) * ITEMSIZE

    def turn_cycles(self, problem: Problem) -> float:
        op = conv_op(problem)
        lines = op.in_channels * op.kernel_size[0]
        # Measured at batch 64: two channels per thread take 1.2 times as long as four, because more
        # FMAs wait for a third operand, and a smaller share of the instructions are FMAs.
        overhead = 1 + 1 / self.channels
        return overhead * self.m * self.n * self.k * lines / PRODUCTS_PER_CYCLE


TILES = (
    FewChannelsFp32Tile(224, 64, 7, blocks=2, channels=4),
    FewChannelsFp32Tile(224, 32, 7, blocks=2, channels=2),
)


def pack_weight(weight: Array, n: int) -> Array:
    """OIHW to [tile of n channels][line][tap][n], zeros for missing channels."""
    o, c, kh, kw = weight.shape
    padded = np.zeros((ceil_div(o, n) * n, c * kh, kw), np.float32)
    padded[:o] = weight.reshape(o, c * kh, kw)
    return np.ascontiguousarray(padded.reshape(-1, n, c * kh, kw).transpose(0, 2, 3, 1))


@dataclass(frozen=True, eq=False)
class FewChannelsFp32(FewChannels):
    algorithm = "few_channels"

    precision: Precision = FP32

    @property
    def all_tiles(self) -> tuple[FewChannelsFp32Tile, ...]:
        return TILES

    @property
    def edges(self) -> tuple[int, ...]:
        sizes: set[int] = set()
        for tile in TILES:
            if self.config in (None, tile):
                columns = tile.columns // (2 if self.pooled else 1)
                sizes |= {columns // LANES, columns, tile.n}
        return tuple(sorted(sizes))

    def entry(self, tile: FewChannelsTile) -> Entry:
        macros = (*tile.defines, ("POOL", int(self.pooled)))
        return Entry("stem/few_channels", "conv2d_few_channels", macros)

    def refuses_window(self, op: Conv2d) -> str | None:
        columns = op.kernel_size[1]
        if columns != TILES[0].k:
            return f"takes windows of {TILES[0].k} columns, not {columns}"
        return None

    def depth(self, op: Conv2d) -> int:
        return op.depth

    def pack_weight(self, weight: Array, op: Conv2d, n: int) -> Array:
        return pack_weight(weight, n)


@dataclass(frozen=True, eq=False)
class FewChannelsConv(FewChannelsFp32):
    op = Conv2d


@dataclass(frozen=True, eq=False)
class FewChannelsConvMaxPool(FewChannelsFp32):
    op = ConvMaxPool


def few_channels_kernels() -> tuple[FewChannelsFp32, ...]:
    """Per op the kernel that chooses, then one per tile."""
    return tuple(
        kernel(config=config)
        for kernel in (FewChannelsConvMaxPool, FewChannelsConv)
        for config in (None, *TILES)
    )
