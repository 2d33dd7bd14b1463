"""The shape struct, epilogue operands and rounding contract shared by all convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import Precision
from r18_cupy.cuda.launch import NULL, Argument, Pointer, Role, struct
from r18_cupy.kernel import CudaKernel

# Mirrors `ConvShape` in kernels/common/epilogue.cuh.
CONV_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "n",
            "c",
            "h",
            "w",
            "o",
            "oh",
            "ow",
            "kh",
            "kw",
            "sh",
            "sw",
            "ph",
            "pw",
            "relu",
        )
    ]
)


def conv_shape(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """The problem as the kernels' `ConvShape` argument."""
    op = cast(Conv2d, problem.op)
    n, c, h, w = problem.inputs[0]
    _, o, oh, ow = problem.output
    fields = (n, c, h, w, o, oh, ow, *op.kernel_size, *op.stride, *op.padding, int(op.relu))
    return struct(np.array([fields], CONV_SHAPE))


def bias_and_residual(op: Conv2d) -> tuple[Argument, Argument]:
    """The epilogue's two pointers, null if the op has none."""
    return (
        Pointer(Role.WEIGHT, 1) if op.bias else NULL,
        Pointer(Role.INPUT, 1) if op.residual else NULL,
    )


def output_format(precision: Precision) -> str:
    """The format that a convolution rounds its outputs to: tf32 where the next one multiplies in
    it.

    Tensor cores ignore what tf32 does not hold of an activation. That loss leans to zero and adds
    up from layer to layer; rounded once where it is stored, the activation loses nothing more.
    """
    return "tf32" if precision.multiply == "tf32" else precision.storage


@dataclass(frozen=True, eq=False)
class ConvKernel(CudaKernel):
    """A convolution that accumulates in float32, in any order, and rounds once."""

    op = Conv2d

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("sum", self.precision.accumulate, output_format(self.precision))
