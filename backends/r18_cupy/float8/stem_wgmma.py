"""Convolutions of e4m3 images with few channels fused with max-pooling, with `wgmma` of e4m3.

Reads e4m3 or float32 in NCHW; writes NHWC. See r18_cupy.bytes.stem_wgmma and
kernels/float8/stem_wgmma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, cast

from r18.backend import RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.scaled import Scale, ScaledConv2d, ScaledConvMaxPool
from r18_cupy.bytes.stem_wgmma import (
    CHANNELS,
    FLOAT32_NBYTES,
    PADDING,
    PIXEL,
    PIXELS,
    POOL,
    STRIDE,
    WINDOW,
    ByteStemTile,
    ByteStemWgmma,
)
from r18_cupy.float8.kernel import Float8Kernel, narrow_sum
from r18_cupy.stem.strips import ROWS

LINE_NANS = 64  # bytes per line that say which pixels are NaN


class Image(IntEnum):
    """The format of a tile's image, numbered as in stem_image.cuh; float32 has a scale."""

    E4M3 = 1
    FLOAT32 = 2


@dataclass(frozen=True)
class ScaledStemTile(ByteStemTile):
    line_notes: ClassVar[int] = LINE_NANS

    image: Image = Image.E4M3

    @property
    def reader_nbytes(self) -> int:
        return FLOAT32_NBYTES if self.image is Image.FLOAT32 else 0


TILES = tuple(
    ScaledStemTile(ROWS * columns, CHANNELS, PIXELS * PIXEL, 2, image)
    for columns in (112, 64)
    for image in Image
)
"""A row of an image of 224 pixels, and about half of one."""


@dataclass(frozen=True, eq=False)
class ScaledStemWgmma(Float8Kernel, ByteStemWgmma):
    """Convolution and max-pooling, from an image of e4m3 or float32."""

    op = ScaledConvMaxPool
    source = "float8/stem_wgmma"

    layout: Layout = Layout.NHWC
    config: ByteStemTile | None = None

    @property
    def contract(self) -> RoundingContract:
        """Sums are never promoted: the longest has 196 products."""
        return narrow_sum(promoted=0)

    @property
    def all_tiles(self) -> tuple[ByteStemTile, ...]:
        return TILES

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

    def image_of(self, problem: Problem) -> Image:
        op = cast(ScaledConvMaxPool, problem.op)
        return Image.E4M3 if op.image is None else Image.FLOAT32
