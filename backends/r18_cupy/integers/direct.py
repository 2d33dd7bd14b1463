"""Direct convolution of integers, one thread per output: the plain baseline, in either layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Layout, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.integers.kernel import BYTES, IntegerKernel, conv_of, ends, epilogue
from r18_cupy.kernel import MAX_ELEMENTS

THREADS = 256


@dataclass(frozen=True, eq=False)
class QuantizedDirect(IntegerKernel):
    """One thread per output: slow and plain. Weights of any number of bits are stored as int8."""

    op = QuantizedConv2d
    algorithm = "direct"

    def entry(self, stored: str) -> Entry:
        symbol = f"qconv2d_direct_{self.layout.value}"
        return Entry("integers/direct", symbol, (("IMAGE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(QuantizedConv2d, problem.op)
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
        op = cast(QuantizedConv2d, problem.op)
        blocks = ceil_div(math.prod(problem.output), THREADS)
        return (
            GridLaunch(
                self.entry(op.stored[0]),
                (blocks, 1, 1),
                (THREADS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), *epilogue(op), OUT),
                    *(conv_shape(conv_of(problem)), *ends(op.output_storage)),
                ),
                overlaps=True,
            ),
        )
