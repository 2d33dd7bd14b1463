"""Profiles: how many problems a campaign draws, how large they are, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from r18.errors import unknown


@dataclass(frozen=True)
class Profile:
    """The effort of a campaign.

    examples:       problems drawn for each kernel.
    max_elements, max_macs: limits on the size of a drawn problem.
    batches:        batch sizes of the network's problems.
    whole:          run every check on the network's problems, not one call per kind of input.
    samples:        images in each comparison of checkpoints.
    shrink_seconds: time limit for shrinking a failing problem.
    call_seconds:   a worker that announces nothing for this long counts as hung.
    every:          each kernel gets every n-th of the corners and crossings; which ones depends on
                    the kernel, its precision and the seed.
    twins:          kernels that differ only in their precision share the corners if there are at
                    least two: each gets every n-th, the next one those that follow.
    alike:          likewise of the network's problems with the same shapes, which differ in their
                    epilogues: up to nine in ResNet-18. Every profile has every shape.
    """

    name: str
    examples: int
    max_elements: int
    max_macs: int
    batches: tuple[int, ...]
    whole: bool
    samples: int
    shrink_seconds: float
    call_seconds: float
    every: int = 1
    twins: int = 1
    alike: int = 1


PROFILES = {
    p.name: p
    for p in (
        Profile("brief", 5, 4_096, 400_000, (1,), False, 1, 5, 60, every=3, alike=3),
        Profile("quick", 15, 4_096, 400_000, (1,), False, 2, 5, 60, twins=2, alike=3),
        Profile("ci", 40, 8_192, 1_000_000, (1,), False, 4, 20, 120),
        Profile("thorough", 250, 65_536, 20_000_000, (1, 2, 8), True, 16, 60, 300),
        Profile("nightly", 2_500, 262_144, 100_000_000, (1, 2, 3, 8, 64), True, 64, 300, 900),
    )
}


def profile(name: str) -> Profile:
    """The profile with this name; raises `UnknownName`."""
    try:
        return PROFILES[name]
    except KeyError:
        raise unknown("profile", name, PROFILES) from None
