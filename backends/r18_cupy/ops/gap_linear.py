"""Global average pooling and the linear layer of its means in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import AvgPoolLinear, Layout, Linear, Problem
from r18.graph.precision import BF16, FP16, FP16X3, FP32, TF32
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel
from r18_cupy.ops.elementwise import vector_width
from r18_cupy.ops.linear import LINEAR_SHAPE

# As in kernels/ops/gap_linear.cu.
LANES, WARPS, MOST_CHANNELS = 32, 16, 4096
CLUSTER = 4
"""CTAs that divide the channels of an image in float32, which is twice as large as in float16."""


@dataclass(frozen=True)
class GapLinearTile(TileConfig):
    """`m` images, 1, and `n` features of a CTA, over `k` channels per access.

    cluster: the CTAs that divide the channels of an image.
    """

    cluster: int = 1


@dataclass(frozen=True, eq=False)
class GapLinear(CudaKernel):
    """A CTA per image and `n` features; each cluster of an image computes its means again.

    float32 sums in a fixed order; means are not rounded to storage.
    """

    op = AvgPoolLinear
    algorithm = "warp_dot"

    layout: Layout = Layout.NHWC
    largest_batch: int = 16

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("mean_sum", self.precision.accumulate, self.precision.storage)

    @property
    def minimum_capability(self) -> tuple[int, int]:  # type: ignore[override]
        """The compute capability that a kernel needs: 9.0 for clusters, else 7.5."""
        return (9, 0) if self.cluster > 1 else (7, 5)

    @property
    def cluster(self) -> int:
        return CLUSTER if self.precision.dtype.itemsize == 4 else 1

    @property
    def tiles(self) -> tuple[GapLinearTile, ...]:
        width = vector_width(self.precision)
        return tuple(GapLinearTile(1, WARPS * n, width, self.cluster) for n in (1, 2, 4))

    @property
    def edges(self) -> tuple[int, ...]:
        width = vector_width(self.precision)
        sizes = {WARPS, width, width * self.cluster, LANES * width}
        return tuple(sorted(sizes | {tile.n for tile in self.tiles}))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Problems with more vectors than are loaded in advance, with fewer than CTAs of a cluster,
        and with few pixels."""
        width = vector_width(self.precision)
        return tuple(
            Problem(AvgPoolLinear(Linear(channels, outputs)), ((batch, channels, height, width),))
            for batch, channels, outputs, height, width in (
                (2, 1040, 70, 3, 5),
                (1, 512, 17, 7, 7),
                (3, width, 33, 2, 4),
                (2, 5 * width, 9, 1, 1),
                (1, 16, 5, 9, 23),
            )
        )

    def entry(self, tile: GapLinearTile) -> Entry:
        nhwc = ("NHWC", int(self.layout is Layout.NHWC))
        return Entry("ops/gap_linear", "gap_linear", (*tile.defines, self.storage, nhwc))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(AvgPoolLinear, problem.op)
        batch, channels = problem.inputs[0][:2]
        width = vector_width(self.precision)
        if batch > self.largest_batch:
            return (
                "computes the means of an image for each group of features, so it takes batches "
                f"of at most {self.largest_batch}, not {batch}"
            )
        if channels % width:
            return f"reads {width} channels at a time, and {channels} is no multiple"
        if channels > MOST_CHANNELS:
            return f"keeps the means of at most {MOST_CHANNELS} channels, not {channels}"
        if channels * op.linear.out_features > MAX_ELEMENTS:
            return "indexes with 32 bits; the weights have too many elements"
        return None

    def grid(self, problem: Problem, tile: GapLinearTile) -> tuple[int, int, int]:
        """The grid of a launch: whole clusters of blocks of features, for each image."""
        batch, features = problem.output
        return ceil_div(ceil_div(features, tile.n), tile.cluster) * tile.cluster, batch, 1

    def tile_for(self, problem: Problem) -> GapLinearTile:
        """The tile with the fewest features whose blocks run all at once; else the last."""
        tiles = ((tile, self.grid(problem, tile)) for tile in self.tiles)
        return next((t for t, (x, y, _) in tiles if x * y <= MULTIPROCESSORS), self.tiles[-1])

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, tile = cast(AvgPoolLinear, problem.op), self.tile_for(problem)
        batch, channels, height, width = problem.inputs[0]
        shape = struct(np.array([(batch, channels, op.linear.out_features)], LINEAR_SHAPE))
        weights = (Pointer(Role.WEIGHT), Pointer(Role.WEIGHT, 1))
        return (
            GridLaunch(
                self.entry(tile),
                self.grid(problem, tile),
                (LANES * WARPS, 1, 1),
                (X, *weights, OUT, shape, np.int32(height * width)),
                overlaps=True,
            ),
        )


def gap_linear_kernels() -> Iterator[GapLinear]:
    """Kernels in the layout in which the convolutions of each precision store."""
    yield GapLinear(FP32, Layout.NCHW)
    for precision in (FP16, BF16, TF32, FP16X3):
        yield GapLinear(precision)
