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

EDGES = ("ties", "largest_to_odd", "largest_to_even", *4 * ("near_tie",))
"""Variants of edges: ties; the largest sum, to the last bit a tie with the odd integer above the
even one, or the even one above; four times such a tie of any sum."""


class QuantizedGlobalAvgPoolSpec(QuantizedSpec[QuantizedGlobalAvgPool]):
    op = QuantizedGlobalAvgPool
    inner = gap.SPEC
    indexed = False
    chosen = ("signed",)

    def part(self, op: QuantizedGlobalAvgPool) -> GlobalAvgPool:
        return GlobalAvgPool()

    def settings(self, op: QuantizedGlobalAvgPool) -> Numbers:
        return {"signed": int(op.stored == "int8")}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        return Problem(QuantizedGlobalAvgPool(stored(settings)), problem.inputs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        # Sums that leave int16.
        yield Problem(QuantizedGlobalAvgPool(), ((1, 2, 16, 16),))

    def many(self) -> Iterator[Problem]:
        yield from super().many()
        # Sums that float32 does not hold, which takes 65,794 bytes.
        yield Problem(QuantizedGlobalAvgPool(), ((1, 1, 260, 260),))

    def variants(self, kind: str) -> int:
        return len(EDGES) if kind == "edges" else 1

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
        edge = EDGES[variant % len(EDGES)] if kind == "edges" else ""
        if kind == "positive":
            x = integers.upper(rng, shape, op.stored)
        elif kind == "wide":
            multiplier *= float(np.exp2(rng.uniform(-8, 8)))
        elif edge == "ties":  # of few small integers
            x = integers.small(rng, shape, op.stored, 9)
            multiplier = float(np.exp2(rng.integers(-3, 0)))
        elif edge in ("largest_to_odd", "largest_to_even"):
            low, high = RANGES[op.stored]
            x = np.full(shape, float(low or high))
            x[:, :, 0, 0] -= 1 if high == 255 else -1  # odd, where the number of pixels is even
            multiplier = _tie(x, 2 * int(rng.integers(1, 30)) + (edge == "largest_to_even"))
        elif edge == "near_tie":
            multiplier = _tie(x, int(rng.integers(2, 60)))
        return (x,), (np.array([multiplier], np.float32).astype(np.float64),)


def _tie(x: Array, below: int) -> float:
    """A multiplier that takes the first channel's sum to a tie, exactly half above an integer."""
    total = max(1.0, abs(float(x[0, 0].sum())))
    return (below + 0.5) / float(np.float32(total))


SPEC = QuantizedGlobalAvgPoolSpec()
