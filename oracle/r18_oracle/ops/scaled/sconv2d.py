"""A convolution of e4m3 numbers with scales, stored in e4m3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.scaled import ScaledConv2d
from r18_oracle.ops import conv2d
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.scaled.spec import ScaledSpec, counted, multipliers, powers, saturated
from r18_oracle.ops.spec import Arrays, Draw, Numbers, Rng, SumSpec, Tensors


class ScaledConv2dSpec(ScaledSpec[ScaledConv2d], SumSpec[ScaledConv2d]):
    op = ScaledConv2d
    inner = conv2d.SPEC

    def part(self, op: ScaledConv2d) -> Conv2d:
        return op.conv

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        conv = problem.op
        assert isinstance(conv, Conv2d)
        return Problem(ScaledConv2d(replace(conv, bias=True)), problem.inputs)

    def depth(self, op: ScaledConv2d) -> int:
        return op.conv.depth

    # -- what it computes ----------------------------------------------------------------------

    def reference(self, op: ScaledConv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        _, bias, multiplier, *more = weights
        y = self.sums(op, inputs, weights) * multiplier[:, None, None] + bias[:, None, None]
        if op.conv.residual:
            y = y + inputs[1] * more[0]
        return saturated(torch.relu(y) if op.conv.relu else y)

    def sums(self, op: ScaledConv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return conv2d.SPEC.sums(op.conv, inputs[:1], weights[:1])

    def addends(self, op: ScaledConv2d, inputs: Arrays, weights: Arrays) -> Arrays:
        """Bias and residual in units of the output."""
        bias = weights[1][:, None, None]
        return (bias, inputs[1] * weights[3][0]) if op.conv.residual else (bias,)

    def window_sum(self, op: ScaledConv2d, x: Array) -> Array:
        return conv2d.SPEC.window_sum(op.conv, x)

    # -- inputs --------------------------------------------------------------------------------

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        """Weights as large as pixels: e4m3 has few numbers that are as small as He's."""
        op = problem.op
        assert isinstance(op, ScaledConv2d)
        weight, bias, multiplier, *residual = op.weights()
        found = (
            draw(weight.shape),
            draw(bias.shape) * np.exp2(rng.uniform(-1, 3, bias.shape)),
            multipliers(rng, multiplier.shape, op.conv.depth),
        )
        return (*found, *(np.exp2(rng.uniform(-2, 3, one.shape)) for one in residual))

    def exact_inputs(
        self, op: ScaledConv2d, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        weight, bias, *factors = weights
        return tuple(inputs), (weight, bias, *(powers(rng, one.shape) for one in factors))

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Impulses, whose multipliers are 1: see `r18_oracle.generate.inputs`."""
        if kind != "impulse":
            return None
        pixels, weight, *more = impulse(self, problem, rng, variant)
        residual = [np.zeros(shape) for shape in problem.inputs[1:]]
        return (pixels, *residual), (weight, *more)


def impulse(spec: ScaledSpec[Any], problem: Problem, rng: Rng, variant: int) -> Arrays:
    """Impulses as for integers, in numbers of the format, and the other weights: the pixels
    first."""
    _, *others = problem.op.weights()
    x, w = integers.impulse(spec, problem, rng, variant, counted, lambda one: counted(one.shape))
    rest = (np.ones(one.shape) if one.positive else np.zeros(one.shape) for one in others)
    return x, w, *rest


SPEC = ScaledConv2dSpec()
