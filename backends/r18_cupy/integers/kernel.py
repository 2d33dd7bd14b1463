"""What kernels of quantised ops share: contract, bytes as C++ types, operands of the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout, Problem
from r18.graph.precision import INT8, Precision
from r18.graph.quantized import QuantizedConv2d
from r18_cupy.cuda.launch import NULL, Argument, Pointer, Role
from r18_cupy.kernel import CudaKernel

BYTES = {"uint8": "unsigned char", "int8": "signed char"}
"""C++ type of each storage format of quantised activations."""


@dataclass(frozen=True, eq=False)
class IntegerKernel(CudaKernel):
    """A kernel of a quantised op."""

    precision: Precision = INT8
    layout: Layout = Layout.NCHW

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("integer", INT8.accumulate, INT8.storage)


def ends(storage: str) -> tuple[np.int32, np.int32]:
    """What values of a storage format saturate at."""
    limits = np.iinfo(storage)
    return np.int32(limits.min), np.int32(limits.max)


def epilogue(op: QuantizedConv2d) -> tuple[Argument, ...]:
    """The arguments that `Epilogue` of kernels/integers/epilogue.cuh begins with, in its order.

    Bias (O,) in int32, multiplier (O,) in float32, residual and the address of its multiplier, and
    whether the residual is int8. Without a residual both pointers are null. Weights are in the
    op's order.
    """
    residual = op.conv.residual
    return (
        Pointer(Role.WEIGHT, 1),
        Pointer(Role.WEIGHT, 2),
        Pointer(Role.INPUT, 1) if residual else NULL,
        Pointer(Role.WEIGHT, 3) if residual else NULL,
        np.int32(residual and op.stored[1] == "int8"),
    )


def conv_of(problem: Problem) -> Problem:
    """The problem of the convolution that a `QuantizedConv2d` quantises."""
    assert isinstance(problem.op, QuantizedConv2d)  # `refusal` has checked it
    return Problem(problem.op.conv, problem.inputs)


__all__ = ["BYTES", "IntegerKernel", "conv_of", "ends", "epilogue"]
