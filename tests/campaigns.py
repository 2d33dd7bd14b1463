"""Campaigns with or without the check `state`, for tests that look at the other checks, and the
problems that a campaign draws."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from r18.backend import Backend, Kernel
from r18.graph.ops import Problem
from r18_oracle.generate.problems import problems
from r18_oracle.search.campaign import Campaign, KernelReport
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.worker import Pool

IN_STATE = 4
"""In the profile `brief`, one in four of the kernels that keep nothing between calls goes through
the check `state`."""


class WithoutState(Campaign):
    """A campaign without the check `state`, which takes a third of a campaign's time."""

    def _run_state(self, problem: Problem | None) -> bool:
        return True


def searched(
    backend: Backend, kernel: Kernel, how: Profile, seed: int, with_state: bool
) -> KernelReport:
    """A campaign on a kernel, without the problems of a network."""
    kind = Campaign if with_state else WithoutState
    return kind(backend, kernel, how, seed, backend.name, None, lambda *call: None).run()


def drawn(kernel: Kernel, count: int) -> list[Problem]:
    """The first problems that the profile `quick` draws for a kernel, always the same."""
    quick = profile("quick")
    found: list[Problem] = []

    @settings(derandomize=True, deadline=None, max_examples=count, database=None)
    @given(problem=problems(kernel, quick.max_elements, quick.max_macs))
    def draw(problem: Problem) -> None:
        found.append(problem)

    draw()
    return found


def kept(pool: Pool) -> Any:
    """A replacement for `run_jobs` with the same workers for all runs, which start slowly."""
    return lambda jobs, *, workers=None, **options: pool.run(jobs, **options)


__all__ = ["IN_STATE", "drawn", "kept", "searched"]
