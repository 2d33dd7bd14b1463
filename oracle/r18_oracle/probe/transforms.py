"""Whether a convolution goes through a transform, such as Winograd's of 3×3 windows or an FFT.

A weight that only meets zeros changes nothing in a sum of products. A transform adds the weights
of a window to each other before it multiplies: next to a weight of 1, one of 2⁻³⁰ loses its bits.
So an image with one pixel, which meets the small weight alone in one output, shows the small weight
there, or what the transform left of it.
"""

from __future__ import annotations

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


def transformed(backend: FunctionBackend, storage: str) -> list[Problem]:
    """The problems among `SHAPES` in which a weight changes an output that it does not meet."""
    if backend.kernel.op is not Conv2d:
        return []
    taken = (p for p in _problems() if takes(backend.kernel, p))
    return [problem for problem in taken if _leaks(backend, problem, storage)]


def _problems() -> list[Problem]:
    return [
        Problem(Conv2d(c, o, (k, k), (1, 1), (k // 2, k // 2)), ((n, c, extent, extent),))
        for n, c, o, extent, k in SHAPES
    ]


def _leaks(backend: FunctionBackend, problem: Problem, storage: str) -> bool:
    op, (_, _, extent, _) = problem.op, problem.inputs[0]
    assert isinstance(op, Conv2d)
    x = np.zeros(problem.inputs[0])
    w = np.zeros((op.out_channels, op.in_channels, *op.kernel_size))
    middle = op.padding[0]
    w[:, :, 0, 0], w[:, :, middle, middle] = 1.0, SMALL[storage] * 1.25
    at = extent // 2
    x[:, 0, at, at] = 1.0
    with kernel_running():
        got = run_kernel(backend, backend.kernel, problem, x, w)
    return bool((got[:, :, at, at].astype(np.float64) != w[0, 0, middle, middle]).any())


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


__all__ = ["as_transform", "transformed"]
