"""Implicit GEMM with TMA and `wgmma` for stride 1, input tile with halo resident in shared memory.
NHWC.

Each pixel is loaded once per tile, where implicit_gemm_wgmma.py loads it once per window position:
a block keeps the image rows under its output rows and reads them at shifted addresses. See
kernels/hopper/implicit_gemm_wgmma_halo.cu. The id keeps the algorithm's earlier word,
`implicit_gemm_wgmma_rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import Precision
from r18_cupy.conv.base import bias_and_residual, conv_shape
from r18_cupy.cuda.h200 import (
    MULTIPROCESSOR_NBYTES,
    MULTIPROCESSORS,
    RESERVED_NBYTES,
    SHARED_BYTES_PER_CYCLE,
    SHARED_NBYTES,
)
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, X, ceil_div, struct
from r18_cupy.cuda.tensor_map import MAX_BOX, ROW_BYTES, MatrixMap, PatchMap
from r18_cupy.hopper.wgmma import (
    ALIGNMENT,
    BARRIER_NBYTES,
    PRECISIONS,
    STEPS,
    WgmmaConv,
    WgmmaTile,
    steps_of,
)

# Mirrors `HaloShape` in kernels/hopper/halo.cuh.
HALO_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "tiles",
            "rows",
            "padded",
            "per_place",
            "has_residual",
            "patch_nbytes",
            "slab_pitch",
            "slots",
            "slot_pitch",
            "slots_nbytes",
        )
    ]
)


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The compiled tiles: pixel counts that the rows of ResNet-18 fill.

    4 rows of 58 pixels without the last two, 14 of 16, 7 of 30; for small batches half as many, or
    7 of 9. A block alone on its SM prefetches its weights further ahead.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    few = (tile_of(120, k, stages=12, blocks=1), tile_of(64, k, stages=12, blocks=1))
    if precision.splits:  # two accumulators or three per output: half the pixels
        return (
            tile_of(120, k, stages=4, blocks=2),
            tile_of(112, k, stages=4, blocks=2),
            tile_of(64, k, stages=4, blocks=3),
            *few,
        )
    return (
        *(tile_of(n, k, stages=4, blocks=2) for n in (232, 224, 208, 120)),
        tile_of(64, k, stages=4, blocks=4),
        *few,
    )


def tile_of(n: int, k: int, stages: int, blocks: int) -> WgmmaTile:
    """The tile of one warpgroup: 64 channels by `n` pixels."""
    return WgmmaTile(64, n, k, groups_m=1, groups_n=1, stages=stages, blocks=blocks)


@dataclass(frozen=True)
class HaloBlocking:
    """How a block covers a problem.

    places: pixels of the tile, outputs or not.
    rows:   output rows, of `width` pixels each.
    padded: pixels per image row, padding included.
    height: image rows under them, the halo included.
    chunks: of the input's channels, 128 bytes each.
    slabs:  of the residual's channels, likewise.
    """

    places: int
    rows: int
    width: int
    padded: int
    height: int
    chunks: int
    slabs: int

    @property
    def patch_nbytes(self) -> int:
        """Bytes of one channel chunk of the image rows."""
        return self.height * self.padded * ROW_BYTES

    @property
    def slab_nbytes(self) -> int:
        """Bytes of a slab as TMA moves it: outputs, or the residual."""
        return self.rows * self.width * ROW_BYTES

    @property
    def slab_pitch(self) -> int:
        """Bytes of a slab as threads write it: places that are not outputs have rows behind the
        outputs.
        """
        return aligned(self.places * ROW_BYTES)


@dataclass(frozen=True)
class Slots:
    """The slots of shared memory for chunks of image rows, and for slabs of the residual.

    count:  slots in shared memory.
    pitch:  bytes from one to the next.
    nbytes: of all.
    """

    count: int
    pitch: int
    nbytes: int


def aligned(nbytes: int) -> int:
    """Rounded up to where the next slot or slab may begin."""
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


def blocking_of(problem: Problem, tile: WgmmaTile) -> HaloBlocking:
    """As many rows as the tile's pixels hold; 0 if a row is longer. Pure."""
    op = cast(Conv2d, problem.op)
    _, c, _, w = problem.inputs[0]
    _, _, oh, ow = problem.output
    kh, kw = op.kernel_size
    padded = w + 2 * op.padding[1]
    rows = min((tile.n + kw - 1) // padded, oh)
    slabs = tile.m // tile.k if op.residual else 0
    return HaloBlocking(tile.n, rows, ow, padded, rows + kh - 1, ceil_div(c, tile.k), slabs)


def weights_nbytes(tile: WgmmaTile) -> int:
    """Bytes of all stages of weights."""
    return tile.stages * tile.m * ROW_BYTES


def reach_nbytes(blocking: HaloBlocking, tile: WgmmaTile) -> int:
    """How many bytes past a slot's start the matrices of a tile reach."""
    places = blocking.height * blocking.padded + max(0, tile.n - blocking.rows * blocking.padded)
    return (places + MAX_BOX) * ROW_BYTES


# -- choosing ----------------------------------------------------------------------------------

PIXELS_PER_CYCLE = 2  # of a step's products with 64 channels, per SM
SPLIT_BYTES_PER_CYCLE = 28  # of image rows, by a block alone on its SM, whose products wait
HIDDEN_SPLIT_BYTES_PER_CYCLE = 64  # the same, overlapped with another block's products
COPY_LATENCY = 1600  # cycles from issuing a step's weight load until it arrives
TILE_LATENCY = 2000  # cycles per block outside of its products: prologue and epilogue,
PIXEL_LATENCY = 40  # plus a part that grows with its pixels


def step_cycles(tile: WgmmaTile, precision: Precision) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory.

    Weights are written and read, pixels read, with fp16x3 one and a half times.
    """
    reads = steps_of(precision) / STEPS
    rows = tile.m + (tile.m + tile.n) * reads
    return max(
        steps_of(precision) * tile.n / PIXELS_PER_CYCLE, rows * ROW_BYTES / SHARED_BYTES_PER_CYCLE
    )


def estimate(problem: Problem, precision: Precision, tile: WgmmaTile, shared_nbytes: int) -> float:
    """Rough cycles: rounds of blocks that share an SM. A step waits for a hardware unit or for its
    weights, a chunk until it is split.
    """
    op = cast(Conv2d, problem.op)
    n, o, oh, _ = problem.output
    blocking = blocking_of(problem, tile)
    steps = blocking.chunks * math.prod(op.kernel_size)
    share = ceil_div(n * ceil_div(oh, blocking.rows) * ceil_div(o, tile.m), MULTIPROCESSORS)
    at_once = min(tile.blocks, MULTIPROCESSOR_NBYTES // (shared_nbytes + RESERVED_NBYTES))
    sharing = min(at_once, share)
    waiting = COPY_LATENCY / (tile.stages - 1)
    work = steps * max(step_cycles(tile, precision) * sharing, waiting)
    if precision.splits:
        rate = HIDDEN_SPLIT_BYTES_PER_CYCLE if sharing > 1 else SPLIT_BYTES_PER_CYCLE
        work += blocking.chunks * blocking.patch_nbytes / rate
    rounds = max(1, share / at_once)  # blocks do not end together
    return rounds * (work + TILE_LATENCY + PIXEL_LATENCY * tile.n)


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaHalo(WgmmaConv):
    """Whole output rows per block, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma_rows"
    source = "hopper/implicit_gemm_wgmma_halo"

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    def slots(self, blocking: HaloBlocking, tile: WgmmaTile) -> Slots:
        """Two slots, or one if that suffices. With a single chunk, the second slot holds only a
        slab.

        At the end the outputs overwrite the slots and the weights behind them, but not the
        mbarriers, which come next. Pure.
        """
        slab = aligned(blocking.slab_nbytes)
        pitch = max(aligned(blocking.patch_nbytes), slab)
        count = min(2, blocking.chunks + blocking.slabs)
        second = pitch if blocking.chunks > 1 else slab
        outputs = tile.m // tile.k * blocking.slab_pitch
        nbytes = max(pitch + (count - 1) * second, outputs - weights_nbytes(tile))
        return Slots(count, pitch, nbytes)

    def blocks(self, tiles: int, tile: WgmmaTile) -> int:
        """Blocks of a launch over `tiles` tiles."""
        return tiles

    def tile_for(self, problem: Problem) -> WgmmaTile | None:
        """The tile with the lowest estimate among those that take the problem. Pure."""
        fitting = [tile for tile in self.tiles if self.obstacle(problem, tile) is None]

        def cycles(tile: WgmmaTile) -> float:
            return estimate(problem, self.precision, tile, self.shared_nbytes(problem, tile))

        return min(fitting, key=cycles, default=None)

    def shared_nbytes(self, problem: Problem, tile: WgmmaTile) -> int:
        """Bytes of slots, weights and mbarriers, and of memory that is only read: where the rows
        have fewer pixels than the tile, discarded products read on behind the image rows.
        """
        blocking = blocking_of(problem, tile)
        slots = self.slots(blocking, tile)
        barriers = (tile.stages + slots.count) * BARRIER_NBYTES
        last_slot = (slots.count - 1) * slots.pitch if blocking.chunks > 1 else 0
        return ALIGNMENT + max(
            slots.nbytes + weights_nbytes(tile) + barriers,
            last_slot + reach_nbytes(blocking, tile),
        )

    def obstacle(self, problem: Problem, tile: WgmmaTile) -> str | None:
        """Why a tile does not take a problem of stride 1, or None. The only place that says which
        tiles are legal for a problem: at least one row of outputs, TMA's box limits, shared memory.
        """
        op = cast(Conv2d, problem.op)
        blocking = blocking_of(problem, tile)
        if blocking.rows < 1:
            most = tile.n + op.kernel_size[1] - 1
            return f"holds rows of {most} pixels with their padding, got {blocking.padded}"
        if max(blocking.height, blocking.padded, blocking.rows * blocking.width) > MAX_BOX:
            return f"copies at most {MAX_BOX} rows of {MAX_BOX} pixels, got {blocking}"
        needed = self.shared_nbytes(problem, tile)
        if needed > SHARED_NBYTES:
            return f"has {SHARED_NBYTES} bytes of shared memory, and the image rows need {needed}"
        return None

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.stride != (1, 1):
            return f"reads its windows from whole rows, one pixel apart; the stride is {op.stride}"
        if reason := self.refuses_channels(op):
            return reason
        reasons = [self.obstacle(problem, tile) for tile in self.tiles]
        return None if None in reasons else reasons[0]

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        blocking = blocking_of(problem, tile)
        slots = self.slots(blocking, tile)
        n, o, oh, ow = problem.output
        _, c, h, w = problem.inputs[0]
        storage = self.precision.storage
        bias, residual = bias_and_residual(op)
        out = MatrixMap(OUT, storage, oh * ow, o, blocking.rows * ow, n)
        tiles = n * ceil_div(oh, blocking.rows) * ceil_div(o, tile.m)
        shape = (
            tiles,
            blocking.rows,
            blocking.padded,
            ceil_div(2**16, blocking.padded),
            int(op.residual),
            blocking.patch_nbytes,
            blocking.slab_pitch,
            slots.count,
            slots.pitch,
            slots.nbytes,
        )
        return (
            GridLaunch(
                self.entry(tile),
                (self.blocks(tiles, tile), 1, 1),
                (self.threads(tile), 1, 1),
                (
                    PatchMap(X, storage, (n, c, h, w), blocking.height, blocking.padded),
                    self.weights(op, tile),
                    replace(out, pointer=residual) if isinstance(residual, Pointer) else out,
                    out,
                    bias,
                    conv_shape(problem),
                    struct(np.array([shape], HALO_SHAPE)),
                ),
                self.shared_nbytes(problem, tile),
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_halo_kernels() -> tuple[ImplicitGemmWgmmaHalo, ...]:
    return tuple(ImplicitGemmWgmmaHalo(precision) for precision in PRECISIONS)
