"""Variants: a kernel that chooses among functions by a problem's size, with one of them alone.

The larger of them would only ever be chosen for problems that no profile has: a tile of 128 by 192
outputs for those of 64 images. As a variant each is shown problems that are small, and whose sizes
are on both sides of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from r18.backend import Backend, Kernel, variants
from r18.errors import UsageError
from r18.ops import Problem
from r18_oracle.corners import corners
from r18_oracle.crossings import crossings, variant_crossings
from r18_oracle.findings import KERNEL_VARIANT, Finding

if TYPE_CHECKING:
    from r18_oracle.campaign import Profile

SHARE = 5
"""A variant gets one example where its kernel gets so many."""


def shares(backend: Backend, kernel: Kernel, how: Profile) -> Iterator[tuple[Kernel, Profile]]:
    """The kernel, and each of its variants with fewer examples."""
    yield kernel, how
    fewer = replace(how, examples=max(1, how.examples // SHARE))
    for variant in variants(backend, kernel):
        yield variant, fewer


def known_problems(
    backend: Backend, kernel: Kernel, one: Kernel, how: Profile
) -> tuple[Problem, ...]:
    """What is shown besides what is drawn: to the kernel its op's corners and its crossings; to
    one of its variants crossings at those sizes that not all of them have."""
    if one is kernel:
        return (
            *corners(kernel.op, how.max_elements, how.max_macs),
            *crossings(kernel, how.max_elements, how.max_macs),
        )
    common = frozenset.intersection(*(frozenset(v.edges) for v in variants(backend, kernel)))
    return variant_crossings(one, common, how.max_elements, how.max_macs)


def of_variant(finding: Finding, kernel: Kernel) -> Finding:
    """A finding on a variant as one on its kernel; its details name the variant."""
    details = finding.details | {KERNEL_VARIANT: finding.kernel}
    return replace(finding, kernel=kernel.id, details=details)


def suspects(backend: Backend, kernel: Kernel, finding: Finding) -> tuple[Kernel, ...]:
    """What a finding on the kernel may be about: the kernel or the variant that it names, and of a
    worker that was lost the kernel and all its variants, since nobody is left who would say.

    Raises `UsageError` for a variant that the kernel does not have.
    """
    every = variants(backend, kernel)
    name = finding.details.get(KERNEL_VARIANT)
    if name is None:
        return (kernel, *every) if finding.check in ("crash", "hang") else (kernel,)
    named = tuple(variant for variant in every if variant.id == name)
    if not named:
        raise UsageError(f"the finding is about {name}, a variant that {kernel.id} does not have")
    return named
