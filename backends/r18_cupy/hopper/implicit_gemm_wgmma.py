"""Implicit GEMM with TMA and `wgmma`: fp16, bf16, tf32 and fp16x3. NHWC.

Compared to conv/implicit_gemm_mma.py the operands are swapped: M = O channels, N = N·OH·OW output
pixels, K = kh·kw·C. TMA gathers the pixels, `wgmma` multiplies; see
kernels/hopper/implicit_gemm_wgmma.cu. Split-K: where there are too few tiles to fill a GPU, the
CTAs of a cluster divide K. The small fp16x3 tiles use
kernels/hopper/implicit_gemm_wgmma_registers.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import Precision
from r18_cupy.conv.base import bias_and_residual, conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS, PRODUCT_BYTES_PER_CYCLE, SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, X, ceil_div
from r18_cupy.cuda.tensor_map import ROW_BYTES, Im2colMap, MatrixMap
from r18_cupy.hopper.wgmma import (
    PRECISIONS,
    PRODUCER_THREADS,
    STEPS,
    WgmmaConv,
    WgmmaTile,
    packed_depth,
    steps_of,
)


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The compiled tiles, those with many outputs first."""
    k = ROW_BYTES // precision.dtype.itemsize
    deep_parts: tuple[int, ...] = (8,)
    if precision.splits:
        tiles, deep_parts = _split_tiles(k), (4, 6, 8)
    elif precision.dtype.itemsize == 2:
        # With fewer bytes, short-lived blocks wait for load latency more than for L2 bandwidth.
        middle = (*_middle_tiles(k), _flat_tile(k))
        tiles = (*_large_tiles(k), *middle, _small_tile(k, stages=12, blocks=1))
    else:
        tiles = (*_large_tiles(k), _flat_tile(k), *_divided_tiles(k))
    return (
        *tiles,
        _small_tile(k, stages=4, blocks=3),
        _small_tile(k, stages=6, blocks=2, parts=2),
        _small_tile(k, stages=6, blocks=2, parts=4),
        # Few tiles, each bound by latency: prefetch as much as fits.
        *(_small_tile(k, stages=10, blocks=1, parts=parts) for parts in deep_parts),
    )


def _large_tiles(k: int) -> tuple[WgmmaTile, ...]:
    """A warpgroup with many pixels reads the fewest bytes of shared memory per product. Two blocks
    per SM hide the epilogue of one behind the products of the other. 96 and 192 pixels divide some
    problems more evenly. A block alone on its SM, for want of tiles, gets as many stages as fit, so
    it waits for loads less often.
    """
    return (
        WgmmaTile(128, 128, k, groups_m=2, groups_n=1, stages=3, blocks=2),
        WgmmaTile(128, 96, k, groups_m=2, groups_n=1, stages=3, blocks=2),
        WgmmaTile(128, 192, k, groups_m=2, groups_n=1, stages=5, blocks=1),
        WgmmaTile(128, 96, k, groups_m=2, groups_n=1, stages=8, blocks=1),
        WgmmaTile(64, 256, k, groups_m=1, groups_n=2, stages=2, blocks=2),
    )


def _middle_tiles(k: int) -> tuple[WgmmaTile, ...]:
    """Tiles for a few images, one block per SM."""
    return (
        WgmmaTile(64, 128, k, groups_m=1, groups_n=1, stages=8, blocks=1),
        WgmmaTile(128, 64, k, groups_m=2, groups_n=1, stages=8, blocks=1, parts=2),
        WgmmaTile(128, 64, k, groups_m=2, groups_n=1, stages=8, blocks=1, parts=3),
    )


def _divided_tiles(k: int) -> tuple[WgmmaTile, ...]:
    """Many outputs and split-K: for a few images, small tiles would reread more than the L2
    delivers.
    """
    return (
        WgmmaTile(128, 128, k, groups_m=2, groups_n=1, stages=5, blocks=1, parts=4),
        WgmmaTile(128, 112, k, groups_m=2, groups_n=1, stages=5, blocks=1, parts=4),
        WgmmaTile(128, 96, k, groups_m=2, groups_n=1, stages=7, blocks=1, parts=2),
        WgmmaTile(128, 64, k, groups_m=2, groups_n=1, stages=8, blocks=1, parts=8),
    )


def _flat_tile(k: int) -> WgmmaTile:
    """For 8 images of 7×7: twice 208 pixels covers their 392."""
    return WgmmaTile(64, 208, k, groups_m=1, groups_n=1, stages=5, blocks=1, parts=6)


def _split_tiles(k: int) -> tuple[WgmmaTile, ...]:
    """Tiles for fp16x3 with half as many pixels per warpgroup, which keeps two accumulators per
    output, and a third of at least half of them (kernels/hopper/promotion.cuh).

    Two warpgroups with the same pixels split them only once.
    """
    return (
        WgmmaTile(128, 128, k, groups_m=2, groups_n=1, stages=7, blocks=1),
        WgmmaTile(128, 64, k, groups_m=2, groups_n=1, stages=4, blocks=2),
        WgmmaTile(64, 128, k, groups_m=1, groups_n=1, stages=4, blocks=2),
    )


def _small_tile(k: int, stages: int, blocks: int, parts: int = 1) -> WgmmaTile:
    """The tile of one warpgroup and the fewest outputs."""
    return WgmmaTile(64, 64, k, groups_m=1, groups_n=1, stages=stages, blocks=blocks, parts=parts)


