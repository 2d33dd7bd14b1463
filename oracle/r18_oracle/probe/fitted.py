"""The contract of an op without sums of products: the sharpest under which random inputs pass.

BatchNorm may be computed as it is written or as x·scale + shift, softmax and a mean in the format
of the arrays or in a wider one. Where no contract fits, the function is wrong, and the search says
so with what was expected of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from r18.backend import Array
from r18.errors import R18Error
from r18.graph.ops import BatchNorm, Problem
from r18.runtime.launch import run_kernel
from r18_oracle.cases import Case
from r18_oracle.functions.arithmetic import SUMS, Arithmetic
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.generate.inputs import ROUNDING, make_case
from r18_oracle.generate.sizes import takes
from r18_oracle.judge.reference import kernel_running, reference
from r18_oracle.judge.verdict import judge
from r18_oracle.ops.table import spec_of

PROBLEMS = 3
CHANNELS = 64


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


def _seen(backend: FunctionBackend) -> Iterator[tuple[Case, Array]]:
    """Cases, and what the function returned."""
    kernel = backend.kernel
    for case in _cases(kernel):
        with kernel_running():
            got = run_kernel(backend, kernel, case.problem, *case.inputs, *case.handed())
        yield case, got


def _cases(kernel: FunctionKernel) -> Iterator[Case]:
    """Small problems with every kind of random input, and what tells the forms of BatchNorm."""
    ordinary = (p for p in spec_of(kernel.op).ordinary(kernel) if takes(kernel, p))
    for problem in islice(ordinary, PROBLEMS):
        for kind in ROUNDING:
            yield make_case(kernel, problem, kind, 0)
    if kernel.op is BatchNorm:
        yield _cancelling_twice(kernel)


def _cancelling_twice(kernel: FunctionKernel) -> Case:
    """Means of 1000, inputs a few last bits above them, and biases that leave little of the rest.

    x·scale rounds 1000·scale, which x − mean never holds; what is left is so small that rounding to
    a narrow format does not hide it.
    """
    rng = np.random.default_rng(0)
    step = 4.0 if kernel.precision.storage == "bfloat16" else 0.5
    x = 1000 + step * rng.integers(1, 4, CHANNELS)
    mean = np.full(CHANNELS, 1000.0)
    weight, var = rng.uniform(0.5, 1.5, CHANNELS), rng.uniform(0.1, 3.0, CHANNELS)
    problem = Problem(BatchNorm(CHANNELS), ((1, CHANNELS, 1, 1),))
    image = x.reshape(problem.inputs[0])

    def case(bias: Array) -> Case:
        return Case.of(kernel, problem, (image,), (weight, bias, mean, var))

    plain = case(np.zeros(CHANNELS))
    return case(-reference(problem, *plain.wide()).reshape(-1))


def _within(arithmetic: Arithmetic, case: Case, got: Array) -> bool:
    """Whether a result is within the bound of this arithmetic."""
    try:
        return judge(case, arithmetic.contract, got).ok
    except R18Error:
        return False


__all__ = ["candidates", "fitted"]
