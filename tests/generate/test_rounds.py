"""Problems beyond the limit of a workspace: found for every limit, and needed for some faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import r18_cupy
from faults import Fault, rounds
from faults.conv import CONV
from faults.fault import HostBackend, kernel
from r18.backend import Kernel
from r18.graph.ops import Conv2d, Problem
from r18_cupy.conv.im2col import Im2col
from r18_cupy.conv.winograd import Winograd
from r18_oracle.generate import rounds as generate
from r18_oracle.loading import with_choices
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.choices import Share
from r18_oracle.search.profiles import profile

QUICK = replace(profile("quick"), shrink_seconds=0.0)


def limited(scratch: Callable[[Problem], int] | None) -> Kernel:
    return kernel("any", Conv2d, "limited", CONV, scratch=scratch)


def beyond(one: Kernel) -> tuple[Problem, ...]:
    return generate.rounds(one, QUICK.max_elements, QUICK.max_macs)


def pixels(problem: Problem) -> int:
    n, _, oh, ow = problem.output
    return n * oh * ow


def raising(problem: Problem) -> int:
    raise ValueError("no workspace")


@pytest.mark.parametrize("scratch", [None, lambda p: 4096, lambda p: 64 * pixels(p), raising])
def test_a_workspace_without_a_limit_has_no_rounds(scratch: Any) -> None:
    assert beyond(limited(scratch)) == ()


@pytest.mark.parametrize("tile", [1, 16, 128])
@pytest.mark.parametrize("limit", [1 << 9, 3000, 1 << 14, 50_000, 1 << 19])
def test_a_limit_on_pixels_is_exceeded_by_two_or_three_rounds(limit: int, tile: int) -> None:
    """A limit on a batch's or an image's pixels is exceeded by 2 or 3 rounds of whole tiles."""
    limit = max(limit, 8 * tile)

    def of_batch(problem: Problem) -> int:
        return min(-(-pixels(problem) // tile) * tile, limit)

    def of_image(problem: Problem) -> int:
        return min(-(-pixels(problem) // problem.batch // tile) * tile, limit)

    for scratch, at_once in ((of_batch, pixels), (of_image, lambda p: pixels(p) // p.batch)):
        (problem,) = beyond(limited(scratch))
        assert 1 < at_once(problem) / limit <= 3.5
        assert at_once(problem) % limit


def test_a_limit_that_only_larger_problems_exceed_is_left() -> None:
    assert beyond(limited(lambda problem: min(pixels(problem), 1 << 26))) == ()


def test_every_limit_of_cupy_is_exceeded_and_the_last_round_is_not_full() -> None:
    """Every cupy limit is exceeded with a partial last round; no device is needed."""
    backend = r18_cupy.Backend()
    found: dict[str, int] = {}
    for one in with_choices(backend, backend.kernels()):
        if isinstance(one, Winograd):
            (problem,) = beyond(one)
            *full, last = (int(span["count"][0]) for span in one.tiling(problem).spans())
            assert full
            assert 0 < last < full[0]
            found[one.algorithm] = found.get(one.algorithm, 0) + 1
        if isinstance(one, Im2col):
            (problem,) = beyond(one)
            launches = [launch for launch in one.launches(problem) if launch.phase == "im2col"]
            assert 0 < launches[-1].grid[0] < launches[0].grid[0]
            found[one.algorithm] = found.get(one.algorithm, 0) + 1
    assert found == {"im2col": 1, "winograd_f2x2": 5, "winograd_f4x4": 5}


@pytest.mark.parametrize("fault", rounds.FAULTS, ids=lambda fault: fault.kernel.algorithm)
def test_only_rounds_show_a_fault_of_the_last_one(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the last round shows in no other problem, not even the network's."""
    backend = HostBackend([fault.kernel])
    report = run_campaign(backend, fault.kernel, QUICK, 0, network_name=None)
    assert report.finding is not None
    assert report.finding.check in fault.checks
    monkeypatch.setattr(Share, "rounds", ())
    assert run_campaign(backend, fault.kernel, QUICK, 0).verdict == "ok"
