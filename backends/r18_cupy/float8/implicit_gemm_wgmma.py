"""Implicit GEMM of e4m3 numbers with TMA and `wgmma`. NHWC.

TMA gathers the pixels of each window position, `wgmma` multiplies them, and sums are promoted to
float32; see kernels/float8/hopper/implicit_gemm_wgmma.cu. Split-K: where there are too few tiles to
fill a GPU, the CTAs of a cluster divide K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.graph.ops import Conv2d, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.float8.kernel import conv_of, factors
from r18_cupy.float8.wgmma import ScaledWgmmaConv
from r18_cupy.hopper.wgmma import PRODUCER_GROUP_THREADS, PRODUCER_THREADS
from r18_cupy.integers.implicit_gemm_wgmma import blocks_at_once, estimate
from r18_cupy.integers.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.integers.wgmma import CHUNK, GROUP_M, SLAB_ROW, IntegerTile, packed_depth

WARP_FED = 128
"""Pixels of a warpgroup that one warp of producers loads for."""


class PromotedTile(IntegerTile):
    """An `IntegerTile` whose threads have two registers for each of their outputs, as promoted sums
    take: for more than `WARP_FED` pixels a warpgroup of producers gives registers away.
    """

    @property
    def threads(self) -> int:
        gives = self.group_n > WARP_FED
        return super().threads + (PRODUCER_GROUP_THREADS - PRODUCER_THREADS if gives else 0)


def tile_of(k: int, m: int, n: int, stages: int, blocks: int, parts: int = 1) -> PromotedTile:
    """The tile with as many warpgroups as its channels need."""
    return PromotedTile(m, n, k, m // GROUP_M, 1, stages, blocks, parts)


TILES = (
    tile_of(128, 128, 192, stages=4, blocks=1),
    tile_of(128, 128, 128, stages=4, blocks=1),
    tile_of(128, 128, 64, stages=6, blocks=1),
    tile_of(128, 64, 128, stages=4, blocks=2),
    tile_of(128, 64, 64, stages=4, blocks=3),
    # For a few images, K is split, and as much is prefetched as fits.
    tile_of(128, 128, 128, stages=6, blocks=1, parts=4),
    tile_of(128, 64, 128, stages=8, blocks=1, parts=4),
    tile_of(128, 128, 64, stages=6, blocks=1, parts=2),
    tile_of(128, 128, 64, stages=8, blocks=1, parts=4),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=2),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=4),
    tile_of(128, 64, 64, stages=8, blocks=1, parts=8),
    # For 64 channels or fewer.
    tile_of(64, 128, 192, stages=8, blocks=1),
    tile_of(64, 128, 128, stages=8, blocks=1),
    tile_of(64, 64, 128, stages=8, blocks=2),
    tile_of(64, 64, 64, stages=8, blocks=3),
    tile_of(64, 64, 64, stages=12, blocks=2, parts=2),
)
"""The compiled tiles, by K and by outputs."""


@dataclass(frozen=True, eq=False)
class ScaledImplicitGemmWgmma(ScaledWgmmaConv):
    """Implicit GEMM on `wgmma` of e4m3, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma"
    source = "float8/hopper/implicit_gemm_wgmma"
    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False

    @property
    def tiles(self) -> tuple[IntegerTile, ...]:
        return TILES

    def tile_for(self, problem: Problem) -> IntegerTile:
        """The tile with the lowest estimate, which is that of the integers. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, tile))

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

    def pixels(self, problem: Problem, tile: IntegerTile) -> ByteIm2colMap:
        """The tensor map of the input."""
        op = cast(ScaledConv2d, problem.op).conv
        windows = (op.kernel_size, op.stride, op.padding)
        n, c, h, w = problem.inputs[0]
        return ByteIm2colMap(X, "uint8", (n, c, h, w), *windows, tile.n, tile.k)

    def refuses(self, problem: Problem) -> str | None:
        if reason := self.refuses_channels(cast(ScaledConv2d, problem.op).conv):
            return reason
        if reason := self.pixels(problem, self.tiles[0]).refusal():
            return f"TMA takes {reason}"
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(ScaledConv2d, problem.op)
        tile = self.tile_for(problem)
        n, o, oh, ow = problem.output
        tiles = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m)
        blocks = tiles if tile.parts > 1 else min(tiles, blocks_at_once(tile))
        bias, multiplier, residual_multiplier = factors(op)
        residual = Pointer(Role.INPUT, 1) if op.conv.residual else None

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, n * oh * ow), (SLAB_ROW, tile.group_n))

        return (
            GridLaunch(
                self.entry(tile),
                (blocks, tile.parts, 1),
                (tile.threads, 1, 1),
                (
                    self.pixels(problem, tile),
                    self.weights(op.conv, tile),
                    slab(residual or OUT),
                    slab(OUT),
                    bias,
                    multiplier,
                    residual or NULL,
                    residual_multiplier,
                    OUT,
                    conv_shape(conv_of(problem)),
                    np.int32(tiles),
                    np.int32(packed_depth(op.conv, tile.k) // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def _with_residual(conv: Conv2d, image: tuple[int, int, int, int]) -> Problem:
    made = replace(conv, residual=False).infer(image)
    return Problem(ScaledConv2d(conv), (image, made))
