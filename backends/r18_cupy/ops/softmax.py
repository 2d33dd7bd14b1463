"""Softmax over rows of any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Problem
from r18.graph.ops import Softmax as SoftmaxOp
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X
from r18_cupy.kernel import CudaKernel

THREADS = 256  # of kernels/ops/softmax.cu


@dataclass(frozen=True, eq=False)
class Softmax(CudaKernel):
    """One block per row, in float32, shifted by the row's maximum."""

    op = SoftmaxOp
    algorithm = "shifted"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("softmax", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (32, THREADS)

    @property
    def entry(self) -> Entry:
        return Entry("ops/softmax", "softmax_rows", (self.storage,))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        rows, features = problem.output
        arguments = (X, OUT, np.int32(features))
        return (GridLaunch(self.entry, (rows, 1, 1), (THREADS, 1, 1), arguments),)
