"""Corners: fixed problems on which kernels go wrong, shown to every kernel.

Drawn problems have these features only by luck: padding on one axis only, every pair of extents
different, sums so long that kernels split them. Each op's `OpSpec` lists its corners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from r18.graph.ops import Op, Problem
from r18_oracle.ops.table import spec_of

MOST_ELEMENTS = 2**30
"""Tensors of problems that run have fewer elements. Larger problems only test refusals."""


def corners(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """An op's corners, except those that are many times larger than drawn problems."""
    spec = spec_of(op)
    near = (*spec.corners(), *spec.many_tiles())
    many = small_enough(spec.many(), 20 * max_elements, 4 * max_macs)
    return (*small_enough(near, 8 * max_elements, 4 * max_macs), *many)


def many_tiles(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """The corners that have more tiles than a device computes at a time."""
    return small_enough(spec_of(op).many_tiles(), 8 * max_elements, 4 * max_macs)


def vast(op: type[Op]) -> tuple[Problem, ...]:
    """Problems that are too large to run, to check whether a kernel refuses them."""
    return tuple(spec_of(op).vast())


def runnable(problem: Problem) -> bool:
    """Whether every tensor and weight of a problem has few enough elements to be allocated."""
    shapes = (*problem.inputs, problem.output, *(spec.shape for spec in problem.op.weights()))
    return max(map(math.prod, shapes)) < MOST_ELEMENTS


def small_enough(
    problems: Iterable[Problem], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    """The problems whose largest tensor and number of multiplications are within these limits."""
    return tuple(
        problem
        for problem in problems
        if problem.macs <= max_macs
        and max(map(math.prod, (*problem.inputs, problem.output))) <= max_elements
    )
