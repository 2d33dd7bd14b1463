"""Linear layers with `wgmma`: a 1×1 convolution with one pixel per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Linear, Problem
from r18.graph.precision import BF16, FP16, TF32
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import GridLaunch
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.kernel import CudaKernel


@dataclass(frozen=True, eq=False)
class LinearWgmma(CudaKernel):
    """Samples are pixels, features are channels; see implicit_gemm_wgmma.py."""

    op = Linear
    algorithm = "wgmma"
    batch_invariant: ClassVar[bool] = False
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    @property
    def product(self) -> ImplicitGemmWgmma:
        """The convolution that computes it; in tf32 its results stay in float32."""
        return ImplicitGemmWgmma(self.precision, feeds=False)

    @property
    def contract(self) -> RoundingContract:
        return self.product.contract

    @property
    def edges(self) -> tuple[int, ...]:
        return self.product.edges

    def entries(self) -> tuple[Entry, ...]:
        return self.product.entries()

    def refuses(self, problem: Problem) -> str | None:
        return self.product.refusal(as_convolution(problem))

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, bias = weights
        return self.product.pack(as_convolution(problem), (weight[:, :, None, None], bias))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        return self.product.launches(as_convolution(problem))


def as_convolution(problem: Problem) -> Problem:
    """The equivalent 1×1 convolution over images of one pixel."""
    op = cast(Linear, problem.op)
    conv = Conv2d(op.in_features, op.out_features, (1, 1), bias=True)
    return Problem(conv, ((problem.batch, op.in_features, 1, 1),))


def linear_wgmma_kernels() -> tuple[LinearWgmma, ...]:
    return tuple(LinearWgmma(precision) for precision in (FP16, BF16, TF32))
