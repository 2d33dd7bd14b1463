"""Convolutions of e4m3 images with few channels fused with max-pooling, with `wgmma` of e4m3.

Reads e4m3 or float32 in NCHW; writes NHWC. K runs over the window's rows, and in each over its
pixels, whose channels are adjacent. See kernels/float8/stem_wgmma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, Problem
from r18.graph.scaled import Scale, ScaledConv2d, ScaledConvMaxPool
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import PRODUCT_BYTES_PER_CYCLE, SHARED_NBYTES
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.float8.kernel import Float8Kernel, narrow_sum
from r18_cupy.integers.stem_wgmma import (
    AHEAD,
    BARRIER_NBYTES,
    CHANNELS,
    CHUNK_BYTES,
    CONSUMERS,
    CORE_ROWS,
    GROUP_CHUNKS,
    LINE_THREADS,
    PADDING,
    PIXEL,
    PIXELS,
    POOL,
    PRODUCERS,
    QUAD_NBYTES,
    STAGE_LINES,
    STAGES,
    STRIDE,
    WARP_CHANNELS,
    WARPS,
    WINDOW,
    pack_weight,
)
from r18_cupy.kernel import MAX_ELEMENTS
from r18_cupy.stem.strips import (
    MAX_REACH,
    ROWS,
    TASK,
    Blocking,
    FewChannelsTile,
    choose,
    conv_of,
)

LINE_NANS = 64  # bytes per line that say which pixels are NaN


class Image(IntEnum):
    """What a tile's image is, as stem_image.cuh has it; float32 has a scale."""

    E4M3 = 1
    FLOAT32 = 2


READER_NBYTES = {
    Image.E4M3: 0,
    Image.FLOAT32: AHEAD * STAGE_LINES * LINE_THREADS * QUAD_NBYTES,
}
"""The shared memory of an image's reader: float32 quads on their way."""


