"""The precision, contracts and epilogue operands shared by the kernels of scaled ops."""

from __future__ import annotations

from dataclasses import dataclass

from r18.backend import RoundingContract
from r18.graph.ops import Layout
from r18.graph.precision import FP8, Precision
from r18.graph.scaled import ScaledConv2d
from r18_cupy.cuda.launch import NULL, Argument, Pointer, Role
from r18_cupy.kernel import CudaKernel

FRACTION = 13
"""Bits of fraction that Hopper's tensor cores keep of a sum of e4m3 products."""
WIDE = "float32"


@dataclass(frozen=True, eq=False)
class Float8Kernel(CudaKernel):
    """A kernel of a scaled op, or of an op that moves e4m3 numbers."""

    precision: Precision = FP8
    layout: Layout = Layout.NCHW


def exact() -> RoundingContract:
    """The contract of kernels that move or compare numbers."""
    return RoundingContract("exact", FP8.accumulate, FP8.storage)


def plain_sum(output: str = FP8.storage) -> RoundingContract:
    """The contract of kernels that sum in float32."""
    return RoundingContract("scaled_sum", FP8.accumulate, output)


def narrow_sum(promoted: int) -> RoundingContract:
    """The contract of sums on tensor cores. promoted: products until a sum is added to one in
    float32; 0: never."""
    return RoundingContract(
        "scaled_sum",
        FP8.accumulate,
        FP8.storage,
        truncates=True,
        promoted=promoted,
        fraction=FRACTION,
    )


def factors(op: ScaledConv2d) -> tuple[Argument, Argument, Argument]:
    """Bias, multiplier, and the residual's multiplier, null without one."""
    more = Pointer(Role.WEIGHT, 3) if op.conv.residual else NULL
    return Pointer(Role.WEIGHT, 1), Pointer(Role.WEIGHT, 2), more


__all__ = [
    "FRACTION",
    "WIDE",
    "Float8Kernel",
    "exact",
    "factors",
    "narrow_sum",
    "plain_sum",
]
