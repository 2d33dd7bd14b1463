"""Relayout of integers, and of a quantised network's images in float32: values are moved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from r18.graph.ops import Problem, Relayout
from r18.graph.quantized import QuantizedRelayout
from r18_oracle.ops import relayout
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.spec import QuantizedSpec, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors


class QuantizedRelayoutSpec(QuantizedSpec[QuantizedRelayout]):
    op = QuantizedRelayout
    inner = relayout.SPEC
    shuffles = True
    chosen = ("signed", "wide")

    def part(self, op: QuantizedRelayout) -> Relayout:
        return Relayout(op.source, op.target)

    def settings(self, op: QuantizedRelayout) -> Numbers:
        return {"signed": int(op.stored == "int8"), "wide": int(op.stored == "float32")}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, Relayout)
        kept = "float32" if settings.get("wide") else stored(settings)
        op = QuantizedRelayout(problem.op.source, problem.op.target, kept)
        return Problem(op, problem.inputs)

    def corners(self) -> Iterator[Problem]:
        """Each change of layout in each storage format."""
        for problem in self.inner.corners():
            for signed, wide in ((0, 0), (1, 0), (0, 1)):
                yield self.quantized(problem, {"signed": signed, "wide": wide})

    def reference(self, op: QuantizedRelayout, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0].clone()

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizedRelayout)
        if kind == "impulse":
            return (integers.counted(shape),), ()
        if op.stored != "float32":
            draws = {"positive": integers.upper, "edges": integers.ends}
            return (draws.get(kind, integers.whole)(rng, shape, op.stored),), ()
        x = rng.standard_normal(shape)
        if kind == "wide":
            x *= np.exp2(rng.uniform(-100, 100, shape))
        elif kind == "edges":
            x = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-149, 1.0], shape)
        return (x,), ()


SPEC = QuantizedRelayoutSpec()
