"""Implicit GEMM of bytes with TMA and `wgmma` for stride 1, input tile with halo in shared memory.
NHWC.

Each pixel is loaded once per tile, where implicit_gemm_wgmma.py loads it once per window position:
a block keeps the image rows under its output rows and reads them at shifted addresses. Two kernels:
`implicit_gemm_wgmma_halo` streams the weights through a ring of stages, one tile a block;
`implicit_gemm_wgmma_resident` keeps all weights of its 64 channels and computes many tiles. See
kernels/bytes/hopper.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from r18.graph.ops import Problem
from r18_cupy.bytes.conv import conv_of, conv_op, residual_of
from r18_cupy.bytes.tensor_map import ByteMap
from r18_cupy.bytes.wgmma import GROUP_M, SLAB_ROW, ByteTile, ByteWgmmaConv
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.h200 import (
    MULTIPROCESSOR_NBYTES,
    MULTIPROCESSORS,
    PRODUCT_BYTES_PER_CYCLE,
    RESERVED_NBYTES,
    SHARED_BYTES_PER_CYCLE,
    SHARED_NBYTES,
)
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, X, ceil_div, struct
from r18_cupy.cuda.tensor_map import MAX_BOX
from r18_cupy.hopper.implicit_gemm_wgmma_halo import aligned
from r18_cupy.hopper.wgmma import ALIGNMENT, BARRIER_NBYTES

# Mirrors `HaloShape` in kernels/bytes/hopper/halo.cuh.
HALO_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "tiles",
            "rows",
            "padded",
            "per_place",
            "patch_nbytes",
            "patch_pitch",
            "slots",
            "slabs",
            "slab_pitch",
        )
    ]
)


@dataclass(frozen=True)
class Blocking:
    """How the tiles of a warpgroup cover a problem.

    rows:      output rows, of `width` pixels each.
    padded:    pixels per image row, padding included.
    height:    image rows under them, the halo included.
    chunks:    of the input's channels, the tile's k each.
    positions: of the window.
    tiles:     in the problem.
    """

    tile: ByteTile
    rows: int
    width: int
    padded: int
    height: int
    chunks: int
    positions: int
    tiles: int

    @property
    def patch_nbytes(self) -> int:
        """Bytes of one chunk of the image rows."""
        return self.height * self.padded * self.tile.k

    @property
    def patch_pitch(self) -> int:
        return aligned(self.patch_nbytes)

    @property
    def slab_pitch(self) -> int:
        """Bytes of a slab: a row for each place, outputs or not."""
        return aligned(self.tile.group_n * SLAB_ROW)

    @property
    def reach_nbytes(self) -> int:
        """Bytes past a patch's start that products read, discarded ones included."""
        last = (self.height - self.rows) * self.padded + self.padded - self.width
        return (last + self.tile.group_n) * self.tile.k


