"""The problems that the check `state` calls a kernel on, and their relatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from r18.backend import Kernel
from r18.errors import R18Error
from r18.graph.ops import Layout, Problem
from r18_oracle.generate.problems import fitted
from r18_oracle.generate.shrink import elements
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.spec import FLAGS, FORMATS
from r18_oracle.ops.table import spec_of

FEWEST = 8
"""Outputs of a problem, at least: enough that some are negative before a ReLU."""


def base_problem(kernel: Kernel, max_macs: int) -> Problem | None:
    """The problem A for a kernel: the first that it takes of its op's ordinary ones, within a
    limit. None if it takes none of them."""
    ordinary = (fitted(kernel, p, max_macs) for p in spec_of(kernel.op).ordinary(kernel))
    fitting = (p for p in ordinary if p.macs <= max_macs and takes(kernel, p))
    return next((p for p in fitting if np.prod(p.output) >= FEWEST), None)


def others(kernel: Kernel, problem: Problem) -> dict[str, Problem]:
    """For each field, a problem that the kernel takes and that differs in that field only.

    Two axes change together where the kernel takes no change of one alone.
    """
    spec = spec_of(problem.op)
    numbers = spec.numbers(problem)
    found: dict[str, Problem] = {}

    def first(name: str, *changed: str) -> None:
        for step in range(len(_changes(changed[0], numbers[changed[0]]))):
            several = {key: _changes(key, numbers[key]) for key in changed}
            values = {key: v[min(step, len(v) - 1)] for key, v in several.items() if v}
            try:
                other = spec.rebuild(problem.op, numbers | values)
            except R18Error:
                continue
            if other != problem and _near(problem, other) and takes(kernel, other):
                found[name] = other
                return

    for name in numbers:
        first(name, name)
    for name in numbers:
        both = name.removesuffix("_h")
        if both != name and name not in found and f"{both}_w" not in found:
            first(both, name, f"{both}_w")
    settings = ((name, other) for name, other in _other_settings(problem) if takes(kernel, other))
    return found | dict(settings)


def regrouped(kernel: Kernel, problem: Problem) -> tuple[Problem, Problem] | None:
    """Two relatives with the same total channels, in two groups and in four. None if the op has no
    groups or the kernel takes none."""
    spec = spec_of(problem.op)
    numbers = spec.numbers(problem)
    if "groups" not in numbers:
        return None
    doubled = {name: 2 * numbers[name] for name in ("c", "o")}
    few = spec.rebuild(problem.op, numbers | doubled | {"groups": 2})
    many = spec.rebuild(problem.op, numbers | {"groups": 4})
    return (few, many) if takes(kernel, few) and takes(kernel, many) else None


def _changes(name: str, n: int) -> tuple[int, ...]:
    """Other values of a number, in the order in which they are tried."""
    if name in FLAGS:
        return (1 - n,)
    if name in FORMATS:
        return tuple(v for v in (0, 1, 2) if v != n)
    if any(one in name for one in ("stride", "padding", "kernel_size", "dilation")):
        least = int("padding" not in name)
        return tuple(v for v in (n + 1, n - 1, n + 2, n - 2) if v >= least)
    return (n + 1, n + 2, n + 4, n + 8, n + 16, n + 32, n + 64, max(1, n - 1), max(1, n // 2))


def _other_settings(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Other settings that are not sizes, such as the eps of a BatchNorm."""
    for field in fields(problem.op):
        value = getattr(problem.op, field.name)
        if isinstance(value, float):
            other = replace(problem.op, **{field.name: value * 64})
            yield field.name, Problem(other, problem.inputs)
        elif isinstance(value, tuple) and value and isinstance(value[0], float):
            more = tuple(number * 1.5 for number in value)
            yield field.name, Problem(replace(problem.op, **{field.name: more}), problem.inputs)
        elif isinstance(value, Layout):
            for layout in set(Layout) - {value}:
                other = replace(problem.op, **{field.name: layout})
                yield field.name, Problem(other, problem.inputs)


def _near(problem: Problem, other: Problem) -> bool:
    """Whether it is not much larger."""
    return other.macs <= 64 * problem.macs + FEWEST and elements(other) <= 64 * elements(problem)
