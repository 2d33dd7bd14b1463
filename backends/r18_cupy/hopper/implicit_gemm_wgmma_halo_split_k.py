"""Implicit GEMM with TMA and `wgmma` for stride 1 and few tiles: input tile with halo resident in
shared memory, and K divided among the CTAs of a cluster. NHWC.

For a few images implicit_gemm_wgmma.py divides K too, but loads each pixel once per window
position, and the L2 limits it. See kernels/hopper/implicit_gemm_wgmma_halo_split_k.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import BF16, FP16, TF32, Precision
from r18_cupy.conv.base import bias_and_residual
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, ceil_div
from r18_cupy.cuda.tensor_map import ROW_BYTES
from r18_cupy.hopper.implicit_gemm_wgmma import CLUSTER_MULTIPROCESSORS, L2_BYTES_PER_CYCLE
from r18_cupy.hopper.implicit_gemm_wgmma_halo import (
    HaloBlocking,
    ImplicitGemmWgmmaHalo,
    Slots,
    aligned,
    blocking_of,
    reach_nbytes,
    step_cycles,
    weights_nbytes,
)
from r18_cupy.hopper.wgmma import ALIGNMENT, BARRIER_NBYTES, WgmmaTile, chunk_of


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The compiled tiles: 14 and 7 rows of 16 pixels, 4 and 2 of 30, 7 of 9.

    A block has its SM to itself, and the weights of a chunk's nine positions in flight.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    sizes = ((224, 4), (224, 8), (120, 2), (120, 4), (64, 2), (64, 4), (64, 8))
    return tuple(
        WgmmaTile(64, n, k, groups_m=1, groups_n=1, stages=10, blocks=1, parts=parts)
        for n, parts in sizes
    )


def chunks_of_part(chunks: int, parts: int) -> int:
    """The most chunks of channels that one of the parts of K touches."""
    if chunks % parts == 0:
        return chunks // parts
    if parts % chunks == 0:
        return 1
    return min(chunks, chunks // parts + 2)


# -- choosing ----------------------------------------------------------------------------------

BLOCK_LATENCY = 4500  # cycles per block outside of its products: image rows, first sums
PART_LATENCY = 300  # cycles per CTA of a cluster: launching it, adding its sums
PIXEL_LATENCY = 8  # cycles per pixel of a tile, for its sums


def estimate(problem: Problem, precision: Precision, tile: WgmmaTile) -> float:
    """Rough cycles: rounds of blocks, each bound by products or by what all read from the L2."""
    op = cast(Conv2d, problem.op)
    n, o, oh, _ = problem.output
    blocking = blocking_of(problem, tile)
    steps = ceil_div(blocking.chunks * math.prod(op.kernel_size), tile.parts)
    blocks = n * ceil_div(oh, blocking.rows) * ceil_div(o, tile.m) * tile.parts
    multiprocessors = CLUSTER_MULTIPROCESSORS.get(tile.parts, MULTIPROCESSORS)
    nbytes = steps * tile.m * ROW_BYTES
    nbytes += chunks_of_part(blocking.chunks, tile.parts) * blocking.patch_nbytes
    reading = min(blocks, multiprocessors) * nbytes / L2_BYTES_PER_CYCLE
    ends = BLOCK_LATENCY + PART_LATENCY * tile.parts + PIXEL_LATENCY * tile.n
    work = max(steps * step_cycles(tile, precision), reading)
    return ceil_div(blocks, multiprocessors) * (work + ends)


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaHaloSplitK(ImplicitGemmWgmmaHalo):
    """A cluster per tile of whole output rows, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma_halo_split_k"
    source = "hopper/implicit_gemm_wgmma_halo_split_k"
    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Parts that begin and end within a chunk, that touch three, and that are empty."""
        k, chunk = self.tiles[0].k, chunk_of(self.precision)
        window = Conv2d(2 * k + chunk, 72, (3, 3), padding=(1, 1), bias=True, residual=True)
        found = [Problem(window, ((2, 2 * k + chunk, 5, 6), (2, 72, 5, 6)))]
        for channels, size in ((chunk, 1), (chunk, 2), (3 * k, 1), (7 * k, 1)):
            op = Conv2d(channels, 64, (size, size), bias=True, relu=True)
            found.append(Problem(op, ((1, channels, 4, 4),)))
        return (*super().extra_problems, *found)

    def slots(self, blocking: HaloBlocking, tile: WgmmaTile) -> Slots:
        """One for each chunk of a part. Pure."""
        pitch = aligned(blocking.patch_nbytes)
        count = chunks_of_part(blocking.chunks, tile.parts)
        return Slots(count, pitch, count * pitch)

    def tile_for(self, problem: Problem) -> WgmmaTile | None:
        """The tile with the lowest estimate among those that take the problem. Pure."""
        fitting = [tile for tile in self.tiles if self.obstacle(problem, tile) is None]
        return min(fitting, key=lambda tile: estimate(problem, self.precision, tile), default=None)

    def shared_nbytes(self, problem: Problem, tile: WgmmaTile) -> int:
        """Bytes of slots, weights and mbarriers, and of memory that is only read: where the rows
        have fewer pixels than the tile, discarded products read on behind the image rows.
        """
        blocking = blocking_of(problem, tile)
        slots = self.slots(blocking, tile)
        barriers = (tile.stages + slots.count) * BARRIER_NBYTES
        return ALIGNMENT + max(
            slots.nbytes + weights_nbytes(tile) + barriers,
            (slots.count - 1) * slots.pitch + reach_nbytes(blocking, tile),
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        (launch,) = super().launches(problem)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        bias, residual = bias_and_residual(cast(Conv2d, problem.op))
        maps, shapes = launch.arguments[:2], launch.arguments[-2:]
        arguments = (*maps, bias, residual, OUT, *shapes)
        return (replace(launch, grid=(launch.grid[0], tile.parts, 1), arguments=arguments),)


def implicit_gemm_wgmma_halo_split_k_kernels() -> tuple[ImplicitGemmWgmmaHaloSplitK, ...]:
    """Without fp16x3: the compiler would serialise its products."""
    return tuple(ImplicitGemmWgmmaHaloSplitK(precision) for precision in (FP16, BF16, TF32))
