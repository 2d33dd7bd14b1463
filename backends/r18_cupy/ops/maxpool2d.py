"""Max-pooling, in either layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout, MaxPool2d, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.elementwise import vector_width

THREADS = 256

# Mirrors `PoolShape` in kernels/ops/maxpool2d.cu.
POOL_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in ("n", "c", "h", "w", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw")
    ]
)


@dataclass(frozen=True, eq=False)
class MaxPool(CudaKernel):
    """Each window independently. NCHW: one thread per output. NHWC: one thread per 16 bytes of
    channels.

    NHWC with channels that are not whole vectors: one thread per channel.
    """

    op = MaxPool2d
    algorithm = "direct"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("exact", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (THREADS,) if self.layout is Layout.NCHW else (vector_width(self.precision), THREADS)

    @property
    def entry(self) -> Entry:
        return Entry("ops/maxpool2d", f"maxpool2d_{self.layout.value}", (self.storage,))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(MaxPool2d, problem.op)
        n, c, h, w = problem.inputs[0]
        _, _, oh, ow = problem.output
        fields = (n, c, h, w, oh, ow, *op.kernel_size, *op.stride, *op.padding)
        width = vector_width(self.precision)
        if self.layout is Layout.NCHW or c % width:
            width = 1
        blocks = ceil_div(math.prod(problem.output) // width, THREADS)
        arguments = (X, OUT, struct(np.array([fields], POOL_SHAPE)))
        return (GridLaunch(self.entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)
