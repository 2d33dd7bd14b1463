"""ReLU: max(x, 0) on any shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Kernel
from r18.graph.ops import Problem, ReLU
from r18_oracle.generate.sizes import FLAT, Sizes, along_flat, any_shape
from r18_oracle.ops.spec import OpSpec, Tensors


class ReLUSpec(OpSpec[ReLU]):
    op = ReLU
    algorithms = ("exact",)

    def reference(self, op: ReLU, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return F.relu(inputs[0])

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        for shape in FLAT:
            yield Problem(ReLU(), (shape,))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_flat(size):
            yield Problem(ReLU(), (shape,))


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    return Problem(ReLU(), (draw(any_shape(sizes, most)),))


SPEC = ReLUSpec()
