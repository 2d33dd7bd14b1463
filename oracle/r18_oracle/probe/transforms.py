"""Whether a convolution goes through a transform, such as Winograd's of 3×3 windows or an FFT.

A weight that only meets zeros changes nothing in a sum of products. A transform adds the weights
of a window to each other before it multiplies: next to a weight of 1, one of 2⁻³⁰ loses its bits.
So an image with one pixel is convolved twice: with small weights, and with one of them replaced by
1. A sum gives the same bits both times in every output that does not meet that weight.

A library may choose a transform for shapes that are not among `SHAPES`. So the problem of a finding
can be posed too (`r18_oracle.probe.again`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from r18.errors import R18Error
from r18.graph.ops import Conv2d, Problem
from r18.runtime.launch import run_kernel
from r18_oracle.functions.arithmetic import Arithmetic
from r18_oracle.functions.backend import FunctionBackend
from r18_oracle.generate.inputs import ROUNDING, make_case
from r18_oracle.generate.sizes import takes
from r18_oracle.judge.reference import kernel_running
from r18_oracle.judge.verdict import judge

KNOWN = ("winograd_f2x2", "winograd_f4x4", "transforms")
"""The algorithms with a bound, the sharpest first."""
SHAPES = (
    *((1, 4, 4, 8, 3), (2, 8, 8, 14, 3), (16, 16, 16, 12, 3), (1, 64, 64, 28, 3)),
    *((2, 8, 8, 14, 5), (16, 16, 16, 12, 5)),
)
"""Batch, channels, output channels, extent and window: libraries choose by them."""
SMALL = {"float16": 2.0**-12, "bfloat16": 2.0**-30, "float32": 2.0**-30, "float64": 2.0**-60}
"""Weights that, next to 1, are less than a unit roundoff of the arrays' format."""
ROUNDING_ERROR = 0.5
"""A larger change is no rounding error: the output meets the weight of 1, where it should not."""


def transformed(
    backend: FunctionBackend, storage: str, also: Sequence[Problem] = ()
) -> list[Problem]:
    """The problems among `SHAPES` in which a weight changes an output that it does not meet, and
    those of `also`, which `leaks` has found to be such."""
    if backend.kernel.op is not Conv2d:
        return []
    taken = (p for p in _problems() if takes(backend.kernel, p))
    return [*(p for p in taken if leaks(backend, p, storage)), *also]


def _problems() -> list[Problem]:
    return [
        Problem(Conv2d(c, o, (k, k), (1, 1), (k // 2, k // 2)), ((n, c, extent, extent),))
        for n, c, o, extent, k in SHAPES
    ]


def leaks(backend: FunctionBackend, problem: Problem, storage: str) -> bool:
    """Whether a weight changes outputs that it does not meet, by no more than a rounding error.

    False for a window of one pixel, whose only weight every output meets, and for a stride.
    """
    op, (_, _, height, width) = problem.op, problem.inputs[0]
    if not isinstance(op, Conv2d) or op.stride != (1, 1) or op.kernel_size == (1, 1) or op.extras:
        return False
    x = np.zeros(problem.inputs[0])
    row, column = height // 2, width // 2
    x[:, 0, row, column] = 1.0
    weight, *others = (np.zeros(spec.shape) for spec in op.weights())
    weight[...] = small = SMALL[storage] * 1.25
    results = []
    for first in (small, 1.0):
        weight[:, :, 0, 0] = first
        with kernel_running():
            got = run_kernel(backend, backend.kernel, problem, x, weight, *others)
        results.append(got.astype(np.float64))
    change = np.abs(results[1] - results[0])
    # The only outputs that this weight meets the pixel in; the slice may be empty.
    below, right = row + op.padding[0], column + op.padding[1]
    change[:, :, below : below + 1, right : right + 1] = 0.0
    return bool(change.any() and (change < ROUNDING_ERROR).all())


def as_transform(
    backend: FunctionBackend, problems: list[Problem], found: Arithmetic
) -> Arithmetic | None:
    """The contract of a transform that random inputs are within; None if there is none."""
    for algorithm in KNOWN:
        one = replace(found, algorithm=algorithm)
        if all(_within(backend, problem, one) for problem in problems):
            return one
    return None


def _within(backend: FunctionBackend, problem: Problem, arithmetic: Arithmetic) -> bool:
    kernel = replace(backend.kernel, arithmetic=arithmetic)
    for kind in ROUNDING:
        case = make_case(kernel, problem, kind, 0)
        with kernel_running():
            got = run_kernel(backend, backend.kernel, problem, *case.inputs, *case.handed())
        try:
            if not judge(case, arithmetic.contract, got).ok:
                return False
        except R18Error:
            return False
    return True


def note_on(problems: Sequence[Problem], known: str | None) -> str:
    """A sentence on the problems that are transformed. known: the algorithm whose bound random
    inputs are within, None if there is none."""
    windows = " and ".join(dict.fromkeys(window_of(problem) for problem in problems))
    if known is None:
        how = "which none of the known bounds fits"
    elif known == "transforms":
        how = "within the bound of an FFT and of Winograd's F(6×6)"
    else:
        how = known
    return f"transforms {windows} windows: {how}; a weight changes outputs it does not meet"


def window_of(problem: Problem) -> str:
    """The window of a convolution, such as 3×3."""
    op = problem.op
    assert isinstance(op, Conv2d)
    return "{}×{}".format(*op.kernel_size)


__all__ = ["KNOWN", "as_transform", "leaks", "note_on", "transformed", "window_of"]
