"""What worker processes are asked to do: campaigns and checkpoint comparisons, by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache

from r18.backend import Backend, Kernel
from r18.errors import unknown
from r18.registry import load_backend
from r18.schedule import network
from r18.weights import Weights, load_weights
from r18_oracle.campaign import Announce, KernelReport, Profile, replay, run_campaign
from r18_oracle.checkpoint_report import CheckpointReport
from r18_oracle.checkpoints import compare_checkpoints, seeded_images
from r18_oracle.findings import Finding
from r18_oracle.worker import Job


def campaign_job(
    backend: str, kernel: str, how: Profile, seed: int, network_name: str | None
) -> Job:
    """A campaign on one kernel as a job for a worker; its result is a `KernelReport`."""
    arguments = {
        "backend": backend,
        "kernel": kernel,
        "how": how,
        "seed": seed,
        "network_name": network_name,
    }
    return Job(campaign, arguments, backend, kernel, how.call_seconds)


def campaign(
    *,
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    announce: Announce,
) -> KernelReport:
    """Run a campaign on a backend that `load_backend` knows by that name."""
    loaded = _loaded(backend)
    return run_campaign(
        loaded,
        kernel_of(loaded, kernel),
        how,
        seed,
        backend_name=backend,
        network_name=network_name,
        announce=announce,
    )


@dataclass(frozen=True)
class NetworkRun:
    """A network to run end to end: `samples` seeded images through it, in one precision."""

    network: str
    weights: str
    precision: str
    fusion: str
    samples: int
    seed: int


def network_job(backend: str, run: NetworkRun, silence_seconds: float) -> Job:
    """An end-to-end run as a job for a worker; its result is a `CheckpointReport`."""
    label = f"{backend}/program/{run.fusion}/{run.precision}"
    return Job(network_run, {"backend": backend, "run": run}, backend, label, silence_seconds)


def network_run(*, backend: str, run: NetworkRun, announce: Announce) -> CheckpointReport:
    """Compare the network on a backend with float64, checkpoint by checkpoint."""
    schedule = network(run.network)
    report = compare_checkpoints(
        _loaded(backend),
        schedule,
        _weights(run.weights, run.network),
        seeded_images(schedule, run.samples, run.seed),
        precision=run.precision,
        fusion=run.fusion,
        backend_name=backend,
        seed=run.seed,
        progress=lambda step, problem: announce(problem, "network", run.seed),
    )
    asked = {"run": asdict(run)}
    findings = tuple(replace(f, details=f.details | asked) for f in report.findings)
    return replace(report, findings=findings)


def replay_job(finding: Finding, silence_seconds: float) -> Job:
    """A finding's replay as a job; its result is the finding that comes out, or None."""
    arguments = {"finding": finding}
    return Job(replay_finding, arguments, finding.backend, finding.kernel, silence_seconds)


def replay_finding(*, finding: Finding, announce: Announce) -> Finding | None:
    """Run what a finding is about again, a kernel's problem or a network."""
    if "run" in finding.details:
        run = NetworkRun(**finding.details["run"])
        again = network_run(backend=finding.backend, run=run, announce=announce).findings
        same = [f for f in again if (f.kernel, f.check) == (finding.kernel, finding.check)]
        return next(iter([*same, *again]), None)
    loaded = _loaded(finding.backend)
    kernel = kernel_of(loaded, finding.kernel)
    return replay(loaded, kernel, finding, backend_name=finding.backend, announce=announce)


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


@cache
def _weights(source: str, network_name: str) -> Weights:
    return load_weights(source, network(network_name))
