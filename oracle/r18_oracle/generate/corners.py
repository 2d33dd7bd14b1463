"""Corners: fixed problems on which kernels go wrong, shown to every kernel.

Drawn problems have these features only by luck: padding on one axis only, every pair of extents
different, sums so long that kernels split them. Each op's `OpSpec` lists its corners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from r18.graph.ops import Op, Problem
from r18_oracle.ops.table import spec_of


def corners(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """An op's corners, except those that are many times larger than drawn problems."""
    spec = spec_of(op)
    near = (*spec.corners(), *spec.many_tiles())
    many = small_enough(spec.many(), 20 * max_elements, 4 * max_macs)
    return (*small_enough(near, 8 * max_elements, 4 * max_macs), *many)


def many_tiles(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """The corners that have more tiles than a device computes at a time."""
    return small_enough(spec_of(op).many_tiles(), 8 * max_elements, 4 * max_macs)


def small_enough(
    problems: Iterable[Problem], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    """Those with at most so many elements in their largest tensor, and so many multiplications."""
    return tuple(
        problem
        for problem in problems
        if problem.macs <= max_macs
        and max(map(math.prod, (*problem.inputs, problem.output))) <= max_elements
    )
