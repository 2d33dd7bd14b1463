"""Linear layers of integers: warp dot products for small batches, tiles of dp4a for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedLinear
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.integers.kernel import BYTES, IntegerKernel
from r18_cupy.kernel import MAX_ELEMENTS
from r18_cupy.ops.linear import LINEAR_SHAPE

CHUNK = 16  # bytes of an access, as in kernels/integers/rows.cuh


def pitch(features: int) -> int:
    """Bytes per row of the packed weight: whole chunks."""
    return ceil_div(features, CHUNK) * CHUNK


@dataclass(frozen=True, eq=False)
class QuantizedLinearKernel(IntegerKernel):
    """Products by dp4a; bias and multiplier last. Weights of any number of bits are int8."""

    op = QuantizedLinear

    def refuses(self, problem: Problem) -> str | None:
        linear = cast(QuantizedLinear, problem.op).linear
        if linear.out_features * pitch(linear.in_features) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Rows of the weight padded with zeros to whole chunks."""
        weight, *others = super().pack(problem, weights)
        more = pitch(weight.shape[1]) - weight.shape[1]
        return np.pad(weight, ((0, 0), (0, more))), *others

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        linear = cast(QuantizedLinear, problem.op).linear
        fields = (problem.batch, linear.in_features, linear.out_features)
        shape = struct(np.array([fields], LINEAR_SHAPE))
        weights = (Pointer(Role.WEIGHT, index) for index in range(3))
        return (X, *weights, OUT, shape, np.int32(pitch(linear.in_features)))


@dataclass(frozen=True, eq=False)
class QuantizedWarpDot(QuantizedLinearKernel):
    """One warp per output feature, for `rows` samples at a time."""

    algorithm = "warp_dot"

    warps: int = 8  # per block
    rows: int = 4
    largest_batch: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.rows, self.warps, CHUNK, 32 * CHUNK)

    def entry(self, stored: str) -> Entry:
        defines = (("BYTE", BYTES[stored]), ("WARPS", self.warps), ("ROWS", self.rows))
        return Entry("integers/linear_warp_dot", "qlinear_warp_dot", defines)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def refuses(self, problem: Problem) -> str | None:
        if problem.batch > self.largest_batch:
            return (
                f"reads the weights once for every {self.rows} samples, so it takes batches of at "
                f"most {self.largest_batch}, not {problem.batch}"
            )
        return super().refuses(problem)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(QuantizedLinear, problem.op)
        grid = (ceil_div(op.linear.out_features, self.warps), ceil_div(problem.batch, self.rows), 1)
        block = (32 * self.warps, 1, 1)
        entry = self.entry(op.stored)
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)


@dataclass(frozen=True, eq=False)
class QuantizedTiledLinear(QuantizedLinearKernel):
    """One block per tile of `block_m` samples by `block_n` output features."""

    algorithm = "tiled"

    block_m: int = 32
    block_n: int = 64

    @property
    def edges(self) -> tuple[int, ...]:
        return (CHUNK, self.block_m, self.block_n, 8 * CHUNK)

    def entry(self, stored: str) -> Entry:
        defines = (
            ("BYTE", BYTES[stored]),
            ("BLOCK_M", self.block_m),
            ("BLOCK_N", self.block_n),
        )
        return Entry("integers/linear_tiled", "qlinear_tiled", defines)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(QuantizedLinear, problem.op)
        down = ceil_div(problem.batch, self.block_m)
        across = ceil_div(op.linear.out_features, self.block_n)
        grid, block = (down * across, 1, 1), (256, 1, 1)
        entry = self.entry(op.stored)
        return (GridLaunch(entry, grid, block, self.arguments(problem), overlaps=True),)
