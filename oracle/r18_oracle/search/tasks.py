"""What worker processes are asked to do: campaigns and checkpoint comparisons, by name."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.errors import UsageError, unknown
from r18.graph.schedule import network
from r18.weights import Weights, load_weights
from r18_oracle.findings import CHOICE, Finding
from r18_oracle.generate.inputs import ROUNDING
from r18_oracle.judge.reference import KernelRunning
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_images
from r18_oracle.search.campaign import (
    Announce,
    KernelReport,
    Profile,
    network_problems,
    profile,
    replay,
    run_campaign,
)
from r18_oracle.search.choices import on_kernel, suspects
from r18_oracle.search.coverage import coverage_findings, idle_finding, program_refusal
from r18_oracle.search.worker import Job, Outcome, run_jobs


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
    _, op, _, precision, *_ = (*kernel.split("/"), "", "", "")  # whatever it calls itself
    return Job(campaign, arguments, backend, kernel, how.call_seconds, f"{op}/{precision}")


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
    loaded = loaded_backend(backend)
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
    """An end-to-end run as a job for a worker; its result is that of `network_run`."""
    arguments = {"backend": backend, "run": run}
    return Job(
        network_run,
        arguments,
        backend,
        program_label(backend, run.fusion, run.precision),
        silence_seconds,
        f"{run.network}/{run.weights}",
    )


def network_run(*, backend: str, run: NetworkRun, announce: Announce) -> CheckpointReport | Finding:
    """Compare the network on a backend with float64, checkpoint by checkpoint.

    A finding instead of a report is that the program raised something. Raises `UsageError` for
    weights and images that no precision can take, and what making a weights source raises.
    """
    schedule = network(run.network)
    weights = _weights(run.weights, run.network)
    images = seeded_images(schedule, run.samples, run.seed)
    asked = {"run": asdict(run)}
    try:
        report = compare_checkpoints(
            loaded_backend(backend),
            schedule,
            weights,
            images,
            precision=run.precision,
            fusion=run.fusion,
            backend_name=backend,
            seed=run.seed,
            progress=lambda step, problem: announce(problem, "network", run.seed),
        )
    except UsageError:
        raise
    except Exception as error:  # whatever a program raises is what it did wrong
        last = traceback.extract_tb(error.__traceback__)[-1]
        return _about_program(
            "independence" if isinstance(error, KernelRunning) else "runs",
            backend,
            run,
            f"raised {type(error).__name__} in {last.name} ({Path(last.filename).name}:"
            f"{last.lineno}): {error}",
        )
    findings = tuple(replace(f, details=f.details | asked) for f in report.findings)
    return replace(report, findings=findings)


def no_program(backend: str, run: NetworkRun, why: str) -> Finding:
    """The finding that a network which was asked for cannot be run."""
    message = f"cannot run {run.network} in {run.precision}: {why}"
    return _about_program("coverage", backend, run, message)


def _about_program(check: str, backend: str, run: NetworkRun, message: str) -> Finding:
    return Finding(
        check=check,
        backend=backend,
        kernel=program_label(backend, run.fusion, run.precision),
        problem=None,
        kind="network",
        seed=run.seed,
        message=message,
        details={"run": asdict(run)},
    )


def program_label(backend: str, fusion: str, precision: str) -> str:
    """What a finding about a whole program names instead of a kernel."""
    return f"{backend}/program/{fusion}/{precision}"


# -- replay ------------------------------------------------------------------------------------


def finding_of(outcome: Outcome) -> Finding | None:
    """What was found by a job of this module, with all that a replay of it needs, or None.

    Raises the exception that the oracle itself failed with.
    """
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is None:
        found = outcome.result
        return found if isinstance(found, Finding) else getattr(found, "finding", None)
    lost, arguments = outcome.finding, outcome.job.arguments
    details: dict[str, Any] = {"silence_seconds": outcome.job.silence_seconds}
    if "run" in arguments:
        details["run"] = asdict(arguments["run"])
    elif lost.problem is not None:
        how: Profile = arguments["how"]
        name = arguments["network_name"]
        included = network_problems(name, how.batches) if name is not None else ()
        details["rounding"] = lost.kind if lost.kind in ROUNDING else "normal"
        details["light"] = (
            not how.whole and lost.seed == arguments["seed"] and lost.problem in included
        )
    return replace(lost, details=details)


def replayed(finding: Finding, silence_seconds: float | None = None) -> Finding | None:
    """Run what a finding is about again, in a worker; the finding that comes out, or None.

    silence_seconds: after which it counts as hung; default as when it was found, or two minutes.
    Raises `UnknownName` for a backend or kernel that is not there, and the oracle's own failure.
    """
    seconds = silence_seconds or finding.details.get("silence_seconds", 120.0)
    job = Job(replay_finding, {"finding": finding}, finding.backend, finding.kernel, seconds)
    (outcome,) = run_jobs([job], workers=1)
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        return replace(outcome.finding, details=finding.details)
    again: Finding | None = outcome.result
    return again


def replay_finding(*, finding: Finding, announce: Announce) -> Finding | None:
    """Run what a finding is about again: a kernel's problem, a network, or what is covered."""
    loaded = loaded_backend(finding.backend)
    try:
        if "run" in finding.details:
            run = NetworkRun(**finding.details["run"])
            return _program_again(loaded, run, finding, announce)
        if finding.check == "coverage" and CHOICE in finding.details:
            return _choice_again(loaded, finding, announce)
        if finding.check == "coverage":
            return _coverage_again(loaded, finding)
    except (KeyError, TypeError) as error:
        raise UsageError(f"a damaged finding: its details lack something: {error}") from None
    kernel = kernel_of(loaded, finding.kernel)
    for one in suspects(loaded, kernel, finding):
        again = replay(loaded, one, finding, backend_name=finding.backend, announce=announce)
        if again is not None:
            return on_kernel(again, kernel)
    return None


