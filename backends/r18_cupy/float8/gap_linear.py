"""Global average pooling of e4m3 numbers and the linear layer of its means in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout, Linear, Problem
from r18.graph.precision import FP8
from r18.graph.scaled import ScaledAvgPoolLinear, ScaledLinear
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.float8.kernel import WIDE, Float8Kernel
from r18_cupy.kernel import MAX_ELEMENTS
from r18_cupy.ops.linear import LINEAR_SHAPE

# As in kernels/float8/gap_linear.cu.
LANES, WARPS, CHUNK, FOUR = 32, 8, 16, 4
MOST_CHANNELS = LANES * WARPS * CHUNK

TILES = tuple(TileConfig(1, WARPS * features, CHUNK) for features in (1, 2, 4, 8))
"""Of one image and 8 to 64 output features."""


def scaled(channels: int, outputs: int) -> ScaledAvgPoolLinear:
    """The op that makes `outputs` logits of `channels` means."""
    return ScaledAvgPoolLinear(ScaledLinear(Linear(channels, outputs)))


@dataclass(frozen=True, eq=False)
class ScaledGapLinear(Float8Kernel):
    """A CTA per image and `n` features; each CTA of an image computes its means again.

    float32 sums in a fixed order; means stay in float32.
    """

    op = ScaledAvgPoolLinear
    algorithm = "warp_dot"
    tiles: ClassVar[tuple[TileConfig, ...]] = TILES

    layout: Layout = Layout.NHWC
    largest_batch: int = 16

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("mean_sum", FP8.accumulate, WIDE)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {WARPS, CHUNK, LANES * FOUR, LANES * CHUNK, *(tile.n for tile in self.tiles)}
        return tuple(sorted(sizes))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Problems with more channels than are loaded in advance, images with fewer pixels than
        groups, more pixels than a thread has in flight, or sums of pixels that are not exact."""
        return tuple(
            Problem(scaled(channels, outputs), ((batch, channels, height, width),))
            for batch, channels, outputs, height, width in (
                (2, 1040, 70, 3, 5),
                (1, 16, 9, 16, 16),
                (3, 512, 65, 7, 7),
                (1, 528, 10, 9, 23),
            )
        )

    def entry(self, tile: TileConfig) -> Entry:
        return Entry("float8/gap_linear", "sgap_linear", tile.defines)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(ScaledAvgPoolLinear, problem.op)
        batch, channels = problem.inputs[0][:2]
        if batch > self.largest_batch:
            return (
                "computes the means of an image in each block of it, so it takes batches of at "
                f"most {self.largest_batch}, not {batch}"
            )
        if channels % CHUNK:
            return f"reads {CHUNK} channels at a time, and {channels} is no multiple"
        if channels > MOST_CHANNELS:
            return f"has a thread per {CHUNK} channels, so at most {MOST_CHANNELS}, not {channels}"
        if channels * op.linear.linear.out_features > MAX_ELEMENTS:
            return "indexes with 32 bits; the weights have too many elements"
        return None

    def tile_for(self, problem: Problem) -> TileConfig:
        """The tile with the fewest features whose blocks run all at once; else the last."""
        batch, features = problem.output
        return next(
            (t for t in self.tiles if batch * ceil_div(features, t.n) <= MULTIPROCESSORS),
            self.tiles[-1],
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, tile = cast(ScaledAvgPoolLinear, problem.op), self.tile_for(problem)
        batch, channels, height, width = problem.inputs[0]
        features = op.linear.linear.out_features
        shape = struct(np.array([(batch, channels, features)], LINEAR_SHAPE))
        weights = (Pointer(Role.WEIGHT, index) for index in range(3))
        return (
            GridLaunch(
                self.entry(tile),
                (ceil_div(features, tile.n), batch, 1),
                (LANES * WARPS, 1, 1),
                (X, *weights, OUT, shape, np.int32(height * width)),
                overlaps=True,
            ),
        )
