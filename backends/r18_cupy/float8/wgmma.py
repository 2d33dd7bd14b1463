"""The rounding contract and the small test problems of the e4m3 `wgmma` convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.backend import RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.bytes.wgmma import CHUNK, ByteTile, ByteWgmmaConv
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument
from r18_cupy.float8.kernel import Float8Kernel, factors, narrow_sum

PROMOTED = 640
"""Products of a sum until it is promoted, as in kernels/float8/hopper/finishing.cuh. A 3×3 window
of 64 channels has fewer."""


@dataclass(frozen=True, eq=False)
class ScaledWgmmaConv(Float8Kernel, ByteWgmmaConv):
    """Sums of e4m3 products are promoted to float32."""

    op = ScaledConv2d

    layout: Layout = Layout.NHWC

    @property
    def contract(self) -> RoundingContract:
        """A run of K tiles has `PROMOTED` products, so an output has no more of them than window
        positions times ⌈C / PROMOTED⌉.

        A K tile holds channels of one position, and a run holds several tiles. A shorter first run
        and a split of K make more sums, but of fewer products each.
        """
        return narrow_sum(PROMOTED)

    def entry(self, tile: ByteTile) -> Entry:
        return Entry(self.source, f"sconv2d_{self.algorithm}", tile.defines, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def entry_of(self, problem: Problem, tile: ByteTile) -> Entry:
        return self.entry(tile)

    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        return factors(cast(ScaledConv2d, problem.op))


def small_problem(channels: int, images: tuple[int, int, int]) -> Problem:
    """A 3×3 window with a residual. channels: of the output. images: (N, H, W)."""
    conv = Conv2d(CHUNK, channels, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True)
    n, h, w = images
    return Problem(ScaledConv2d(conv), ((n, CHUNK, h, w), (n, channels, h, w)))