def blocking_of(problem: Problem, tile: ByteTile) -> Blocking:
    """As many rows as a warpgroup's pixels hold; 0 if a row is longer. Pure."""
    op = conv_op(problem)
    _, c, _, w = problem.inputs[0]
    n, o, oh, ow = problem.output
    kh, kw = op.kernel_size
    padded = w + 2 * op.padding[1]
    rows = min((tile.group_n + kw - 1) // padded, oh)
    tiles = n * ceil_div(oh, max(rows, 1)) * ceil_div(o, GROUP_M)
    return Blocking(tile, rows, ow, padded, rows + kh - 1, ceil_div(c, tile.k), kh * kw, tiles)


def step_cycles(tile: ByteTile) -> float:
    """Cycles of an SM for the products of one window position and chunk."""
    products = GROUP_M * tile.group_n * tile.k / PRODUCT_BYTES_PER_CYCLE
    return max(products, (2 * GROUP_M + tile.group_n) * tile.k / SHARED_BYTES_PER_CYCLE)


class ByteHaloConv(ByteWgmmaConv):
    """Whole output rows per warpgroup and tile, with the tile that suits the problem best."""

    @abstractmethod
    def slots(self, blocking: Blocking) -> int:
        """Slots in shared memory. Pure."""

    def slabs(self, blocking: Blocking) -> int:
        """Slabs in shared memory. Pure."""
        return 1

    @abstractmethod
    def shared_nbytes(self, blocking: Blocking) -> int:
        """Bytes of shared memory. Pure."""

    @abstractmethod
    def blocks(self, problem: Problem, blocking: Blocking) -> int:
        """Blocks of the launch. Pure."""

    @abstractmethod
    def estimate(self, problem: Problem, blocking: Blocking) -> float:
        """Rough cycles. Pure."""

    def suiting(self, problem: Problem) -> list[ByteTile]:
        """The tiles that take the problem and may be chosen. Pure."""
        return [tile for tile in self.tiles if self.obstacle(problem, tile) is None]

    def tile_for(self, problem: Problem) -> ByteTile | None:
        """The tile with the lowest estimate. Pure."""

        def cycles(tile: ByteTile) -> float:
            return self.estimate(problem, blocking_of(problem, tile))

        return min(self.suiting(problem), key=cycles, default=None)

    def obstacle(self, problem: Problem, tile: ByteTile) -> str | None:
        """Why a tile does not take a problem of stride 1, or None. The only place that says which
        tiles are legal for a problem: at least one row of outputs, TMA's box limits, shared memory.
        """
        blocking = blocking_of(problem, tile)
        if blocking.rows < 1:
            most = tile.group_n + conv_op(problem).kernel_size[1] - 1
            return f"holds rows of {most} pixels with their padding, got {blocking.padded}"
        if max(blocking.height, blocking.padded, blocking.rows * blocking.width) > MAX_BOX:
            return f"copies at most {MAX_BOX} rows of {MAX_BOX} pixels, got {blocking}"
        needed = self.shared_nbytes(blocking)
        if needed > SHARED_NBYTES:
            return f"has {SHARED_NBYTES} bytes of shared memory, and the problem needs {needed}"
        return None

    def refuses(self, problem: Problem) -> str | None:
        op = conv_op(problem)
        if op.stride != (1, 1):
            return f"reads its windows from whole rows, one pixel apart; the stride is {op.stride}"
        if reason := self.refuses_channels(op):
            return reason
        reasons = [self.obstacle(problem, tile) for tile in self.tiles]
        return None if None in reasons else reasons[0]

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = conv_op(problem)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        blocking = blocking_of(problem, tile)
        n, o, oh, ow = problem.output
        _, c, h, w = problem.inputs[0]
        residual = residual_of(problem)

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, oh * ow, n), (SLAB_ROW, blocking.rows * ow, 1))

        shape = (
            blocking.tiles,
            blocking.rows,
            blocking.padded,
            ceil_div(2**16, blocking.padded),
            blocking.patch_nbytes,
            blocking.patch_pitch,
            self.slots(blocking),
            self.slabs(blocking),
            blocking.slab_pitch,
        )
        patch = (tile.k, blocking.padded, blocking.height, 1)
        return (
            GridLaunch(
                self.entry_of(problem, tile),
                (self.blocks(problem, blocking), 1, 1),
                (tile.threads, 1, 1),
                (
                    ByteMap(X, (c, w, h, n), patch),
                    self.weights(op, tile),
                    slab(residual if isinstance(residual, Pointer) else OUT),
                    slab(OUT),
                    *self.factors(problem),
                    conv_shape(conv_of(problem)),
                    struct(np.array([shape], HALO_SHAPE)),
                ),
                self.shared_nbytes(blocking),
                overlaps=True,
            ),
        )


FULL_ROUNDS = 7  # blocks of an SM after which they no longer end together

# -- weights in a ring -------------------------------------------------------------------------


