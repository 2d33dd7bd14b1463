"""What the e4m3 `wgmma` convolutions share: packed weights, contract, operands. NHWC.

Tiles, tensor maps and the order of packed weights are those of the integers, which have as many
bytes: see r18_cupy.integers.wgmma. M = O channels, N = output pixels, K = kh·kw·C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Pointer, Role
from r18_cupy.float8.kernel import Float8Kernel, narrow_sum
from r18_cupy.integers.tensor_map import ByteMap
from r18_cupy.integers.wgmma import CHUNK, IntegerTile, pack_weight, packed_depth
from r18_cupy.kernel import MAX_ELEMENTS

PROMOTED = 640
"""Products of a sum until it is promoted, as in kernels/float8/hopper/tile.cuh. A 3×3 window of 64
channels has fewer."""


@dataclass(frozen=True, eq=False)
class ScaledWgmmaConv(Float8Kernel):
    """A convolution in one launch, with the tile of `tiles` that suits the problem best."""

    op = ScaledConv2d
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    source: ClassVar[str]  # see `Entry`

    layout: Layout = Layout.NHWC

    @property
    @abstractmethod
    def tiles(self) -> Sequence[IntegerTile]:
        """The compiled tiles."""

    @abstractmethod
    def tile_for(self, problem: Problem) -> IntegerTile | None:
        """The tile of a problem: it decides how weights are packed. Pure."""

    @property
    def contract(self) -> RoundingContract:
        """A run of K tiles has `PROMOTED` products, so an output has no more of them than window
        positions times ⌈C / PROMOTED⌉.

        A K tile holds channels of one position, and a run holds several tiles. A shorter first run
        and a split of K make more sums, but of fewer products each.
        """
        return narrow_sum(PROMOTED)

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({CHUNK, *(size for tile in self.tiles for size in tile.edges)}))

    def entry(self, tile: IntegerTile) -> Entry:
        return Entry(self.source, f"sconv2d_{self.algorithm}", tile.defines, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def weights(self, op: Conv2d, tile: IntegerTile) -> ByteMap:
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
        op = cast(ScaledConv2d, problem.op).conv
        return (pack_weight(weight.view(np.int8), op, tile.k), *others)


def small_problem(channels: int, images: tuple[int, int, int]) -> Problem:
    """A 3×3 window with a residual. channels: of the output. images: (N, H, W)."""
    conv = Conv2d(CHUNK, channels, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True)
    n, h, w = images
    return Problem(ScaledConv2d(conv), ((n, CHUNK, h, w), (n, channels, h, w)))
