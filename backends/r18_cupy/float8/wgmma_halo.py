"""Implicit GEMM of e4m3 numbers with TMA and `wgmma` for stride 1, input tile with halo in shared
memory. NHWC.

The two kernels of r18_cupy.integers.wgmma_halo, with their tiles, blockings and shared memory:
`implicit_gemm_wgmma_halo` streams the weights through a ring of stages, one tile a block;
`implicit_gemm_wgmma_resident` keeps all weights of its 64 channels and computes many tiles. See
kernels/float8/hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.float8.kernel import conv_of, factors, narrow_sum
from r18_cupy.float8.wgmma import ScaledWgmmaConv, small_problem
from r18_cupy.integers.tensor_map import ByteMap
from r18_cupy.integers.wgmma import CHUNK, GROUP_M, SLAB_ROW, IntegerTile
from r18_cupy.integers.wgmma_halo import (
    HALO_SHAPE,
    RESIDENT_TILES,
    QuantizedHaloConv,
    QuantizedImplicitGemmWgmmaHalo,
    QuantizedImplicitGemmWgmmaResident,
    blocking_of,
)


@dataclass(frozen=True, eq=False)
class ScaledHaloConv(ScaledWgmmaConv):
    """Whole output rows per warpgroup and tile, with the tile that suits the problem best."""

    integers: ClassVar[QuantizedHaloConv]
    """The kernel whose shared memory, blocks and estimates are also this one's."""

    def tile_for(self, problem: Problem) -> IntegerTile | None:
        """The tile with the lowest estimate among those that take the problem. Pure.

        Channels decide the order of a sum: the K tile is the narrowest that holds them.
        """
        fitting = [t for t in self.tiles if self.integers.obstacle(problem, t) is None]
        channels = problem.inputs[0][1]
        widths = {tile.k for tile in fitting}
        k = min((k for k in widths if k >= channels), default=max(widths, default=0))

        def cycles(tile: IntegerTile) -> float:
            return self.integers.estimate(problem, blocking_of(problem, tile))

        return min((tile for tile in fitting if tile.k == k), key=cycles, default=None)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        return (small_problem(3 * CHUNK, (2, 5, 6)),)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(ScaledConv2d, problem.op).conv
        if op.stride != (1, 1):
            return f"reads its windows from whole rows, one pixel apart; the stride is {op.stride}"
        if reason := self.refuses_channels(op):
            return reason
        reasons = [self.integers.obstacle(problem, tile) for tile in self.tiles]
        return None if None in reasons else reasons[0]

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(ScaledConv2d, problem.op)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        blocking = blocking_of(problem, tile)
        n, o, oh, ow = problem.output
        _, c, h, w = problem.inputs[0]

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, oh * ow, n), (SLAB_ROW, blocking.rows * ow, 1))

        shape = (
            blocking.tiles,
            blocking.rows,
            blocking.padded,
            ceil_div(2**16, blocking.padded),
            blocking.patch_nbytes,
            blocking.patch_pitch,
            self.integers.slots(blocking),
            self.integers.slabs(blocking),
            blocking.slab_pitch,
        )
        patch = (tile.k, blocking.padded, blocking.height, 1)
        return (
            GridLaunch(
                self.entry(tile),
                (self.integers.blocks(problem, blocking), 1, 1),
                (tile.threads, 1, 1),
                (
                    ByteMap(X, (c, w, h, n), patch),
                    self.weights(op.conv, tile),
                    slab(Pointer(Role.INPUT, 1) if op.conv.residual else OUT),
                    slab(OUT),
                    *factors(op),
                    conv_shape(conv_of(problem)),
                    struct(np.array([shape], HALO_SHAPE)),
                ),
                self.integers.shared_nbytes(blocking),
                overlaps=True,
            ),
        )


# -- weights in a ring -------------------------------------------------------------------------


HALO_TILES = (
    IntegerTile(GROUP_M, 128, 128, 1, 1, stages=4, blocks=2),
    IntegerTile(GROUP_M, 64, 128, 1, 1, stages=4, blocks=3),
    IntegerTile(GROUP_M, 128, 128, 1, 1, stages=9, blocks=1),
    IntegerTile(GROUP_M, 64, 128, 1, 1, stages=9, blocks=1),
    IntegerTile(GROUP_M, 128, 64, 1, 1, stages=8, blocks=2),
    IntegerTile(GROUP_M, 64, 64, 1, 1, stages=8, blocks=3),
)
"""For small batches: promoted sums take two registers for each output of a thread, so a warpgroup
has at most 128 pixels. A block alone on its SM prefetches its weights further ahead."""


class ScaledImplicitGemmWgmmaHalo(ScaledHaloConv):
    """One tile a block; weights stream through a ring."""

    algorithm = "implicit_gemm_wgmma_halo"
    source = "float8/hopper/implicit_gemm_wgmma_halo"
    integers = QuantizedImplicitGemmWgmmaHalo()

    @property
    def tiles(self) -> tuple[IntegerTile, ...]:
        return HALO_TILES

    def pays(self, problem: Problem) -> bool:
        """Whether it is the faster of the two, so few are the tiles of the other one.

        Not measured in fp8. In int8 it was faster at batch 8, with 112 tiles of layer1, and slower
        at 64. Pure.
        """
        other = ScaledImplicitGemmWgmmaResident()
        if other.refusal(problem) is not None or self.refusal(problem) is not None:
            return False
        tile = other.tile_for(problem)
        return tile is not None and blocking_of(problem, tile).tiles <= MULTIPROCESSORS


# -- weights resident --------------------------------------------------------------------------


class ScaledImplicitGemmWgmmaResident(ScaledHaloConv):
    """Many tiles a block, of the same 64 channels, whose weights stay in shared memory."""

    algorithm = "implicit_gemm_wgmma_resident"
    source = "float8/hopper/implicit_gemm_wgmma_resident"
    integers = QuantizedImplicitGemmWgmmaResident()

    @property
    def tiles(self) -> tuple[IntegerTile, ...]:
        return RESIDENT_TILES

    @property
    def contract(self) -> RoundingContract:
        """Sums have at most 9·128 products and are never promoted."""
        return narrow_sum(promoted=0)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """And for each block more than twice as many tiles as slots, of two sets of channels."""
        images = MULTIPROCESSORS * max(tile.blocks * (tile.stages + 1) for tile in self.tiles)
        return (*super().extra_problems, small_problem(GROUP_M + CHUNK, (images, 2, 2)))
