"""Softmax over the last axis of (N, F)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from r18.backend import Kernel
from r18.graph.ops import Problem, Softmax
from r18_oracle.generate.sizes import BATCHES, BEYOND_GRID, Sizes, along_flat, extents
from r18_oracle.ops.spec import Arrays, OpSpec, Rng, Tensors


class SoftmaxSpec(OpSpec[Softmax]):
    op = Softmax
    algorithms = ("softmax",)

    def reference(self, op: Softmax, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return torch.softmax(inputs[0], dim=1)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        for shape in ((3, 1), (2, 1021), (7, 3), (3, 3)):  # the last: along the wrong axis
            yield Problem(Softmax(), (shape,))

    def many(self) -> Iterator[Problem]:
        yield Problem(Softmax(), ((BEYOND_GRID, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_flat(size):
            yield Problem(Softmax(), (shape,))

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """Values around 1000, whose exp overflows in every format."""
        return (inputs[0] + 1000.0,), weights

    def wide(
        self, problem: Problem, inputs: Arrays, weights: Arrays, rng: Rng
    ) -> tuple[Arrays, Arrays]:
        """Values so far apart that exp overflows in float32 unless the largest value is
        subtracted."""
        return (rng.standard_normal(problem.inputs[0]) * 100.0,), weights


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    axes = {"n": BATCHES, "k": sizes.also(10, 127, 1000)}
    drawn = draw(extents(axes, [(most, "nk")]))
    return Problem(Softmax(), ((drawn["n"], drawn["k"]),))


SPEC = SoftmaxSpec()
