"""Global pooling of integers: their sum, requantised (`r18_oracle.ops.integers.requantize`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import GlobalAvgPool, Problem
from r18.graph.quantized import QuantizedGlobalAvgPool
from r18_oracle.ops import gap
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.requantize import RANGES, Sums, explained, requantized
from r18_oracle.ops.integers.spec import QuantizedSpec, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors

EDGES = 6
"""Variants of edges: ties; the largest sums; four times a tie to the last bit."""


class QuantizedGlobalAvgPoolSpec(QuantizedSpec[QuantizedGlobalAvgPool]):
    op = QuantizedGlobalAvgPool
    inner = gap.SPEC
    indexed = False

    def part(self, op: QuantizedGlobalAvgPool) -> GlobalAvgPool:
        return GlobalAvgPool()

    def settings(self, op: QuantizedGlobalAvgPool) -> Numbers:
        return {"signed": int(op.stored == "int8")}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        return Problem(QuantizedGlobalAvgPool(stored(settings)), problem.inputs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        # Sums that leave int16, and sums that float32 does not hold.
        for side in (16, 260):
            yield Problem(QuantizedGlobalAvgPool(), ((1, 2, side, side),))

    def variants(self, kind: str) -> int:
        return EDGES if kind == "edges" else 1

    def sums(self, op: QuantizedGlobalAvgPool, inputs: Tensors, weights: Tensors) -> Sums:
        total = inputs[0].long().sum(dim=(2, 3))
        return Sums(total, weights[0].float(), op.output_storage)

    def reference(
        self, op: QuantizedGlobalAvgPool, inputs: Tensors, weights: Tensors
    ) -> torch.Tensor:
        return requantized(self.sums(op, inputs, weights))

    def explain(
        self, op: QuantizedGlobalAvgPool, inputs: Tensors, weights: Tensors, got: Array
    ) -> str:
        return explained(self.sums(op, inputs, weights), got)

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizedGlobalAvgPool)
        pixels = math.prod(shape[2:])
        multiplier = rng.uniform(0.5, 1.5) / pixels
        x = integers.whole(rng, shape, op.stored)
        if kind == "positive":
            x = integers.upper(rng, shape, op.stored)
        elif kind == "wide":
            multiplier *= float(np.exp2(rng.uniform(-8, 8)))
        elif kind == "edges" and variant % EDGES == 0:  # ties, of few small integers
            x = integers.small(rng, shape, op.stored, 9)
            multiplier = float(np.exp2(rng.integers(-3, 0)))
        elif kind == "edges" and variant % EDGES == 1:  # the largest sums
            x = np.full(shape, float(rng.choice(RANGES[op.stored])))
        elif kind == "edges":  # of one sum, a tie to the last bit
            total = max(1.0, abs(float(x[0, 0].sum())))
            multiplier = (rng.integers(2, 60) + 0.5) / float(np.float32(total))
        return (x,), (np.array([multiplier], np.float32).astype(np.float64),)


SPEC = QuantizedGlobalAvgPoolSpec()
