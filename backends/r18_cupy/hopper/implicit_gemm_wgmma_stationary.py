"""Weight-stationary implicit GEMM with TMA and `wgmma` for 3×3 windows of stride 1: fp16, bf16,
tf32 and fp16x3. NHWC.

The weights of 64 output channels stay in the registers of a block while patches of pixels pass
through shared memory, so only the pixels are read there. See
kernels/hopper/implicit_gemm_wgmma_stationary.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import Precision
from r18_cupy.conv.base import bias_and_residual, conv_shape
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tensor_map import ROW_BYTES, PatchMap
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.hopper.implicit_gemm_wgmma import estimate as gather_estimate
from r18_cupy.hopper.implicit_gemm_wgmma_pingpong import ImplicitGemmWgmmaPingpong
from r18_cupy.hopper.wgmma import (
    ALIGNMENT,
    BARRIER_NBYTES,
    PRECISIONS,
    STEPS,
    WgmmaConv,
    WgmmaTile,
    chunk_of,
    pack_weight,
    steps_of,
)

WINDOW = (3, 3)
POSITIONS = 9  # of the window
WIDTH = 8  # pixels in a row of a tile
CONSUMERS = 128  # threads of a warpgroup
TURNS = 2  # consumer warpgroups
THREADS = (TURNS + 1) * CONSUMERS  # with the producers' warpgroup
RESIDUALS = 2  # sets of slabs for residuals
FURTHER_NBYTES = 32  # of mbarriers: two for turns, two for sums that are passed on
WORDS = 8  # of 4 bytes in a K step, per row

# Mirrors `StationaryShape` in kernels/hopper/stationary.cuh.
STATIONARY_SHAPE = np.dtype(
    [(name, np.int32) for name in ("tiles", "row_tiles", "column_tiles", "has_residual")]
)


@dataclass(frozen=True)
class StationaryTile(WgmmaTile):
    """64 channels by `height` rows of 8 pixels.

    height:   rows.
    groups_k: 128-byte chunks of input channels, 1 or 2. With 2, each consumer warpgroup has the
    weights of one; with 1, each has all and takes every second tile.
    stages:   patches of one chunk in shared memory at a time.
    """

    height: int = 1
    groups_k: int = 1

    @property
    def threads(self) -> int:
        return TURNS * CONSUMERS

    @property
    def stage_nbytes(self) -> int:
        """Bytes of a stage: a chunk of a tile's pixels and their halo, up to where the next may
        begin.
        """
        patch = (self.height + WINDOW[0] - 1) * (WIDTH + WINDOW[1] - 1) * ROW_BYTES
        return ceil_div(patch, ALIGNMENT) * ALIGNMENT

    @property
    def shared_nbytes(self) -> int:
        """Bytes of patches, slabs of outputs, sums that are passed on, and mbarriers."""
        sets = TURNS // self.groups_k + RESIDUALS
        slabs = sets * self.n * ROW_BYTES * (self.m // self.k)
        passed = 4 * self.m * self.n if self.groups_k > 1 else 0
        barriers = (self.stages + RESIDUALS) * BARRIER_NBYTES + FURTHER_NBYTES
        return ALIGNMENT + self.stages * self.stage_nbytes + slabs + passed + barriers

    @property
    def name(self) -> str:
        """`m64n112k64s6` with one chunk of input channels, `m64n112k64s6g2` with two."""
        return f"{super().name}g{self.groups_k}" if self.groups_k > 1 else super().name


def tiles_of(precision: Precision) -> tuple[StationaryTile, ...]:
    """The compiled tiles: 14 rows, a quarter of 56 or a half of 28, and 7 rows.

    A chunk has 64 input channels in 16 bits and 32 in tf32 and fp16x3. In fp16x3 a thread has two
    accumulators for each output, and registers for 8 rows, a seventh of 56. There is no tile for
    one chunk, since no layer of a ResNet has so few channels.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    if precision.splits:
        return (_tile(8, k, 8, chunks=2),)
    stages = 6 if precision.dtype.itemsize == 2 else 5
    return tuple(_tile(height, k, stages, chunks) for chunks in (1, 2) for height in (14, 7))


def _tile(height: int, k: int, stages: int, chunks: int) -> StationaryTile:
    return StationaryTile(
        64, WIDTH * height, k, 1, 1, stages, blocks=1, height=height, groups_k=chunks
    )


