"""Verify backends: a campaign on every kernel, then network runs, all in worker processes.

`Request` says what to verify, `verify` does it, and `Verification` holds what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from r18.backend import Backend, DeviceInfo, Kernel
from r18.errors import R18Error, UsageError, counted, unknown, unknown_kernel
from r18.graph.ops import Problem
from r18.graph.precision import PRECISIONS
from r18.graph.resnet import network
from r18_oracle.findings import RUN, Finding
from r18_oracle.loading import kernel_of
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.search.campaign import KernelReport, idle_choice, joined
from r18_oracle.search.choices import Part, divided
from r18_oracle.search.coverage import (
    coverage_findings,
    idle_finding,
    lacks_convolutions,
    program_refusal,
    repeated_findings,
)
from r18_oracle.search.crashes import smallest
from r18_oracle.search.history import confirmed
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.profiles import Profile
from r18_oracle.search.replay import fresh
from r18_oracle.search.tasks import campaign_job, finding_of, network_job
from r18_oracle.search.worker import Job, Outcome, Pool, deadline_in, processes, run_jobs
from r18_oracle.xfails import ExpectedFailure


@dataclass(frozen=True)
class Request:
    """The kernels and networks to verify.

    kernels:    a glob over kernel ids.
    expected:   failures that are expected, strictly (`r18_oracle.xfails`).
    settled:    ids of kernels to skip, because a record has verified their present sources.
    network, weights: the network to run, whose problems campaigns include; its weights source.
    precisions: of the network runs; empty for all that the backend can run.
    workers:    number of worker processes; None for one per core.
    minutes:    the time limit; what is not done by then is left. None for no limit.
    simulated_kernels: whether to run campaigns on simulated devices, which take longer than all
                others together. If not, such a device only runs the network.
    """

    profile: Profile
    kernels: str = "*"
    network: str = "resnet18"
    weights: str = "synthetic"
    precisions: tuple[str, ...] = ()
    fusion: str = "all"
    seed: int = 0
    workers: int | None = None
    minutes: float | None = None
    simulated_kernels: bool = True
    settled: frozenset[str] = frozenset()
    expected: tuple[ExpectedFailure, ...] = ()


SIMULATED_NETWORK = "tiny:image_size=24"
"""Its stages see images of 6, 3, 2 and 1 pixels a side."""


def suited(request: Request, device: DeviceInfo) -> Request:
    """The request, reduced for a simulated device.

    A simulated GPU takes microseconds for a multiplication, so it gets the tiny network and fewer
    and smaller problems. A CPU that emulates instructions takes some nanoseconds: its problems are
    only smaller.
    """
    if not device.simulated:
        return request
    how = request.profile
    if device.kind == "cpu":
        return replace(request, profile=replace(how, max_macs=how.max_macs // 10))
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
    """The results of one backend.

    skipped:  precisions without a network run, with the reason.
    left_out: what else was not run, and how to run it.
    expected: the findings that were expected, each with its entry. passed: the tests that passed
              although an entry expects them to fail.
    empty:    the backend has no kernel.
    """

    name: str
    device: DeviceInfo
    kernels: list[KernelReport] = field(default_factory=list)
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    empty: bool = False
    findings: list[Finding] = field(default_factory=list)
    expected: list[tuple[Finding, ExpectedFailure]] = field(default_factory=list)
    passed: list[tuple[str, ExpectedFailure]] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(report.tally.problems for report in self.kernels)

    @property
    def executed(self) -> bool:
        """Whether anything was judged, or crashed or hung when it was called."""
        found = (*self.findings, *(finding for finding, _ in self.expected))
        called = any(finding.check != "coverage" for finding in found)
        return bool(self.problems or self.checkpoints or called)


@dataclass
class Verification:
    """The results of every backend. left: what the time limit left undone, kernels and networks."""

    request: Request
    backends: list[BackendResult]
    seconds: float = 0.0
    left: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.backends for finding in result.findings]

    @property
    def passed(self) -> list[tuple[str, ExpectedFailure]]:
        """The tests that passed although they are expected to fail."""
        return [one for result in self.backends for one in result.passed]

    @property
    def ok(self) -> bool:
        """Whether kernels ran, the findings are exactly the expected ones, and nothing is left."""
        return self.executed and not (self.findings or self.passed or self.left)

    @property
    def executed(self) -> bool:
        """Whether every backend ran something; with a glob over kernels, whether any did."""
        every = all if self.request.kernels == "*" else any
        return bool(self.backends) and every(result.executed for result in self.backends)

    def closing(self) -> str:
        """The last line of the text."""
        kernels = [report for result in self.backends for report in result.kernels]
        runs = sum(len(result.checkpoints) for result in self.backends)
        names = ", ".join(result.name for result in self.backends) or "no backend"
        did = (
            f"{names}: {counted(len(kernels), 'kernel')} on "
            f"{counted(sum(k.tally.problems for k in kernels), 'problem')} and "
            f"{counted(runs, 'network')} in {self.seconds:.0f} s: "
            + (counted(len(self.findings), "finding") if self.findings else "no finding")
        )
        if expected := sum(len(result.expected) for result in self.backends):
            did += f", {counted(expected, 'expected failure')}"
        if self.passed:
            did += f", {len(self.passed)} that should have failed and passed"
        if self.left:
            did += f"; the time limit left {', '.join(self.left)}"
        if self.executed:
            return did
        idle = ", ".join(result.name for result in self.backends if not result.executed)
        where = f" on {idle}" if any(result.executed for result in self.backends) else ""
        if self.request.kernels == "*" and all(result.empty for result in self.backends):
            return f"{did}; kernels() returned no kernel{where}, so nothing is verified"
        return f"{did}; nothing was executed{where}, so nothing is verified"


def verify(
    backends: Mapping[str, Backend],
    request: Request,
    *,
    on_start: Callable[[int], None] = lambda jobs: None,
    on_progress: Callable[[str, Problem | None], None] = lambda what, problem: None,
    on_done: Callable[[str], None] = lambda what: None,
    on_sound: Callable[[BackendResult], None] = lambda part: None,
) -> Verification:
    """Verify probed backends, given by the names that `load_backend` takes.

    on_start gets the number of jobs, on_progress the kernel and problem of each call, on_done the
    kernel of each finished job, on_sound the result of each network run and of each campaign
    without a finding, when its last job is done: it is final then. Crashes, hangs and network
    problems that no kernel takes are findings. At the time limit the kernels that are done are
    complete, and the others are left. Raises `UnknownName` if no kernel matches the glob, what
    making a weights source raises, and `R18Error` if a job has no outcome, so that no kernel is
    left out silently.
    """
    start, deadline = time.perf_counter(), deadline_in(request.minutes)
    _check_glob(request.kernels, backends)
    _check_expected(request, backends)
    runs = {name: _BackendRun(name, backend, request) for name, backend in backends.items()}
    parts = divided(sum(len(run.kernels) for run in runs.values()), processes(request.workers))
    jobs = [job for run in runs.values() for job in run.jobs(parts)]
    on_start(len(jobs))
    missing = {id(job): job for job in jobs}
    for outcome in run_jobs(
        jobs,
        workers=request.workers,
        on_progress=lambda job, problem: on_progress(job.kernel, problem),
        deadline=deadline,
        wanted=lambda job: runs[job.backend].wants(job),
    ):
        run = runs[outcome.job.backend]
        if (sound := run.take(outcome)) is not None:
            on_sound(sound)
        on_done(outcome.job.kernel)
        del missing[id(outcome.job)]
    left = [job for job in missing.values() if runs[job.backend].wants(job)]
    if left and time.monotonic() < deadline:
        raise R18Error(
            f"{len(left)} of {len(jobs)} jobs have no outcome: this is a fault of the oracle"
        )
    for run in runs.values():
        run.complete()
    results = [run.result for run in runs.values()]
    seconds = time.perf_counter() - start
    undone = dict.fromkeys(job.kernel for job in left if runs[job.backend].wants(job))
    return Verification(request, results, seconds, tuple(undone))


def _check_glob(glob: str, backends: Mapping[str, Backend]) -> None:
    ids = [kernel.id for backend in backends.values() for kernel in backend.kernels()]
    if glob != "*" and not any(fnmatchcase(kernel, glob) for kernel in ids):
        raise unknown_kernel(glob, ids)


def _check_expected(request: Request, backends: Mapping[str, Backend]) -> None:
    """Raise `UsageError` for an entry on a kernel or network that matches none, as a typo does."""
    if request.kernels != "*":
        return
    tests = [f"test_kernel[{k.id}]" for backend in backends.values() for k in backend.kernels()]
    for name, backend in backends.items():
        offered = dict.fromkeys(kernel.precision.name for kernel in backend.kernels())
        tests += [f"test_network[{name}/{precision}]" for precision in offered]
    for entry in request.expected:
        of_ours = entry.test.startswith(("test_kernel[", "test_network["))
        if of_ours and not any(entry.matches(test) for test in tests):
            raise unknown("test of an [[xfail]]", entry.test, tests, error=UsageError)


class _BackendRun:
    """The jobs of one backend, and the result that their outcomes make up.

    kernels: those that get a campaign.
    """

    def __init__(self, name: str, backend: Backend, request: Request) -> None:
        device = backend.probe()
        self.name = name
        self.backend = backend
        self.request = suited(request, device)
        self.result = BackendResult(name, device, empty=not backend.kernels())
        self.kernels: list[Kernel] = []
        if request.simulated_kernels or not device.simulated:
            self.kernels = _kernels(backend, request)
        else:
            self.result.left_out = (
                f"only the network '{self.request.network}'; its kernels with --backend {name}"
            )
        self._begun: dict[str, list[KernelReport | None]] = {}
        """Of each kernel without a report, the reports of the parts of its campaign."""

    def jobs(self, parts: int) -> Iterator[Job]:
        """The network runs, which take longest, and then the parts of each campaign. Also adds the
        findings on coverage to the result."""
        request, result = self.request, self.result
        how = request.profile, request.seed, request.network
        yield from _network_jobs(self.name, self.backend, request, result)
        for kernel in self.kernels:
            self._begun[kernel.id] = [None] * parts
            for nth in range(parts):
                yield campaign_job(self.name, kernel.id, *how, Part(nth, parts))
        if request.kernels == "*":
            batches = request.profile.batches
            result.findings += coverage_findings(
                self.name, self.backend, request.network, batches, request.seed
            )
        else:
            result.findings += repeated_findings(
                self.name, self.backend, request.network, request.profile.batches, request.seed
            )

    def wants(self, job: Job) -> bool:
        """Whether the result depends on a job without an outcome: not if the kernel has its report,
        or an earlier part of its campaign a finding."""
        part = _part_of(job)
        if part is None:
            return True
        reports = self._begun.get(job.kernel)
        return reports is not None and part.nth < len(_needed(reports))

    def take(self, outcome: Outcome) -> BackendResult | None:
        """Add the outcome of a job.

        Returns the result of a network run, or of the campaign that the job completes; None if that
        has a finding, which is not final yet.
        """
        finding, job = finding_of(outcome), outcome.job
        part = _part_of(job)
        if part is None:
            return self._take_run(outcome, finding)
        reports = self._begun.get(job.kernel)
        if reports is None:  # an earlier part had a finding
            return None
        report = outcome.result
        if not isinstance(report, KernelReport):
            report = KernelReport(self.name, job.kernel, finding=finding, seconds=outcome.seconds)
        reports[part.nth] = report
        if None in _needed(reports):
            return None
        whole = self._add(job.kernel)
        sound = whole.verdict == "ok" and not self._found_on(job.kernel)
        return self._alone(kernels=[whole]) if sound else None

    def _take_run(self, outcome: Outcome, finding: Finding | None) -> BackendResult | None:
        report = outcome.result
        if isinstance(report, CheckpointReport):
            self.result.checkpoints.append(report)
            self.result.findings += report.findings
        if finding is not None:
            self.result.findings.append(finding)
        if self._found_on(outcome.job.kernel) or not isinstance(report, CheckpointReport):
            return None
        return self._alone(checkpoints=[report]) if report.ok else None

    def _add(self, kernel: str) -> KernelReport:
        """Join what the parts of a campaign have reported, and add it to the result."""
        request = self.request
        needed = _needed(self._begun.pop(kernel))
        report = joined([one for one in needed if one is not None])
        if report.finding is None:
            report.finding = idle_choice(report, request.profile, request.seed, request.network)
        self.result.kernels.append(report)
        self.result.findings += [f for f in [report.finding] if f is not None]
        return report

    def _found_on(self, kernel: str) -> bool:
        return any(finding.kernel == kernel for finding in self.result.findings)

    def _alone(self, **reports: Any) -> BackendResult:
        """These reports as a result of their own."""
        return BackendResult(self.result.name, self.result.device, **reports)

    def complete(self) -> None:
        """When all jobs are done, or the time is up: find idle kernels, shrink crashes and hangs,
        confirm the other findings in fresh processes, sort."""
        for kernel, reports in list(self._begun.items()):
            if any(map(_failed, reports)):
                self._add(kernel)
        with Pool(1) as pool:
            for report in self.result.kernels:
                before = report.finding
                report.finding = self._final_finding(report, pool)
                if report.finding is not before:
                    self.result.findings = [f for f in self.result.findings if f is not before]
                    self.result.findings += [f for f in [report.finding] if f is not None]
        self._sort()
        self._expect()

    def _expect(self) -> None:
        """Set the expected findings apart, and note what passed although it should not."""
        result, entries = self.result, self.request.expected
        ran = {f"test_kernel[{report.kernel}]" for report in result.kernels}
        ran |= {f"test_network[{self.name}/{report.precision}]" for report in result.checkpoints}
        failed: set[str] = set()
        for finding in list(result.findings):
            test = _test_of(finding)
            failed.add(test)
            entry = next((entry for entry in entries if entry.matches(test)), None)
            if entry is not None:
                result.expected.append((finding, entry))
                result.findings.remove(finding)
        for entry in entries:
            hits = sorted(test for test in ran - failed if entry.matches(test))
            result.passed += [(test, entry) for test in hits]

    def _final_finding(self, report: KernelReport, pool: Pool) -> Finding | None:
        request = self.request
        if report.verdict == "refused":
            kernel = kernel_of(self.backend, report.kernel)
            batches = request.profile.batches
            return idle_finding(
                self.name, self.backend, kernel, request.network, batches, request.seed
            )
        if report.finding is not None:
            least = smallest(report.finding, request.profile, pool)
            return confirmed(least, report.history, fresh)
        return None

    def _sort(self) -> None:
        """Sort kernels and precisions as they are listed; findings on the network last."""
        order = {kernel.id: index for index, kernel in enumerate(self.backend.kernels())}
        precisions = list(PRECISIONS)
        result = self.result
        result.kernels.sort(key=lambda report: order[report.kernel])
        result.checkpoints.sort(key=lambda report: precisions.index(report.precision))
        result.findings.sort(key=lambda f: (f.kind == "network", order.get(f.kernel, len(order))))


def _test_of(finding: Finding) -> str:
    """The name of the conformance suite's test that a finding fails."""
    if RUN in finding.details:
        return f"test_network[{finding.backend}/{finding.details[RUN]['precision']}]"
    return f"test_kernel[{finding.kernel}]"


