"""Quantised linear: sums of integers, scaled to float32 logits."""

from __future__ import annotations

import math

import numpy as np
import torch

from r18.graph.ops import Linear, Problem
from r18.graph.quantized import LIMITS, QuantizedLinear
from r18_oracle.ops import linear
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.spec import BITS, QuantizedSpec, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors


class QuantizedLinearSpec(QuantizedSpec[QuantizedLinear]):
    op = QuantizedLinear
    inner = linear.SPEC

    def part(self, op: QuantizedLinear) -> Linear:
        return op.linear

    def settings(self, op: QuantizedLinear) -> Numbers:
        return {"signed": int(op.stored == "int8"), "narrow": BITS.index(op.bits)}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, Linear)
        op = QuantizedLinear(problem.op, stored(settings), BITS[settings["narrow"]])
        return Problem(op, problem.inputs)

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
            x, w = np.zeros(shape), np.zeros(filters)
            met = self.meeting(problem, rng)
            assert met is not None
            x[met[0]], w[met[1]] = 3, 1
            if variant % 3 == 1:
                x = integers.counted(shape)
            elif variant % 3 == 2:
                w = (integers.counted(filters, 39) - 20).clip(-limit, limit)
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
        if kind == "wide":
            multiplier = (multiplier * np.exp2(rng.uniform(-60, 60, outputs))).astype(np.float32)
        return (x,), (w, bias, multiplier.astype(np.float64))


SPEC = QuantizedLinearSpec()
