"""The convolution of a quantised or scaled op, and its direct kernel: the plain baseline."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.quantized import QuantizedConv2d
from r18.graph.scaled import ScaledConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import NULL, OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel

THREADS = 256


def conv_op(problem: Problem) -> Conv2d:
    """The convolution that the problem's op quantises or scales."""
    return cast(QuantizedConv2d | ScaledConv2d, problem.op).conv


def conv_of(problem: Problem) -> Problem:
    """The problem of that convolution."""
    return Problem(conv_op(problem), problem.inputs)


def residual_of(problem: Problem) -> Argument:
    """The residual; null without one."""
    return Pointer(Role.INPUT, 1) if conv_op(problem).residual else NULL


@dataclass(frozen=True, eq=False)
class ByteDirect(CudaKernel):
    """One thread per output: slow and plain. See kernels/bytes/direct.cuh."""

    algorithm = "direct"

    @abstractmethod
    def entry_of(self, problem: Problem) -> Entry:
        """The function that computes a problem."""

    @abstractmethod
    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        """The epilogue's operands: bias, multiplier, the residual's multiplier, and others."""

    def ends(self, problem: Problem) -> tuple[Argument, ...]:
        """The limits at which outputs saturate, unless the kernel has them built in."""
        return ()

    def refuses(self, problem: Problem) -> str | None:
        if math.prod(problem.op.weights()[0].shape) > MAX_ELEMENTS:
            return "indexes with 32 bits; the weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weight as OIHW for NCHW, as HWIO for NHWC."""
        weight, *others = super().pack(problem, weights)
        if self.layout is Layout.NHWC:
            weight = np.ascontiguousarray(weight.transpose(2, 3, 1, 0))
        return weight, *others

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        bias, multiplier, *others = self.factors(problem)
        return (
            GridLaunch(
                self.entry_of(problem),
                (ceil_div(math.prod(problem.output), THREADS), 1, 1),
                (THREADS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), bias, multiplier, residual_of(problem), *others),
                    *(OUT, conv_shape(conv_of(problem)), *self.ends(problem)),
                ),
                overlaps=True,
            ),
        )
