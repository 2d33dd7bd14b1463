"""Linear layers: warp dot products for small batches, a tiled GEMM for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Linear, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.elementwise import vector_width

# Mirrors `LinearShape` in kernels/ops/linear.cuh.
LINEAR_SHAPE = np.dtype([(name, np.int32) for name in ("n", "features", "out_features")])


@dataclass(frozen=True, eq=False)
class LinearKernel(CudaKernel):
    """Products of stored values, summed in float32 with the bias last, rounded once.

    The order in which a sample's terms are added does not depend on the batch.
    """

    op = Linear

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("sum", self.precision.accumulate, self.precision.storage)

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        op = cast(Linear, problem.op)
        fields = (problem.batch, op.in_features, op.out_features)
        shape = struct(np.array([fields], LINEAR_SHAPE))
        return (X, Pointer(Role.WEIGHT), Pointer(Role.WEIGHT, 1), OUT, shape)


@dataclass(frozen=True, eq=False)
class WarpDot(LinearKernel):
    """One warp per output feature, for `rows` samples at a time."""

    algorithm = "warp_dot"

    warps: int = 8  # per block
    rows: int = 4
    largest_batch: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        width = vector_width(self.precision)
        return (self.rows, self.warps, width, 32 * width)

    @property
    def entry(self) -> Entry:
        defines = (self.storage, ("WARPS", self.warps), ("ROWS", self.rows))
        return Entry("ops/linear_warp_dot", "linear_warp_dot", defines)

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch > self.largest_batch:
            return (
                f"reads the weights once for every {self.rows} samples, so it takes batches of at "
                f"most {self.largest_batch}, not {problem.batch}"
            )
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Linear, problem.op)
        grid = (ceil_div(op.out_features, self.warps), ceil_div(problem.batch, self.rows), 1)
        block = (32 * self.warps, 1, 1)
        return (GridLaunch(self.entry, grid, block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class TiledLinear(LinearKernel):
    """One block per tile of `block_m` samples by `block_n` output features."""

    algorithm = "tiled"

    block_m: int = 32
    block_n: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        return (32, self.block_m, self.block_n)

    @property
    def entry(self) -> Entry:
        defines = (self.storage, ("BLOCK_M", self.block_m), ("BLOCK_N", self.block_n))
        return Entry("ops/linear_tiled", "linear_tiled", defines)

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Linear, problem.op)
        blocks = ceil_div(problem.batch, self.block_m) * ceil_div(op.out_features, self.block_n)
        grid, block = (blocks, 1, 1), (256, 1, 1)
        return (GridLaunch(self.entry, grid, block, self.arguments(problem), overlaps=True),)
