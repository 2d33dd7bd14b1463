"""Linear: x · wᵀ + bias; and MatMul, the same without a bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Array, Kernel
from r18.graph.ops import Linear, MatMul, Problem, Shape
from r18.runtime.arena import aligned
from r18_oracle.generate.sizes import BATCHES, BEYOND_GRID, MULTIPLES, Sizes, along, extents
from r18_oracle.ops.spec import Arrays, Numbers, Rng, SumSpec, Tensors, pick


class LinearSpec(SumSpec[Linear]):
    op = Linear
    algorithms = ("sum",)

    def reference(self, op: Linear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return self.sums(op, inputs, weights) + weights[1]

    def pytorch(self, op: Linear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return F.linear(inputs[0], weights[0], weights[1])

    def sums(self, op: Linear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0] @ weights[0].T

    def depth(self, op: Linear) -> int:
        return op.in_features

    def addends(self, op: Linear, inputs: Arrays, weights: Arrays) -> Arrays:
        return (weights[1],)

    def window_sum(self, op: Linear, x: Array) -> Array:
        """Shape (N, 1)."""
        total: Array = x.sum(axis=1, keepdims=True)
        return total

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most, macs)

    def corners(self) -> Iterator[Problem]:
        for n, features, out in ((3, 17, 13), (1, 4097, 3), (5, 1, 1), (2, 3, 1021)):
            yield Problem(Linear(features, out), ((n, features),))
        # A transposed operand has the right shape only where extents are equal.
        for extent in (3, 64):
            yield Problem(Linear(extent, extent), ((extent, extent),))

    def many(self) -> Iterator[Problem]:
        yield Problem(Linear(1, BEYOND_GRID), ((1, 1),))
        yield Problem(Linear(1, 1), ((BEYOND_GRID, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for n, k, o in along(size, 2, 3, 2, full=(0, 2)):
            yield Problem(Linear(k, o), ((n, k),))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        """Features rounded up to what a kernel may require."""
        op = problem.op
        assert isinstance(op, Linear)
        for multiple in MULTIPLES:
            k, o = aligned(op.in_features, multiple), aligned(op.out_features, multiple)
            yield Problem(Linear(k, o), ((problem.batch, k),))

    def numbers(self, problem: Problem) -> Numbers:
        (n, k), o = problem.inputs[0], problem.output[1]
        return {"n": n, "k": k, "o": o}

    def rebuild(self, op: Linear, numbers: Numbers) -> Problem:
        return Problem(Linear(numbers["k"], numbers["o"]), ((numbers["n"], numbers["k"]),))

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        n, o = pick(rng, problem.output)
        (k,) = pick(rng, problem.inputs[0][1:])
        return (n, k), (o, k)


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    wide = sizes.also(10, 127, 512, 1000)
    axes = {"n": BATCHES, "k": wide, "o": wide}
    drawn = draw(extents(axes, [(macs, "nko"), (most, "nk"), (most, "no")]))
    return Problem(Linear(drawn["k"], drawn["o"]), ((drawn["n"], drawn["k"]),))


SPEC = LinearSpec()


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
        """Shape (N, 1)."""
        return SPEC.window_sum(Linear(op.in_features, op.out_features), x)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return SPEC.draw(kernel, most, macs).map(_without_bias)

    def corners(self) -> Iterator[Problem]:
        yield from map(_without_bias, SPEC.corners())

    def many(self) -> Iterator[Problem]:
        yield from map(_without_bias, SPEC.many())

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from map(_without_bias, SPEC.crossings(kernel, size))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        with_bias = Problem(Linear(*_features(problem)), problem.inputs)
        yield from map(_without_bias, SPEC.nearby(with_bias))

    def numbers(self, problem: Problem) -> Numbers:
        return SPEC.numbers(problem)

    def rebuild(self, op: MatMul, numbers: Numbers) -> Problem:
        return Problem(MatMul(numbers["k"], numbers["o"]), ((numbers["n"], numbers["k"]),))

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        return SPEC.meeting(problem, rng)


def _features(problem: Problem) -> tuple[int, int]:
    op = problem.op
    assert isinstance(op, Linear | MatMul)
    return op.in_features, op.out_features


def _without_bias(problem: Problem) -> Problem:
    return Problem(MatMul(*_features(problem)), problem.inputs)


MATMUL_SPEC = MatMulSpec()