def _kernels(backend: Backend, request: Request) -> list[Kernel]:
    """The kernels to run campaigns on."""
    return [
        kernel
        for kernel in backend.kernels()
        if fnmatchcase(kernel.id, request.kernels) and kernel.id not in request.settled
    ]


def _part_of(job: Job) -> Part | None:
    """The part of a campaign that a job runs; None for a network run."""
    part: Part | None = job.arguments.get("part")
    return part


def _failed(report: KernelReport | None) -> bool:
    return report is not None and report.finding is not None


def _needed(reports: list[KernelReport | None]) -> list[KernelReport | None]:
    """The reports up to the first with a finding; None for a part that has none yet."""
    failed = next((nth for nth, one in enumerate(reports) if _failed(one)), len(reports))
    return reports[: failed + 1]


def _network_jobs(
    name: str, backend: Backend, request: Request, result: BackendResult
) -> Iterator[Job]:
    """A network run for each precision in which the backend can run the network."""
    if request.kernels != "*":
        return
    schedule = network(request.network)
    offered = dict.fromkeys(kernel.precision.name for kernel in backend.kernels())
    lacking = [p for p in offered if lacks_convolutions(backend, p)]
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
        if precision in request.precisions or len(lacking) == len(offered):
            result.findings.append(run.refused(name, refusal))
