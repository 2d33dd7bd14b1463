"""Images of few channels with their max-pooling on Hopper's tensor cores.

Reads NCHW, writes NHWC. K runs over the rows of a window and in each over its pixels, which have
all their channels side by side. See kernels/conv2d_maxpool2d_few_channels_wgmma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, Problem
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18_cupy.conv.operands import round_to_tf32, split
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import PRODUCT_BYTES_PER_CYCLE, SHARED_NBYTES
from r18_cupy.cuda.launch import ceil_div
from r18_cupy.stem.strips import (
    ROWS,
    STRIDE,
    FewChannels,
    FewChannelsTile,
    conv_op,
    pool_padding,
)

PIXEL = 4  # channels of a pixel in shared memory
MAX_WINDOW = 8  # columns
CHANNELS, WINDOW = 3, (7, 7)  # of a convolution whose products may be written out
CONSUMERS, PRODUCERS = 128, 128  # threads
PLANES = 2  # of a line of the image, or of either half of its split factors
CHUNK_BYTES = 16  # of K: a row of a core matrix
CORE_ROWS = 8
STEP_CHUNKS = 2
BARRIER_NBYTES = 128

SPLIT_PRODUCTS = 3  # of split factors that make one
POOL_CYCLES = 8  # of a block for eight columns of a row of sums


@dataclass(frozen=True)
class FewChannelsWgmmaTile(FewChannelsTile):
    """k: products of a step. split: whether factors are two float16 numbers each.

    unrolled: for a ResNet's stem alone, CHANNELS under WINDOW, whose products are written out one
              after the other. Only then does the compiler let a row's products go on while the row
              before is pooled.
    """

    split: bool = False
    unrolled: bool = False

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """`SPLIT` is there or not, as in the kernels of `r18_cupy.hopper.wgmma`."""
        names = [(name, value) for name, value in super().defines if name != "TILE_SPLIT"]
        return (*names, *((("SPLIT", 1),) if self.split else ()))

    @property
    def halves(self) -> int:
        """Of a factor."""
        return 2 if self.split else 1

    @property
    def threads(self) -> int:
        return CONSUMERS + PRODUCERS

    @property
    def shared_limit(self) -> int:
        return SHARED_NBYTES

    @property
    def itemsize(self) -> int:
        return STEP_CHUNKS * CHUNK_BYTES // self.k

    @property
    def columns(self) -> int:
        """Of the convolution, that a block computes."""
        return self.m // ROWS

    def suits(self, problem: Problem) -> bool:
        op = conv_op(problem)
        return not self.unrolled or (op.in_channels, op.kernel_size) == (CHANNELS, WINDOW)

    def column_tiles(self, problem: Problem) -> int:
        """Each begins with a window that the one to the left has; but for the first."""
        return max(ceil_div(problem.output[3] - 1, self.columns // 2 - 1), 1)

    @property
    def line_nbytes(self) -> int:
        """Planes of a line of the image, each a chunk for every two pixels."""
        pairs = self.columns - 1 + MAX_WINDOW // STRIDE
        return self.halves * PLANES * pairs * CHUNK_BYTES

    def shared_nbytes(self, problem: Problem) -> int:
        """Barriers, weights, the ring of lines, and zeros for the columns of a chunk."""
        op = conv_op(problem)
        steps = steps_of(op, self.itemsize) * op.kernel_size[0]
        weights = self.halves * steps * STEP_CHUNKS * self.n
        zeros = self.columns * CHUNK_BYTES
        lines = ring_of(op) * self.line_nbytes
        return BARRIER_NBYTES + weights * CHUNK_BYTES + lines + zeros

    def turn_cycles(self, problem: Problem) -> float:
        """Of products, and of pooling where the tensor cores wait for it."""
        op = conv_op(problem)
        depth = steps_of(op, self.itemsize) * op.kernel_size[0] * self.k
        products = self.m * self.n * depth * self.itemsize / PRODUCT_BYTES_PER_CYCLE
        if self.split:
            products *= SPLIT_PRODUCTS
        return products if self.unrolled else products + POOL_CYCLES * self.m / CORE_ROWS


def tiles_of(precision: Precision) -> tuple[FewChannelsWgmmaTile, ...]:
    """The tilings that are compiled: a row of an image of 224 pixels, and half of one.

    Split factors have two sums each: a whole row of them takes too many registers.
    """
    split = precision.splits
    k = STEP_CHUNKS * CHUNK_BYTES // operand_itemsize(precision)
    return tuple(
        FewChannelsWgmmaTile(ROWS * columns, 64, k, blocks=2, split=split, unrolled=unrolled)
        for columns in ((64,) if split else (112, 64))
        for unrolled in (True, False)
    )


def operand_itemsize(precision: Precision) -> int:
    """Bytes of what the unit multiplies."""
    return 2 if precision.splits else precision.dtype.itemsize


def chunks_of(op: Conv2d, itemsize: int) -> int:
    """Chunks of a window's row: pixels, of 16 bits two in one."""
    return ceil_div(op.kernel_size[1] * PIXEL * itemsize, CHUNK_BYTES)