def in_registers(tile: WgmmaTile, precision: Precision) -> bool:
    """Whether pixels are split in registers and not in shared memory: only small fp16x3 tiles have
    the registers.
    """
    return precision.splits and tile.m == tile.n == 64


# -- choosing ----------------------------------------------------------------------------------

# Fitted so that the estimates order the times of every tile on an H200, for every convolution of a
# ResNet-18.
COPY_LATENCY = 2000  # cycles from issuing a stage's loads until they arrive,
COPY_BYTES_PER_CYCLE = 256  # plus a part that grows with its bytes
L2_BYTES_PER_CYCLE = 5600  # to all SMs together
BLOCK_LATENCY = 3400  # cycles per block outside of its steps: prologue and epilogue,
OUTPUT_BYTES_PER_CYCLE = 15  # plus a part that grows with the bytes written
SHARING = 1.05  # slowdown of products when several blocks share an SM
PART_LATENCY = 300  # cycles per CTA of a cluster: launching it, adding its sums
FULL_ROUNDS = 7  # rounds after which blocks no longer end together
# A cluster must fit in one GPC, and large clusters do not fill the GPCs.
CLUSTER_MULTIPROCESSORS = {6: 96, 8: 104}


def step_cycles(tile: WgmmaTile, precision: Precision) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory.

    TMA writes a row of weights or pixels once; each warpgroup reads its own 64 rows of weights and
    its pixels, with fp16x3 one and a half times. Splitting in place reads and writes the pixels
    once more; splitting in registers replaces their other reads.
    """
    reads = steps_of(precision) / STEPS
    products = tile.m * tile.n * ROW_BYTES * reads / PRODUCT_BYTES_PER_CYCLE
    rows = tile.m * (1 + reads * tile.groups_n) + tile.n * (1 + reads * tile.groups_m)
    if in_registers(tile, precision):
        rows -= tile.n * (reads - 1)
    elif precision.splits:
        rows += 2 * tile.n
    return max(products, rows * ROW_BYTES / SHARED_BYTES_PER_CYCLE)


def estimate(problem: Problem, precision: Precision, tile: WgmmaTile) -> float:
    """Rough cycles: rounds of blocks that share an SM.

    A round takes the maximum of its products, the L2 traffic of all blocks, and the latency of a
    single block whose steps wait for their loads.
    """
    op = cast(Conv2d, problem.op)
    n, o, oh, ow = problem.output
    steps = ceil_div(packed_depth(op, precision) // tile.k, tile.parts)
    blocks = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m) * tile.parts
    multiprocessors = CLUSTER_MULTIPROCESSORS.get(tile.parts, MULTIPROCESSORS)
    share = ceil_div(blocks, multiprocessors)
    rounds: float = ceil_div(share, tile.blocks)
    if rounds > FULL_ROUNDS:  # blocks no longer end together
        rounds = blocks / multiprocessors / tile.blocks
    together = min(tile.blocks, share)
    work = step_cycles(tile, precision)
    copy = COPY_LATENCY + tile.stage_nbytes / COPY_BYTES_PER_CYCLE
    reading = min(blocks, multiprocessors * tile.blocks) * tile.stage_nbytes / L2_BYTES_PER_CYCLE
    step = max(together * work * SHARING, copy / (tile.stages - 1), reading)
    ends = BLOCK_LATENCY + tile.m * tile.n * precision.dtype.itemsize / OUTPUT_BYTES_PER_CYCLE
    parts = PART_LATENCY * tile.parts if tile.parts > 1 else 0
    return rounds * (steps * step + ends + parts)


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmma(WgmmaConv):
    """Implicit GEMM on `wgmma`, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma"
    source = "hopper/implicit_gemm_wgmma"
    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    def entry(self, tile: WgmmaTile) -> Entry:
        entry = super().entry(tile)
        if not in_registers(tile, self.precision):
            return entry
        return replace(entry, source=f"{entry.source}_registers")

    def producers(self, tile: WgmmaTile) -> int:
        few = in_registers(tile, self.precision) and tile.blocks < 3  # registers are no limit
        return PRODUCER_THREADS if few else super().producers(tile)

    def tile_for(self, problem: Problem) -> WgmmaTile:
        """The tile with the lowest estimate. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, self.precision, tile))

    def pixels(self, problem: Problem, run: int) -> Im2colMap:
        """The tensor map of the input."""
        op = cast(Conv2d, problem.op)
        n, c, h, w = problem.inputs[0]
        windows = (op.kernel_size, op.stride, op.padding)
        return Im2colMap(X, self.precision.storage, (n, c, h, w), *windows, run)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if reason := self.refuses_channels(op):
            return reason
        if reason := self.pixels(problem, 1).refusal():
            return f"TMA takes {reason}"
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        tile, storage = self.tile_for(problem), self.precision.storage
        n, o, oh, ow = problem.output
        depth = packed_depth(op, self.precision)
        bias, residual = bias_and_residual(op)
        out = MatrixMap(OUT, storage, n * oh * ow, o, tile.n)
        return (
            GridLaunch(
                self.entry(tile),
                (ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m), tile.parts, 1),
                (self.threads(tile), 1, 1),
                (
                    self.pixels(problem, tile.n),
                    self.weights(op, tile),
                    replace(out, pointer=residual) if isinstance(residual, Pointer) else out,
                    out,
                    bias,
                    residual,
                    OUT,
                    conv_shape(problem),
                    np.int32(depth // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_kernels() -> tuple[ImplicitGemmWgmma, ...]:
    return tuple(ImplicitGemmWgmma(precision) for precision in PRECISIONS)