@dataclass(frozen=True)
class ScaledStemTile(FewChannelsTile):
    """k: bytes of one `wgmma`, a row of the window."""

    image: Image = Image.E4M3

    @property
    def name(self) -> str:
        """`m224n64k32float32`: the image is part of it."""
        return f"{super().name}{self.image.name.lower()}"

    @property
    def threads(self) -> int:
        return CONSUMERS + PRODUCERS

    @property
    def shared_limit(self) -> int:
        return SHARED_NBYTES

    @property
    def columns(self) -> int:
        """Columns of the convolution per block: the even ones, then the odd ones."""
        return self.m // ROWS

    @property
    def groups(self) -> int:
        """Groups of eight even columns."""
        return self.columns // 2 // CORE_ROWS

    @property
    def line_nbytes(self) -> int:
        """Bytes per line of the image: a copy for even and one for odd columns."""
        return 2 * self.groups * GROUP_CHUNKS * CHUNK_BYTES

    def column_tiles(self, problem: Problem) -> int:
        """Each block but the first begins with a window that the block to the left writes."""
        return max(ceil_div(problem.output[3] - 1, self.columns // 2 - 1), 1)

    def shared_nbytes(self, problem: Problem) -> int:
        """Bytes of mbarriers, pooled rows of each warp, the ring of lines, and the reader."""
        pooled = ceil_div(self.groups, 4) * 4 * CORE_ROWS * CHUNK_BYTES
        lines = STAGES * STAGE_LINES * (self.line_nbytes + LINE_NANS)
        return BARRIER_NBYTES + WARPS * pooled + lines + READER_NBYTES[self.image]

    def turn_cycles(self, problem: Problem) -> float:
        return self.m * self.n * WINDOW[0] * self.k / PRODUCT_BYTES_PER_CYCLE


TILES = tuple(
    ScaledStemTile(ROWS * columns, CHANNELS, PIXELS * PIXEL, 2, image)
    for columns in (112, 64)
    for image in Image
)
"""A row of an image of 224 pixels, and about half of one."""


def of_floats(problem: Problem) -> Problem:
    """The same problem of float16 or float32: how blocks divide it is the same."""
    assert isinstance(problem.op, ScaledConvMaxPool)  # `refusal` has checked it
    return Problem(ConvMaxPool(problem.op.conv.conv, problem.op.pool), problem.inputs)


def image_of(op: ScaledConvMaxPool) -> Image:
    return Image.E4M3 if op.image is None else Image.FLOAT32


@dataclass(frozen=True, eq=False)
class ScaledStemWgmma(Float8Kernel):
    """Convolution and max-pooling, from an image of e4m3 or float32."""

    op = ScaledConvMaxPool
    algorithm = "few_channels_wgmma"
    reads: ClassVar[Layout] = Layout.NCHW
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    layout: Layout = Layout.NHWC
    config: ScaledStemTile | None = None

    @property
    def contract(self) -> RoundingContract:
        """Sums are never promoted: the longest has 196 products."""
        return narrow_sum(promoted=0)

    @property
    def all_tiles(self) -> tuple[ScaledStemTile, ...]:
        return TILES

    @property
    def tiles(self) -> tuple[ScaledStemTile, ...]:
        return (self.config,) if self.config else self.all_tiles

    @property
    def tile(self) -> str:
        return self.config.name if self.config else ""

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {PIXEL, WARP_CHANNELS, CHANNELS}
        for tile in self.all_tiles:
            sizes |= {tile.columns // 2, tile.columns}
        return tuple(sorted(sizes))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """A small stem of each kind of image: few of the common problems are of a tile's kind."""
        conv = ScaledConv2d(Conv2d(3, CHANNELS, WINDOW, STRIDE, PADDING, True))
        made_by = {Image.E4M3: None, Image.FLOAT32: Scale()}
        kinds = {tile.image for tile in self.tiles}
        return tuple(
            Problem(ScaledConvMaxPool(conv, POOL, made_by[image]), ((2, 3, 13, 20),))
            for image in Image
            if image in kinds
        )

    def entry(self, tile: FewChannelsTile) -> Entry:
        symbol = "sconv2d_maxpool2d_few_channels_wgmma"
        return Entry("float8/stem_wgmma", symbol, (*tile.defines, ("POOL", 1)), self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def suiting(self, problem: Problem) -> tuple[ScaledStemTile, ...]:
        """The tiles for the problem's image."""
        assert isinstance(problem.op, ScaledConvMaxPool)  # `refusal` has checked it
        return tuple(tile for tile in self.tiles if tile.image is image_of(problem.op))

    def refuses(self, problem: Problem) -> str | None:
        assert isinstance(problem.op, ScaledConvMaxPool)  # `refusal` has checked it
        op, pool = problem.op.conv.conv, problem.op.pool
        if not self.suiting(problem):
            return f"this tile takes images of {self.tiles[0].image.name.lower()}"
        if (op.kernel_size, op.stride, op.padding) != (WINDOW, STRIDE, PADDING):
            return "takes windows of 7×7 with a stride of 2 and a padding of 3 and no others"
        if pool != POOL:
            return "pools windows of 3×3 with a stride of 2 and a padding of 1 and no others"
        if op.in_channels > PIXEL:
            return f"takes images of at most {PIXEL} channels, not {op.in_channels}"
        if op.out_channels % WARP_CHANNELS:
            return (
                f"writes {WARP_CHANNELS} channels at a time, and {op.out_channels} is no multiple"
            )
        if self.packed_size(op) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        if max(problem.inputs[0][2:]) + 2 * max(PADDING) > MAX_REACH:
            return f"indexes with 32 bits; the padded image has over {MAX_REACH} rows or columns"
        return None

    def packed_size(self, op: Conv2d) -> int:
        """Bytes of the packed weights."""
        return ceil_div(op.out_channels, CHANNELS) * CHANNELS * WINDOW[0] * PIXELS * PIXEL

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weight in the integers' order, whose operands have as many bytes."""
        weight, *others = super().pack(problem, weights)
        return (pack_weight(weight.view(np.int8)), *others)

    def blocking(self, problem: Problem) -> Blocking:
        return choose(of_floats(problem), self.suiting(problem))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        floats, blocking = of_floats(problem), self.blocking(problem)
        tile = blocking.tile
        assert isinstance(tile, ScaledStemTile)
        fields = (*problem.output[2:], *POOL.padding, blocking.strip)
        shape, task = conv_shape(conv_of(floats)), struct(np.array([fields], TASK))
        weights = tuple(Pointer(Role.WEIGHT, index) for index in range(3))
        scale = NULL if tile.image is Image.E4M3 else Pointer(Role.WEIGHT, 3)
        return (
            GridLaunch(
                self.entry(tile),
                (blocking.blocks(floats), 1, 1),
                (tile.threads, 1, 1),
                (X, *weights, scale, OUT, shape, task),
                tile.shared_nbytes(floats),
                overlaps=True,
            ),
        )
