"""Every kernel alone: drawn problems and the network's, all checks of `r18_oracle.check.checks`."""

from __future__ import annotations

import pytest

from r18.backend.registry import load_backend
from r18_oracle.loading import kernel_of
from r18_oracle.search.coverage import idle_finding, unavailable
from r18_oracle.search.crashes import smallest
from r18_oracle.search.history import confirmed
from r18_oracle.search.profiles import profile
from r18_oracle.search.replay import fresh
from r18_oracle.search.tasks import campaign_job, finding_of
from r18_oracle.search.worker import Pool


def test_kernel(r18_kernel: tuple[str, str], r18_pool: Pool, pytestconfig: pytest.Config) -> None:
    """In a worker process: a kernel that crashes or hangs fails this test, not the session.

    One that takes no problem fails too, unless its precision is not to be had on this device.
    """
    backend, kernel = r18_kernel
    how = profile(pytestconfig.getoption("--r18-profile"))
    seed = pytestconfig.getoption("--r18-seed")
    network = pytestconfig.getoption("--r18-network")
    (outcome,) = r18_pool.run([campaign_job(backend, kernel, how, seed, network)])
    finding = finding_of(outcome)
    if finding is not None:
        history = getattr(outcome.result, "history", ())
        finding = confirmed(smallest(finding, how, r18_pool), history, fresh)
    elif not outcome.result.tally.problems:
        loaded = load_backend(backend)
        idle = kernel_of(loaded, kernel)
        reason = unavailable(loaded, idle.precision.name)
        if reason is not None:
            pytest.skip(reason)
        finding = idle_finding(backend, loaded, idle, network, how.batches, seed)
    if finding is not None:
        again = (
            f"  again     pytest --pyargs r18_oracle.conformance -k test_kernel "
            f"--r18-backend {backend} --r18-kernels '{kernel}' "
            f"--r18-profile {how.name} --r18-seed {seed} --r18-network {network}"
        )
        pytest.fail(f"{finding.describe()}\n{again}", pytrace=False)
