"""The contract, C++ byte types and epilogue operands shared by the kernels of quantised ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout
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
    """The lowest and highest value of a storage format, at which outputs saturate."""
    limits = np.iinfo(storage)
    return np.int32(limits.min), np.int32(limits.max)


def factors(op: QuantizedConv2d) -> tuple[Argument, ...]:
    """The epilogue's operands, in the order of the kernel's parameters.

    Bias (O,) in int32, multiplier (O,) in float32, the address of the residual's multiplier, null
    without a residual, and whether the residual is int8. Weights are in the op's order.
    """
    residual = op.conv.residual
    return (
        Pointer(Role.WEIGHT, 1),
        Pointer(Role.WEIGHT, 2),
        Pointer(Role.WEIGHT, 3) if residual else NULL,
        np.int32(residual and op.stored[1] == "int8"),
    )


def epilogue(op: QuantizedConv2d) -> tuple[Argument, ...]:
    """The arguments that `Epilogue` of kernels/integers/epilogue.cuh begins with, in its order:
    `factors`, with the residual behind the multiplier.
    """
    bias, multiplier, *others = factors(op)
    residual = Pointer(Role.INPUT, 1) if op.conv.residual else NULL
    return bias, multiplier, residual, *others


__all__ = ["BYTES", "IntegerKernel", "ends", "epilogue", "factors"]
