"""Global pooling of e4m3 numbers and the linear layer of its float32 means, as one op."""

from __future__ import annotations

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import AvgPoolLinear, Problem, parts_of
from r18.graph.scaled import ScaledAvgPoolLinear, ScaledLinear
from r18_oracle.ops.pairs import gap_linear
from r18_oracle.ops.scaled import sgap, slinear
from r18_oracle.ops.scaled.sconv2d import impulse
from r18_oracle.ops.scaled.spec import ScaledSpec, powers
from r18_oracle.ops.spec import Arrays, Draw, Numbers, Rng, Tensors


class ScaledAvgPoolLinearSpec(ScaledSpec[ScaledAvgPoolLinear]):
    op = ScaledAvgPoolLinear
    algorithms = ("mean_sum",)
    inner = gap_linear.SPEC
    outputs = ("float32",)
    products = True

    def part(self, op: ScaledAvgPoolLinear) -> AvgPoolLinear:
        return AvgPoolLinear(op.linear.linear)

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        _, layer = parts_of(problem)
        linear = slinear.SPEC.quantized(layer, settings).op
        assert isinstance(linear, ScaledLinear)
        return Problem(ScaledAvgPoolLinear(linear), problem.inputs)

    def depth(self, op: ScaledAvgPoolLinear) -> int:
        return slinear.SPEC.depth(op.linear)

    # -- what it computes ----------------------------------------------------------------------

    def reference(self, op: ScaledAvgPoolLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        pooling, layer = op.parts
        means = sgap.SPEC.reference(pooling, inputs, ())  # type: ignore[arg-type]
        return slinear.SPEC.reference(layer, (means,), weights)  # type: ignore[arg-type]

    # -- inputs --------------------------------------------------------------------------------

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Whether results are exact: only where the divisor is a power of two, as the factors
        are."""
        return self.inner.exact(self._inside(problem), algorithm)

    def terms(self, problem: Problem) -> int:
        return self.inner.terms(problem)

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        _, layer = parts_of(problem)
        return slinear.SPEC.weights(layer, rng, draw, scale)

    def exact_inputs(
        self,
        op: ScaledAvgPoolLinear,
        inputs: list[Array],
        weights: list[Array],
        rng: Rng,
        variant: int,
    ) -> tuple[Arrays, Arrays]:
        weight, bias, multiplier = weights
        part = self.part(op)
        given = self.inner.exact_inputs(part, inputs, [weight, bias], rng, variant)
        return given[0], (*given[1], powers(rng, multiplier.shape))

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        if kind != "impulse":
            return None
        pixels, *weights = impulse(self, problem, rng, variant)
        return (pixels,), tuple(weights)

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """A bias that nearly cancels the sums of the means."""
        means = np.asarray(inputs[0].mean(axis=(2, 3)))
        return inputs, slinear.SPEC.cancelling((means,), weights)[1]


SPEC = ScaledAvgPoolLinearSpec()
