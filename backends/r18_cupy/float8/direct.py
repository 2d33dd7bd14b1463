"""Direct convolution of e4m3 numbers: the plain baseline, in either layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Layout, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.float8.kernel import Float8Kernel, conv_of, factors, plain_sum
from r18_cupy.kernel import MAX_ELEMENTS

THREADS = 256


@dataclass(frozen=True, eq=False)
class ScaledDirect(Float8Kernel):
    """One thread per output: slow and plain. See kernels/float8/direct.cu."""

    op = ScaledConv2d
    algorithm = "direct"

    @property
    def contract(self) -> RoundingContract:
        return plain_sum()

    @property
    def entry(self) -> Entry:
        return Entry("float8/direct", f"sconv2d_direct_{self.layout.value}")

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(ScaledConv2d, problem.op)
        if math.prod(op.weights()[0].shape) > MAX_ELEMENTS:
            return "indexes with 32 bits; the weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weight as OIHW for NCHW, as HWIO for NHWC."""
        weight, *others = super().pack(problem, weights)
        if self.layout is Layout.NHWC:
            weight = np.ascontiguousarray(weight.transpose(2, 3, 1, 0))
        return weight, *others

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(ScaledConv2d, problem.op)
        bias, multiplier, more = factors(op)
        residual = Pointer(Role.INPUT, 1) if op.conv.residual else NULL
        return (
            GridLaunch(
                self.entry,
                (ceil_div(math.prod(problem.output), THREADS), 1, 1),
                (THREADS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), bias, multiplier, residual, more, OUT),
                    conv_shape(conv_of(problem)),
                ),
                overlaps=True,
            ),
        )
