"""Global average pooling of bytes and the linear layer of its means in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.graph.ops import Layout, Linear, Problem
from r18.graph.quantized import QuantizedAvgPoolLinear, QuantizedGlobalAvgPool, QuantizedLinear
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.integers.kernel import BYTES, IntegerKernel
from r18_cupy.kernel import MAX_ELEMENTS
from r18_cupy.ops.linear import LINEAR_SHAPE

# As in kernels/integers/gap_linear.cu.
LANES, WARPS, CHUNK = 32, 8, 16
MOST_CHANNELS = LANES * WARPS * CHUNK
MOST_PIXELS = 65535 // 255  # of bytes in a sum of 16 bits

TILES = tuple(TileConfig(1, WARPS * features, CHUNK) for features in (1, 2, 4, 8))
"""Of one image and 8 to 64 output features."""


def quantized(channels: int, outputs: int, stored: str) -> QuantizedAvgPoolLinear:
    """The op that makes `outputs` numbers of `channels` means of bytes."""
    linear = QuantizedLinear(Linear(channels, outputs), stored)
    return QuantizedAvgPoolLinear(QuantizedGlobalAvgPool(stored), linear)


@dataclass(frozen=True, eq=False)
class QuantizedGapLinear(IntegerKernel):
    """A CTA per image and `n` features; each CTA of an image computes its means again."""

    op = QuantizedAvgPoolLinear
    algorithm = "warp_dot"
    tiles: ClassVar[tuple[TileConfig, ...]] = TILES

    layout: Layout = Layout.NHWC
    largest_batch: int = 16

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {WARPS, CHUNK, LANES * CHUNK, *(tile.n for tile in self.tiles)}
        return tuple(sorted(sizes))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Problems with more chunks than lanes, each way to store bytes, and images with fewer
        pixels than groups."""
        return tuple(
            Problem(quantized(channels, outputs, stored), ((batch, channels, height, width),))
            for stored in BYTES
            for batch, channels, outputs, height, width in (
                (2, 1040, 70, 3, 5),
                (1, 16, 9, 16, 16),
                (3, 512, 65, 7, 7),
            )
        )

    def entry(self, tile: TileConfig, stored: str) -> Entry:
        return Entry("integers/gap_linear", "qgap_linear", (*tile.defines, ("BYTE", BYTES[stored])))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.entry(tile, stored) for tile in self.tiles for stored in BYTES)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(QuantizedAvgPoolLinear, problem.op)
        batch, channels, height, width = problem.inputs[0]
        if batch > self.largest_batch:
            return (
                "computes the means of an image in each block of it, so it takes batches of at "
                f"most {self.largest_batch}, not {batch}"
            )
        if channels % CHUNK:
            return f"reads {CHUNK} channels at a time, and {channels} is no multiple"
        if channels > MOST_CHANNELS:
            return f"has a thread per {CHUNK} channels, so at most {MOST_CHANNELS}, not {channels}"
        if height * width > MOST_PIXELS:
            return (
                f"adds up pixels in 16 bits, so it takes at most {MOST_PIXELS} of them, not "
                f"{height * width}"
            )
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
        op, tile = cast(QuantizedAvgPoolLinear, problem.op), self.tile_for(problem)
        batch, channels, height, width = problem.inputs[0]
        features = op.linear.linear.out_features
        shape = struct(np.array([(batch, channels, features)], LINEAR_SHAPE))
        weights = (Pointer(Role.WEIGHT, index) for index in range(4))
        return (
            GridLaunch(
                self.entry(tile, op.gap.stored),
                (ceil_div(features, tile.n), batch, 1),
                (LANES * WARPS, 1, 1),
                (X, *weights, OUT, shape, np.int32(height * width)),
                overlaps=True,
            ),
        )
