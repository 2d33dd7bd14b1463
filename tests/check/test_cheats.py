"""Kernels that try to pass without computing: each is caught, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from faults import HostBackend
from faults.cheats import CHEATS, FATAL, HOLLOW, LARGE, Backend, Cheat
from r18.graph.resnet import network
from r18_oracle.check.watch import Process
from r18_oracle.search.campaign import KernelReport, run_campaign
from r18_oracle.search.coverage import uncovered
from r18_oracle.search.profiles import profile
from r18_oracle.search.tasks import campaign_job
from r18_oracle.search.worker import run_jobs

QUICK = replace(profile("quick"), shrink_seconds=0.1)
SEEDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check that the oracle has undone every change that a cheat made to the process."""
    before = Process.now()
    yield
    change = before.change()
    before.restore()
    assert change is None


def campaign(cheat: Cheat, seed: int, network_name: str | None = None) -> KernelReport:
    kernel = cheat.make()
    return run_campaign(HostBackend([kernel]), kernel, QUICK, seed, network_name=network_name)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_is_caught_by_its_check(cheat: Cheat) -> None:
    for seed in SEEDS:
        finding = campaign(cheat, seed).finding
        assert finding is not None, f"escaped seed {seed}: {cheat.trick}"
        assert finding.check in cheat.checks, finding.describe()


@pytest.mark.parametrize("cheat", LARGE, ids=lambda cheat: cheat.name)
def test_what_is_right_on_small_problems_alone_is_caught_on_the_networks_own(cheat: Cheat) -> None:
    assert campaign(cheat, 1).verdict == "ok"
    finding = campaign(cheat, 1, "resnet18").finding
    assert finding is not None
    assert finding.check in cheat.checks


def test_a_kernel_that_took_nothing_is_never_ok() -> None:
    (cheat,) = (c for c in HOLLOW if c.checks == ("refused",))
    report = campaign(cheat, 1, "resnet18")
    assert report.verdict == "refused"
    assert not report.tally.problems
    assert not report.network_problems
    assert report.tally.refused["not today"] > 0


def test_a_kernel_that_takes_the_small_alone_leaves_the_network_uncovered() -> None:
    (cheat,) = (c for c in HOLLOW if c.checks == ("uncovered",))
    kernel = cheat.make()
    report = campaign(cheat, 1)
    assert report.verdict == "ok"
    missing = uncovered(HostBackend([kernel]), network("resnet18"), (1,))
    convolutions = [p for _, p in missing if p.op.name == "conv2d"]
    assert len(convolutions) >= 11


def test_what_ends_or_hangs_its_process_is_a_finding_of_the_worker() -> None:
    name = "faults.cheats:Backend"
    how = replace(QUICK, call_seconds=3.0)
    jobs = [campaign_job(name, kernel.id, how, 1, None) for kernel in Backend().kernels()]
    found = {o.job.kernel: o.finding for o in run_jobs(jobs, workers=2)}
    for cheat in FATAL:
        finding = found[cheat.make().id]
        assert finding is not None
        assert (finding.check,) == cheat.checks
        assert finding.problem is not None


def test_there_are_cheats_enough() -> None:
    every = (*CHEATS, *LARGE, *HOLLOW, *FATAL)
    assert len(every) >= 25
    assert len({cheat.name for cheat in every}) == len(every)
