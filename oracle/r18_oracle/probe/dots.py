"""Posing dot products to a function: as a matrix product, or as convolutions of several forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, GlobalAvgPool, Linear, MatMul, Problem, Shape
from r18.runtime.launch import run_kernel
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.judge.reference import kernel_running

TERMS = 72
"""Terms of a sum with few non-zero terms: a multiple of the terms that matrix units take in one
step, and of a 3×3 window's."""
OUTPUTS = 16
"""A function may take another path for one row or column, such as a matrix-vector product."""


def spread(values: Array) -> Array:
    """Each value alone in a row of `TERMS` terms, each at another place."""
    terms = np.zeros((len(values), TERMS))
    rows = np.arange(len(values))
    terms[rows, rows % TERMS] = values
    return terms


@dataclass(frozen=True)
class Form:
    """One way to make a problem of N × O dot products of K terms.

    name:     for people. multiple: K is a multiple of this.
    problem:  of (n, k, o). inputs, weight: the shapes of x and w in it.
    """

    name: str
    multiple: int
    problem: Callable[[int, int, int], Problem]
    bias: bool


@dataclass(frozen=True, eq=False)
class Dots:
    """A function, asked for dot products in one form. posed: gets each problem, in order."""

    backend: FunctionBackend
    form: Form
    posed: dict[Problem, None] = field(default_factory=dict)

    @property
    def kernel(self) -> FunctionKernel:
        return self.backend.kernel

    def __call__(self, x: Array, w: Array, bias: float = 0.0) -> Array:
        """x (N, K) and w (O, K) in float64 → (N, O), as the function computes it, in float64.

        A mean has no weights: w is not used. A bias is only added where the form has one.
        """
        (n, k), o = x.shape, len(w)
        problem = self.form.problem(n, k, o)
        self.posed[problem] = None
        arrays = [_placed(x, problem.inputs[0])]
        shapes = [spec.shape for spec in problem.op.weights()]
        if shapes:
            arrays.append(w.reshape(shapes[0]))
            arrays += [np.full(shape, bias) for shape in shapes[1:]]
        with np.errstate(over="ignore"), kernel_running():
            made = run_kernel(self.backend, self.kernel, problem, *arrays)
        wide = made.astype(np.float64)
        if wide.ndim == 4 and wide.shape[0] == 1 and n > 1:  # pixels of one image
            return np.asarray(wide.reshape(o, n).T)
        return np.asarray(wide.reshape(n, -1))

    def takes(self, n: int, k: int, o: int) -> bool:
        """Whether it computes N × O sums of K terms in this form; K is a multiple of the form's."""
        return self.kernel.refusal(self.form.problem(n, k, o)) is None

    @property
    def multiplies(self) -> bool:
        """Whether the terms of a sum are products; those of a mean are not."""
        return bool(self.form.problem(1, self.form.multiple, 1).op.weights())

    @property
    def usual(self) -> bool:
        """Whether it takes the sums that most probes pose."""
        return self.takes(OUTPUTS, TERMS, OUTPUTS)


def _placed(x: Array, shape: Shape) -> Array:
    """Rows of terms as an input: a sample each, or a pixel of one image each."""
    if len(shape) == 4 and shape[0] == 1 and len(x) > 1:
        return np.ascontiguousarray(x.T.reshape(shape))
    return x.reshape(shape)


def forms(backend: FunctionBackend) -> list[Dots]:
    """The forms that the function takes, the plainest first."""
    op = backend.kernel.op
    if op is Linear:
        found = [Form("rows", 1, lambda n, k, o: Problem(Linear(k, o), ((n, k),)), True)]
    elif op is MatMul:
        found = [Form("rows", 1, lambda n, k, o: Problem(MatMul(k, o), ((n, k),)), False)]
    elif op is GlobalAvgPool:
        found = [
            Form("pixels", 1, lambda n, k, o: Problem(GlobalAvgPool(), ((n, 1, 1, k),)), False)
        ]
    elif op is Conv2d:
        found = [form for bias in (False, True) for form in _convolutions(bias)]
    else:
        return []
    taken = [dots for form in found if (dots := Dots(backend, form)).usual]
    without = [dots for dots in taken if not dots.form.bias]
    return without or taken


def with_bias(backend: FunctionBackend) -> list[Dots]:
    """The forms with a bias that the function takes."""
    if backend.kernel.op is Conv2d:
        found = [Dots(backend, form) for form in _convolutions(True)]
    else:
        found = [dots for dots in forms(backend) if dots.form.bias]
    return [dots for dots in found if dots.usual]


def _convolutions(bias: bool) -> tuple[Form, ...]:
    def whole(n: int, k: int, o: int) -> Problem:
        return Problem(Conv2d(k // 9, o, (3, 3), bias=bias), ((n, k // 9, 3, 3),))

    def pointwise(n: int, k: int, o: int) -> Problem:
        return Problem(Conv2d(k, o, (1, 1), bias=bias), ((1, k, 1, n),))

    def samples(n: int, k: int, o: int) -> Problem:
        return Problem(Conv2d(k, o, (1, 1), bias=bias), ((n, k, 1, 1),))

    return (
        Form("a 3×3 window", 9, whole, bias),
        Form("pixels of a 1×1 convolution", 1, pointwise, bias),
        Form("samples of a 1×1 convolution", 1, samples, bias),
    )


__all__ = ["OUTPUTS", "TERMS", "Dots", "Form", "forms", "spread", "with_bias"]
