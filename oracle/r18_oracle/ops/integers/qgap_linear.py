"""Global pooling of integers and the linear layer of its means, as one op."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import AvgPoolLinear, Problem, parts_of
from r18.graph.quantized import QuantizedAvgPoolLinear, QuantizedGlobalAvgPool, QuantizedLinear
from r18_oracle.ops.integers import qgap, qlinear
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.spec import NUMBERS, QuantizedSpec, pairwise
from r18_oracle.ops.pairs import gap_linear
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors

EDGES = (*qgap.EDGES, "largest_sums")
"""Variants of edges: those of the pooling; then the largest sums that int32 holds, of means that
saturate. The linear layer's own edges take turns with them."""


class QuantizedAvgPoolLinearSpec(QuantizedSpec[QuantizedAvgPoolLinear]):
    op = QuantizedAvgPoolLinear
    inner = gap_linear.SPEC
    chosen = ("signed", "narrow")

    def part(self, op: QuantizedAvgPoolLinear) -> AvgPoolLinear:
        return AvgPoolLinear(op.linear.linear)

    def settings(self, op: QuantizedAvgPoolLinear) -> Numbers:
        return qlinear.SPEC.settings(op.linear)

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        pooling, layer = parts_of(problem)
        gap = qgap.SPEC.quantized(pooling, settings).op
        linear = qlinear.SPEC.quantized(layer, settings).op
        assert isinstance(gap, QuantizedGlobalAvgPool)
        assert isinstance(linear, QuantizedLinear)
        return Problem(QuantizedAvgPoolLinear(gap, linear), problem.inputs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        # Each storage format with each number of bits, of whole vectors of bytes and of others.
        for settings in pairwise({name: NUMBERS[name] for name in self.chosen}):
            for numbers in (
                {"n": 3, "c": 17, "h": 3, "w": 2, "o": 5},
                {"n": 2, "c": 48, "h": 3, "w": 5, "o": 9},
            ):
                plain = self.inner.rebuild(AvgPoolLinear(qlinear.CROSSED), numbers)
                yield self.quantized(plain, settings)

    def many(self) -> Iterator[Problem]:
        yield from super().many()
        # Sums that float32 does not hold, which takes 65,794 bytes.
        large = {"n": 1, "c": 1, "h": 260, "w": 260, "o": 2}
        plain = self.inner.rebuild(AvgPoolLinear(qlinear.CROSSED), large)
        yield self.quantized(plain, {"signed": 0, "narrow": 0})

    # -- what it computes ----------------------------------------------------------------------

    def reference(
        self, op: QuantizedAvgPoolLinear, inputs: Tensors, weights: Tensors
    ) -> torch.Tensor:
        *of_linear, multiplier = weights
        means = qgap.SPEC.reference(op.gap, inputs, (multiplier,))
        return qlinear.SPEC.reference(op.linear, (means,), tuple(of_linear))

    # -- inputs --------------------------------------------------------------------------------

    def variants(self, kind: str) -> int:
        return len(EDGES) if kind == "edges" else 1

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """The pooling's inputs, and weights for the means that they have."""
        op = problem.op
        assert isinstance(op, QuantizedAvgPoolLinear)
        pooling, layer = parts_of(problem)
        pixels = math.prod(problem.inputs[0][2:])
        outputs = (op.linear.linear.out_features,)
        if kind == "impulse":
            x, w = integers.impulse(self, problem, rng, variant)
            # A single pixel must not vanish in its mean, and all of them must not saturate it.
            one = np.float32(1 / pixels if variant % 3 == 1 else 1)
            return (x,), (w, np.zeros(outputs), np.ones(outputs), _one(one))
        drawn = qlinear.SPEC.given(layer, kind, rng, variant)
        assert drawn is not None
        edge = EDGES[variant % len(EDGES)] if kind == "edges" else ""
        if edge == "largest_sums":
            x, w, bias = integers.largest(
                rng,
                problem.inputs[0],
                op.gap.stored,
                op.weights()[0],
                op.linear.bits,
                both_signs=True,
            )
            return (x,), (w, bias, drawn[1][2], _one(np.float32(2 / pixels)))
        of_gap = qgap.SPEC.given(pooling, kind, rng, variant % len(EDGES))
        assert of_gap is not None
        (x,), (multiplier,) = of_gap
        w, bias, factors = drawn[1]
        if kind == "cancelling":
            given = torch.from_numpy(x), torch.from_numpy(multiplier)
            means = qgap.SPEC.reference(op.gap, given[:1], given[1:])
            bias = -np.rint((means.numpy() @ w.T).mean(axis=0))
        return (x,), (w, bias, factors, multiplier)


def _one(number: np.float32) -> Array:
    return np.array([number], np.float64)


SPEC = QuantizedAvgPoolLinearSpec()