def lane_order(packed: Array, chunks: int) -> np.ndarray[Any, Any]:
    """Packed weights in the order in which threads hold them, as words of 4 bytes.

    packed: [O][9 · chunks · 128 bytes], positions of the window outermost, as `pack_weight` makes
    it.
    Returns: [O / 64, rounded up][chunk][9 positions · 4 K steps][128 threads][4]. Lane i of warp w
    holds rows 16·w + i / 4 and 16·w + i / 4 + 8: word i % 4 of both, then word i % 4 + 4 of both
    (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16").
    """
    words = np.ascontiguousarray(packed).view(np.uint32)
    rows = ceil_div(len(words), 64) * 64
    padded = np.zeros((rows, words.shape[1]), np.uint32)
    padded[: len(words)] = words
    # Rows: tile, warp, half of 8, lane / 4. Words: position, chunk, step, half, lane % 4.
    split = padded.reshape(-1, 4, 2, 8, POSITIONS, chunks, STEPS, 2, WORDS // 2)
    ordered = split.transpose(0, 5, 4, 6, 1, 3, 8, 7, 2)
    return np.ascontiguousarray(ordered).reshape(-1)


# -- choosing ----------------------------------------------------------------------------------

# Fitted to the times of all tiles on an H200, for the convolutions with stride 1 in layers 1 and 2
# of a ResNet-18 at batches 1 to 256. A microsecond is 1830 cycles, as in the estimate of
# implicit_gemm_wgmma_pingpong.py, with which `pays` compares.
BLOCK_LATENCY = 4200  # cycles of a block for its weights, its first patch and its last outputs
SLOWDOWN = 1.08  # of products, which copies to and from shared memory delay
TILE_LATENCY = 200  # cycles per tile outside of its products: the change of turns,
OUTPUT_BYTES_PER_CYCLE = 45  # plus a part that grows with the bytes written,
RESIDUAL_BYTES_PER_CYCLE = 26  # and with those of the residual


def estimate(problem: Problem, precision: Precision, tile: StationaryTile) -> float:
    """Rough cycles of the block with the most tiles. A K step takes half a cycle per pixel.

    In fp16x3 without the time to split patches, a fifth of the whole: the estimates of the kernels
    that `pays` compares with leave it out as well. Measured times of blocks with one tile are the
    same with a residual as without; each further residual costs time.
    """
    products = POSITIONS * steps_of(precision) * tile.groups_k * tile.n / 2
    set_nbytes = tile.n * ROW_BYTES * (tile.m // tile.k)
    tiles = rounds(problem, tile)
    cycles = SLOWDOWN * products + TILE_LATENCY + set_nbytes / OUTPUT_BYTES_PER_CYCLE
    residuals = tiles - 1 if precision.splits else tiles
    if cast(Conv2d, problem.op).residual:
        return BLOCK_LATENCY + tiles * cycles + residuals * set_nbytes / RESIDUAL_BYTES_PER_CYCLE
    return BLOCK_LATENCY + tiles * cycles


def rounds(problem: Problem, tile: StationaryTile) -> int:
    """Tiles of the block with the most. Pure."""
    return ceil_div(tiles_in(problem, tile), blocks_in(problem, tile))


def blocks_in(problem: Problem, tile: StationaryTile) -> int:
    """The blocks that share the pixels for each 64 output channels. Pure."""
    share = max(1, MULTIPROCESSORS // ceil_div(problem.output[1], tile.m))
    return min(tiles_in(problem, tile), share)


def tiles_in(problem: Problem, tile: StationaryTile) -> int:
    """The tiles of pixels that cover a problem."""
    n, _, oh, ow = problem.output
    return n * ceil_div(oh, tile.height) * ceil_div(ow, WIDTH)


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaStationary(WgmmaConv):
    """For few input channels: one block per SM of an H200 keeps its weights in registers."""

    algorithm = "implicit_gemm_wgmma_stationary"
    source = "hopper/implicit_gemm_wgmma_stationary"

    @property
    def tiles(self) -> tuple[StationaryTile, ...]:
        return tiles_of(self.precision)

    @property
    def contract(self) -> RoundingContract:
        contract = super().contract
        return replace(contract, promoted=POSITIONS * contract.promoted)  # a chunk of each position

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """For one chunk of input channels and for two: a problem with full chunks, a residual and
        ReLU, and one whose last chunk and last 64 outputs are partly filled. Each has several tiles
        per block and two tiles of output channels.
        """
        images, k, few = MULTIPROCESSORS * 6, self.tiles[0].k, chunk_of(self.precision)
        found = list(super().extra_problems)
        for chunks in sorted({tile.groups_k for tile in self.tiles}):
            for channels, outputs in ((chunks * k, 128), ((chunks - 1) * k + few, 64 + few)):
                fused = channels == chunks * k
                op = Conv2d(
                    channels,
                    outputs,
                    WINDOW,
                    padding=(1, 1),
                    bias=True,
                    residual=fused,
                    relu=fused,
                )
                residual = ((images, outputs, 2, 2),) if fused else ()
                found.append(Problem(op, ((images, channels, 2, 2), *residual)))
        return tuple(found)

    def threads(self, tile: WgmmaTile) -> int:
        return THREADS

    def tile_for(self, problem: Problem) -> StationaryTile | None:
        """The tile with the lowest estimate among those that take the problem. Pure."""
        fitting = [tile for tile in self.tiles if self.obstacle(problem, tile) is None]
        return min(fitting, key=lambda tile: estimate(problem, self.precision, tile), default=None)

    def pays(self, problem: Problem) -> bool:
        """Whether it should take less time than implicit_gemm_wgmma.py and, where that one pays,
        implicit_gemm_wgmma_pingpong.py, by the estimates of all three. Pure.
        """
        tile = self.tile_for(problem) if self.refusal(problem) is None else None
        if tile is None:
            return False
        gathering = ImplicitGemmWgmma(self.precision)
        others = [gather_estimate(problem, self.precision, gathering.tile_for(problem))]
        pingpong = ImplicitGemmWgmmaPingpong(self.precision)
        if pingpong.pays(problem):
            others.append(pingpong.cycles(problem, cast(WgmmaTile, pingpong.tile_for(problem))))
        return estimate(problem, self.precision, tile) < min(others)

    def obstacle(self, problem: Problem, tile: StationaryTile) -> str | None:
        """Why a tile does not take a problem of this window and stride, or None."""
        channels = cast(Conv2d, problem.op).in_channels
        if ceil_div(channels, tile.k) != tile.groups_k:
            return f"keeps the weights of {tile.groups_k} chunks of {tile.k}; got {channels}"
        return None

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != WINDOW or op.stride != (1, 1):
            return (
                f"keeps the weights of 3×3 windows of stride 1; the window is {op.kernel_size}, "
                f"the stride {op.stride}"
            )
        if reason := self.refuses_channels(op):
            return reason
        most = max(tile.k * tile.groups_k for tile in self.tiles)
        if op.in_channels > most:
            return f"keeps the weights of at most {most} input channels, got {op.in_channels}"
        reasons = [self.obstacle(problem, tile) for tile in self.tiles]
        return None if None in reasons else reasons[0]

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(Conv2d, problem.op)
        chunks = ceil_div(op.in_channels, self.tiles[0].k)
        packed = lane_order(pack_weight(weights[0], op, self.precision), chunks)
        biases = (np.ascontiguousarray(bias, np.float32) for bias in weights[1:])
        return (packed, *biases)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        storage = self.precision.storage
        n, c, h, w = problem.inputs[0]
        _, o, oh, ow = problem.output
        bias, residual = bias_and_residual(op)
        out = PatchMap(OUT, storage, (n, o, oh, ow), tile.height, WIDTH)
        added = replace(out, pointer=residual) if isinstance(residual, Pointer) else out
        shape = (
            tiles_in(problem, tile),
            ceil_div(oh, tile.height),
            ceil_div(ow, WIDTH),
            int(op.residual),
        )
        return (
            GridLaunch(
                self.entry(tile),
                (ceil_div(o, tile.m), blocks_in(problem, tile), 1),
                (THREADS, 1, 1),
                (
                    PatchMap(
                        X,
                        storage,
                        (n, c, h, w),
                        tile.height + WINDOW[0] - 1,
                        WIDTH + WINDOW[1] - 1,
                    ),
                    Pointer(Role.WEIGHT),
                    added,
                    out,
                    bias,
                    conv_shape(problem),
                    struct(np.array([shape], STATIONARY_SHAPE)),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_stationary_kernels() -> tuple[ImplicitGemmWgmmaStationary, ...]:
    return tuple(ImplicitGemmWgmmaStationary(precision) for precision in PRECISIONS)
