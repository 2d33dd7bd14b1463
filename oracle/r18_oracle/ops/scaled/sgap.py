"""Global average pooling of e4m3 numbers, to means in float32."""

from __future__ import annotations

import torch

from r18.graph.ops import GlobalAvgPool, Problem
from r18.graph.scaled import ScaledGlobalAvgPool
from r18_oracle.ops import gap
from r18_oracle.ops.scaled.spec import ScaledSpec
from r18_oracle.ops.spec import Numbers, Tensors


class ScaledGlobalAvgPoolSpec(ScaledSpec[ScaledGlobalAvgPool]):
    op = ScaledGlobalAvgPool
    algorithms = ("mean",)
    inner = gap.SPEC
    indexed = False
    outputs = ("float32",)

    def part(self, op: ScaledGlobalAvgPool) -> GlobalAvgPool:
        return GlobalAvgPool()

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        return Problem(ScaledGlobalAvgPool(), problem.inputs)

    def reference(self, op: ScaledGlobalAvgPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return gap.SPEC.reference(GlobalAvgPool(), inputs, weights)

    def exact(self, problem: Problem, algorithm: str) -> bool:
        return gap.SPEC.exact(problem, algorithm)

    def terms(self, problem: Problem) -> int:
        return gap.SPEC.terms(problem)


SPEC = ScaledGlobalAvgPoolSpec()
