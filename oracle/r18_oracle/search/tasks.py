"""Jobs for worker processes: campaigns and network runs, and the findings in their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from r18_oracle.findings import CAMPAIGN, RUN, SILENCE, STATE, Finding, problem_to_json
from r18_oracle.generate.inputs import ROUNDING
from r18_oracle.loading import kernel_of, loaded_backend
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.search.campaign import Announce, KernelReport, network_problems, run_campaign
from r18_oracle.search.choices import WHOLE, Part
from r18_oracle.search.network_run import NetworkRun, program_label
from r18_oracle.search.profiles import Profile
from r18_oracle.search.worker import Job, Outcome


def kernel_job(
    task: Callable[..., Any],
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    **further: Any,
) -> Job:
    """A task on one kernel and the problems of a campaign; further: other arguments of the task."""
    arguments = {
        "backend": backend,
        "kernel": kernel,
        "how": how,
        "seed": seed,
        "network_name": network_name,
        **further,
    }
    _, op, _, precision, *_ = (*kernel.split("/"), "", "", "")  # an id may have fewer parts
    return Job(task, arguments, backend, kernel, how.call_seconds, f"{op}/{precision}")


def campaign_job(
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    part: Part = WHOLE,
) -> Job:
    """A campaign on one kernel, or a part of it; the job's result is a `KernelReport`."""
    return kernel_job(campaign, backend, kernel, how, seed, network_name, part=part)


def campaign(
    *,
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    part: Part,
    announce: Announce,
) -> KernelReport:
    """Run a campaign in a worker; the backend as `load_backend` takes it."""
    loaded = loaded_backend(backend)
    return run_campaign(
        loaded,
        kernel_of(loaded, kernel),
        how,
        seed,
        backend_name=backend,
        network_name=network_name,
        part=part,
        announce=announce,
    )


def network_job(backend: str, run: NetworkRun, silence_seconds: float) -> Job:
    """A network run; the job's result is that of `NetworkRun.on`."""
    return Job(
        network_run,
        {"backend": backend, "run": run},
        backend,
        program_label(backend, run.fusion, run.precision),
        silence_seconds,
        f"{run.network}/{run.weights}",
    )


def network_run(*, backend: str, run: NetworkRun, announce: Announce) -> CheckpointReport | Finding:
    """Run a network in a worker."""
    return run.on(backend, announce)


def finding_of(outcome: Outcome) -> Finding | None:
    """The finding of a campaign or a network run, with all details that a replay needs, or None.

    Raises the exception if the oracle itself failed.
    """
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        return _with_details(outcome.finding, outcome.job)
    if isinstance(outcome.result, Finding):
        return outcome.result
    return getattr(outcome.result, "finding", None)


def _with_details(lost: Finding, job: Job) -> Finding:
    """A crash or a hang, with the input kinds that its campaign used or the network run."""
    arguments = job.arguments
    details: dict[str, Any] = {SILENCE: job.silence_seconds}
    if "run" in arguments:
        details[RUN] = asdict(arguments["run"])
    elif lost.problem is not None:
        how: Profile = arguments["how"]
        name = arguments["network_name"]
        plain = asdict(how) | {"batches": list(how.batches)}
        details[CAMPAIGN] = {"profile": plain, "seed": arguments["seed"], "network": name}
        if lost.kind == STATE:
            details[STATE] = {"scenario": None, "base": problem_to_json(lost.problem)}
        included = network_problems(name, how.batches) if name is not None else ()
        details["rounding"] = lost.kind if lost.kind in ROUNDING else "normal"
        details["light"] = (
            not how.whole and lost.seed == arguments["seed"] and lost.problem in included
        )
    return lost.with_details(details)
