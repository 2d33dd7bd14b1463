"""Implicit GEMM of integers with TMA and `wgmma`. NHWC.

See r18_cupy.bytes.implicit_gemm_wgmma and kernels/integers/hopper/implicit_gemm_wgmma.cu.
"""

from __future__ import annotations

from dataclasses import replace

from r18.graph.ops import Conv2d, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_cupy.bytes.implicit_gemm_wgmma import ByteImplicitGemmWgmma, blocks_at_once
from r18_cupy.bytes.wgmma import CHUNK, GROUP_M, ByteTile
from r18_cupy.cuda.launch import ceil_div
from r18_cupy.integers.wgmma import QuantizedWgmmaConv


def tile_of(
    k: int, m: int, n: int, stages: int, blocks: int, parts: int = 1, groups_n: int = 1
) -> ByteTile:
    """The tile with as many warpgroups as its channels need, times `groups_n`."""
    return ByteTile(m, n, k, m // GROUP_M, groups_n, stages, blocks, parts)


TILES = (
    # A warpgroup with many pixels reads the fewest bytes of shared memory per product.
    tile_of(128, 128, 256, stages=4, blocks=1),
    tile_of(128, 128, 192, stages=4, blocks=1),
    tile_of(128, 128, 112, stages=3, blocks=2),
    tile_of(128, 128, 96, stages=3, blocks=2),
    tile_of(128, 64, 256, stages=4, blocks=1, groups_n=2),
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
    tile_of(64, 128, 256, stages=8, blocks=1),
    tile_of(64, 128, 192, stages=8, blocks=1),
    tile_of(64, 128, 112, stages=6, blocks=2),
    tile_of(64, 64, 128, stages=8, blocks=2),
    tile_of(64, 64, 64, stages=8, blocks=3),
    tile_of(64, 64, 64, stages=12, blocks=2, parts=2),
)
"""The compiled tiles, by K and by outputs."""


class QuantizedImplicitGemmWgmma(QuantizedWgmmaConv, ByteImplicitGemmWgmma):
    """Implicit GEMM on integer `wgmma`."""

    source = "integers/hopper/implicit_gemm_wgmma"

    @property
    def tiles(self) -> tuple[ByteTile, ...]:
        return TILES

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Also several tiles for each persistent block, with a residual and without."""
        run = max((blocks_at_once(t) * t.n for t in self.tiles if t.parts == 1), default=0)
        image = (ceil_div(2 * run + 1, 7 * 9), CHUNK, 7, 9)
        plain = Conv2d(CHUNK, CHUNK, (1, 3), padding=(0, 1), bias=True)
        added = replace(plain, residual=True, relu=True)
        several = (
            Problem(QuantizedConv2d(added, ("uint8", "int8")), (image, image)),
            Problem(QuantizedConv2d(plain, ("int8",)), (image,)),
        )
        return (*super().extra_problems, *(several if run else ()))


def implicit_gemm_wgmma_kernels() -> tuple[QuantizedImplicitGemmWgmma, ...]:
    return (QuantizedImplicitGemmWgmma(),)
