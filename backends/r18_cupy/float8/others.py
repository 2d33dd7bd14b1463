"""Every scaled op but convolutions, and what moves e4m3 numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout, MaxPool2d, Problem, Relayout
from r18.graph.precision import FP8
from r18.graph.scaled import Scale, ScaledGlobalAvgPool, ScaledLinear
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.float8.kernel import WIDE, Float8Kernel, exact, plain_sum
from r18_cupy.ops.linear import LINEAR_SHAPE
from r18_cupy.ops.maxpool2d import POOL_SHAPE
from r18_cupy.ops.relayout import (
    NARROW,
    NARROW_LENGTH,
    TILE,
    TRANSPOSE_SHAPE,
    matrices,
    tile_extents,
)

THREADS = 256
RGB, RGB_PIXELS = 3, 4  # channels, and pixels per thread
RUN = 4  # elements per thread of an image whose layout stays
WIDTH = 16  # channels per thread of max-pooling, in NHWC
LANES, WARPS, WORD = 32, 8, 4  # of kernels/float8/gap.cu
TILE_SAMPLES = TILE_FEATURES = 32  # of a block of kernels/float8/linear.cu,
TILE_THREADS = 128


@dataclass(frozen=True, eq=False)
class ScaleKernel(Float8Kernel):
    """Reads NCHW, as images are given. To NHWC: four pixels of RGB per thread; images with other
    channels, or whose planes are not whole vectors, one element per thread. Where both layouts have
    one order, as for NCHW: four elements per thread.
    """

    op = Scale
    algorithm = "divide"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("scale", FP8.accumulate, FP8.storage)

    @property
    def reads(self) -> Layout | None:
        return Layout.NCHW

    @property
    def edges(self) -> tuple[int, ...]:
        return (RUN, THREADS) if self.layout is Layout.NCHW else (RGB, RGB_PIXELS, THREADS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """RGB in planes of whole vectors."""
        return (Problem(Scale(), ((2, RGB, 3, RGB_PIXELS),)),)

    def entries(self) -> tuple[Entry, ...]:
        symbols = ["scale_elements"]
        if self.layout is Layout.NHWC:
            symbols += ["scale_rgb_to_nhwc", "scale_any_to_nhwc"]
        return tuple(Entry("float8/scale", symbol) for symbol in symbols)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        shape, count = problem.output, math.prod(problem.output)
        elements, *to_nhwc = self.entries()
        if not to_nhwc or len(shape) != 4 or 1 in (shape[1], shape[2] * shape[3]):
            return (self._launch(elements, ceil_div(count, RUN), count),)
        rgb, any_channels = to_nhwc
        n, c, h, w = shape
        if c == RGB and h * w % RGB_PIXELS == 0:
            runs = h * w // RGB_PIXELS
            return (self._launch(rgb, n * runs, n * runs, runs),)
        return (self._launch(any_channels, count, count, h * w, c),)

    def _launch(self, entry: Entry, threads: int, *sizes: int) -> GridLaunch:
        arguments: tuple[Argument, ...] = (X, Pointer(Role.WEIGHT), OUT, *map(np.uint32, sizes))
        blocks = ceil_div(threads, THREADS)
        return GridLaunch(entry, (blocks, 1, 1), (THREADS, 1, 1), arguments, overlaps=True)


@dataclass(frozen=True, eq=False)
class ScaledMaxPool(Float8Kernel):
    """Each window independently. NCHW: one thread per output. NHWC: one thread per 16 channels.

    NHWC with channels that are not whole vectors: one thread per channel.
    """

    op = MaxPool2d
    algorithm = "direct"

    @property
    def contract(self) -> RoundingContract:
        return exact()

    @property
    def edges(self) -> tuple[int, ...]:
        return (THREADS,) if self.layout is Layout.NCHW else (WIDTH, THREADS)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry("float8/maxpool2d", f"smaxpool2d_{self.layout.value}"),)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        pool, (n, c, h, w) = cast(MaxPool2d, problem.op), problem.inputs[0]
        _, _, oh, ow = problem.output
        fields = (n, c, h, w, oh, ow, *pool.kernel_size, *pool.stride, *pool.padding)
        shape = struct(np.array([fields], POOL_SHAPE))
        width = WIDTH if self.layout is Layout.NHWC and c % WIDTH == 0 else 1
        blocks = ceil_div(math.prod(problem.output) // width, THREADS)
        widths = (np.uint32(width),) if self.layout is Layout.NHWC else ()
        (entry,) = self.entries()
        arguments = (X, OUT, shape, *widths)
        return (GridLaunch(entry, (blocks, 1, 1), (THREADS, 1, 1), arguments, overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledGap(Float8Kernel):
    """float32 sums in a fixed tree. NCHW: one warp per plane. NHWC: eight warps per 128 channels of
    an image, or per 32 where channels are not whole words."""

    op = ScaledGlobalAvgPool
    algorithm = "tree"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("mean", FP8.accumulate, WIDE)

    @property
    def edges(self) -> tuple[int, ...]:
        narrow = (WARPS, LANES)
        return narrow if self.layout is Layout.NCHW else (WORD, *narrow, LANES * WORD)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry("float8/gap", f"sgap_{self.layout.value}"),)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.inputs[0]
        if self.layout is Layout.NCHW:
            blocks, groups = ceil_div(n * c, WARPS), n * c
        else:
            blocks, groups = n * ceil_div(c, LANES * (1 if c % WORD else WORD)), c
        (entry,) = self.entries()
        arguments = (X, OUT, np.int32(groups), np.int32(h * w))
        grid, block = (blocks, 1, 1), (LANES * WARPS, 1, 1)
        return (GridLaunch(entry, grid, block, arguments, overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledLinearKernel(Float8Kernel):
    """Products of widened weights in float32; multiplier and bias last."""

    op = ScaledLinear

    warps: int = 8  # per block, of a small batch
    rows: int = 4  # samples at a time, of a small batch

    @property
    def contract(self) -> RoundingContract:
        return plain_sum(WIDE)

    def entry(self, symbol: str) -> Entry:
        return Entry("float8/linear", symbol, (("WARPS", self.warps), ("ROWS", self.rows)))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry(f"slinear_{self.algorithm}"),)

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        linear = cast(ScaledLinear, problem.op).linear
        fields = (problem.batch, linear.in_features, linear.out_features)
        weights = (Pointer(Role.WEIGHT, index) for index in range(3))
        return (X, *weights, OUT, struct(np.array([fields], LINEAR_SHAPE)))


@dataclass(frozen=True, eq=False)
class ScaledWarpDot(ScaledLinearKernel):
    """One warp per output feature, for `rows` samples at a time."""

    algorithm = "warp_dot"

    largest_batch: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.rows, self.warps, LANES)

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch > self.largest_batch:
            return (
                f"reads the weights once for every {self.rows} samples, so it takes batches of at "
                f"most {self.largest_batch}, not {problem.batch}"
            )
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        features = cast(ScaledLinear, problem.op).linear.out_features
        grid = (ceil_div(features, self.warps), ceil_div(problem.batch, self.rows), 1)
        block = (LANES * self.warps, 1, 1)
        (entry,) = self.entries()
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledTiledLinear(ScaledLinearKernel):
    """One block per tile of samples and output features."""

    algorithm = "tiled"

    @property
    def edges(self) -> tuple[int, ...]:
        return (TILE_SAMPLES,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        features = cast(ScaledLinear, problem.op).linear.out_features
        blocks = ceil_div(problem.batch, TILE_SAMPLES) * ceil_div(features, TILE_FEATURES)
        (entry,) = self.entries()
        block = (TILE_THREADS, 1, 1)
        return (GridLaunch(entry, (blocks, 1, 1), block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledTranspose(Float8Kernel):
    """The transposition of kernels/ops/relayout.cu, of bytes."""

    op = Relayout
    algorithm = "transpose"

    @property
    def contract(self) -> RoundingContract:
        return exact()

    @property
    def edges(self) -> tuple[int, ...]:
        return (NARROW, TILE, NARROW_LENGTH)

    def entries(self) -> tuple[Entry, ...]:
        sizes = (("TILE", TILE), ("NARROW", NARROW), ("NARROW_LENGTH", NARROW_LENGTH))
        bits = ("BITS", "unsigned char")
        return (Entry("ops/relayout", "relayout_transpose", (bits, *sizes)),)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        count, rows, columns = matrices(problem)
        height, width = tile_extents(rows, columns)
        blocks = count * ceil_div(rows, height) * ceil_div(columns, width)
        shape = np.array([(count, rows, columns, height, width)], TRANSPOSE_SHAPE)
        (entry,) = self.entries()
        return (GridLaunch(entry, (blocks, 1, 1), (THREADS, 1, 1), (X, OUT, struct(shape))),)
