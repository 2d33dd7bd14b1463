"""Where a NaN or an infinity in an output comes from: the input that holds it, in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18_oracle.cases import Case
from r18_oracle.judge.reference import reference

MOST = 16
"""The most non-finite elements of one input that are tried one by one."""


@dataclass(frozen=True)
class Held:
    """A non-finite element: its array (inputs first, then weights), its place and its value."""

    array: int
    name: str
    index: tuple[int, ...]
    value: float

    def __str__(self) -> str:
        return f"the {self.value} of {self.name} at {self.index}"


def origin(case: Case, at: tuple[int, ...], got: float, expected: float) -> str:
    """Name the input or weight that holds the NaN or infinity of an output element; "" if both
    values are finite.

    An element reaches the output at `at` if the reference there changes when 1 takes its place.
    """
    if np.isfinite(got) and np.isfinite(expected):
        return ""
    held = _held(case)
    if not held:
        return "no input holds a NaN or an infinity"
    before = _at(case, at)
    for one in held:
        after = _at(case, at, one)
        if not (after == before or (np.isnan(after) and np.isnan(before))):
            return f"{one} reaches it"
    return f"{held[0]} does not reach it"


def _held(case: Case) -> list[Held]:
    """The first non-finite elements of each input and weight."""
    names = [f"input {index}" for index in range(len(case.inputs))]
    names += [f"weight '{spec.role}'" for spec in case.problem.op.weights()]
    found: list[Held] = []
    for array, (name, values) in enumerate(zip(names, (*case.inputs, *case.weights), strict=True)):
        wide = values.astype(np.float64)
        for index in np.argwhere(~np.isfinite(wide))[:MOST]:
            where = tuple(int(i) for i in index)
            found.append(Held(array, name, where, float(wide[where])))
    return found


def _at(case: Case, at: tuple[int, ...], without: Held | None = None) -> float:
    """One element of the reference, with 1 in place of one element."""
    inputs, weights = case.wide()
    if without is not None:
        arrays = [*inputs, *weights]
        arrays[without.array] = arrays[without.array].copy()
        arrays[without.array][without.index] = 1.0
        inputs, weights = tuple(arrays[: len(inputs)]), tuple(arrays[len(inputs) :])
    with np.errstate(all="ignore"):
        return float(reference(case.problem, inputs, weights)[at])
