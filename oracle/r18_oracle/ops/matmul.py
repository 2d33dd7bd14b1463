"""MatMul: x · wᵀ, a linear layer without its bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Linear, MatMul, Problem, Shape
from r18_oracle.ops import linear
from r18_oracle.ops.spec import Arrays, Numbers, Rng, SumSpec, Tensors

WITH_BIAS = linear.SPEC
"""The layer with a bias: its problems are of the same shapes."""


class MatMulSpec(SumSpec[MatMul]):
    op = MatMul
    algorithms = ("sum",)

    def reference(self, op: MatMul, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return self.sums(op, inputs, weights)

    def sums(self, op: MatMul, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0] @ weights[0].T

    def depth(self, op: MatMul) -> int:
        return op.in_features

    def addends(self, op: MatMul, inputs: Arrays, weights: Arrays) -> Arrays:
        return ()

    def window_sum(self, op: MatMul, x: Array) -> Array:
        """(N, 1)."""
        return WITH_BIAS.window_sum(Linear(op.in_features, op.out_features), x)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return WITH_BIAS.draw(kernel, most, macs).map(_without_bias)

    def corners(self) -> Iterator[Problem]:
        yield from map(_without_bias, WITH_BIAS.corners())

    def many(self) -> Iterator[Problem]:
        yield from map(_without_bias, WITH_BIAS.many())

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from map(_without_bias, WITH_BIAS.crossings(kernel, size))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        with_bias = Problem(Linear(*_features(problem)), problem.inputs)
        yield from map(_without_bias, WITH_BIAS.nearby(with_bias))

    def numbers(self, problem: Problem) -> Numbers:
        return WITH_BIAS.numbers(problem)

    def rebuild(self, op: MatMul, numbers: Numbers) -> Problem:
        return Problem(MatMul(numbers["k"], numbers["o"]), ((numbers["n"], numbers["k"]),))

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        return WITH_BIAS.meeting(problem, rng)


def _features(problem: Problem) -> tuple[int, int]:
    op = problem.op
    assert isinstance(op, Linear | MatMul)
    return op.in_features, op.out_features


def _without_bias(problem: Problem) -> Problem:
    return Problem(MatMul(*_features(problem)), problem.inputs)


SPEC = MatMulSpec()
