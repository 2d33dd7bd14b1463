"""Linear layers of weights in bytes: warp dot products for small batches, tiles for large ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.graph.ops import Linear, Problem
from r18.graph.quantized import QuantizedLinear
from r18.graph.scaled import ScaledLinear
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.linear import LINEAR_SHAPE

LANES = 32
TILE_THREADS = 256


def linear_op(problem: Problem) -> Linear:
    """The linear layer that the problem's op quantises or scales."""
    return cast(QuantizedLinear | ScaledLinear, problem.op).linear


@dataclass(frozen=True, eq=False)
class ByteLinear(CudaKernel):
    """Weight, bias and multiplier, and float32 outputs."""

    @abstractmethod
    def entry_of(self, problem: Problem) -> Entry:
        """The function that computes a problem."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[tuple[str, str | int], ...]:
        """The macros of its sizes."""

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        linear = linear_op(problem)
        fields = (problem.batch, linear.in_features, linear.out_features)
        weights = (Pointer(Role.WEIGHT, index) for index in range(3))
        return (X, *weights, OUT, struct(np.array([fields], LINEAR_SHAPE)))


@dataclass(frozen=True, eq=False)
class ByteWarpDot(ByteLinear):
    """One warp per output feature, for `rows` samples at a time."""

    algorithm = "warp_dot"

    warps: int = 8  # per block
    rows: int = 4
    largest_batch: int = 64

    @property
    def sizes(self) -> tuple[tuple[str, str | int], ...]:
        return (("WARPS", self.warps), ("ROWS", self.rows))

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch > self.largest_batch:
            return (
                f"reads the weights once for every {self.rows} samples, so it takes batches of at "
                f"most {self.largest_batch}, not {problem.batch}"
            )
        return super().refuses(problem)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        features = linear_op(problem).out_features
        grid = (ceil_div(features, self.warps), ceil_div(problem.batch, self.rows), 1)
        block, entry = (LANES * self.warps, 1, 1), self.entry_of(problem)
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class ByteTiledLinear(ByteLinear):
    """One block per tile of `block_m` samples by `block_n` output features. See
    kernels/bytes/linear_tiled.cuh.
    """

    algorithm = "tiled"

    block_m: int = 32
    block_n: int = 64

    @property
    def sizes(self) -> tuple[tuple[str, str | int], ...]:
        return (("BLOCK_M", self.block_m), ("BLOCK_N", self.block_n))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        down = ceil_div(problem.batch, self.block_m)
        across = ceil_div(linear_op(problem).out_features, self.block_n)
        grid, block = (down * across, 1, 1), (TILE_THREADS, 1, 1)
        entry = self.entry_of(problem)
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)
