"""BatchNorm, ReLU and Add: 16 bytes of elements per thread, in place on request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Add, BatchNorm, Layout, Problem, ReLU
from r18.graph.precision import Precision
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.kernel import CudaKernel

THREADS = 256
VECTOR_NBYTES = 16  # as `WIDTH` in kernels/common/vector.cuh


def vector_width(precision: Precision) -> int:
    """Elements per thread and access, where they are aligned."""
    return VECTOR_NBYTES // precision.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Elementwise(CudaKernel):
    """An output element depends only on the input elements at its place; any shape."""

    in_place: ClassVar[bool] = True
    symbol: ClassVar[str]

    @property
    def edges(self) -> tuple[int, ...]:
        width = vector_width(self.precision)
        return (width, width * THREADS)

    @property
    def entry(self) -> Entry:
        return Entry("ops/elementwise", self.symbol, (self.storage,))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def over_elements(self, problem: Problem, *arguments: Argument) -> tuple[GridLaunch, ...]:
        """One thread per vector of the output."""
        count = math.prod(problem.output)
        blocks = ceil_div(count, THREADS * vector_width(self.precision))
        return (GridLaunch(self.entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)


def _count(problem: Problem) -> np.uint32:
    return np.uint32(math.prod(problem.output))


@dataclass(frozen=True, eq=False)
class ReLUKernel(Elementwise):
    """NaN stays NaN."""

    op = ReLU
    algorithm = "elementwise"
    symbol = "elementwise_relu"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("exact", self.precision.accumulate, self.precision.storage)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        return self.over_elements(problem, X, OUT, _count(problem))


@dataclass(frozen=True, eq=False)
class AddKernel(Elementwise):
    """Adds in float32, applies ReLU if the op says so, and rounds once."""

    op = Add
    algorithm = "elementwise"
    symbol = "elementwise_add"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("elementwise", self.precision.accumulate, self.precision.storage)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        with_relu = np.int32(cast(Add, problem.op).relu)
        other = Pointer(Role.INPUT, 1)
        return self.over_elements(problem, X, other, OUT, _count(problem), with_relu)


@dataclass(frozen=True, eq=False)
class BatchNormKernel(Elementwise):
    """(x − mean)·scale + bias, with scale = weight / √(var + eps) computed once, in float64.

    The mean is subtracted first: where it is large compared to x − mean, the form x·scale + shift
    cancels, and this one does not.
    """

    op = BatchNorm
    algorithm = "centred"
    symbol = "elementwise_batchnorm"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("batchnorm", self.precision.accumulate, self.precision.storage)

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Mean, scale and bias: (C,) each, float32."""
        weight, bias, mean, var = (a.astype(np.float64) for a in super().pack(problem, weights))
        with np.errstate(invalid="ignore"):  # a negative variance gives NaN
            scale = weight / np.sqrt(var + cast(BatchNorm, problem.op).eps)
        with np.errstate(over="ignore"):  # overflow to infinity is intended
            return (
                mean.astype(np.float32),
                scale.astype(np.float32),
                bias.astype(np.float32),
            )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        _, c, h, w = problem.inputs[0]
        run = h * w if self.layout is Layout.NCHW else 1
        parameters = (Pointer(Role.WEIGHT, index) for index in range(3))
        return self.over_elements(
            problem, X, *parameters, OUT, _count(problem), np.uint32(c), np.uint32(run)
        )
