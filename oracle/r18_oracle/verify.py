"""The main job: every kernel of the chosen backends, then the network, checkpoint by checkpoint.

Kernels are searched with drawn problems and the network's own, in worker processes; then each
backend runs the network in each of its precisions and is compared with float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from r18.backend import Backend, CompileOptions, DeviceInfo
from r18.errors import NoKernel, UsageError, unknown
from r18.executor import make_plan
from r18.ops import Problem
from r18.precision import PRECISIONS
from r18.schedule import network
from r18_oracle.campaign import KernelReport, Profile, uncovered
from r18_oracle.checkpoint_report import CheckpointReport
from r18_oracle.findings import Finding
from r18_oracle.tasks import NetworkRun, campaign_job, network_job
from r18_oracle.worker import Job, Outcome, run_jobs


@dataclass(frozen=True)
class Request:
    """What to verify.

    kernels:    a glob over kernel ids.
    network, weights: whose problems are included and what runs end to end; a weights source.
    precisions: of the end-to-end runs; empty for all that the backend can run.
    workers:    processes at once.
    """

    profile: Profile
    kernels: str = "*"
    network: str = "resnet18"
    weights: str = "synthetic"
    precisions: tuple[str, ...] = ()
    fusion: str = "all"
    seed: int = 0
    workers: int | None = None


@dataclass
class BackendResult:
    """What was found on one backend; `skipped` says why a precision was not run end to end."""

    name: str
    device: DeviceInfo
    kernels: list[KernelReport] = field(default_factory=list)
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(report.tally.problems for report in self.kernels)


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
        """Whether anything was judged at all."""
        return any(result.problems or result.checkpoints for result in self.backends)

    def closing(self) -> str:
        """The last line."""
        kernels = [report for result in self.backends for report in result.kernels]
        runs = sum(len(result.checkpoints) for result in self.backends)
        names = ", ".join(result.name for result in self.backends)
        did = (
            f"{names}: {len(kernels)} kernels on {sum(k.tally.problems for k in kernels)} problems "
            f"and {runs} networks in {self.seconds:.0f} s"
        )
        if not self.executed:
            return f"{did}: nothing was executed, so nothing is verified"
        count = len(self.findings)
        return f"{did}: " + (f"{count} finding(s)" if count else "no finding")


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
    A crash, a hang, or a network problem that no kernel takes is a finding.
    """
    start = time.perf_counter()
    results = {name: BackendResult(name, backend.probe()) for name, backend in backends.items()}
    jobs: list[Job] = []
    for name, backend in backends.items():
        jobs += _network_jobs(name, backend, request, results[name])
        jobs += _kernel_jobs(name, backend, request)
        if request.kernels == "*":
            results[name].findings += _uncovered(name, backend, request)
    if request.kernels != "*" and not any(job.arguments.get("kernel") for job in jobs):
        ids = [kernel.id for backend in backends.values() for kernel in backend.kernels()]
        raise unknown("kernel", request.kernels, ids, hint="A glob over ids works too.")
    on_start(len(jobs))
    for outcome in run_jobs(
        jobs,
        workers=request.workers,
        on_progress=lambda job, problem: on_progress(job.kernel, problem),
    ):
        _take(results[outcome.job.backend], outcome)
        on_done(outcome.job.kernel)
    for name, backend in backends.items():
        order = {kernel.id: index for index, kernel in enumerate(backend.kernels())}
        results[name].kernels.sort(key=lambda report: order[report.kernel])
        results[name].checkpoints.sort(key=lambda report: list(PRECISIONS).index(report.precision))
    return Verification(request, list(results.values()), time.perf_counter() - start)


def _kernel_jobs(name: str, backend: Backend, request: Request) -> Iterator[Job]:
    for kernel in backend.kernels():
        if fnmatchcase(kernel.id, request.kernels):
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
        try:
            make_plan(backend, schedule, CompileOptions(1, precision, request.fusion))
        except NoKernel as refusal:
            if precision in request.precisions:
                result.findings.append(_no_program(name, precision, request, str(refusal)))
            result.skipped[precision] = str(refusal).splitlines()[-1].strip()
            continue
        run = NetworkRun(
            request.network,
            request.weights,
            precision,
            request.fusion,
            request.profile.samples,
            request.seed,
        )
        yield network_job(name, run, request.profile.call_seconds)


def _no_program(name: str, precision: str, request: Request, why: str) -> Finding:
    return Finding(
        check="coverage",
        backend=name,
        kernel=f"{name}/program/{request.fusion}/{precision}",
        problem=None,
        kind="network",
        seed=request.seed,
        message=f"cannot run {request.network} in {precision}: {why}",
    )


def _uncovered(name: str, backend: Backend, request: Request) -> list[Finding]:
    """A finding for each network problem that no kernel takes."""
    missing = uncovered(backend, network(request.network), request.profile.batches)
    return [
        Finding(
            check="coverage",
            backend=name,
            kernel=f"{name}/{problem.op.name}/*/{precision}",
            problem=problem,
            kind="network",
            seed=request.seed,
            message=f"no {precision} kernel takes this problem of {request.network}",
        )
        for precision, problem in missing
    ]


def _take(result: BackendResult, outcome: Outcome) -> None:
    """File an outcome under its backend."""
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        result.findings.append(outcome.finding)
        if "kernel" in outcome.job.arguments:
            report = KernelReport(
                result.name, outcome.job.kernel, finding=outcome.finding, seconds=outcome.seconds
            )
            result.kernels.append(report)
    elif isinstance(outcome.result, KernelReport):
        result.kernels.append(outcome.result)
        if outcome.result.finding is not None:
            result.findings.append(outcome.result.finding)
    elif isinstance(outcome.result, CheckpointReport):
        result.checkpoints.append(outcome.result)
        result.findings += outcome.result.findings
    else:
        raise UsageError(f"a worker sent a {type(outcome.result).__name__}")
