"""The main job: every kernel of the chosen backends, then the network, checkpoint by checkpoint.

Kernels are searched with drawn problems and the network's own, in worker processes; then each
backend runs the network in each of its precisions and is compared with float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from r18.backend import Backend, DeviceInfo
from r18.errors import R18Error, unknown
from r18.graph.ops import Problem
from r18.graph.precision import PRECISIONS
from r18.graph.schedule import network
from r18_oracle.findings import Finding
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.search.campaign import KernelReport, Profile
from r18_oracle.search.coverage import coverage_findings, idle_finding, program_refusal
from r18_oracle.search.lost import smallest
from r18_oracle.search.tasks import (
    NetworkRun,
    campaign_job,
    finding_of,
    kernel_of,
    network_job,
    no_program,
)
from r18_oracle.search.worker import Job, Outcome, Pool, run_jobs


@dataclass(frozen=True)
class Request:
    """What to verify.

    kernels:    a glob over kernel ids.
    settled:    ids of kernels that are not run again: a record holds them as they stand.
    network, weights: whose problems are included and what runs end to end; a weights source.
    precisions: of the end-to-end runs; empty for all that the backend can run.
    workers:    processes at once.
    simulated_kernels: whether kernels of simulated devices are searched too; they take longer than
                those of all others together. If not, such a device runs its network alone.
    """

    profile: Profile
    kernels: str = "*"
    network: str = "resnet18"
    weights: str = "synthetic"
    precisions: tuple[str, ...] = ()
    fusion: str = "all"
    seed: int = 0
    workers: int | None = None
    simulated_kernels: bool = True
    settled: frozenset[str] = frozenset()


SIMULATED_NETWORK = "tiny"


def suited(request: Request, device: DeviceInfo) -> Request:
    """The request as the device can bear it.

    A simulated one takes microseconds for a multiplication: it gets the tiny network in place of
    any other, and fewer and smaller problems.
    """
    if not device.simulated:
        return request
    how = request.profile
    smaller = replace(
        how,
        examples=max(3, how.examples // 4),
        max_elements=how.max_elements // 20,
        max_macs=how.max_macs // 200,
        batches=(1,),
        whole=False,
        samples=1,
    )
    return replace(request, profile=smaller, network=SIMULATED_NETWORK)


@dataclass
class BackendResult:
    """What was found on one backend.

    skipped: why a precision was not run end to end. left_out: what else was not run, and how to.
    """

    name: str
    device: DeviceInfo
    kernels: list[KernelReport] = field(default_factory=list)
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(report.tally.problems for report in self.kernels)

    @property
    def executed(self) -> bool:
        """Whether anything was judged, or called and never came back."""
        called = any(finding.check != "coverage" for finding in self.findings)
        return bool(self.problems or self.checkpoints or called)


@dataclass
class Verification:
    """Everything that was run, by backend."""

    request: Request
    backends: list[BackendResult]
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.backends for finding in result.findings]

    @property
    def executed(self) -> bool:
        """Whether every backend ran something; of chosen kernels, not each backend has any."""
        every = all if self.request.kernels == "*" else any
        return bool(self.backends) and every(result.executed for result in self.backends)

    def closing(self) -> str:
        """The last line."""
        kernels = [report for result in self.backends for report in result.kernels]
        runs = sum(len(result.checkpoints) for result in self.backends)
        names = ", ".join(result.name for result in self.backends) or "no backend"
        did = (
            f"{names}: {counted(len(kernels), 'kernel')} on "
            f"{counted(sum(k.tally.problems for k in kernels), 'problem')} and "
            f"{counted(runs, 'network')} in {self.seconds:.0f} s: "
            + (counted(len(self.findings), "finding") if self.findings else "no finding")
        )
        if self.executed:
            return did
        idle = ", ".join(result.name for result in self.backends if not result.executed)
        where = f" on {idle}" if any(result.executed for result in self.backends) else ""
        return f"{did}; nothing was executed{where}, so nothing is verified"


def counted(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def verify(
    backends: Mapping[str, Backend],
    request: Request,
    *,
    on_start: Callable[[int], None] = lambda jobs: None,
    on_progress: Callable[[str, Problem | None], None] = lambda what, problem: None,
    on_done: Callable[[str], None] = lambda what: None,
) -> Verification:
    """Verify backends, given by the names that `load_backend` takes; they must be probed.

    on_start gets the number of jobs; on_progress what is under way; on_done each job that ended.
    Raises `UnknownName` when no kernel matches the glob and what making a weights source raises.
    A crash, a hang, or a network problem that no kernel takes is a finding. Raises `R18Error` when
    a job came to no end, so that no kernel is left out unseen.
    """
    start = time.perf_counter()
    results = {name: BackendResult(name, backend.probe()) for name, backend in backends.items()}
    asked = {name: suited(request, result.device) for name, result in results.items()}
    jobs: list[Job] = []
    for name, backend in backends.items():
        own = asked[name]
        jobs += _network_jobs(name, backend, own, results[name])
        if request.simulated_kernels or not results[name].device.simulated:
            jobs += _kernel_jobs(name, backend, own)
        else:
            results[
                name
            ].left_out = f"the network '{own.network}' only; its kernels with --backend {name}"
        if own.kernels == "*":
            results[name].findings += coverage_findings(
                name, backend, own.network, own.profile.batches, own.seed
            )
    if request.kernels != "*" and not any(
        fnmatchcase(kernel.id, request.kernels)
        for backend in backends.values()
        for kernel in backend.kernels()
    ):
        ids = [kernel.id for backend in backends.values() for kernel in backend.kernels()]
        raise unknown("kernel", request.kernels, ids, hint="A glob over ids works too.")
    on_start(len(jobs))
    missing = len(jobs)
    for outcome in run_jobs(
        jobs,
        workers=request.workers,
        on_progress=lambda job, problem: on_progress(job.kernel, problem),
    ):
        _take(results[outcome.job.backend], outcome)
        on_done(outcome.job.kernel)
        missing -= 1
    if missing:
        raise R18Error(
            f"{missing} of {len(jobs)} jobs came to no end: this is a fault of the oracle"
        )
    for name, backend in backends.items():
        _complete(results[name], backend, asked[name])
        order = {kernel.id: index for index, kernel in enumerate(backend.kernels())}
        results[name].kernels.sort(key=lambda report: order[report.kernel])
        results[name].checkpoints.sort(key=lambda report: list(PRECISIONS).index(report.precision))
        results[name].findings.sort(
            key=lambda f: (f.kind == "network", order.get(f.kernel, len(order)))
        )
    return Verification(request, list(results.values()), time.perf_counter() - start)


def _kernel_jobs(name: str, backend: Backend, request: Request) -> Iterator[Job]:
    for kernel in backend.kernels():
        if fnmatchcase(kernel.id, request.kernels) and kernel.id not in request.settled:
            yield campaign_job(name, kernel.id, request.profile, request.seed, request.network)


def _network_jobs(
    name: str, backend: Backend, request: Request, result: BackendResult
) -> Iterator[Job]:
    """One end-to-end run a precision, of those that the backend can plan the network in."""
    if request.kernels != "*":
        return
    schedule = network(request.network)
    offered = dict.fromkeys(kernel.precision.name for kernel in backend.kernels())
    for precision in request.precisions or offered:
        run = NetworkRun(
            request.network,
            request.weights,
            precision,
            request.fusion,
            request.profile.samples,
            request.seed,
        )
        refusal = program_refusal(backend, schedule, precision, request.fusion)
        if refusal is None:
            yield network_job(name, run, request.profile.call_seconds)
            continue
        result.skipped[precision] = refusal
        if precision in request.precisions:
            result.findings.append(no_program(name, run, refusal))


def _complete(result: BackendResult, backend: Backend, request: Request) -> None:
    """What is to be said of kernels when all jobs are done: who was idle, and on what who died."""
    how = request.profile
    with Pool(1) as pool:
        for report in result.kernels:
            before = report.finding
            if report.verdict == "refused":
                kernel = kernel_of(backend, report.kernel)
                asked = (request.network, how.batches, request.seed)
                report.finding = idle_finding(result.name, backend, kernel, *asked)
            elif before is not None:
                report.finding = smallest(before, how, pool)
            if report.finding is not before:
                result.findings = [f for f in result.findings if f is not before]
                result.findings += [f for f in [report.finding] if f is not None]


def _take(result: BackendResult, outcome: Outcome) -> None:
    """File an outcome under its backend."""
    finding = finding_of(outcome)
    if isinstance(outcome.result, CheckpointReport):
        result.checkpoints.append(outcome.result)
        result.findings += outcome.result.findings
    if finding is not None:
        result.findings.append(finding)
    if isinstance(outcome.result, KernelReport):
        result.kernels.append(outcome.result)
    elif "kernel" in outcome.job.arguments:
        report = KernelReport(
            result.name, outcome.job.kernel, finding=finding, seconds=outcome.seconds
        )
        result.kernels.append(report)
