"""Implicit GEMM of e4m3 numbers with TMA and `wgmma` for stride 1, input tile with halo in shared
memory. NHWC.

See r18_cupy.bytes.wgmma_halo and kernels/float8/hopper. Tiles, blockings and estimates are those of
the integers.
"""

from __future__ import annotations

from r18.backend import RoundingContract
from r18.graph.ops import Problem
from r18_cupy.bytes.wgmma import CHUNK, GROUP_M, ByteTile
from r18_cupy.bytes.wgmma_halo import ByteHaloConv, ByteResidentConv, ByteRingConv, blocking_of
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.float8.kernel import narrow_sum
from r18_cupy.float8.wgmma import ScaledWgmmaConv, small_problem


class ScaledHaloConv(ScaledWgmmaConv, ByteHaloConv):
    """Whole output rows per warpgroup and tile, with the tile that suits the problem best."""

    def suiting(self, problem: Problem) -> list[ByteTile]:
        """Channels decide the order of a sum: the K tile is the narrowest that holds them."""
        fitting = super().suiting(problem)
        channels = problem.inputs[0][1]
        widths = {tile.k for tile in fitting}
        k = min((k for k in widths if k >= channels), default=max(widths, default=0))
        return [tile for tile in fitting if tile.k == k]

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        return (small_problem(3 * CHUNK, (2, 5, 6)),)


HALO_TILES = (
    ByteTile(GROUP_M, 128, 128, 1, 1, stages=4, blocks=2),
    ByteTile(GROUP_M, 64, 128, 1, 1, stages=4, blocks=3),
    ByteTile(GROUP_M, 128, 128, 1, 1, stages=9, blocks=1),
    ByteTile(GROUP_M, 64, 128, 1, 1, stages=9, blocks=1),
    ByteTile(GROUP_M, 128, 64, 1, 1, stages=8, blocks=2),
    ByteTile(GROUP_M, 64, 64, 1, 1, stages=8, blocks=3),
)
"""For small batches: promoted sums take two registers for each output of a thread, so a warpgroup
has at most 128 pixels. A block alone on its SM prefetches its weights further ahead."""


class ScaledImplicitGemmWgmmaHalo(ScaledHaloConv, ByteRingConv):
    """One tile a block; weights stream through a ring."""

    source = "float8/hopper/implicit_gemm_wgmma_halo"

    @property
    def tiles(self) -> tuple[ByteTile, ...]:
        return HALO_TILES

    def pays(self, problem: Problem) -> bool:
        """Whether it should beat `ScaledImplicitGemmWgmmaResident`, whose tiles are few here.

        Not measured in fp8. In int8 it was faster at batch 8, with 112 tiles of layer1, and slower
        at 64. Pure.
        """
        other = ScaledImplicitGemmWgmmaResident()
        if other.refusal(problem) is not None or self.refusal(problem) is not None:
            return False
        tile = other.tile_for(problem)
        return tile is not None and blocking_of(problem, tile).tiles <= MULTIPROCESSORS


class ScaledImplicitGemmWgmmaResident(ScaledHaloConv, ByteResidentConv):
    """Many tiles a block, of the same 64 channels, whose weights stay in shared memory."""

    source = "float8/hopper/implicit_gemm_wgmma_resident"

    @property
    def contract(self) -> RoundingContract:
        """Sums have at most 9·128 products and are never promoted."""
        return narrow_sum(promoted=0)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Also many tiles for each block, of two sets of channels."""
        several = small_problem(GROUP_M + CHUNK, (self.most_images, 2, 2))
        return (*super().extra_problems, several)
