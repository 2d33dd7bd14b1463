"""Convolutions of images with few channels fused with max-pooling, with `wgmma` of bytes.

Reads bytes or float32 in NCHW, or pixels; writes NHWC. K runs over the window's rows, and in each
over its pixels, whose channels are adjacent. See kernels/bytes/hopper/stem_kernel.cuh.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, MaxPool2d, Problem
from r18.graph.quantized import QuantizedConvMaxPool
from r18.graph.scaled import ScaledConvMaxPool
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import PRODUCT_BYTES_PER_CYCLE, SHARED_NBYTES
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel
from r18_cupy.stem.strips import (
    MAX_REACH,
    ROWS,
    TASK,
    Blocking,
    FewChannelsTile,
    choose,
    conv_of,
)

WINDOW, STRIDE, PADDING = (7, 7), (2, 2), (3, 3)  # the only convolution
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))  # the only pooling
PIXEL = 4  # bytes per pixel in shared memory, and the most channels
PIXELS = 8  # of a row of the window, the first outside of it
CHANNELS = 64  # rows of A
WARP_CHANNELS = 16
CHUNK_BYTES = 16  # of K: a row of a core matrix
GROUP_CHUNKS = 9  # of eight columns; the last one is the second of the last column
CORE_ROWS = 8
STAGES, STAGE_LINES = 6, 4  # of the ring
CONSUMERS, PRODUCERS = 128, 128  # threads
WARPS = CONSUMERS // 32
BARRIER_NBYTES = 128
AHEAD = 3  # stages that producers read ahead
LINE_THREADS = 64  # producers of a line
QUAD_NBYTES = PIXEL * 16  # of four float32 pixels
BYTES = 1  # the image of a tile that reads what the convolution does

FLOAT32_NBYTES = AHEAD * STAGE_LINES * LINE_THREADS * QUAD_NBYTES
"""The shared memory of a reader of float32: quads on their way."""


@dataclass(frozen=True)
class ByteStemTile(FewChannelsTile):
    """A tile of the stem. k: bytes of one `wgmma`, a row of the window. image: its format."""

    line_notes: ClassVar[int] = 0
    """Bytes that are noted of each line."""

    image: IntEnum

    @property
    @abstractmethod
    def reader_nbytes(self) -> int:
        """The shared memory of the image's reader."""

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
        lines = STAGES * STAGE_LINES * (self.line_nbytes + self.line_notes)
        return BARRIER_NBYTES + WARPS * pooled + lines + self.reader_nbytes

    def turn_cycles(self, problem: Problem) -> float:
        return self.m * self.n * WINDOW[0] * self.k / PRODUCT_BYTES_PER_CYCLE


def floats_op(problem: Problem) -> ConvMaxPool:
    """The op of numbers, from an image, that the problem's op quantises or scales."""
    op = cast(QuantizedConvMaxPool | ScaledConvMaxPool, problem.op)
    return ConvMaxPool(op.conv.conv, op.pool)


def of_floats(problem: Problem) -> Problem:
    """The same problem of numbers: how blocks divide it is the same."""
    return Problem(floats_op(problem), problem.inputs)


def pack_weight(weight: Array) -> Array:
    """OIHW of bytes to registers of a warpgroup: [tile of 64 channels][kh][thread][4 registers]
    [4 bytes].

    Bytes of a register are the channels of one pixel; of the window's pixels the first has zeros.
    Registers 0 and 1 of lane i have pixel i % 4, for rows i / 4 and 8 more of its warp's 16,
    registers 2 and 3 the pixel four further. Rows r and r + 8 are output channels 2·r and the next,
    so that a lane has two adjacent ones.
    """
    o, c, kh, kw = weight.shape
    tiles = ceil_div(o, CHANNELS)
    windows = np.zeros((tiles * CHANNELS, kh, PIXELS, PIXEL), np.int8)
    windows[:o, :, PIXELS - kw :, :c] = weight.view(np.int8).transpose(0, 2, 3, 1)
    axes = (tiles, WARPS, WARP_CHANNELS // 2, 2, kh, 2, PIXELS // 2, PIXEL)
    # tile, warp, row, row + 8, kh, half of the pixels, pixel of the half, channel
    packed = windows.reshape(axes).transpose(0, 4, 1, 2, 6, 5, 3, 7)
    return np.ascontiguousarray(packed).reshape(tiles, kh, CONSUMERS, 4, PIXEL)


@dataclass(frozen=True, eq=False)
class ByteStemWgmma(CudaKernel):
    """Convolution and max-pooling, from an image of one of the kinds that tiles read."""

    algorithm = "few_channels_wgmma"
    reads: ClassVar[Layout] = Layout.NCHW
    source: ClassVar[str]  # see `Entry`
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    layout: Layout = Layout.NHWC
    config: ByteStemTile | None = None

    @property
    @abstractmethod
    def all_tiles(self) -> tuple[ByteStemTile, ...]:
        """The compiled tiles."""

    @property
    def tiles(self) -> tuple[ByteStemTile, ...]:
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

    @abstractmethod
    def image_of(self, problem: Problem) -> IntEnum:
        """The format of a problem's image."""

    def entry(self, tile: FewChannelsTile) -> Entry:
        symbol = f"{self.op.name}_{self.algorithm}"
        return Entry(self.source, symbol, (*tile.defines, ("POOL", 1)), self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def suiting(self, problem: Problem) -> tuple[ByteStemTile, ...]:
        """The tiles for the problem's image."""
        return tuple(tile for tile in self.tiles if tile.image is self.image_of(problem))

    def refuses(self, problem: Problem) -> str | None:
        pooled = floats_op(problem)
        op, pool = pooled.conv, pooled.pool
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
        weight, *others = super().pack(problem, weights)
        return (pack_weight(weight), *others)

    def blocking(self, problem: Problem) -> Blocking:
        return choose(of_floats(problem), self.suiting(problem))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        floats, blocking = of_floats(problem), self.blocking(problem)
        tile = blocking.tile
        assert isinstance(tile, ByteStemTile)
        fields = (*problem.output[2:], *POOL.padding, blocking.strip)
        shape, task = conv_shape(conv_of(floats)), struct(np.array([fields], TASK))
        weights = tuple(Pointer(Role.WEIGHT, index) for index in range(3))
        image_weight = NULL if tile.image == BYTES else Pointer(Role.WEIGHT, 3)
        return (
            GridLaunch(
                self.entry(tile),
                (blocking.blocks(floats), 1, 1),
                (tile.threads, 1, 1),
                (X, *weights, image_weight, OUT, shape, task),
                tile.shared_nbytes(floats),
                overlaps=True,
            ),
        )
