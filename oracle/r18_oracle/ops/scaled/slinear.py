"""A linear layer of float32 means and e4m3 weights, to float32 logits."""

from __future__ import annotations

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Linear, Problem
from r18.graph.scaled import ScaledLinear
from r18_oracle.ops import linear
from r18_oracle.ops.scaled.sconv2d import impulse
from r18_oracle.ops.scaled.spec import ScaledSpec, multipliers, powers
from r18_oracle.ops.spec import Arrays, Draw, Numbers, Rng, SumSpec, Tensors


class ScaledLinearSpec(ScaledSpec[ScaledLinear], SumSpec[ScaledLinear]):
    op = ScaledLinear
    inner = linear.SPEC
    outputs = ("float32",)

    def part(self, op: ScaledLinear) -> Linear:
        return op.linear

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, Linear)
        return Problem(ScaledLinear(problem.op), problem.inputs)

    def depth(self, op: ScaledLinear) -> int:
        return op.linear.in_features

    def reference(self, op: ScaledLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        _, bias, multiplier = weights
        return self.sums(op, inputs, weights) * multiplier + bias

    def sums(self, op: ScaledLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0] @ weights[0].T

    def addends(self, op: ScaledLinear, inputs: Arrays, weights: Arrays) -> Arrays:
        return (weights[1],)

    def window_sum(self, op: ScaledLinear, x: Array) -> Array:
        return linear.SPEC.window_sum(op.linear, x)

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        op = problem.op
        assert isinstance(op, ScaledLinear)
        weight, bias, multiplier = op.weights()
        factors = multipliers(rng, multiplier.shape, op.linear.in_features)
        return draw(weight.shape), draw(bias.shape), factors

    def exact_inputs(
        self, op: ScaledLinear, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        weight, bias, multiplier = weights
        return tuple(inputs), (weight, bias, powers(rng, multiplier.shape))

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        if kind != "impulse":
            return None
        features, *weights = impulse(self, problem, rng, variant)
        return (features,), tuple(weights)

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """A bias that nearly cancels the sums."""
        weight, _, multiplier = weights
        total = (inputs[0] @ weight.T) * multiplier
        bias: Array = -np.asarray(total.mean(axis=0), np.float32).astype(np.float64)
        return inputs, (weight, bias, multiplier)


SPEC = ScaledLinearSpec()