def _choice_again(backend: Backend, finding: Finding, announce: Announce) -> Finding | None:
    """The campaign once more, which alone says what a choice takes of what it is shown."""
    kernel = kernel_of(backend, finding.kernel)
    how, name = profile(finding.details["profile"]), finding.details["network"]
    report = run_campaign(
        backend,
        kernel,
        how,
        finding.seed,
        backend_name=finding.backend,
        network_name=name,
        announce=announce,
    )
    return report.finding


def _coverage_again(backend: Backend, finding: Finding) -> Finding | None:
    name, batches = finding.details["network"], tuple(finding.details["batches"])
    if "*" not in finding.kernel:
        kernel = kernel_of(backend, finding.kernel)
        if finding.problem is None or kernel.refusal(finding.problem) is None:
            return None
        return idle_finding(finding.backend, backend, kernel, name, batches, finding.seed)
    again = coverage_findings(finding.backend, backend, name, batches, finding.seed)
    return next((f for f in again if f.kernel == finding.kernel), None)


def _program_again(
    backend: Backend, run: NetworkRun, finding: Finding, announce: Announce
) -> Finding | None:
    refusal = program_refusal(backend, network(run.network), run.precision, run.fusion)
    if refusal is not None:
        return no_program(finding.backend, run, refusal)
    again = network_run(backend=finding.backend, run=run, announce=announce)
    if isinstance(again, Finding):
        return again
    same = [f for f in again.findings if (f.kernel, f.check) == (finding.kernel, finding.check)]
    return next(iter([*same, *again.findings]), None)


def kernel_of(backend: Backend, kernel_id: str) -> Kernel:
    """The backend's kernel of that id; raises `UnknownName` with the nearest."""
    for kernel in backend.kernels():
        if kernel.id == kernel_id:
            return kernel
    raise unknown("kernel", kernel_id, (k.id for k in backend.kernels()))


@cache
def loaded_backend(name: str) -> Backend:
    """The backend that `load_backend` knows by that name, probed; once a process."""
    backend = load_backend(name)
    backend.probe()
    return backend


@cache
def _weights(source: str, network_name: str) -> Weights:
    return load_weights(source, network(network_name))
