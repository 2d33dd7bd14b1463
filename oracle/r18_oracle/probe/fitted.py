"""The contract of an op without sums of products: the sharpest under which random inputs pass.

BatchNorm may be computed as it is written or as x·scale + shift, softmax and a mean in the format
of the arrays or in a wider one. Where no contract fits, the function is wrong, and the search says
so with what was expected of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from r18.errors import R18Error
from r18.graph.ops import Problem
from r18.runtime.launch import run_kernel
from r18_oracle.functions.arithmetic import SUMS, Arithmetic
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.generate.inputs import ROUNDING, make_case
from r18_oracle.generate.sizes import takes
from r18_oracle.judge.verdict import judge
from r18_oracle.ops.table import spec_of

PROBLEMS = 3


def candidates(expected: Arithmetic, algorithms: tuple[str, ...]) -> Iterator[Arithmetic]:
    """The contracts that are tried, the sharpest first."""
    finest = SUMS.index(expected.sums)
    for sums in SUMS[finest:]:
        for algorithm in algorithms:
            yield replace(expected, algorithm=algorithm, sums=sums)


def fitted(backend: FunctionBackend, expected: Arithmetic) -> Arithmetic | None:
    """The first candidate that the function's results are within; None if there is none."""
    like = backend.kernel.like
    if like.algorithms == ("exact",):
        return expected
    seen = list(_seen(backend))
    for one in candidates(expected, like.algorithms):
        if seen and all(_within(one, *call) for call in seen):
            return one
    return None


def _seen(backend: FunctionBackend) -> Iterator[tuple[FunctionKernel, Problem, str, object]]:
    """Problems with random inputs, and what the function returned."""
    kernel = backend.kernel
    ordinary = (p for p in spec_of(kernel.op).ordinary(kernel) if takes(kernel, p))
    for problem, _ in zip(ordinary, range(PROBLEMS), strict=False):
        for kind in ROUNDING:
            case = make_case(kernel, problem, kind, 0)
            arrays = (*case.inputs, *case.handed())
            yield kernel, problem, kind, run_kernel(backend, kernel, problem, *arrays)


def _within(
    arithmetic: Arithmetic, kernel: FunctionKernel, problem: Problem, kind: str, got: object
) -> bool:
    """Whether a result is within the bound of this arithmetic."""
    case = make_case(kernel, problem, kind, 0)
    try:
        return judge(case, arithmetic.contract, got).ok  # type: ignore[arg-type]
    except R18Error:
        return False


__all__ = ["candidates", "fitted"]