class ByteRingConv(ByteHaloConv):
    """One tile a block; weights stream through a ring."""

    algorithm = "implicit_gemm_wgmma_halo"

    # Fitted as those of implicit_gemm_wgmma.py: 1.1 % longer than the best tiles.
    STEP_LATENCY = 380  # cycles per step on top of its products: waiting, issuing
    COPY_LATENCY = 5700  # cycles from issuing a step's weight load until it arrives
    TILE_LATENCY = 1000  # cycles per block outside of its products: prologue and epilogue,
    PIXEL_LATENCY = 124  # plus a part that grows with its pixels
    PATCH_BYTES_PER_CYCLE = 1.5  # of the first image rows, for which all else waits

    def slots(self, blocking: Blocking) -> int:
        return min(2, blocking.chunks)

    def shared_nbytes(self, blocking: Blocking) -> int:
        tile, slots = blocking.tile, self.slots(blocking)
        weights = tile.stages * tile.m * tile.k
        barriers = (tile.stages + slots + 1) * BARRIER_NBYTES
        last_slot = (slots - 1) * blocking.patch_pitch
        held = slots * blocking.patch_pitch + weights + blocking.slab_pitch + barriers
        return ALIGNMENT + max(held, last_slot + blocking.reach_nbytes)

    def blocks(self, problem: Problem, blocking: Blocking) -> int:
        return blocking.tiles

    def estimate(self, problem: Problem, blocking: Blocking) -> float:
        tile = blocking.tile
        share = ceil_div(blocking.tiles, MULTIPROCESSORS)
        shared = self.shared_nbytes(blocking) + RESERVED_NBYTES
        at_once = min(tile.blocks, MULTIPROCESSOR_NBYTES // shared)
        waiting = self.COPY_LATENCY / (tile.stages - 1)
        together = min(at_once, share)
        step = max((step_cycles(tile) + self.STEP_LATENCY) * together, waiting)
        first = blocking.patch_pitch / self.PATCH_BYTES_PER_CYCLE
        ends = self.TILE_LATENCY + self.PIXEL_LATENCY * tile.n * together + first
        rounds: float = ceil_div(share, at_once)
        if share > FULL_ROUNDS:  # blocks do not end together
            rounds = share / at_once
        return rounds * (blocking.chunks * blocking.positions * step + ends)


# -- weights resident --------------------------------------------------------------------------


RESIDENT_TILES = (
    ByteTile(GROUP_M, 480, 64, 1, groups_n=2, stages=4, blocks=1),
    ByteTile(GROUP_M, 240, 64, 1, groups_n=1, stages=2, blocks=2),
    ByteTile(GROUP_M, 416, 128, 1, groups_n=2, stages=3, blocks=1),
)
"""For 64 channels of 56 columns or fewer, and for 128 of 28 or fewer. `n` counts the pixels of all
warpgroups, which take tiles in turn; `stages` are the slots.
"""


class ByteResidentConv(ByteHaloConv):
    """Many tiles a block, of the same 64 channels, whose weights stay in shared memory."""

    algorithm = "implicit_gemm_wgmma_resident"

    WINDOW = (3, 3)
    LATENCY = 6000  # cycles of a block for its weights, first rows and last outputs
    PIXEL_LATENCY = 12  # cycles per pixel of a tile on top of its products

    @property
    def tiles(self) -> tuple[ByteTile, ...]:
        return RESIDENT_TILES

    @property
    def most_images(self) -> int:
        """For each block more than twice as many tiles as slots, if an image is one tile."""
        return MULTIPROCESSORS * max(tile.blocks * (tile.stages + 1) for tile in self.tiles)

    def slots(self, blocking: Blocking) -> int:
        return blocking.tile.stages

    def slabs(self, blocking: Blocking) -> int:
        """Where there is room, one for each slot: then residuals arrive as early as image rows."""
        tile = blocking.tile
        room = SHARED_NBYTES if tile.blocks == 1 else MULTIPROCESSOR_NBYTES // tile.blocks
        room -= self._held(blocking, 0) + RESERVED_NBYTES
        return max(min(room // blocking.slab_pitch, tile.stages), tile.groups_n)

    def obstacle(self, problem: Problem, tile: ByteTile) -> str | None:
        op = conv_op(problem)
        if op.kernel_size != self.WINDOW:
            return f"has unrolled a window of {self.WINDOW}, got {op.kernel_size}"
        if op.in_channels > tile.k:
            return f"keeps {tile.k} channels of all weights, got {op.in_channels}"
        return super().obstacle(problem, tile)

    def shared_nbytes(self, blocking: Blocking) -> int:
        last_slot = (blocking.tile.stages - 1) * blocking.patch_pitch
        held = self._held(blocking, self.slabs(blocking))
        return max(held, ALIGNMENT + last_slot + blocking.reach_nbytes)

    def _held(self, blocking: Blocking, slabs: int) -> int:
        """Bytes of image rows, weights, slabs and mbarriers."""
        tile = blocking.tile
        weights = blocking.positions * tile.m * tile.k
        rows = tile.stages * blocking.patch_pitch
        barriers = (2 * tile.stages + tile.groups_n + 1) * BARRIER_NBYTES
        return ALIGNMENT + rows + weights + slabs * blocking.slab_pitch + barriers

    def blocks(self, problem: Problem, blocking: Blocking) -> int:
        """As many as an H200 runs at a time, and a multiple of the channel tiles."""
        tiles = ceil_div(problem.output[1], GROUP_M)
        most = max(MULTIPROCESSORS * blocking.tile.blocks // tiles, 1) * tiles
        return min(blocking.tiles, most)

    def estimate(self, problem: Problem, blocking: Blocking) -> float:
        tile = blocking.tile
        work = blocking.positions * step_cycles(tile)
        share = ceil_div(blocking.tiles, MULTIPROCESSORS)
        work = max(work * share, share * (work + self.PIXEL_LATENCY * tile.group_n) / 2)
        return self.LATENCY + work
