"""What worker processes are asked to do: campaigns and checkpoint comparisons, by name."""

from __future__ import annotations

from functools import cache

from r18.backend import Backend, Kernel
from r18.errors import unknown
from r18.registry import load_backend
from r18_oracle.campaign import Announce, KernelReport, Profile, replay, run_campaign
from r18_oracle.findings import Finding
from r18_oracle.worker import Job


def campaign_job(backend: str, kernel: str, how: Profile, seed: int, network: str | None) -> Job:
    """A campaign on one kernel as a job for a worker; its result is a `KernelReport`."""
    arguments = {
        "backend": backend,
        "kernel": kernel,
        "how": how,
        "seed": seed,
        "network": network,
    }
    return Job(campaign, arguments, backend, kernel, how.call_seconds)


def campaign(
    *, backend: str, kernel: str, how: Profile, seed: int, network: str | None, announce: Announce
) -> KernelReport:
    """Run a campaign on a backend that `load_backend` knows by that name."""
    loaded = _loaded(backend)
    return run_campaign(
        loaded,
        kernel_of(loaded, kernel),
        how,
        seed,
        backend_name=backend,
        network_name=network,
        announce=announce,
    )


def replay_job(finding: Finding, silence_seconds: float) -> Job:
    """A finding's replay as a job; its result is the finding that comes out, or None."""
    return Job(
        replay_finding, {"finding": finding}, finding.backend, finding.kernel, silence_seconds
    )


def replay_finding(*, finding: Finding, announce: Announce) -> Finding | None:
    """Run a finding's problem again."""
    loaded = _loaded(finding.backend)
    return replay(
        loaded,
        kernel_of(loaded, finding.kernel),
        finding,
        backend_name=finding.backend,
        announce=announce,
    )


def kernel_of(backend: Backend, kernel_id: str) -> Kernel:
    """The backend's kernel of that id; raises `UnknownName` with the nearest."""
    for kernel in backend.kernels():
        if kernel.id == kernel_id:
            return kernel
    raise unknown("kernel", kernel_id, (k.id for k in backend.kernels()))


@cache
def _loaded(name: str) -> Backend:
    backend = load_backend(name)
    backend.probe()
    return backend
