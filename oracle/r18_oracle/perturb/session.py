"""`perturb`: run a backend's kernels and programs with perturbed schedules, and record results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r18.backend import Backend
from r18.graph.resnet import tiny
from r18_oracle.check.perturbed import SEEDS, Delays, lost, unable
from r18_oracle.findings import SILENCE, Finding
from r18_oracle.perturb.record import Record
from r18_oracle.perturb.tasks import Result, perturb_kernel, program_job
from r18_oracle.search.coverage import program_refusal
from r18_oracle.search.profiles import profile
from r18_oracle.search.tasks import kernel_job
from r18_oracle.search.worker import Job, Outcome, deadline_in, run_jobs
from r18_oracle.session import backend_with, matching


@dataclass
class Perturbation:
    """The results of a run.

    kernels, programs: how many were requested. known: how many results are from the record.
    kinds: the kinds of site that were delayed. seeds: how many seeds of delays each problem had.
    path: the record, if there is one.
    """

    kernels: int
    programs: int
    known: int
    kinds: Sequence[str]
    seeds: int
    results: list[Result] = field(default_factory=list)
    path: Path | None = None

    @property
    def left(self) -> int:
        """How many results are missing."""
        return self.kernels + self.programs - len(self.results)

    @property
    def ok(self) -> bool:
        """Whether everything ran and nothing failed."""
        return not self.left and all(result.verdict == "ok" for result in self.results)

    @property
    def findings(self) -> list[Finding]:
        return [result.finding for result in self.results if result.finding is not None]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        results = [
            {
                "name": result.name,
                "verdict": result.verdict,
                "problems": result.problems,
                "calls": result.calls,
                "finding": result.finding and result.finding.to_json(),
                "broken": result.broken,
                "seconds": round(result.seconds, 3),
            }
            for result in self.results
        ]
        return {"seeds": self.seeds, "kinds": list(self.kinds), "results": results}

    def text(self) -> str:
        """The failures without a finding, and a summary."""
        lines = [
            f"{result.name}: {result.broken or result.verdict}"
            for result in self.results
            if result.verdict != "ok" and result.finding is None
        ]
        bad = sum(result.verdict != "ok" for result in self.results)
        lines.append(
            f"{self.kernels} kernels and {self.programs} programs, {self.left} left: "
            f"{sum(result.problems for result in self.results):,} problems, "
            f"{sum(result.calls for result in self.results):,} calls with {self.seeds} seeds of "
            f"delays ({', '.join(self.kinds)}): {bad} failed"
        )
        if self.known:
            lines.append(f"{self.known} of these results are from the record")
        if self.left:
            lines.append("STOPPED early; with --record the same command continues")
        return "\n".join(lines)


def perturb(
    backend: str,
    *,
    kernels: str = "*",
    profile_name: str = "quick",
    network: str | None = "resnet18",
    seed: int = 0,
    seeds: int = SEEDS,
    kinds: Sequence[str] | None = None,
    jobs: int | None = None,
    minutes: float | None = None,
    records_folder: Path | None = None,
    again: bool = False,
    on_start: Callable[[int, int], None] = lambda todo, known: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Perturbation:
    """Run a backend's kernels with seeds of delays, and its programs too if `kernels` is `*`.

    kernels: a glob over kernel ids. seed: for problems and inputs. seeds: how many seeds of delays
    there are, from 0. kinds: the kinds of site to delay; None for all. jobs: processes at a time;
    by default one per core. minutes: time limit of the run. records_folder: the folder of the
    record, which is written after each kernel. Results that it holds for the same sources are not
    computed again, except with `again`. on_start: called with the numbers of results to compute and
    of known ones.

    Raises `UnknownName` for an unknown kernel, profile or kind, and `UsageError` for backend `auto`
    or a backend that cannot perturb its schedule.
    """
    deadline = deadline_in(minutes)
    how = profile(profile_name)
    chosen = backend_with(backend, kernels)
    device = chosen.probe()  # from now on `kernels()` lists those of this device
    ids = matching(chosen, kernels)
    offered = chosen.perturb(0, kinds)
    chosen.perturb(None)
    if not offered:
        raise unable(chosen)
    late = tuple(kind for kind in offered if kinds is None or kind in kinds)
    delays = Delays(tuple(range(seeds)), late)
    record = None
    if records_folder is not None:
        record = Record(
            records_folder,
            device,
            chosen,
            profile=profile_name,
            network=network,
            seed=seed,
            seeds=seeds,
            kinds=late,
        )
    known = record.fresh(ids) if record and not again else []
    done = {result.name for result in known}
    todo = [
        kernel_job(
            perturb_kernel, backend, name, how, seed, network, delays=delays, deadline=deadline
        )
        for name in ids
        if name not in done
    ]
    programs = [
        program_job(backend, precision, delays, deadline)
        for precision in (_precisions(chosen) if kernels == "*" else ())
    ]
    found = Perturbation(len(ids), len(programs), len(known), late, seeds, known)
    on_start(len(todo) + len(programs), len(known))
    for result in _results([*programs, *todo], delays, jobs, deadline):
        found.results.append(result)
        if record is not None:
            record.write([result])
        on_result(result)
    found.path = record.path if record is not None else None
    return found


def _results(
    jobs: Sequence[Job], delays: Delays, workers: int | None, deadline: float
) -> Iterator[Result]:
    """The results that were computed before the deadline."""
    if time.monotonic() >= deadline:
        return
    for outcome in run_jobs(jobs, workers=workers):
        result = _result(outcome, delays)
        if not result.late:
            yield result


def _result(outcome: Outcome, delays: Delays) -> Result:
    """A job's result, also for a crash or a hang. Raises the exception if the oracle failed."""
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is None:
        result: Result = outcome.result
        return result
    name, gone = outcome.job.kernel, outcome.finding
    if gone.problem is None:
        return Result(name, 0, 0, broken=f"{gone.check}: {gone.message}", seconds=outcome.seconds)
    details = {SILENCE: outcome.job.silence_seconds}
    finding = lost(gone.with_details(details), delays)
    return Result(name, 1, 1, finding, seconds=outcome.seconds)


def _precisions(backend: Backend) -> Iterator[str]:
    """The precisions in which programs run: those whose results have the same bits each time."""
    kernels = backend.kernels()
    for precision in dict.fromkeys(kernel.precision.name for kernel in kernels):
        same_bits = all(k.deterministic for k in kernels if k.precision.name == precision)
        if same_bits and program_refusal(backend, tiny(), precision, "all") is None:
            yield precision


__all__ = ["Perturbation", "perturb"]
