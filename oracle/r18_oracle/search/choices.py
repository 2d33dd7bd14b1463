"""Choices: a kernel that chooses among functions by a problem's size, with one of them alone.

The larger of them would only ever be chosen for problems that no profile has: a tile of 128 by 192
outputs for those of 64 images. By itself each is shown problems that are small, and whose sizes
are on both sides of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from r18.backend import Backend, Kernel
from r18.errors import UsageError
from r18.graph.ops import Problem
from r18_oracle.findings import CHOICE, Finding
from r18_oracle.generate.corners import corners, many_tiles
from r18_oracle.generate.crossings import choice_crossings, crossings

if TYPE_CHECKING:
    from r18_oracle.search.profiles import Profile

SHARE = 5
"""A choice gets one example where its kernel gets so many, and one more: the first is trivial."""


@dataclass(frozen=True)
class Share:
    """What is shown to a kernel, or to one of its choices.

    one: the kernel or the choice. how, seed: of what is drawn. common: the edges of all choices;
    None for the kernel itself.
    """

    one: Kernel
    how: Profile
    seed: int
    common: frozenset[int] | None = None

    @property
    def known(self) -> tuple[Problem, ...]:
        """Besides what is drawn: for a kernel its op's corners and its crossings; for a choice
        crossings at those sizes that not all of them have, and many tiles."""
        op, limits = self.one.op, (self.how.max_elements, self.how.max_macs)
        if self.common is None:
            return (*corners(op, *limits), *crossings(self.one, *limits))
        return (*choice_crossings(self.one, self.common, *limits), *many_tiles(op, *limits))


def shares(backend: Backend, kernel: Kernel, how: Profile, seed: int) -> Iterator[Share]:
    """The kernel's, and those of its choices, with fewer examples and each a seed of its own."""
    yield Share(kernel, how, seed)
    found = backend.variants(kernel)
    if not found:
        return
    common = frozenset.intersection(*(frozenset(one.edges) for one in found))
    fewer = replace(how, examples=how.examples // SHARE + 1)
    for index, choice in enumerate(found, 1):
        yield Share(choice, fewer, seed + index, common)


def on_kernel(finding: Finding, kernel: Kernel) -> Finding:
    """A finding on a kernel or on one of its choices, as one on the kernel; its details name the
    choice."""
    if finding.kernel == kernel.id:
        return finding
    details = finding.details | {CHOICE: finding.kernel}
    return replace(finding, kernel=kernel.id, details=details)


def suspects(backend: Backend, kernel: Kernel, finding: Finding) -> tuple[Kernel, ...]:
    """What a finding on the kernel may be about: the kernel or the choice that it names, and of a
    worker that was lost the kernel and all its choices, since nobody is left who would say.

    Raises `UsageError` for a choice that the kernel does not have.
    """
    every = backend.variants(kernel)
    name = finding.details.get(CHOICE)
    if name is None:
        return (kernel, *every) if finding.check in ("crash", "hang") else (kernel,)
    named = tuple(choice for choice in every if choice.id == name)
    if not named:
        raise UsageError(f"the finding is about {name}, a choice that {kernel.id} does not have")
    return named
