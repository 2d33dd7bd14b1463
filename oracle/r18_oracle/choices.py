"""Choices: a kernel that chooses among functions by a problem's size, with one of them alone.

The larger of them would only ever be chosen for problems that no profile has: a tile of 128 by 192
outputs for those of 64 images. By itself each is shown problems that are small, and whose sizes
are on both sides of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from r18.backend import Backend, Kernel, choices
from r18.errors import UsageError
from r18.ops import Problem
from r18_oracle.corners import corners, many_tiles
from r18_oracle.crossings import choice_crossings, crossings
from r18_oracle.findings import CHOICE, Finding

if TYPE_CHECKING:
    from r18_oracle.campaign import Profile

SHARE = 5
"""A choice gets one example where its kernel gets so many, and one more: the first is trivial."""


def shares(
    backend: Backend, kernel: Kernel, how: Profile, seed: int
) -> Iterator[tuple[Kernel, Profile, int]]:
    """The kernel, and each of its choices with fewer examples and a seed of its own."""
    yield kernel, how, seed
    fewer = replace(how, examples=how.examples // SHARE + 1)
    for index, choice in enumerate(choices(backend, kernel), 1):
        yield choice, fewer, seed + index


def known_problems(
    backend: Backend, kernel: Kernel, one: Kernel, how: Profile
) -> tuple[Problem, ...]:
    """What is shown besides what is drawn: to the kernel its op's corners and its crossings; to
    one of its choices crossings at those sizes that not all of them have, and many tiles."""
    limits = how.max_elements, how.max_macs
    if one is kernel:
        return (*corners(kernel.op, *limits), *crossings(kernel, *limits))
    common = frozenset.intersection(*(frozenset(c.edges) for c in choices(backend, kernel)))
    return (*choice_crossings(one, common, *limits), *many_tiles(kernel.op, *limits))


def of_choice(finding: Finding, kernel: Kernel) -> Finding:
    """A finding on a choice as one on its kernel; its details name the choice."""
    details = finding.details | {CHOICE: finding.kernel}
    return replace(finding, kernel=kernel.id, details=details)


def suspects(backend: Backend, kernel: Kernel, finding: Finding) -> tuple[Kernel, ...]:
    """What a finding on the kernel may be about: the kernel or the choice that it names, and of a
    worker that was lost the kernel and all its choices, since nobody is left who would say.

    Raises `UsageError` for a choice that the kernel does not have.
    """
    every = choices(backend, kernel)
    name = finding.details.get(CHOICE)
    if name is None:
        return (kernel, *every) if finding.check in ("crash", "hang") else (kernel,)
    named = tuple(choice for choice in every if choice.id == name)
    if not named:
        raise UsageError(f"the finding is about {name}, a choice that {kernel.id} does not have")
    return named
