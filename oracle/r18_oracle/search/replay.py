"""Replay: run again what a finding is about, and return the finding that comes out, if any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from r18.backend import Backend, Kernel
from r18.backend.registry import check_named
from r18.errors import UsageError, plain, show, unknown
from r18.graph.resnet import network
from r18.weights.sources import check_source_named
from r18_oracle.check import perturbed
from r18_oracle.check.checks import CHECKS, examine
from r18_oracle.check.perturbed import Delays, Perturbed
from r18_oracle.findings import CAMPAIGN, CHOICE, RUN, SILENCE, STATE, Failed, Finding, Subject
from r18_oracle.generate.inputs import KINDS
from r18_oracle.loading import kernel_of, loaded_backend
from r18_oracle.search.campaign import Announce, run_campaign
from r18_oracle.search.coverage import coverage_findings, idle_finding, program_refusal
from r18_oracle.search.history import after, alone, earlier_calls, scenario
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.tasks import campaign_job, finding_of
from r18_oracle.search.worker import Job, run_jobs

LOST = ("crash", "hang")
"""Findings of a worker that was lost, and not of a check."""
MOST_SAMPLES = 4096
"""The most images of a network run; profiles have some."""
SILENCE_SECONDS = 120.0
"""A replay hangs after this long without a sign of life, if the finding does not say otherwise."""


def check_trusted(
    finding: Finding, path: Path, backend: str | None = None, weights: str | None = None
) -> None:
    """Raise `UsageError` or `WeightsError` unless the user wants what the finding's file names.

    backend, weights: what the user named; a module and a file of weights must be repeated.
    """
    where = f"the finding '{path}'"
    if backend not in (None, finding.backend):
        raise UsageError(f"{where} is of the backend '{plain(finding.backend)}', not '{backend}'")
    check_named(finding.backend, where, () if backend is None else (backend,))
    if finding.weights is not None and finding.weights != weights:
        if weights is not None:
            named = plain(finding.weights)
            raise UsageError(f"{where} is of the weights '{named}', not '{weights}'")
        check_source_named(finding.weights, where)


def check_sound(finding: Finding) -> None:
    """Raise `UsageError` for a finding that no check could have made: it would be found gone."""
    if finding.check not in (known := (*CHECKS, *LOST, "coverage", "checkpoint", perturbed.CHECK)):
        raise unknown("check of a finding", finding.check, known, error=UsageError)
    if finding.subject is Subject.KERNEL:
        if finding.problem is None and finding.check not in LOST:
            raise UsageError("a damaged finding: it names no problem")
        if finding.kind not in (kinds := (*KINDS, STATE, "none")):
            raise unknown("kind of input", finding.kind, kinds, error=UsageError)
        only = finding.details.get("only")
        if only is not None and only not in CHECKS:
            raise unknown("check", only, CHECKS, error=UsageError)
    if finding.subject is Subject.NETWORK_RUN:
        _run_of(finding)
    if finding.check == perturbed.CHECK:
        Delays.of(finding)


def _run_of(finding: Finding) -> NetworkRun:
    """The network run; raises `UsageError` unless every field is there and of its type."""
    data = finding.details[RUN]
    try:
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(NetworkRun)}:
            raise ValueError(f"{show(data)} is no network run")
        run = msgspec.convert(data, NetworkRun)
        if not (1 <= run.samples <= MOST_SAMPLES and run.seed >= 0):
            raise ValueError(f"{run.samples} samples with seed {run.seed} are none")
    except ValueError as error:  # msgspec's ValidationError is one
        raise UsageError(f"a damaged finding: its details: {plain(error)}") from None
    return run


def _suspects(backend: Backend, kernel: Kernel, finding: Finding) -> tuple[Kernel, ...]:
    """The kernel or the choice that a finding on the kernel may be about.

    That is the one that it names. After a lost worker, it may be the kernel or any of its choices.
    """
    every = backend.variants(kernel)
    name = finding.details.get(CHOICE)
    if name is None:
        return (kernel, *every) if finding.check in LOST else (kernel,)
    named = tuple(choice for choice in every if choice.id == name)
    if not named:
        raise UsageError(f"the finding is about {name}, a choice that {kernel.id} does not have")
    return named


def _refused(kernels: Sequence[Kernel], finding: Finding) -> None:
    """Raise `UsageError` where no kernel ran at all, so that nothing can be said to be gone."""
    if finding.problem is None or finding.check in ("declaration", "refusal"):
        return
    reasons = [kernel.refusal(finding.problem) for kernel in kernels]
    if all(reason is not None for reason in reasons):
        raise UsageError(
            f"'{plain(kernels[0].id)}' refuses the finding's problem, so nothing was run: "
            f"{plain(reasons[0])}\n  problem: {finding.problem}"
        )


def replayed(finding: Finding, silence_seconds: float | None = None) -> Finding | None:
    """Replay a finding in a worker process.

    One that needs earlier calls is first replayed without them, in another process; `ALONE` in the
    details then says that it was right.

    silence_seconds: when it counts as hung; by default as when it was found. Raises `UnknownName`
    for a missing backend or kernel, `UsageError` for a damaged finding, and whatever the oracle
    itself failed with.
    """
    check_sound(finding)
    if finding.depends_on_calls and (found := fresh(alone(finding), silence_seconds)) is not None:
        return found  # it takes no earlier calls
    again = fresh(finding, silence_seconds)
    if again is None and CAMPAIGN in finding.details:
        return _in_its_campaign(finding, silence_seconds)
    return again


def _in_its_campaign(finding: Finding, silence_seconds: float | None) -> Finding | None:
    """A crash or hang that its call alone does not show: the campaign that it was found in.

    Returns whatever the campaign finds, with a message that says so.
    """
    try:
        how = finding.details[CAMPAIGN]
        most = vars(profile("nightly"))
        given = {**how["profile"], "batches": tuple(how["profile"]["batches"])}
        within = {
            key: min(value, most[key]) if type(value) in (int, float) else value
            for key, value in given.items()
        }
        job = campaign_job(
            finding.backend, finding.kernel, Profile(**within), int(how["seed"]), how["network"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"a damaged finding: its campaign: {error}") from None
    seconds = silence_seconds or finding.details.get(SILENCE, SILENCE_SECONDS)
    (outcome,) = run_jobs([replace(job, silence_seconds=seconds)], workers=1)
    again = finding_of(outcome)
    if again is None:
        return None
    message = f"right in a fresh process, wrong in its campaign: {again.check}: {again.message}"
    return replace(again, message=message).with_details(finding.details | again.details)


def fresh(finding: Finding, silence_seconds: float | None = None) -> Finding | None:
    """Replay a finding in a process of its own, after the calls that it needs."""
    seconds = silence_seconds or finding.details.get(SILENCE, SILENCE_SECONDS)
    job = Job(replay_finding, {"finding": finding}, finding.backend, finding.kernel, seconds)
    (outcome,) = run_jobs([job], workers=1)
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        return outcome.finding.with_details(finding.details)
    again: Finding | None = outcome.result
    return again


def replay_finding(*, finding: Finding, announce: Announce) -> Finding | None:
    """Replay a finding in this process, by its subject."""
    backend = loaded_backend(finding.backend)
    if finding.subject is Subject.KERNEL:
        return replay(backend, finding, announce)
    try:
        match finding.subject:
            case Subject.NETWORK_RUN:
                return _network_run(backend, finding, announce)
            case Subject.CHOICE:
                return _choice(backend, finding, announce)
            case _:
                return _coverage(backend, finding)
    except (KeyError, TypeError) as error:
        raise UsageError(f"a damaged finding: its details lack something: {error}") from None


def replay(
    backend: Backend,
    finding: Finding,
    announce: Announce = lambda problem, kind, seed: None,
) -> Finding | None:
    """The problem of a finding again, on its kernel or on the choices that may be at fault.

    Returns the finding that comes out, or None. Raises `UnknownName` for a missing kernel, and
    `UsageError` for a missing choice and where all of them refuse the problem.
    """
    kernel = kernel_of(backend, finding.kernel)
    suspects = _suspects(backend, kernel, finding)
    if finding.problem is None:
        return None
    before = earlier_calls(finding) if finding.depends_on_calls else []
    for one in suspects:
        try:
            if finding.check == perturbed.CHECK:
                delays = Delays.of(finding)
                Perturbed(backend, finding.backend, delays, announce).again(one, finding)
            elif STATE in finding.details:
                scenario(backend, one, finding, announce)
            else:
                for call in before:
                    call.again(backend, announce)
                examine(
                    backend,
                    one,
                    finding.problem,
                    finding.seed,
                    rounding=finding.details.get("rounding", "normal"),
                    light=finding.details.get("light", False),
                    only=finding.details.get("only"),
                    backend_name=finding.backend,
                    announce=announce,
                )
        except Failed as failure:
            again = after(failure.finding, before) if before else failure.finding
            return again.on_kernel(kernel.id)
    _refused(suspects, finding)
    return None


def _network_run(backend: Backend, finding: Finding, announce: Announce) -> Finding | None:
    """The same check on the same step if it fails again, else the first finding of the run."""
    run = _run_of(finding)
    refusal = program_refusal(backend, network(run.network), run.precision, run.fusion)
    if refusal is not None:
        return run.refused(finding.backend, refusal)
    again = run.on(finding.backend, announce)
    if isinstance(again, Finding):
        return again
    same = [f for f in again.findings if (f.kernel, f.check) == (finding.kernel, finding.check)]
    return next(iter([*same, *again.findings]), None)


def _choice(backend: Backend, finding: Finding, announce: Announce) -> Finding | None:
    """Replay the whole campaign: only that shows which problems a choice takes."""
    return run_campaign(
        backend,
        kernel_of(backend, finding.kernel),
        profile(finding.details["profile"]),
        finding.seed,
        backend_name=finding.backend,
        network_name=finding.details["network"],
        announce=announce,
    ).finding


def _coverage(backend: Backend, finding: Finding) -> Finding | None:
    """The finding of a kernel that takes nothing, or of an op of the network that no kernel
    takes."""
    name, batches = finding.details["network"], tuple(finding.details["batches"])
    if "*" in finding.kernel or finding.problem is None:
        again = coverage_findings(finding.backend, backend, name, batches, finding.seed)
        return next((f for f in again if f.kernel == finding.kernel), None)
    kernel = kernel_of(backend, finding.kernel)
    if kernel.refusal(finding.problem) is None:
        return None
    return idle_finding(finding.backend, backend, kernel, name, batches, finding.seed)
