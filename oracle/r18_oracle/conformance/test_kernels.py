"""Every kernel alone: drawn problems and the network's, all checks of `r18_oracle.checks`."""

from __future__ import annotations

import pytest

from r18_oracle.campaign import profile
from r18_oracle.tasks import campaign_job
from r18_oracle.worker import Pool


def test_kernel(r18_kernel: tuple[str, str], r18_pool: Pool, pytestconfig: pytest.Config) -> None:
    """In a worker process: a kernel that crashes or hangs fails this test, not the session."""
    backend, kernel = r18_kernel
    how = profile(pytestconfig.getoption("--r18-profile"))
    seed = pytestconfig.getoption("--r18-seed")
    network = pytestconfig.getoption("--r18-network")
    (outcome,) = r18_pool.run([campaign_job(backend, kernel, how, seed, network)])
    if isinstance(outcome.result, Exception):
        raise outcome.result
    finding = outcome.finding or outcome.result.finding
    again = (
        f"  again     pytest --pyargs r18_oracle.conformance --r18-backend {backend} "
        f"--r18-profile {how.name} --r18-seed {seed} --r18-kernels '{kernel}'"
    )
    if finding is not None:
        pytest.fail(f"{finding.describe()}\n{again}", pytrace=False)
    refused = outcome.result.tally.refused
    assert outcome.result.tally.problems, f"{kernel} refused every problem: {dict(refused)}"
