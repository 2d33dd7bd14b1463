"""Implicit GEMM of e4m3 numbers with TMA and `wgmma`. NHWC.

See r18_cupy.bytes.implicit_gemm_wgmma and kernels/float8/hopper/implicit_gemm_wgmma.cu, which
promotes sums to float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from r18.graph.ops import Conv2d, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.bytes.implicit_gemm_wgmma import ByteImplicitGemmWgmma, blocks_at_once
from r18_cupy.bytes.wgmma import CHUNK, GROUP_M, ByteTile
from r18_cupy.cuda.launch import ceil_div
from r18_cupy.float8.wgmma import ScaledWgmmaConv
from r18_cupy.hopper.wgmma import PRODUCER_GROUP_THREADS, PRODUCER_THREADS

WARP_FED = 128
"""Pixels of a warpgroup that one warp of producers loads for."""


class PromotedTile(ByteTile):
    """A `ByteTile` whose threads have two registers for each of their outputs, as promoted sums
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
    tile_of(128, 128, 128, stages=5, blocks=1, parts=4),
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


class ScaledImplicitGemmWgmma(ScaledWgmmaConv, ByteImplicitGemmWgmma):
    """Implicit GEMM on `wgmma` of e4m3. The integers' estimates choose its tiles."""

    source = "float8/hopper/implicit_gemm_wgmma"
    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False

    @property
    def tiles(self) -> tuple[ByteTile, ...]:
        return TILES

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Problems with a residual and without, with a K tile that is not full, and with several
        tiles for each block."""
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


def _with_residual(conv: Conv2d, image: tuple[int, int, int, int]) -> Problem:
    made = replace(conv, residual=False).infer(image)
    return Problem(ScaledConv2d(conv), (image, made))
