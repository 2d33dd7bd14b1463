"""Every scaled op but convolutions, and what moves e4m3 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import MaxPool2d, Problem, Relayout
from r18.graph.precision import FP8
from r18.graph.scaled import Scale, ScaledGlobalAvgPool, ScaledLinear
from r18_cupy.bytes.gap import ByteGap
from r18_cupy.bytes.maxpool2d import ByteMaxPool
from r18_cupy.bytes.quantize import ByteQuantize
from r18_cupy.bytes.relayout import BYTE, ByteTranspose, transposing
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.float8.kernel import WIDE, Float8Kernel, exact, plain_sum
from r18_cupy.ops.linear import LINEAR_SHAPE

LANES = 32
TILE_SAMPLES = TILE_FEATURES = 32  # of a block of kernels/float8/linear.cu,
TILE_THREADS = 128


@dataclass(frozen=True, eq=False)
class ScaleKernel(Float8Kernel, ByteQuantize):
    """See kernels/float8/scale.cu."""

    op = Scale
    source = "float8/scale"
    run = 4

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("scale", FP8.accumulate, FP8.storage)


@dataclass(frozen=True, eq=False)
class ScaledMaxPool(Float8Kernel, ByteMaxPool):
    """See kernels/float8/maxpool2d.cu."""

    op = MaxPool2d

    @property
    def contract(self) -> RoundingContract:
        return exact()

    def entries(self) -> tuple[Entry, ...]:
        return (Entry("float8/maxpool2d", f"smaxpool2d_{self.layout.value}"),)

    def entry_of(self, problem: Problem) -> Entry:
        (entry,) = self.entries()
        return entry

    def pool_of(self, problem: Problem) -> MaxPool2d:
        return cast(MaxPool2d, problem.op)


@dataclass(frozen=True, eq=False)
class ScaledGap(Float8Kernel, ByteGap):
    """float32 sums in a fixed tree. See kernels/float8/gap.cu."""

    op = ScaledGlobalAvgPool

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("mean", FP8.accumulate, WIDE)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry("float8/gap", f"sgap_{self.layout.value}"),)

    def entry_of(self, problem: Problem) -> Entry:
        (entry,) = self.entries()
        return entry


@dataclass(frozen=True, eq=False)
class ScaledLinearKernel(Float8Kernel):
    """Products of widened weights in float32; multiplier and bias last."""

    op = ScaledLinear

    warps: int = 8  # per block, of a small batch
    rows: int = 4  # samples at a time, of a small batch

    @property
    def contract(self) -> RoundingContract:
        return plain_sum(WIDE)

    def entry(self, symbol: str) -> Entry:
        return Entry("float8/linear", symbol, (("WARPS", self.warps), ("ROWS", self.rows)))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry(f"slinear_{self.algorithm}"),)

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        linear = cast(ScaledLinear, problem.op).linear
        fields = (problem.batch, linear.in_features, linear.out_features)
        weights = (Pointer(Role.WEIGHT, index) for index in range(3))
        return (X, *weights, OUT, struct(np.array([fields], LINEAR_SHAPE)))


@dataclass(frozen=True, eq=False)
class ScaledWarpDot(ScaledLinearKernel):
    """One warp per output feature, for `rows` samples at a time."""

    algorithm = "warp_dot"

    largest_batch: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.rows, self.warps, LANES)

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch > self.largest_batch:
            return (
                f"reads the weights once for every {self.rows} samples, so it takes batches of at "
                f"most {self.largest_batch}, not {problem.batch}"
            )
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        features = cast(ScaledLinear, problem.op).linear.out_features
        grid = (ceil_div(features, self.warps), ceil_div(problem.batch, self.rows), 1)
        block = (LANES * self.warps, 1, 1)
        (entry,) = self.entries()
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledTiledLinear(ScaledLinearKernel):
    """One block per tile of samples and output features."""

    algorithm = "tiled"

    @property
    def edges(self) -> tuple[int, ...]:
        return (TILE_SAMPLES,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        features = cast(ScaledLinear, problem.op).linear.out_features
        blocks = ceil_div(problem.batch, TILE_SAMPLES) * ceil_div(features, TILE_FEATURES)
        (entry,) = self.entries()
        block = (TILE_THREADS, 1, 1)
        return (GridLaunch(entry, (blocks, 1, 1), block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class ScaledTranspose(Float8Kernel, ByteTranspose):
    """Of e4m3 numbers."""

    op = Relayout

    @property
    def contract(self) -> RoundingContract:
        return exact()

    def entries(self) -> tuple[Entry, ...]:
        return (transposing(BYTE),)

    def entry_of(self, problem: Problem) -> Entry:
        return transposing(BYTE)
