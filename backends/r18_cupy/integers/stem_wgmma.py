"""Convolutions of int8 images with few channels fused with max-pooling, with integer `wgmma`.

Reads int8 or float32 in NCHW, or pixels; writes NHWC. See r18_cupy.bytes.stem_wgmma and
kernels/integers/stem_wgmma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from r18.graph.ops import Conv2d, Layout, Normalize, Problem
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizePixels,
)
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
from r18_cupy.integers.kernel import IntegerKernel
from r18_cupy.stem.strips import ROWS


class Image(IntEnum):
    """The format of a tile's image, numbered as in stem_image.cuh; pixels have a table, float32 a
    scale."""

    INT8 = 1
    PIXELS = 2
    FLOAT32 = 3


READER_NBYTES = {Image.INT8: 0, Image.PIXELS: PIXEL * 256, Image.FLOAT32: FLOAT32_NBYTES}
"""The shared memory of an image's reader: the table, or quads on their way."""


@dataclass(frozen=True)
class StemTile(ByteStemTile):
    image: Image = Image.INT8

    @property
    def reader_nbytes(self) -> int:
        return READER_NBYTES[self.image]


TILES = tuple(
    StemTile(ROWS * columns, CHANNELS, PIXELS * PIXEL, 2, image)
    for columns in (112, 64)
    for image in Image
)
"""A row of an image of 224 pixels, and about half of one."""


@dataclass(frozen=True, eq=False)
class StemWgmma(IntegerKernel, ByteStemWgmma):
    """Convolution and max-pooling, from an image of int8, pixels or float32."""

    op = QuantizedConvMaxPool
    source = "integers/stem_wgmma"

    layout: Layout = Layout.NHWC
    config: ByteStemTile | None = None

    @property
    def all_tiles(self) -> tuple[ByteStemTile, ...]:
        return TILES

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """A small stem of each kind of image: few of the common problems are of a tile's kind."""
        conv = QuantizedConv2d(Conv2d(3, CHANNELS, WINDOW, STRIDE, PADDING, True), ("int8",))
        pixels = QuantizePixels(Normalize((0.5,) * 3, (0.25,) * 3))
        made_by = {Image.INT8: None, Image.PIXELS: pixels, Image.FLOAT32: Quantize()}
        kinds = {tile.image for tile in self.tiles}
        return tuple(
            Problem(QuantizedConvMaxPool(conv, POOL, made_by[image]), ((2, 3, 13, 20),))
            for image in Image
            if image in kinds
        )

    def image_of(self, problem: Problem) -> Image:
        op = cast(QuantizedConvMaxPool, problem.op)
        if op.image is None:
            return Image.INT8
        return Image.PIXELS if op.of_pixels else Image.FLOAT32

    def refuses(self, problem: Problem) -> str | None:
        stored = cast(QuantizedConvMaxPool, problem.op).conv.stored[0]
        if stored != "int8":
            return f"reads images of int8, not {stored}"
        return super().refuses(problem)


def stem_wgmma_kernels() -> tuple[StemWgmma, ...]:
    return (StemWgmma(),)
