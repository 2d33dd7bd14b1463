"""Implicit GEMM with TMA and `wgmma` for stride 1, two warpgroups in turn: fp16, bf16, tf32. NHWC.

One block per SM computes several tiles of implicit_gemm_wgmma_halo.py: one warpgroup multiplies
while the other one writes its outputs, and image rows arrive during the products of earlier tiles.
See kernels/hopper/implicit_gemm_wgmma_pingpong.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import BF16, FP16, TF32, Precision
from r18_cupy.cuda.h200 import MULTIPROCESSORS, SHARED_NBYTES
from r18_cupy.cuda.launch import GridLaunch, ceil_div
from r18_cupy.cuda.tensor_map import ROW_BYTES
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.hopper.implicit_gemm_wgmma import estimate as gather_estimate
from r18_cupy.hopper.implicit_gemm_wgmma_halo import (
    HaloBlocking,
    ImplicitGemmWgmmaHalo,
    Slots,
    aligned,
    blocking_of,
    reach_nbytes,
    step_cycles,
    tile_of,
    weights_nbytes,
)
from r18_cupy.hopper.wgmma import ALIGNMENT, BARRIER_NBYTES, WgmmaTile, chunk_of

TURNS = 2  # consumer warpgroups
PRODUCER_THREADS = 64  # a warp for weights, a warp for image rows
MOST_SLOTS = 4
TURN_NBYTES = 32  # of mbarriers: two for each consumer warpgroup


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The compiled tiles: 4 rows of 58 pixels, and 7 of 30; with 4 bytes per channel also 3 of 58,
    which leave room for two sets of slabs. Others pay nowhere, see docs/performance-log.md.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    pixels = (232, 208, 176) if precision.dtype.itemsize == 4 else (232, 208)
    return tuple(tile_of(n, k, stages=6, blocks=1) for n in pixels)


# -- choosing ----------------------------------------------------------------------------------

# Fitted to the times of all tiles on an H200, for the convolutions with stride 1 in layers 1 to 3
# of a ResNet-18 at batches 64 and 256. A microsecond is 1830 cycles, about what it is in the
# estimate of implicit_gemm_wgmma.py, with which `pays` compares.
BLOCK_LATENCY = 4200  # cycles of a block for its first image rows and its last outputs
SLOWDOWN = 1.12  # of products, which copies to and from shared memory delay
TILE_LATENCY = 500  # cycles per tile outside of its products: the change of turns,
OUTPUT_BYTES_PER_CYCLE = 24  # plus a part that grows with the bytes written,
RESIDUAL_BYTES_PER_CYCLE = 28  # and with those of the residual


def estimate(problem: Problem, precision: Precision, tile: WgmmaTile) -> float:
    """Rough cycles of the block with the most tiles."""
    op = cast(Conv2d, problem.op)
    steps = blocking_of(problem, tile).chunks * math.prod(op.kernel_size)
    slab_nbytes = tile.m * tile.n * precision.dtype.itemsize
    cycles = SLOWDOWN * steps * step_cycles(tile, precision) + TILE_LATENCY
    cycles += slab_nbytes / OUTPUT_BYTES_PER_CYCLE
    if op.residual:
        cycles += slab_nbytes / RESIDUAL_BYTES_PER_CYCLE
    return BLOCK_LATENCY + ceil_div(tiles_in(problem, tile), MULTIPROCESSORS) * cycles


def tiles_in(problem: Problem, tile: WgmmaTile) -> int:
    """The tiles that cover a problem."""
    n, o, oh, _ = problem.output
    return n * ceil_div(oh, blocking_of(problem, tile).rows) * ceil_div(o, tile.m)


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaPingpong(ImplicitGemmWgmmaHalo):
    """One block per SM of an H200, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma_pingpong"
    source = "hopper/implicit_gemm_wgmma_pingpong"

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Problems with more tiles than slots for each block, of several chunks and of two sets of
        channels."""
        images, channels = MULTIPROCESSORS * 3, 2 * self.tiles[0].k + chunk_of(self.precision)
        op = Conv2d(channels, 72, (3, 3), padding=(1, 1), bias=True, residual=True, relu=True)
        return (
            *super().extra_problems,
            Problem(op, ((images, channels, 2, 2), (images, 72, 2, 2))),
            Problem(replace(op, residual=False), ((images, channels, 2, 2),)),
        )

    def set_nbytes(self, blocking: HaloBlocking, tile: WgmmaTile) -> int:
        """Bytes of the slabs that hold the outputs of a tile."""
        return tile.m // tile.k * blocking.slab_pitch

    def sets(self, blocking: HaloBlocking) -> int:
        """Sets of slabs: one for each warpgroup where there is a residual, which then arrives a
        whole tile ahead; else one for both.
        """
        return TURNS if blocking.slabs else 1

    def slots(self, blocking: HaloBlocking, tile: WgmmaTile) -> Slots:
        """As many as fit, at most MOST_SLOTS. Pure."""
        pitch = aligned(blocking.patch_nbytes)
        slabs = self.sets(blocking) * self.set_nbytes(blocking, tile)
        barriers = (tile.stages + MOST_SLOTS) * BARRIER_NBYTES + TURN_NBYTES
        room = SHARED_NBYTES - ALIGNMENT - weights_nbytes(tile) - slabs - barriers
        count = max(min(room // pitch, MOST_SLOTS), min(2, blocking.chunks))
        return Slots(count, pitch, count * pitch)

    def blocks(self, tiles: int, tile: WgmmaTile) -> int:
        return min(tiles, MULTIPROCESSORS)

    def tile_for(self, problem: Problem) -> WgmmaTile | None:
        """The tile with the lowest estimate among those that take the problem. Pure."""
        fitting = [tile for tile in self.tiles if self.obstacle(problem, tile) is None]
        return min(fitting, key=lambda tile: self.cycles(problem, tile), default=None)

    def cycles(self, problem: Problem, tile: WgmmaTile) -> float:
        """Rough cycles with a tile that takes the problem. Pure."""
        return estimate(problem, self.precision, tile)

    def pays(self, problem: Problem) -> bool:
        """Whether it should take less time than implicit_gemm_wgmma.py, by the estimates of both;
        False for windows of one pixel and for few tiles, which were not measured. Pure.
        """
        tile = self.tile_for(problem) if self.refusal(problem) is None else None
        if tile is None or math.prod(cast(Conv2d, problem.op).kernel_size) == 1:
            return False
        if tiles_in(problem, tile) <= TURNS * MULTIPROCESSORS:
            return False
        gathering = ImplicitGemmWgmma(self.precision)
        other = gather_estimate(problem, self.precision, gathering.tile_for(problem))
        return self.cycles(problem, tile) < other

    def shared_nbytes(self, problem: Problem, tile: WgmmaTile) -> int:
        """Bytes of slots, weights, slabs and mbarriers, and of memory that is only read: where the
        rows have fewer pixels than the tile, discarded products read on behind the image rows.
        """
        blocking = blocking_of(problem, tile)
        slots = self.slots(blocking, tile)
        slabs = self.sets(blocking) * self.set_nbytes(blocking, tile)
        barriers = (tile.stages + slots.count) * BARRIER_NBYTES + TURN_NBYTES
        return ALIGNMENT + max(
            slots.nbytes + weights_nbytes(tile) + slabs + barriers,
            (slots.count - 1) * slots.pitch + reach_nbytes(blocking, tile),
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        (launch,) = super().launches(problem)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        sets = np.int32(self.sets(blocking_of(problem, tile)))
        threads = TURNS * 128 + PRODUCER_THREADS
        arguments = (*launch.arguments, sets)
        return (replace(launch, block=(threads, 1, 1), arguments=arguments),)


def implicit_gemm_wgmma_pingpong_kernels() -> tuple[ImplicitGemmWgmmaPingpong, ...]:
    """Kernels of all precisions but fp16x3, whose several accumulators per output leave room for
    few pixels."""
    return tuple(ImplicitGemmWgmmaPingpong(precision) for precision in (FP16, BF16, TF32))
