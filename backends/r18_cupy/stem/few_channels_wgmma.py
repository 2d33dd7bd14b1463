"""Convolutions of images with few channels fused with max-pooling, with `wgmma`.

Reads NCHW, writes NHWC. K runs over the window's rows, and in each over its pixels, whose channels
are adjacent. See kernels/stem/few_channels_wgmma.cu.
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

PIXEL = 4  # channels per pixel in shared memory
MAX_WINDOW = 8  # columns
CHANNELS, WINDOW = 3, (7, 7)  # the only convolution that has unrolled tiles
CONSUMERS, PRODUCERS = 128, 128  # threads
PLANES = 2  # per line of the image, or per half of it with fp16x3
CHUNK_BYTES = 16  # of K: a row of a core matrix
CORE_ROWS = 8
STEP_CHUNKS = 2
BARRIER_NBYTES = 128

SPLIT_PRODUCTS = 3  # `wgmma` products per fp16x3 product
POOL_CYCLES = 8  # per block, for eight columns of a row of accumulators


@dataclass(frozen=True)
class FewChannelsWgmmaTile(FewChannelsTile):
    """k: products of a step. split: fp16x3.

    unrolled: only for a ResNet's stem, CHANNELS channels under WINDOW, with the products unrolled.
    Only then does the compiler keep a row's products in flight while another row is pooled, and
    only then do the weights of fp16 and bf16 stay in registers.
    """

    split: bool = False
    unrolled: bool = False

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """`SPLIT` is defined or not, as in the kernels of hopper/wgmma.py."""
        names = [(name, value) for name, value in super().defines if name != "TILE_SPLIT"]
        return (*names, *((("SPLIT", 1),) if self.split else ()))

    @property
    def halves(self) -> int:
        """Numbers per operand."""
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
        """Columns of the convolution per block."""
        return self.m // ROWS

    def suits(self, problem: Problem) -> bool:
        op = conv_op(problem)
        return not self.unrolled or (op.in_channels, op.kernel_size) == (CHANNELS, WINDOW)

    def column_tiles(self, problem: Problem) -> int:
        """Each block but the first begins with a window that the block to the left writes."""
        return max(ceil_div(problem.output[3] - 1, self.columns // 2 - 1), 1)

    @property
    def line_nbytes(self) -> int:
        """Bytes per line of the image: planes with one chunk for every two pixels."""
        pairs = self.columns - 1 + MAX_WINDOW // STRIDE
        return self.halves * PLANES * pairs * CHUNK_BYTES

    def shared_nbytes(self, problem: Problem) -> int:
        """Bytes of mbarriers, weights, the ring of lines, and zeros for one chunk per column."""
        op = conv_op(problem)
        steps = steps_of(op, self.itemsize) * op.kernel_size[0]
        weights = self.halves * steps * STEP_CHUNKS * self.n
        zeros = self.columns * CHUNK_BYTES
        lines = ring_of(op) * self.line_nbytes
        return BARRIER_NBYTES + weights * CHUNK_BYTES + lines + zeros

    def turn_cycles(self, problem: Problem) -> float:
        """Cycles of products, and of pooling where the tensor cores wait for it."""
        op = conv_op(problem)
        depth = steps_of(op, self.itemsize) * op.kernel_size[0] * self.k
        products = self.m * self.n * depth * self.itemsize / PRODUCT_BYTES_PER_CYCLE
        if self.split:
            products *= SPLIT_PRODUCTS
        return products if self.unrolled else products + POOL_CYCLES * self.m / CORE_ROWS


def tiles_of(precision: Precision) -> tuple[FewChannelsWgmmaTile, ...]:
    """The compiled tiles: a row of an image of 224 pixels, and half of one.

    fp16x3 has two accumulators per output: a whole row would need too many registers.
    """
    split = precision.splits
    k = STEP_CHUNKS * CHUNK_BYTES // operand_itemsize(precision)
    return tuple(
        FewChannelsWgmmaTile(ROWS * columns, 64, k, blocks=2, split=split, unrolled=unrolled)
        for columns in ((64,) if split else (112, 64))
        for unrolled in (True, False)
    )


def operand_itemsize(precision: Precision) -> int:
    """Bytes of a multiplied number."""
    return 2 if precision.splits else precision.dtype.itemsize


def chunks_of(op: Conv2d, itemsize: int) -> int:
    """Chunks per window row: one per pixel, or per two pixels of 16 bits."""
    return ceil_div(op.kernel_size[1] * PIXEL * itemsize, CHUNK_BYTES)


def steps_of(op: Conv2d, itemsize: int) -> int:
    """wgmma steps per window row."""
    return ceil_div(chunks_of(op, itemsize), STEP_CHUNKS)


def ring_of(op: Conv2d) -> int:
    """Lines in the ring: those of one turn, and those that the next one adds."""
    return STRIDE + op.kernel_size[0] + ROWS * STRIDE


def channel_of_row(row: Array) -> Array:
    """The output channel in a row of the packed weights.

    A lane has the sums of rows i and i + 8 of 16: two adjacent channels.
    """
    warp, within = row // 16 * 16, row % 16
    channel: Array = warp + within % 8 * 2 + within // 8
    return channel


def pack_weight(weight: Array, op: Conv2d, precision: Precision, n: int) -> Array:
    """OIHW to [tile of n channels][kh][step][half][chunk][n/8][8 rows][16 bytes].

    In each 16 rows, row i < 8 has channel 2·i and row i + 8 channel 2·i + 1 (`channel_of_row`). A
    chunk is PIXEL channels of one pixel, or of two pixels of 16 bits; zeros beyond window and
    channels. fp16x3 has a high and a low half.
    """
    itemsize = operand_itemsize(precision)
    o, c, kh, kw = weight.shape
    pixels = CHUNK_BYTES // (PIXEL * itemsize)
    tiles, steps = ceil_div(o, n), steps_of(op, itemsize)
    with np.errstate(over="ignore"):  # overflow to infinity is intended
        stored = np.asarray(weight, precision.dtype)
    windows = np.zeros((tiles * n, kh, steps * STEP_CHUNKS * pixels, PIXEL), precision.dtype)
    windows[:o, :, :kw, :c] = stored.transpose(0, 2, 3, 1)
    windows = windows[channel_of_row(np.arange(tiles * n))]
    if precision.multiply == "tf32":
        windows = round_to_tf32(windows)
    halves = np.stack(split(windows) if precision.splits else (windows,))
    axes = (tiles, n // CORE_ROWS, CORE_ROWS, kh, steps, STEP_CHUNKS, pixels * PIXEL)
    packed = halves.reshape(len(halves), *axes).transpose(1, 4, 5, 0, 6, 2, 3, 7)
    return np.ascontiguousarray(packed)


@dataclass(frozen=True, eq=False)
class FewChannelsWgmma(FewChannels):
    """Convolution and max-pooling.

    The bits do not depend on the batch. In fp16 and bf16 unrolled tiles add the bias last, others
    first, so their bits differ; `choose` takes an unrolled tile wherever one suits.
    """

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
        return Entry(
            "stem/few_channels_wgmma",
            "conv2d_maxpool2d_few_channels_wgmma",
            (*self.formats, *tile.defines, ("POOL", 1)),
            self.family,
        )

    def refuses_window(self, op: Conv2d) -> str | None:
        if op.in_channels > PIXEL:
            return f"takes images of at most {PIXEL} channels, not {op.in_channels}"
        if op.stride[0] != STRIDE:
            return f"takes windows with a vertical stride of {STRIDE}, not {op.stride[0]}"
        if op.kernel_size[1] > MAX_WINDOW:
            return f"takes windows of at most {MAX_WINDOW} columns, not {op.kernel_size[1]}"
        if op.out_channels % 2:
            return f"writes 2 channels at a time, and {op.out_channels} is not a multiple"
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
        """K steps per window row, and lines of the ring."""
        op = conv_op(problem)
        return np.int32(steps_of(op, operand_itemsize(self.precision))), np.int32(ring_of(op))


def few_channels_wgmma_kernels() -> tuple[FewChannelsWgmma, ...]:
    return tuple(FewChannelsWgmma(precision) for precision in (FP16, BF16, TF32, FP16X3))