def steps_of(op: Conv2d, itemsize: int) -> int:
    """wgmma steps of a window's row."""
    return ceil_div(chunks_of(op, itemsize), STEP_CHUNKS)


def ring_of(op: Conv2d) -> int:
    """Lines of the image in shared memory: a turn's, and those that the next one adds."""
    return STRIDE + op.kernel_size[0] + ROWS * STRIDE


def pack_weight(weight: Array, op: Conv2d, precision: Precision, n: int) -> Array:
    """OIHW to [tile of n channels][kh][step][half][chunk][n/8][8 channels][16 bytes].

    A chunk is PIXEL channels of one pixel, or of two of 16 bits; zeros beyond window and channels.
    Split factors have a high and a low half.
    """
    itemsize = operand_itemsize(precision)
    o, c, kh, kw = weight.shape
    pixels = CHUNK_BYTES // (PIXEL * itemsize)
    tiles, steps = ceil_div(o, n), steps_of(op, itemsize)
    with np.errstate(over="ignore"):  # beyond the largest finite value lies infinity
        stored = np.asarray(weight, precision.dtype)
    windows = np.zeros((tiles * n, kh, steps * STEP_CHUNKS * pixels, PIXEL), precision.dtype)
    windows[:o, :, :kw, :c] = stored.transpose(0, 2, 3, 1)
    if precision.multiply == "tf32":
        windows = round_to_tf32(windows)
    halves = np.stack(split(windows) if precision.splits else (windows,))
    axes = (tiles, n // CORE_ROWS, CORE_ROWS, kh, steps, STEP_CHUNKS, pixels * PIXEL)
    packed = halves.reshape(len(halves), *axes).transpose(1, 4, 5, 0, 6, 2, 3, 7)
    return np.ascontiguousarray(packed)


@dataclass(frozen=True, eq=False)
class FewChannelsWgmma(FewChannels):
    """The convolution and its max-pooling. Bits are the same whatever the tile."""

    op = ConvMaxPool
    algorithm = "few_channels_wgmma"
    truncates: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    layout: Layout = Layout.NHWC

    @property
    def all_tiles(self) -> tuple[FewChannelsWgmmaTile, ...]:
        return tiles_of(self.precision)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {PIXEL, MAX_WINDOW}
        for tile in self.all_tiles:
            sizes |= {tile.columns // 2, tile.columns, tile.n}
        return tuple(sorted(sizes))

    def entry(self, tile: FewChannelsTile) -> Entry:
        symbol = "conv2d_maxpool2d_few_channels_wgmma"
        macros = (self.storage, *tile.defines, ("POOL", 1))
        return Entry("stem/few_channels_wgmma", symbol, macros, self.family)

    def refuses_window(self, op: Conv2d) -> str | None:
        if op.in_channels > PIXEL:
            return f"takes images of at most {PIXEL} channels, not {op.in_channels}"
        if op.stride[0] != STRIDE:
            return f"takes windows with a vertical stride of {STRIDE}, not {op.stride[0]}"
        if op.kernel_size[1] > MAX_WINDOW:
            return f"takes windows of at most {MAX_WINDOW} columns, not {op.kernel_size[1]}"
        if self.precision.dtype.itemsize == 2 and op.out_channels % 2:
            return f"writes 2 channels at once, and {op.out_channels} is no multiple of it"
        return None

    def refuses(self, problem: Problem) -> str | None:
        if (reason := super().refuses(problem)) is not None:
            return reason
        if pool_padding(problem) != (1, 1):
            return "pools windows with a padding of 1 and no others"
        return None

    def depth(self, op: Conv2d) -> int:
        tile = self.all_tiles[0]
        return op.kernel_size[0] * steps_of(op, tile.itemsize) * tile.k * tile.halves

    def pack_weight(self, weight: Array, op: Conv2d, n: int) -> Array:
        return pack_weight(weight, op, self.precision, n)

    def sizes(self, problem: Problem, tile: FewChannelsTile) -> tuple[np.int32, ...]:
        """Steps of a window's row, and lines of the ring."""
        op = conv_op(problem)
        return np.int32(steps_of(op, operand_itemsize(self.precision))), np.int32(ring_of(op))


def few_channels_wgmma_kernels() -> tuple[FewChannelsWgmma, ...]:
    return tuple(FewChannelsWgmma(precision) for precision in (FP16, BF16, TF32, FP16X3))
