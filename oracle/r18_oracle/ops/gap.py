"""Global average pooling: the mean over height and width."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from r18.backend import Kernel
from r18.graph.ops import GlobalAvgPool, Problem
from r18_oracle.generate.sizes import BEYOND_GRID, Sizes, along_images, images
from r18_oracle.ops.spec import OpSpec, Tensors


class GlobalAvgPoolSpec(OpSpec[GlobalAvgPool]):
    op = GlobalAvgPool
    algorithms = ("mean",)

    def reference(self, op: GlobalAvgPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0].sum(dim=(2, 3)) / (inputs[0].shape[2] * inputs[0].shape[3])

    def pytorch(self, op: GlobalAvgPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0].mean(dim=(2, 3))

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        for shape in ((2, 3, 5, 7), (2, 3, 1, 1), (3, 2, 8, 4), (1, 65, 1, 9)):
            yield Problem(GlobalAvgPool(), (shape,))

    def many(self) -> Iterator[Problem]:
        yield Problem(GlobalAvgPool(), ((1, BEYOND_GRID, 1, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_images(size):
            yield Problem(GlobalAvgPool(), (shape,))

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Whether results are exact: only where the divisor is a power of two."""
        count = self.terms(problem)
        return algorithm == "mean" and count & (count - 1) == 0

    def terms(self, problem: Problem) -> int:
        return math.prod(problem.inputs[0][2:])


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    return Problem(GlobalAvgPool(), (draw(images(sizes, most)),))


SPEC = GlobalAvgPoolSpec()
