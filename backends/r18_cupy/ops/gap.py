"""Global average pooling, in either layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import GlobalAvgPool, Layout, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div
from r18_cupy.kernel import CudaKernel

LANES, WARPS = 32, 8  # of kernels/ops/gap.cu


@dataclass(frozen=True, eq=False)
class Gap(CudaKernel):
    """float32 sums in a fixed tree. NCHW: one warp per plane. NHWC: eight warps per 32 channels."""

    op = GlobalAvgPool
    algorithm = "tree"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("mean", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (WARPS, LANES)

    @property
    def entry(self) -> Entry:
        return Entry("ops/gap", f"gap_{self.layout.value}", (self.storage,))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.inputs[0]
        if self.layout is Layout.NCHW:
            blocks, groups = ceil_div(n * c, WARPS), n * c
        else:
            blocks, groups = n * ceil_div(c, LANES), c
        arguments = (X, OUT, np.int32(groups), np.int32(h * w))
        grid, block = (blocks, 1, 1), (LANES * WARPS, 1, 1)
        return (GridLaunch(self.entry, grid, block, arguments, overlaps=True),)
