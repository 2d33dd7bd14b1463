"""Quantised linear: sums of integers, scaled to float32 logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from r18.graph.ops import Linear, Problem
from r18.graph.quantized import LIMITS, MOST_DEPTH, QuantizedLinear
from r18_oracle.generate.sizes import BEYOND_INDEX
from r18_oracle.ops import linear
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.spec import BITS, NUMBERS, QuantizedSpec, pairwise, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors

EDGES = ("ends", "largest_sums")
"""Variants of edges: both ends of every format; the largest sums that int32 holds."""

CROSSED = Linear(17, 5)
"""An odd number of weights a row, so that packed ones end within a byte."""


class QuantizedLinearSpec(QuantizedSpec[QuantizedLinear]):
    op = QuantizedLinear
    inner = linear.SPEC
    chosen = ("signed", "narrow")

    def part(self, op: QuantizedLinear) -> Linear:
        return op.linear

    def settings(self, op: QuantizedLinear) -> Numbers:
        return {"signed": int(op.stored == "int8"), "narrow": BITS.index(op.bits)}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, Linear)
        op = QuantizedLinear(problem.op, stored(settings), BITS[settings["narrow"]])
        return Problem(op, problem.inputs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        # Each storage format with each number of bits.
        for settings in pairwise({name: NUMBERS[name] for name in self.chosen}):
            yield self.quantized(Problem(CROSSED, ((3, CROSSED.in_features),)), settings)

    def many(self) -> Iterator[Problem]:
        yield from super().many()
        # The longest sum that int32 holds whatever its terms are.
        yield Problem(QuantizedLinear(Linear(MOST_DEPTH, 2 + integers.FULL)), ((1, MOST_DEPTH),))

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # The inputs are small enough, and the weights are not.
        yield Problem(QuantizedLinear(Linear(1024, BEYOND_INDEX // 1024)), ((1, 1024),))

    def variants(self, kind: str) -> int:
        return len(EDGES) if kind == "edges" else 1

    def reference(self, op: QuantizedLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        """float64 adds integers exactly in any order; the bias is added as an integer."""
        weight, bias, multiplier = weights
        total = linear.SPEC.sums(op.linear, inputs, (weight,)).long() + bias.long()
        return (total.float() * multiplier.float()).double()

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizedLinear)
        outputs, filters = (op.linear.out_features,), op.weights()[0].shape
        depth, limit = op.linear.in_features, LIMITS[op.bits]
        room = integers.room(depth, op.bits)
        if kind == "impulse":
            x, w = integers.impulse(self, problem, rng, variant)
            return (x,), (w, np.zeros(outputs), np.ones(outputs))
        draws = {"positive": integers.upper, "edges": integers.ends}
        x = draws.get(kind, integers.whole)(rng, shape, op.stored)
        w = integers.weight(rng, filters, op.bits)
        typical = 100.0 * limit * math.sqrt(depth)
        bias = integers.biases(rng, outputs, typical)
        if kind == "positive":
            w = np.abs(w)
        elif kind == "cancelling":
            bias = -np.rint(x @ w.T).mean(axis=0).round()
        elif kind in ("wide", "edges"):
            bias = integers.biases(rng, outputs, room)
        multiplier = integers.multipliers(rng, outputs, typical)
        if kind == "edges" and EDGES[variant % len(EDGES)] == "largest_sums":
            x, w, bias = integers.largest(
                rng, shape, op.stored, op.weights()[0], op.bits, both_signs=True
            )
        if kind == "wide":
            multiplier = (multiplier * np.exp2(rng.uniform(-60, 60, outputs))).astype(np.float32)
        return (x,), (w, bias, multiplier.astype(np.float64))


SPEC = QuantizedLinearSpec()
