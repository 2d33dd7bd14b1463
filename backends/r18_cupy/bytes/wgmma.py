"""Tiles, packed weights and refusals shared by the `wgmma` convolutions of bytes. NHWC.

M = O channels, N = output pixels, K = kh·kw·C. See kernels/bytes/hopper/tile.cuh.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Layout, Problem
from r18_cupy.bytes.conv import conv_op
from r18_cupy.bytes.tensor_map import ByteMap
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument, Pointer, Role, ceil_div
from r18_cupy.hopper.wgmma import ALIGNMENT, BARRIER_NBYTES, PRODUCER_THREADS, WgmmaTile
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel

CHUNK = 16  # bytes of a pixel's channels: TMA's unit of strides, and what 8 rows of `stmatrix` hold
GROUP_M = 64  # channels of a warpgroup
SLAB_ROW = 64  # bytes of a pixel in a slab
ROW_ORDER = (*range(0, CHUNK, 2), *range(1, CHUNK, 2))
"""The channels of each 16 in the order of A's rows, see kernels/bytes/hopper/tile.cuh."""


class ByteTile(WgmmaTile):
    """A `WgmmaTile` with `k` products (bytes) per step: 64 or 128, the swizzle's span.

    n / groups_n has an instance in kernels/bytes/hopper/wgmma.cuh. The warpgroups' slabs have
    shared memory of their own; with split-K there are none, and the sums of other CTAs have.
    """

    @property
    def group_n(self) -> int:
        """Pixels of a warpgroup."""
        return self.n // self.groups_n

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, which are all that `WgmmaTile` counts, and the
        producer warp."""
        return super().threads + PRODUCER_THREADS

    @property
    def stage_nbytes(self) -> int:
        return (self.m + self.n) * self.k

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the stages, the slabs or the sums of other CTAs, and the mbarriers."""
        slabs = self.groups_m * self.n * SLAB_ROW
        epilogue = slabs if self.parts == 1 else self.received_nbytes
        barriers = (self.stages + 1) * BARRIER_NBYTES
        return self.stages * self.stage_nbytes + epilogue + barriers + ALIGNMENT


def packed_depth(op: Conv2d, k: int) -> int:
    """K as packed for tiles of `k`: window positions, each with whole tiles of channels."""
    return math.prod(op.kernel_size) * ceil_div(op.in_channels, k) * k


def pack_weight(weight: Array, op: Conv2d, k: int) -> Array:
    """OIHW of bytes to [O][depth]: position (r, s), then channels, zeros elsewhere.

    Rows of each 16 channels are in `ROW_ORDER`.
    """
    channels = ceil_div(op.in_channels, k) * k
    packed = np.zeros((op.out_channels, *op.kernel_size, channels), np.int8)
    packed[..., : op.in_channels] = weight.view(np.int8).transpose(0, 2, 3, 1)
    by_16 = packed.reshape(-1, CHUNK, packed_depth(op, k))
    return np.ascontiguousarray(by_16[:, ROW_ORDER]).reshape(op.out_channels, -1)


@dataclass(frozen=True, eq=False)
class ByteWgmmaConv(CudaKernel):
    """A convolution in one launch, with the tile of `tiles` that suits the problem best.

    A kernel is one of these algorithms, and one of the kinds of numbers, whose class comes first.
    """

    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    source: ClassVar[str]  # see `Entry`

    layout: Layout = Layout.NHWC

    @property
    @abstractmethod
    def tiles(self) -> Sequence[ByteTile]:
        """The compiled tiles."""

    @abstractmethod
    def tile_for(self, problem: Problem) -> ByteTile | None:
        """The tile of a problem: it decides how weights are packed. Pure."""

    @abstractmethod
    def entry_of(self, problem: Problem, tile: ByteTile) -> Entry:
        """The function that computes a problem with a tile."""

    @abstractmethod
    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        """The epilogue's operands: bias, multiplier, the residual's multiplier, and others."""

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {size for tile in self.tiles for size in tile.edges}
        return tuple(sorted({CHUNK, *sizes}))

    def weights(self, op: Conv2d, tile: ByteTile) -> ByteMap:
        """The tensor map of the packed weights."""
        depth = packed_depth(op, tile.k)
        return ByteMap(Pointer(Role.WEIGHT), (depth, op.out_channels), (tile.k, tile.m))

    def refuses_channels(self, op: Conv2d) -> str | None:
        """Why a number of channels is rejected, or None."""
        if op.out_channels % CHUNK:
            return f"writes {CHUNK} channels at a time, and {op.out_channels} is not a multiple"
        if op.in_channels % CHUNK:
            return f"copies {CHUNK} channels at a time, and {op.in_channels} is not a multiple"
        if op.out_channels * packed_depth(op, max(t.k for t in self.tiles)) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *others = super().pack(problem, weights)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no weights"
        return (pack_weight(weight, conv_op(problem), tile.k), *others)
