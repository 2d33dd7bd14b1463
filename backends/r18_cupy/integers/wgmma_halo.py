"""Implicit GEMM of integers with TMA and `wgmma` for stride 1, input tile with halo in shared
memory. NHWC.

See r18_cupy.bytes.wgmma_halo and kernels/integers/hopper.
"""

from __future__ import annotations

from r18.graph.ops import Problem
from r18.graph.quantized import STORAGES
from r18_cupy.bytes.wgmma import CHUNK, GROUP_M, ByteTile
from r18_cupy.bytes.wgmma_halo import ByteResidentConv, ByteRingConv
from r18_cupy.integers.wgmma import QuantizedWgmmaConv, small_problem

HALO_TILES = (
    *(ByteTile(GROUP_M, n, 128, 1, 1, stages=4, blocks=2) for n in (240, 224, 208, 128)),
    ByteTile(GROUP_M, 64, 128, 1, 1, stages=4, blocks=4),
    ByteTile(GROUP_M, 128, 128, 1, 1, stages=9, blocks=1),
    ByteTile(GROUP_M, 64, 128, 1, 1, stages=9, blocks=1),
    *(ByteTile(GROUP_M, n, 64, 1, 1, stages=8, blocks=2) for n in (240, 128)),
    ByteTile(GROUP_M, 64, 64, 1, 1, stages=8, blocks=4),
)
"""Pixel counts that the rows of ResNet-18 fill: 4 rows of 58 pixels without the last two, 14 of 16,
7 of 30; fewer for small batches. A block alone on its SM prefetches its weights further ahead.
"""


class QuantizedImplicitGemmWgmmaHalo(QuantizedWgmmaConv, ByteRingConv):
    """One tile a block; weights stream through a ring."""

    source = "integers/hopper/implicit_gemm_wgmma_halo"

    @property
    def tiles(self) -> tuple[ByteTile, ...]:
        return HALO_TILES


class QuantizedImplicitGemmWgmmaResident(QuantizedWgmmaConv, ByteResidentConv):
    """Many tiles a block, of the same 64 channels, whose weights stay in shared memory."""

    source = "integers/hopper/implicit_gemm_wgmma_resident"

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Also many tiles for each block, of two sets of channels."""
        channels, images = GROUP_M + CHUNK, (self.most_images, 2, 2)
        several = (small_problem(stored, channels, images) for stored in STORAGES)
        return (*super().extra_problems, *several)


def halo_kernels() -> tuple[QuantizedWgmmaConv, ...]:
    return (QuantizedImplicitGemmWgmmaResident(), QuantizedImplicitGemmWgmmaHalo())
