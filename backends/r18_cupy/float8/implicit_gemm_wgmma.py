"""Implicit GEMM of e4m3 numbers with TMA and `wgmma`. NHWC.

TMA gathers the pixels of each window position, `wgmma` multiplies them, and the sum of each K tile
is added in float32; see kernels/float8/hopper/implicit_gemm_wgmma.cu. Split-K: where there are too
few tiles to fill a GPU, the CTAs of a cluster divide K. Tiles, their estimate, packed weights and
tensor maps are those of the integers, which have as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.float8.kernel import Float8Kernel, conv_of, factors, narrow_sum
from r18_cupy.integers.implicit_gemm_wgmma import blocks_at_once, estimate, tile_of
from r18_cupy.integers.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.integers.wgmma import CHUNK, SLAB_ROW, IntegerTile, pack_weight, packed_depth
from r18_cupy.kernel import MAX_ELEMENTS

PROMOTED = 128  # products of a K tile, at most
NARROW = 64  # channels that one K tile of 64 holds


TILES = (
    tile_of(128, 128, 128, stages=4, blocks=1),
    tile_of(128, 128, 64, stages=6, blocks=1),
    tile_of(128, 64, 128, stages=4, blocks=2),
    tile_of(128, 64, 64, stages=4, blocks=3),
    # For a few images, K is split, and as much is prefetched as fits.
    tile_of(128, 64, 128, stages=8, blocks=1, parts=4),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=2),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=4),
    tile_of(128, 64, 64, stages=8, blocks=1, parts=8),
    # For 64 channels or fewer.
    tile_of(64, 128, 128, stages=8, blocks=1),
    tile_of(64, 64, 128, stages=8, blocks=2),
    tile_of(64, 64, 64, stages=8, blocks=3),
    tile_of(64, 64, 64, stages=12, blocks=2, parts=2),
)
"""The compiled tiles. A thread has two registers for each of its outputs: pixels of a warpgroup are
at most 128."""

# -- kernel ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScaledImplicitGemmWgmma(Float8Kernel):
    """A convolution in one launch, with the tile that suits the problem best."""

    op = ScaledConv2d
    algorithm = "implicit_gemm_wgmma"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    batch_invariant: ClassVar[bool] = False  # how K is split depends on the batch

    layout: Layout = Layout.NHWC

    @property
    def contract(self) -> RoundingContract:
        """A K tile has the channels of one position: `PROMOTED` of them, or all if they are few."""
        return narrow_sum(min(PROMOTED, max(tile.k for tile in self.tiles)))

    @property
    def tiles(self) -> tuple[IntegerTile, ...]:
        return TILES

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({CHUNK, *(size for tile in self.tiles for size in tile.edges)}))

    def tile_for(self, problem: Problem) -> IntegerTile:
        """The tile with the lowest estimate, of those whose K tile is as wide as needed. Pure."""
        narrow = cast(ScaledConv2d, problem.op).conv.in_channels <= NARROW
        fit = [tile for tile in self.tiles if (tile.k <= NARROW) == narrow]
        return min(fit or self.tiles, key=lambda tile: estimate(problem, tile))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """A residual and none, a K tile that is not full, and several tiles for each block."""
        run = max((blocks_at_once(t) * t.n for t in self.tiles if t.parts == 1), default=1)
        image = (ceil_div(2 * run + 1, 7 * 9), CHUNK, 7, 9)
        plain = Conv2d(CHUNK, CHUNK, (1, 3), padding=(0, 1), bias=True)
        added = replace(plain, residual=True, relu=True)
        wide = Conv2d(9 * CHUNK, 3 * CHUNK, (3, 3), (2, 1), (1, 1), True, True, True)
        small = (2, 9 * CHUNK, 5, 6)
        return (
            _with_residual(wide, small),
            Problem(ScaledConv2d(added), (image, image)),
            Problem(ScaledConv2d(plain), (image,)),
        )

    def entry(self, tile: IntegerTile) -> Entry:
        symbol = "sconv2d_implicit_gemm_wgmma"
        return Entry("float8/hopper/implicit_gemm_wgmma", symbol, tile.defines, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def pixels(self, problem: Problem, tile: IntegerTile) -> ByteIm2colMap:
        """The tensor map of the input."""
        op = cast(ScaledConv2d, problem.op).conv
        windows = (op.kernel_size, op.stride, op.padding)
        n, c, h, w = problem.inputs[0]
        return ByteIm2colMap(X, "uint8", (n, c, h, w), *windows, tile.n, tile.k)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(ScaledConv2d, problem.op).conv
        if op.out_channels % CHUNK:
            return f"writes {CHUNK} channels at a time, and {op.out_channels} is not a multiple"
        if op.in_channels % CHUNK:
            return f"copies {CHUNK} channels at a time, and {op.in_channels} is not a multiple"
        if op.out_channels * packed_depth(op, max(t.k for t in self.tiles)) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        if reason := self.pixels(problem, self.tiles[0]).refusal():
            return f"TMA takes {reason}"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *others = super().pack(problem, weights)
        op = cast(ScaledConv2d, problem.op).conv
        return (pack_weight(weight.view(np.int8), op, self.tile_for(problem).k), *others)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(ScaledConv2d, problem.op)
        tile = self.tile_for(problem)
        n, o, oh, ow = problem.output
        tiles = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m)
        blocks = tiles if tile.parts > 1 else min(tiles, blocks_at_once(tile))
        depth = packed_depth(op.conv, tile.k)
        bias, multiplier, more = factors(op)
        residual = Pointer(Role.INPUT, 1) if op.conv.residual else NULL

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, n * oh * ow), (SLAB_ROW, tile.group_n))

        return (
            GridLaunch(
                self.entry(tile),
                (blocks, tile.parts, 1),
                (tile.threads, 1, 1),
                (
                    self.pixels(problem, tile),
                    ByteMap(Pointer(Role.WEIGHT), (depth, o), (tile.k, tile.m)),
                    slab(Pointer(Role.INPUT, 1) if op.conv.residual else OUT),
                    slab(OUT),
                    *(bias, multiplier, residual, more, OUT),
                    conv_shape(conv_of(problem)),
                    np.int32(tiles),
                    np.int32(depth // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def _with_residual(conv: Conv2d, image: tuple[int, int, int, int]) -> Problem:
    made = replace(conv, residual=False).infer(image)
    return Problem(ScaledConv2d(conv), (image, made))
