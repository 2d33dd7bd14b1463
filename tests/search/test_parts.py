"""Parts of a campaign: together they are the campaign, and more workers than kernels run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from campaigns import kept
from choosing_toy import EDGES
from r18.backend import Backend
from r18.backend.registry import load_backend
from r18_oracle.findings import CHOICE
from r18_oracle.search import verify as verify_module
from r18_oracle.search.campaign import KernelReport, joined, run_campaign
from r18_oracle.search.choices import MOST_PARTS, Part, divided
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import BackendResult, Request, Verification, verify
from r18_oracle.search.worker import Job, Outcome, Pool

HOW = replace(profile("brief"), shrink_seconds=2.0)
KERNEL = "toy/relu/choosing/fp32"
CHOICES = [f"{KERNEL}/{name}" for name in EDGES]


def of_parts(backend: Backend, name: str, network: str | None, of: int) -> list[KernelReport]:
    kernel = backend.kernels()[0]
    every = [Part(nth, of) for nth in range(of)]
    return [
        run_campaign(backend, kernel, HOW, 0, backend_name=name, network_name=network, part=part)
        for part in every
    ]


@pytest.mark.parametrize("of", [2, 5])
@pytest.mark.parametrize("name", ["choosing_toy:Backend", "choosing_toy:Picky", "numpy"])
def test_parts_are_the_campaign(name: str, of: int) -> None:
    """Each problem is in one part, and the same values are judged."""
    backend = load_backend(name)
    kernel = backend.kernels()[0]
    whole = run_campaign(backend, kernel, HOW, 0, backend_name=name, network_name="tiny")
    reports = of_parts(backend, name, "tiny", of)
    assert replace(joined(reports), seconds=0, history=()) == replace(whole, seconds=0, history=())
    assert whole.network_problems > 1
    assert sum(report.network_problems > 0 for report in reports) == min(of, whole.network_problems)
    of_shares = [report.tally.problems > report.network_problems for report in reports]
    assert sum(of_shares) == min(of, 1 + len(backend.variants(kernel)))


def test_only_parts_that_there_are() -> None:
    for nth, of in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"no part {nth} of {of}"):
            Part(nth, of)


def test_shares_and_problems_are_in_one_part_each() -> None:
    for count in (1, 2, 3, 13):
        for of in (1, 2, 3, 5, 16):
            every = [Part(nth, of) for nth in range(of)]
            assert [place for part in every for place in part.shares(count)] == [*range(count)]
            assert 0 in every[0].shares(count)
            assert max(len(part.shares(count)) for part in every) == -(-count // of)
            places = [place for part in every for place in [*range(count)][part.problems]]
            assert sorted(places) == [*range(count)]


def test_a_campaign_is_divided_while_workers_would_wait() -> None:
    assert [divided(kernels, 4) for kernels in (0, 1, 2, 3, 4, 9)] == [4, 4, 2, 2, 1, 1]
    assert divided(1, 1000) == MOST_PARTS


def test_the_finding_is_that_of_the_first_part_that_has_one() -> None:
    name = "choosing_toy:Wrong"
    reports = of_parts(load_backend(name), name, None, 1 + len(EDGES))
    assert [report.finding is not None for report in reports] == [False, False, True]
    found = joined(reports).finding
    assert found == reports[-1].finding
    assert found is not None
    assert found.details[CHOICE] == CHOICES[-1]
    other = replace(found, message="another")
    assert joined([*reports, replace(reports[0], finding=other)]).finding == found


def test_every_part_knows_a_call_that_was_right() -> None:
    """When a later one raises, the device is lost, whatever the part began with."""
    name = "choosing_toy:Losing"
    whole, *_ = of_parts(load_backend(name), name, None, 1)
    part = of_parts(load_backend(name), name, None, 1 + len(EDGES))[-1]
    assert whole.finding is not None
    assert whole.finding.check == "runs"
    assert part.finding == whole.finding


# -- as jobs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def verified(
    pool: Pool, name: str, workers: int, keep: slice = slice(None), **how: Any
) -> tuple[Verification, list[Job]]:
    """A verification, and its jobs; only those of the slice `keep` run, whatever the deadline."""
    given: list[Job] = []

    def run(jobs: Sequence[Job], **options: Any) -> Iterator[Outcome]:
        given.extend(jobs)
        yield from pool.run(jobs[keep], wanted=options["wanted"])

    request = Request(HOW, KERNEL, network="tiny", workers=workers, **how)
    with patch.object(verify_module, "run_jobs", run):
        return verify({name: load_backend(name)}, request), given


def parts(jobs: Sequence[Job]) -> list[Part]:
    return [job.arguments["part"] for job in jobs]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_more_workers_than_kernels_run_parts(pool: Pool, workers: int) -> None:
    done, given = verified(pool, "choosing_toy:Backend", workers)
    assert parts(given) == [Part(nth, workers) for nth in range(workers)]
    assert done.ok
    (report,) = done.backends[0].kernels
    assert list(report.choices) == CHOICES
    assert all(tally.problems for tally in report.choices.values())


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("Wrong", "exact"),
        ("Deadly", "crash"),
        ("Idle", "coverage"),
        ("Losing", "runs"),
        ("Exiting", "crash"),
    ],
)
def test_parts_have_the_finding_of_the_campaign(pool: Pool, name: str, check: str) -> None:
    """A wrong choice, one that crashes, one that takes no problem, one that loses the device, and
    one that ends the process when it is listed."""
    name = f"choosing_toy:{name}"
    before, _ = verified(pool, name, workers=1)
    done, given = verified(pool, name, workers=3)
    assert len(given) == 3
    (whole,), (together,) = before.findings, done.findings
    assert together == whole
    assert (whole.kernel, whole.check) == (KERNEL, check)
    (report,) = done.backends[0].kernels
    assert (report.verdict, done.left) == ("FAIL", ())


@pytest.mark.parametrize("workers", [1, 3])
def test_a_choice_of_a_kernel_that_takes_nothing_need_not_either(pool: Pool, workers: int) -> None:
    done, given = verified(pool, "choosing_toy:RefusingAll", workers)
    assert len(given) == workers
    (report,) = done.backends[0].kernels
    assert (report.verdict, done.findings) == ("refused", [])


def test_two_kernels_share_the_workers(pool: Pool) -> None:
    name, jobs = "choosing_toy:Backend", list[int]()
    with patch.object(verify_module, "run_jobs", kept(pool)):
        request = Request(HOW, "*/relu/*", network="tiny", workers=4)
        backends = {name: load_backend(name), "numpy": load_backend("numpy")}
        done = verify(backends, request, on_start=jobs.append)
    kernels = [report.kernel for result in done.backends for report in result.kernels]
    assert len(kernels) > 1
    assert jobs == [len(kernels) * divided(len(kernels), 4)]
    assert done.ok


def test_a_kernel_is_final_when_its_last_part_is(pool: Pool) -> None:
    name, steps = "choosing_toy:Backend", list[object]()
    with patch.object(verify_module, "run_jobs", kept(pool)):
        request = Request(HOW, KERNEL, network="tiny", workers=4)
        backends = {name: load_backend(name)}
        done = verify(backends, request, on_sound=steps.append, on_done=steps.append)
    *early, part, last = steps
    assert early == [KERNEL] * 3
    assert isinstance(part, BackendResult)
    assert part.kernels == done.backends[0].kernels
    assert last == KERNEL


def test_a_part_that_is_left_leaves_its_kernel(pool: Pool) -> None:
    done, given = verified(pool, "choosing_toy:Backend", 4, slice(2), minutes=0)
    assert len(given) == 4
    assert done.left == (KERNEL,)
    assert done.backends[0].kernels == []
    assert not done.ok


def test_a_finding_is_kept_though_earlier_parts_are_left(pool: Pool) -> None:
    name = "choosing_toy:Wrong"
    before, _ = verified(pool, name, workers=3)
    done, given = verified(pool, name, 3, slice(2, None), minutes=0)
    assert len(given) == 3
    assert done.findings == before.findings
    assert len(done.findings) == 1
    assert done.left == ()


def test_after_a_finding_later_parts_do_not_begin() -> None:
    """Nor are they missing: the finding stays that of the first part."""
    ran: list[Part] = []

    def run(jobs: Sequence[Job], *, workers: int, **options: Any) -> Iterator[Outcome]:
        with Pool(1) as pool:
            for outcome in pool.run(jobs, **options):
                ran.append(outcome.job.arguments["part"])
                yield outcome

    name = "choosing_toy:Wrong"
    with patch.object(verify_module, "run_jobs", run):
        request = Request(HOW, KERNEL, network="tiny", workers=8)
        done = verify({name: load_backend(name)}, request)
    assert len(EDGES) in ran[-1].shares(1 + len(EDGES))
    assert ran == [Part(nth, 8) for nth in range(ran[-1].nth + 1)]
    assert len(ran) < 8
    assert len(done.findings) == 1
    assert done.left == ()
