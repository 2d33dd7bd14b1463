"""Every scaled op but convolutions, and kernels that move e4m3 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.backend import RoundingContract
from r18.graph.ops import MaxPool2d, Problem, Relayout
from r18.graph.precision import FP8
from r18.graph.scaled import Scale, ScaledGlobalAvgPool, ScaledLinear
from r18_cupy.bytes.gap import ByteGap
from r18_cupy.bytes.linear import LANES, ByteLinear, ByteTiledLinear, ByteWarpDot
from r18_cupy.bytes.maxpool2d import ByteMaxPool
from r18_cupy.bytes.quantize import ByteQuantize
from r18_cupy.bytes.relayout import BYTE, ByteTranspose, transposing
from r18_cupy.cuda.compiler import Entry
from r18_cupy.float8.kernel import WIDE, Float8Kernel, exact, plain_sum

CHUNK = 4  # features of a chunk, as in kernels/float8/linear_tiled.cu


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
class ScaledLinearKernel(Float8Kernel, ByteLinear):
    """Products of widened weights in float32; multiplier and bias last."""

    op = ScaledLinear

    @property
    def contract(self) -> RoundingContract:
        return plain_sum(WIDE)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry(f"float8/linear_{self.algorithm}", f"slinear_{self.algorithm}", self.sizes),)

    def entry_of(self, problem: Problem) -> Entry:
        (entry,) = self.entries()
        return entry


@dataclass(frozen=True, eq=False)
class ScaledWarpDot(ScaledLinearKernel, ByteWarpDot):
    """See kernels/float8/linear_warp_dot.cu."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.rows, self.warps, LANES)


@dataclass(frozen=True, eq=False)
class ScaledTiledLinear(ScaledLinearKernel, ByteTiledLinear):
    """See kernels/float8/linear_tiled.cu."""

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({CHUNK, self.block_m, self.block_n, 16 * CHUNK}))


@dataclass(frozen=True, eq=False)
class ScaledTranspose(Float8Kernel, ByteTranspose):
    """The transpose of e4m3 tensors."""

    op = Relayout

    @property
    def contract(self) -> RoundingContract:
        return exact()

    def entries(self) -> tuple[Entry, ...]:
        return (transposing(BYTE),)

    def entry_of(self, problem: Problem) -> Entry:
        return transposing(BYTE)
