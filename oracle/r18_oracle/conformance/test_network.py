"""Whole networks: against float64 end to end, and what compiled programs promise.

A precision in which the backend cannot run the network is skipped with the reason, as `r18 verify`
does; but one must be able to.
"""

from __future__ import annotations

from typing import Any

import pytest

from r18.backend.registry import load_backend
from r18.graph.passes import FUSION_LEVELS
from r18.graph.resnet import network
from r18_oracle.conformance.programs import CHECKS, check_program
from r18_oracle.findings import Finding
from r18_oracle.network import checkpoint_report
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.search.coverage import program_refusal
from r18_oracle.search.network_run import NetworkRun, program_label
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.tasks import finding_of, network_job
from r18_oracle.search.worker import Job, Pool

PROGRAMS = "tiny"
"""The network of the many small programs; the requested network runs end to end."""


@pytest.fixture
def how(pytestconfig: pytest.Config) -> Profile:
    return profile(pytestconfig.getoption("--r18-profile"))


def test_some_precision_runs_the_network(
    r18_backend_name: str, pytestconfig: pytest.Config
) -> None:
    """Without such a precision every test below would be skipped."""
    backend = load_backend(r18_backend_name)
    schedule = network(pytestconfig.getoption("--r18-network"))
    offered = dict.fromkeys(kernel.precision.name for kernel in backend.kernels())
    refusals = {p: program_refusal(backend, schedule, p, FUSION_LEVELS[0]) for p in offered}
    assert None in refusals.values(), f"it runs in no precision: {refusals}"


def test_network(
    r18_precision: tuple[str, str], r18_pool: Pool, how: Profile, pytestconfig: pytest.Config
) -> None:
    """The network that was asked for, end to end: no step and no checkpoint is off."""
    name: str = pytestconfig.getoption("--r18-network")
    seed: int = pytestconfig.getoption("--r18-seed")
    _, precision = r18_precision
    fusion = _highest_fusion(r18_precision, name)
    run = NetworkRun(name, "synthetic", precision, fusion, how.samples, seed)
    _compare(r18_precision, r18_pool, run, how)


@pytest.mark.parametrize("fusion", FUSION_LEVELS)
def test_fusion_level(
    r18_precision: tuple[str, str], fusion: str, r18_pool: Pool, how: Profile
) -> None:
    """At every level that the kernels allow, the tiny network loses no more than it may."""
    backend, precision = r18_precision
    refusal = program_refusal(load_backend(backend), network(PROGRAMS), precision, fusion)
    if refusal is not None:
        pytest.skip(refusal)
    run = NetworkRun(PROGRAMS, "synthetic", precision, fusion, 2, 0)
    _compare(r18_precision, r18_pool, run, how)


@pytest.mark.parametrize("check", CHECKS)
def test_program(r18_precision: tuple[str, str], check: str, r18_pool: Pool, how: Profile) -> None:
    """See `r18_oracle.conformance.programs`."""
    backend, precision = r18_precision
    fusion = _highest_fusion(r18_precision, PROGRAMS)
    arguments: dict[str, Any] = {
        "check": check,
        "backend": backend,
        "precision": precision,
        "fusion": fusion,
    }
    label = program_label(backend, fusion, precision)
    job = Job(check_program, arguments, backend, label, how.call_seconds)
    (outcome,) = r18_pool.run([job])
    if outcome.finding is not None:
        pytest.fail(outcome.finding.describe(), pytrace=False)
    if isinstance(outcome.result, AssertionError):
        pytest.fail(f"{label}: {check}: {outcome.result}", pytrace=False)
    assert outcome.result is None


def _highest_fusion(r18_precision: tuple[str, str], name: str) -> str:
    """The level at which a network is run; skips the test where there is none."""
    backend, precision = r18_precision
    loaded, schedule = load_backend(backend), network(name)
    for fusion in reversed(FUSION_LEVELS):
        refusal = program_refusal(loaded, schedule, precision, fusion)
        if refusal is None:
            return fusion
    pytest.skip(str(refusal))


def _compare(r18_precision: tuple[str, str], pool: Pool, run: NetworkRun, how: Profile) -> None:
    backend, precision = r18_precision
    (outcome,) = pool.run([network_job(backend, run, how.call_seconds)])
    again = (
        f"  again     r18 verify --backend {backend} --network {run.network} "
        f"--precision {precision} --fusion {run.fusion} --profile {how.name} --seed {run.seed}"
    )
    report = outcome.result
    if isinstance(report, CheckpointReport):
        found: list[Finding] = list(report.findings)
        table = checkpoint_report.text(report)
    else:
        found, table = [f for f in [finding_of(outcome)] if f is not None], ""
    if found:
        told = "\n".join(finding.describe() for finding in found)
        pytest.fail(f"{told}\n{again}\n{table}", pytrace=False)
    assert isinstance(report, CheckpointReport)
    assert report.ok, f"{again}\n{table}"
