"""Parts of a campaign: together they are the campaign, and more workers than kernels run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from choosing_toy import EDGES
from r18.backend import Backend
from r18.backend.registry import load_backend
from r18_oracle.findings import CHOICE
from r18_oracle.search import verify as verify_module
from r18_oracle.search.campaign import KernelReport, Part, run_campaign
from r18_oracle.search.parts import NETWORK_PARTS, joined, parts
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import BackendResult, Request, Verification, verify
from r18_oracle.search.worker import Job, Outcome, Pool

HOW = replace(profile("brief"), shrink_seconds=2.0)
KERNEL = "toy/relu/choosing/fp32"
CHOICES = [f"{KERNEL}/{name}" for name in EDGES]


def of_parts(backend: Backend, name: str, network: str | None) -> list[KernelReport]:
    kernel = backend.kernels()[0]
    return [
        run_campaign(backend, kernel, HOW, 0, backend_name=name, network_name=network, part=part)
        for part in parts(backend, kernel, HOW, 0, network)
    ]


@pytest.mark.parametrize("name", ["choosing_toy:Backend", "choosing_toy:Picky", "numpy"])
def test_parts_are_the_campaign(name: str) -> None:
    """Each problem is in one part, and the same values are judged."""
    backend = load_backend(name)
    kernel = backend.kernels()[0]
    whole = run_campaign(backend, kernel, HOW, 0, backend_name=name, network_name="tiny")
    reports = of_parts(backend, name, "tiny")
    assert len(reports) == 1 + len(backend.variants(kernel)) + NETWORK_PARTS
    assert sum(report.network_problems > 0 for report in reports) > 1 or name != "numpy"
    assert all(report.tally.problems for report in reports[:-NETWORK_PARTS])
    assert replace(joined(reports), seconds=0, history=()) == replace(whole, seconds=0, history=())


def test_without_a_network_there_is_no_part_of_it() -> None:
    backend = load_backend("choosing_toy:Backend")
    found = parts(backend, backend.kernels()[0], HOW, 0, None)
    assert found == tuple(Part(share=place) for place in range(1 + len(EDGES)))


def test_the_first_finding_is_that_of_the_campaign() -> None:
    """The parts that come after it have findings of their own, or none."""
    name = "choosing_toy:Wrong"
    reports = of_parts(load_backend(name), name, None)
    assert [report.finding is not None for report in reports] == [False, False, True]
    found = joined(reports).finding
    assert found == reports[-1].finding
    assert found is not None
    assert found.details[CHOICE] == CHOICES[-1]
    other = replace(found, message="another")
    assert joined([*reports, replace(reports[0], finding=other)]).finding == found


# -- as jobs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


def verified(pool: Pool, name: str, workers: int, leave: int = 0) -> tuple[Verification, list[Job]]:
    """A verification, and its jobs; the last `leave` of them have no outcome."""
    given: list[Job] = []

    def run(jobs: Sequence[Job], **options: Any) -> Iterator[Outcome]:
        given.extend(jobs)
        yield from pool.run(jobs[: len(jobs) - leave])

    request = Request(HOW, KERNEL, network="tiny", workers=workers, minutes=0 if leave else None)
    with patch.object(verify_module, "run_jobs", run):
        return verify({name: load_backend(name)}, request), given


@pytest.mark.parametrize(("workers", "jobs"), [(1, 1), (2, 1 + len(EDGES) + NETWORK_PARTS)])
def test_more_workers_than_kernels_run_parts(pool: Pool, workers: int, jobs: int) -> None:
    done, given = verified(pool, "choosing_toy:Backend", workers)
    assert len(given) == jobs
    assert done.ok
    (report,) = done.backends[0].kernels
    assert list(report.choices) == CHOICES
    assert all(tally.problems for tally in report.choices.values())


def test_the_parts_that_take_longest_begin(pool: Pool) -> None:
    _, given = verified(pool, "choosing_toy:Backend", workers=2)
    taken = [job.arguments["part"].network is not None for job in given]
    assert taken == sorted(taken, reverse=True)


@pytest.mark.parametrize(
    ("name", "check"), [("Wrong", "exact"), ("Deadly", "crash"), ("Idle", "coverage")]
)
def test_parts_have_the_finding_of_the_campaign(pool: Pool, name: str, check: str) -> None:
    """A wrong choice, one that crashes, and one that takes no problem."""
    found = [verified(pool, f"choosing_toy:{name}", workers)[0].backends[0] for workers in (1, 2)]
    (whole,), (together,) = (result.findings for result in found)
    assert together == whole
    assert (whole.kernel, whole.check) == (KERNEL, check)
    (report,) = found[1].kernels
    assert report.verdict == "FAIL"


def test_a_kernel_is_final_when_its_last_part_is(pool: Pool) -> None:
    name, sound = "choosing_toy:Backend", []
    steps: list[str] = []

    def note(part: BackendResult) -> None:
        sound.append(part)
        steps.append("sound")

    with patch.object(verify_module, "run_jobs", lambda jobs, **options: pool.run(jobs)):
        request = Request(HOW, KERNEL, network="tiny", workers=2)
        backends = {name: load_backend(name)}
        done = verify(backends, request, on_sound=note, on_done=steps.append)
    (part,) = sound
    assert part.kernels == done.backends[0].kernels
    assert steps == [KERNEL] * (len(steps) - 2) + ["sound", KERNEL]


def test_a_part_that_is_left_leaves_its_kernel(pool: Pool) -> None:
    done, _ = verified(pool, "choosing_toy:Backend", workers=2, leave=2)
    assert done.left == (KERNEL,)
    assert done.backends[0].kernels == []
    assert not done.ok


def test_a_finding_is_kept_though_other_parts_are_left(pool: Pool) -> None:
    done, given = verified(pool, "choosing_toy:Wrong", workers=2)
    (before,) = done.findings
    assert given[-1].arguments["part"] == Part(share=len(EDGES))

    def run(jobs: Sequence[Job], **options: Any) -> Iterator[Outcome]:
        yield from pool.run(jobs[-1:])

    request = Request(HOW, KERNEL, network="tiny", workers=2, minutes=0)
    name = "choosing_toy:Wrong"
    with patch.object(verify_module, "run_jobs", run):
        done = verify({name: load_backend(name)}, request)
    assert done.left == (KERNEL,)
    (finding,) = done.findings
    assert finding == before
