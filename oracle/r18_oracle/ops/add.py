"""Add: a + b of equal shapes, with a ReLU or without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Kernel
from r18.graph.ops import Add, Problem
from r18_oracle.generate.sizes import FLAT, Sizes, along_flat, any_shape
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Tensors, shape_of


class AddSpec(OpSpec[Add]):
    op = Add
    algorithms = ("elementwise",)

    def reference(self, op: Add, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        y = inputs[0] + inputs[1]
        return F.relu(y) if op.relu else y

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        for op in (Add(), Add(relu=True)):
            for shape in FLAT:
                yield Problem(op, (shape, shape))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_flat(size):
            yield Problem(Add(), (shape, shape))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        yield problem
        yield from self.plainer(problem)

    def plainer(self, problem: Problem) -> Iterator[Problem]:
        """The problem without the ReLU."""
        assert isinstance(problem.op, Add)
        if problem.op.relu:
            yield Problem(Add(), problem.inputs)

    def rebuild(self, op: Add, numbers: Numbers) -> Problem:
        shape = shape_of(numbers)
        return Problem(Add(relu=bool(numbers["relu"])), (shape, shape))

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        return (inputs[0] + 100.0, inputs[1] - 100.0), weights


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    shape = draw(any_shape(sizes, most))
    return Problem(Add(relu=draw(st.booleans())), (shape, shape))


SPEC = AddSpec()
