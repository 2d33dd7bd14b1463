"""Linear layers of integers: warp dot products for small batches, tiles of dp4a for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedLinear
from r18_cupy.bytes.linear import ByteLinear, ByteTiledLinear, ByteWarpDot, linear_op
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument, ceil_div
from r18_cupy.integers.kernel import BYTES, IntegerKernel
from r18_cupy.kernel import MAX_ELEMENTS

CHUNK = 16  # bytes of an access, as in kernels/integers/rows.cuh


def pitch(features: int) -> int:
    """Bytes per row of the packed weight: whole chunks."""
    return ceil_div(features, CHUNK) * CHUNK


@dataclass(frozen=True, eq=False)
class QuantizedLinearKernel(IntegerKernel, ByteLinear):
    """Products by dp4a; bias and multiplier last. Weights of any number of bits are int8."""

    op = QuantizedLinear

    def entry(self, stored: str) -> Entry:
        macros = (("BYTE", BYTES[stored]), *self.sizes)
        return Entry(f"integers/linear_{self.algorithm}", f"qlinear_{self.algorithm}", macros)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def entry_of(self, problem: Problem) -> Entry:
        return self.entry(cast(QuantizedLinear, problem.op).stored)

    def refuses(self, problem: Problem) -> str | None:
        linear = linear_op(problem)
        if linear.out_features * pitch(linear.in_features) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return super().refuses(problem)

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Rows of the weight padded with zeros to whole chunks."""
        weight, *others = super().pack(problem, weights)
        more = pitch(weight.shape[1]) - weight.shape[1]
        return np.pad(weight, ((0, 0), (0, more))), *others

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        return (*super().arguments(problem), np.int32(pitch(linear_op(problem).in_features)))


@dataclass(frozen=True, eq=False)
class QuantizedWarpDot(QuantizedLinearKernel, ByteWarpDot):
    """See kernels/integers/linear_warp_dot.cu."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.rows, self.warps, CHUNK, 32 * CHUNK)


@dataclass(frozen=True, eq=False)
class QuantizedTiledLinear(QuantizedLinearKernel, ByteTiledLinear):
    """See kernels/integers/linear_tiled.cu."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (CHUNK, self.block_m, self.block_n, 8 * CHUNK)
