"""Convolutions of images with few channels on tensor cores (mma.sync): fp16, bf16, tf32 and fp16x3.

Reads NCHW, writes NHWC. K runs over the lines of a window, one row in one channel each, and in each
line over eight taps. See kernels/stem/few_channels_mma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, Problem
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18_cupy.conv.implicit_gemm_mma import chunk_of
from r18_cupy.conv.operands import round_to_tf32, split
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import ceil_div
from r18_cupy.stem.strips import (
    POOL,
    ROWS,
    STRIDE,
    FewChannels,
    FewChannelsTile,
    conv_op,
    is_pooled,
    patch_rows,
)

TAPS = 8  # per line
STAGES = 2  # patches of the image in shared memory
STEP_BYTES = 32  # of K per mma step
CHUNK_BYTES = 16  # of a cp.async

PRODUCTS_PER_CYCLE = {2: 1280, 4: 640}  # per SM by mma.sync, by bytes of an operand
CONTENTION = 0.35  # share of the less busy pipe's time that does not overlap


@dataclass(frozen=True)
class FewChannelsMmaTile(FewChannelsTile):
    """k: products of an mma step. warps: share the columns.

    split: fp16x3: float32 elements as two float16 numbers each.
    """

    warps: int
    split: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def operand_nbytes(self) -> int:
        """Bytes of a multiplied number."""
        return STEP_BYTES // self.k

    @property
    def parts(self) -> int:
        """Multiplied numbers per element."""
        return 2 if self.split else 1

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element, which equals those of its parts."""
        return self.operand_nbytes * self.parts

    @property
    def warp_columns(self) -> int:
        """Columns of the convolution per warp."""
        return self.m // (ROWS * self.warps)

    def advance(self, pooled: bool) -> int:
        """Columns of the convolution from a warp's first to its neighbour's."""
        return self.warp_columns - (2 if pooled else 0)

    def columns(self, pooled: bool) -> int:
        """Output columns per block."""
        return self.warps * self.advance(pooled) // (POOL.stride[1] if pooled else 1)

    def column_tiles(self, problem: Problem) -> int:
        return ceil_div(problem.output[3], self.columns(is_pooled(problem)))

    def pitch(self, pooled: bool) -> int:
        """Elements per line of the patch: whole chunks, including unused elements of the first."""
        chunk = CHUNK_BYTES // self.itemsize
        columns = (self.warps - 1) * self.advance(pooled) + self.warp_columns
        before = chunk - (2 if self.operand_nbytes == 2 else 1)
        return ceil_div((columns - 1) * STRIDE + TAPS + before, chunk) * chunk

    def patch_nbytes(self, problem: Problem) -> int:
        """Bytes of the patch of a turn, including zeros for the empty half of a last step.

        The zeros are behind the patch, repeated for each row of the convolution.
        """
        op = conv_op(problem)
        lines = op.in_channels * patch_rows(op)
        if lines_of(op) * TAPS * self.operand_nbytes % STEP_BYTES:
            lines += (ROWS - 1) * op.stride[0] + 1
        return lines * self.pitch(is_pooled(problem)) * self.itemsize

    def shared_nbytes(self, problem: Problem) -> int:
        """Bytes of patches, weights, offsets of each step's two runs of 16 bytes, and biases."""
        steps = steps_of(conv_op(problem), self.operand_nbytes)
        weights = steps * self.n * STEP_BYTES * self.parts
        runs, biases = ceil_div(steps, 2) * 16, self.n * 4
        return STAGES * self.patch_nbytes(problem) + weights + runs + biases

    def turn_cycles(self, problem: Problem) -> float:
        """Cycles of products and of shared memory.

        Per step a warp loads all weights, and four words per lane for 16 outputs. fp16x3 has three
        products.
        """
        products = self.m * self.n * self.k / PRODUCTS_PER_CYCLE[self.operand_nbytes]
        products *= 3 if self.split else 1
        nbytes = (self.warps * self.n * STEP_BYTES + self.m // 16 * 4 * 4 * 32) * self.parts
        less, more = sorted((products, nbytes / SHARED_BYTES_PER_CYCLE))
        return steps_of(conv_op(problem), self.operand_nbytes) * (more + CONTENTION * less)


def tiles_of(precision: Precision) -> tuple[FewChannelsMmaTile, ...]:
    """The compiled tiles, larger first.

    A warp of 2×32 outputs keeps shared memory busy for 0.6 of the tensor cores' time. One of 2×16
    keeps it fully busy, but leaves more blocks for a single image. fp16x3 has two accumulators per
    output: half of the columns, and then half of the channels.
    """
    k = STEP_BYTES // operand_dtype(precision).itemsize
    if precision.splits:
        return (
            FewChannelsMmaTile(128, 64, k, blocks=2, warps=4, split=True),
            FewChannelsMmaTile(128, 32, k, blocks=3, warps=4, split=True),
        )
    return (
        FewChannelsMmaTile(256, 64, k, blocks=2, warps=4),
        FewChannelsMmaTile(128, 64, k, blocks=3, warps=4),
    )


def operand_dtype(precision: Precision) -> np.dtype[np.generic]:
    """The type of the multiplied numbers, as registers hold them."""
    return np.dtype(np.float16) if precision.splits else precision.dtype


def lines_of(op: Conv2d) -> int:
    """Lines of a window."""
    return op.in_channels * op.kernel_size[0]


def steps_of(op: Conv2d, operand_nbytes: int) -> int:
    """mma steps per window: its lines, in whole steps."""
    return ceil_div(lines_of(op) * TAPS * operand_nbytes, STEP_BYTES)


def skipped_taps(op: Conv2d, operand_nbytes: int) -> int:
    """Taps before the window's first column, so that a line begins at an even element.

    Needed where two operands share a word. Depends only on the padding, since adjacent windows
    begin an even number of elements apart.
    """
    return op.padding[1] % 2 if operand_nbytes == 2 else 0


# -- weights -----------------------------------------------------------------------------------


def pack_weight(weight: Array, op: Conv2d, precision: Precision, n: int) -> Array:
    """OIHW to [tile of n channels][step][half][pair of mma tiles][lane][chunk], as operands.

    For each of two mma tiles, a lane holds one column's taps: a word from each half of the step.
    Columns are channels in an order that leaves the device's lanes with adjacent ones. fp16x3
    operands have two halves, others one.
    """
    chunk, factor = chunk_of(precision), operand_dtype(precision)
    o, c, kh, kw = weight.shape
    skipped, steps = skipped_taps(op, factor.itemsize), steps_of(op, factor.itemsize)
    tiles = ceil_div(o, n)
    with np.errstate(over="ignore"):  # overflow to infinity is intended
        stored = np.asarray(weight, precision.dtype)
    lines = np.zeros((tiles * n, steps * STEP_BYTES // factor.itemsize // TAPS, TAPS), stored.dtype)
    lines[:o, : c * kh, skipped : skipped + kw] = stored.reshape(o, c * kh, kw)
    if precision.multiply == "tf32":
        lines = round_to_tf32(lines)
    factors = np.stack(split(lines) if precision.splits else (lines,))
    # Channels: runs of four chunks, chunks, mma tiles per chunk, two adjacent columns of each. K:
    # steps, halves, words, elements.
    parts, group, word = len(factors), chunk // 2, 4 // factor.itemsize
    axes = (parts, tiles, n // (4 * chunk), 4, group, 2, steps, 2, 4, word)
    fragments = factors.reshape(axes).transpose(1, 6, 0, 2, 4, 3, 5, 8, 7, 9)
    shape = (tiles, steps, parts, n // 16, 2, 32, 2 * word)
    pairs = fragments.reshape(shape).transpose(0, 1, 2, 3, 5, 4, 6)
    return np.ascontiguousarray(pairs.reshape(tiles, steps, parts, n // 16, 32, 4 * word))


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FewChannelsMma(FewChannels):
    algorithm = "few_channels_mma"
    truncates: ClassVar[bool] = True

    layout: Layout = Layout.NHWC

    @property
    def all_tiles(self) -> tuple[FewChannelsMmaTile, ...]:
        return tiles_of(self.precision)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {chunk_of(self.precision)}
        for tile in self.all_tiles:
            if self.config in (None, tile):
                columns = tile.columns(self.pooled)
                sizes |= {columns // tile.warps, columns, tile.n}
        return tuple(sorted(sizes))

    def entry(self, tile: FewChannelsTile) -> Entry:
        pitch = cast(FewChannelsMmaTile, tile).pitch(self.pooled)
        macros = (("POOL", int(self.pooled)), ("PITCH", pitch))
        return Entry(
            "stem/few_channels_mma",
            "conv2d_few_channels_mma",
            (*self.formats, *tile.defines, *macros),
        )

    def refuses_window(self, op: Conv2d) -> str | None:
        taps = op.kernel_size[1] + skipped_taps(op, operand_dtype(self.precision).itemsize)
        if taps > TAPS:
            return f"multiplies rows of windows by {TAPS} elements; this one takes {taps}"
        return None

    def depth(self, op: Conv2d) -> int:
        tile = self.all_tiles[0]
        return steps_of(op, tile.operand_nbytes) * tile.k * tile.parts

    def pack_weight(self, weight: Array, op: Conv2d, n: int) -> Array:
        return pack_weight(weight, op, self.precision, n)

    def sizes(self, problem: Problem, tile: FewChannelsTile) -> tuple[np.int32, ...]:
        """K steps, and bytes of a patch."""
        own = cast(FewChannelsMmaTile, tile)
        steps = steps_of(conv_op(problem), own.operand_nbytes)
        return np.int32(steps), np.int32(own.patch_nbytes(problem))


@dataclass(frozen=True, eq=False)
class FewChannelsMmaConv(FewChannelsMma):
    op = Conv2d


@dataclass(frozen=True, eq=False)
class FewChannelsMmaConvMaxPool(FewChannelsMma):
    op = ConvMaxPool


def few_channels_mma_kernels() -> tuple[FewChannelsMma, ...]:
    """Per op and precision the kernel that chooses, then one per tile."""
    return tuple(
        kernel(precision, config=config)
        for kernel in (FewChannelsMmaConvMaxPool, FewChannelsMmaConv)
        for precision in (FP16, BF16, TF32, FP16X3)
        for config in (None, *tiles_of(precision))
    )
