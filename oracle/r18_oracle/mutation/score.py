"""A mutation run: every mutant of a backend before the oracle, and the share that it caught."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tabulate import tabulate

from r18.backend import CompiledKernel
from r18.errors import R18Error, UsageError, unknown
from r18.registry import load_backend
from r18_oracle.campaign import Profile, profile
from r18_oracle.findings import Finding
from r18_oracle.mutation.equivalents import judged
from r18_oracle.mutation.mutants import Mutant, Target, mutants_of, sample
from r18_oracle.mutation.reach import Span, device_code, reach, reaching
from r18_oracle.mutation.trial import INVALID, SAME_CODE, SAME_REASON, Question, trial
from r18_oracle.worker import Job, Outcome, Pool

REQUIRED = 97.0
"""The score, in percent, that a backend's kernels must reach."""

SHRINK_SECONDS = 0.2
"""A mutant needs to be caught, and its problem only small enough to read."""

THREADS = 2
"""Of each worker: so that kernels that share work among threads do."""

NEVER = 86_400.0
"""Seconds that a worker itself may be silent: its children, which may hang, end themselves."""


@dataclass(frozen=True)
class Result:
    """One mutant's fate.

    status: `killed` by a finding, or `survived`; `equivalent`, judged by hand (then it is not run)
    or proved by its machine code; `invalid`, since it does not compile. The last two for a reason.
    kernels: those that were to be examined, up to the first finding.
    """

    mutant: Mutant
    status: str
    diff: str
    kernels: tuple[str, ...] = ()
    finding: Finding | None = None
    reason: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Without the diff, which `r18 mutate --show ID` prints, and the finding in short."""
        return {
            "id": self.mutant.id,
            "file": self.mutant.file,
            "line": self.mutant.line,
            "scope": self.mutant.scope,
            "operator": self.mutant.operator,
            "before": self.mutant.before,
            "after": self.mutant.after,
            "status": self.status,
            "reason": self.reason,
            "kernels": list(self.kernels),
            "finding": None if self.finding is None else self._found(self.finding),
            "problem": None if self.finding is None else str(self.finding.problem or ""),
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def _found(finding: Finding) -> dict[str, Any]:
        fields = ("check", "kernel", "kind", "seed", "message")
        return {name: getattr(finding, name) for name in fields}


@dataclass(frozen=True)
class Score:
    """What a run found, in the order of the source."""

    backend: str
    profile: str
    seed: int
    results: tuple[Result, ...]

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def percent(self) -> float:
        """Killed / (all − equivalent − invalid), in percent; 0 when that is none."""
        return 100 * self.count("killed") / self.tried if self.tried else 0.0

    @property
    def tried(self) -> int:
        """The mutants that could have been caught."""
        return self.count("killed") + self.count("survived")

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "profile": self.profile,
            "seed": self.seed,
            "mutants": len(self.results),
            "killed": self.count("killed"),
            "survived": self.count("survived"),
            "equivalent": self.count("equivalent"),
            "invalid": self.count("invalid"),
            "score": self.percent,
            "results": [result.to_json() for result in self.results],
        }

    def text(self) -> str:
        """The equivalent and the survivors with their diffs, the tables, and the score."""
        parts = [
            f"equivalent: {result.mutant.id}\n{result.diff}reason: {result.reason}"
            for result in self.results
            if result.status == "equivalent" and result.reason != SAME_REASON
        ]
        parts += [
            f"SURVIVED: {result.mutant.id}\n{result.diff}shown to: {', '.join(result.kernels)}"
            for result in self.results
            if result.status == "survived"
        ]
        operators = dict.fromkeys(result.mutant.operator for result in self.results)
        rows = [self._row(name, name) for name in operators]
        heads = ("operator", "mutants", *self._statuses())
        parts.append(tabulate([*rows, self._row("all", None)], heads))
        checks = Counter(result.finding.check for result in self.results if result.finding)
        parts.append(tabulate(checks.most_common(), ("killed by", "mutants")))
        parts.append(self.closing())
        return "\n\n".join(parts)

    def _row(self, head: str, operator: str | None) -> tuple[str | int, ...]:
        chosen = [r.status for r in self.results if operator in (None, r.mutant.operator)]
        return (head, len(chosen), *(chosen.count(status) for status in self._statuses()))

    def _statuses(self) -> tuple[str, ...]:
        """The table's; no language but a compiled one has invalid mutants."""
        invalid = ("invalid",) if self.count("invalid") else ()
        return ("killed", "survived", "equivalent", *invalid)

    def closing(self) -> str:
        """The last line."""
        invalid = self.count("invalid")
        return (
            f"{self.backend}: {self.count('killed')} of {self.tried} mutants caught "
            f"({self.count('equivalent')} more are equivalent"
            + (f", {invalid} do not compile" if invalid else "")
            + f"): score {self.percent:.2f} %"
        )


@dataclass(frozen=True)
class Plan:
    """The mutants of a backend, before any is run.

    reasons: why, for each that is equivalent, by id. originals: the files as they are. reaches:
    the source of each kernel, by its id, in the backend's order.
    """

    target: Target
    mutants: tuple[Mutant, ...]
    reasons: Mapping[str, str]
    originals: Mapping[str, str]
    reaches: Mapping[str, tuple[Span, ...]]

    @classmethod
    def of(cls, backend: str) -> Plan:
        """Of an installed backend; raises `UsageError` for a stale list of equivalent mutants."""
        target = Target.of(backend)
        originals = target.sources()
        mutants = [m for file, source in originals.items() for m in mutants_of(file, source)]
        if not mutants:
            raise UsageError(f"backend '{backend}' has no source that can be mutated")
        kernels = load_backend(backend).kernels()
        reaches = {
            kernel.id: (*reach(kernel, target.path), *device_code(kernel, target.path))
            for kernel in kernels
        }
        return cls(target, tuple(mutants), judged(backend, mutants), originals, reaches)

    def find(self, name: str) -> Mutant:
        """The mutant of that id; raises `UnknownName`."""
        for mutant in self.mutants:
            if mutant.id == name:
                return mutant
        raise unknown("mutant", name, [m.id for m in self.mutants if m.file == name.split(":")[0]])

    def diff(self, mutant: Mutant) -> str:
        return mutant.diff(self.originals[mutant.file])


Progress = Callable[[int, int, str], None]
"""Called with (done, all, what)."""


def run(
    backend: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    kernels: str = "*",
    files: str = "*",
    profile_name: str = "quick",
    network: str | None = "resnet18",
    workers: int | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Score:
    """Show every mutant of the backend's sources to the oracle; equivalent ones are not run.

    limit:   a sample of so many, spread over the operators, the same for a seed.
    kernels: a glob over kernel ids: these are examined, on the mutants that they reach.
    files:   a glob over the files to change, such as `kernels/*`.

    The unchanged kernels come first. Raises `R18Error` when they do not pass, `UsageError` when
    nothing would be run, and what `Plan.of` raises.
    """
    plan = Plan.of(backend)
    how = replace(profile(profile_name), shrink_seconds=SHRINK_SECONDS)
    wanted = [name for name in plan.reaches if fnmatchcase(name, kernels)]
    if not wanted:
        raise unknown("kernel", kernels, plan.reaches, hint="A glob over ids works too.")
    shown = {m.id: reaching(m.file, m.line, plan.reaches, wanted) for m in plan.mutants}
    chosen = [m for m in plan.mutants if shown[m.id] and fnmatchcase(m.file, files)]
    chosen = chosen if limit is None else sample(chosen, limit, seed)
    trials = [m for m in chosen if m.id not in plan.reasons]
    if not trials:
        raise UsageError("no mutant to run: nothing would be measured")
    with (
        tempfile.TemporaryDirectory(prefix="r18-mutate-") as folder,
        Pool(workers, THREADS) as pool,
    ):
        used = {name for m in trials for name in shown[m.id]}
        architecture, codes = "", dict[str, str]()
        if any(m.compiled for m in trials):
            architecture, codes = _machine_code(backend, used)
        question = Question(plan.target, Path(folder), how, seed, network, architecture, codes)
        took = _baseline(pool, question, [name for name in wanted if name in used], progress)
        fates = {
            m.id: Result(m, "equivalent", plan.diff(m), reason=plan.reasons[m.id])
            for m in chosen
            if m.id in plan.reasons
        }
        jobs = [_job(question, m, shown[m.id], _patience(took, shown[m.id], how)) for m in trials]
        for outcome in pool.run(jobs):
            mutant = outcome.job.arguments["mutant"]
            fates[mutant.id] = _fate(mutant, plan.diff(mutant), tuple(shown[mutant.id]), outcome)
            progress(len(fates), len(chosen), mutant.id)
    return Score(backend, profile_name, seed, tuple(fates[m.id] for m in chosen))


def _fate(mutant: Mutant, diff: str, kernels: tuple[str, ...], outcome: Outcome) -> Result:
    """What a trial says about a mutant."""
    finding = _result(outcome)
    seconds = outcome.seconds
    if finding is None:
        return Result(mutant, "survived", diff, kernels, seconds=seconds)
    nothing = {INVALID: "invalid", SAME_CODE: "equivalent"}
    if finding.check in nothing:
        status = nothing[finding.check]
        return Result(mutant, status, diff, kernels, reason=finding.message, seconds=seconds)
    return Result(mutant, "killed", diff, kernels, finding, seconds=seconds)


def _machine_code(backend: str, kernels: Collection[str]) -> tuple[str, dict[str, str]]:
    """The device's architecture, and the machine code for it of each kernel that is compiled.

    Raises `UsageError` for a backend that does not tell its device's compute capability.
    """
    loaded = load_backend(backend)
    capability = loaded.probe().details.get("compute capability")
    if capability is None:
        raise UsageError(f"backend '{backend}' does not say for which architecture it compiles")
    target = f"sm_{capability.replace('.', '')}"
    return target, {
        kernel.id: kernel.machine_code(target)
        for kernel in loaded.kernels()
        if kernel.id in kernels and isinstance(kernel, CompiledKernel)
    }


def _baseline(
    pool: Pool, question: Question, kernels: Sequence[str], progress: Progress
) -> dict[str, float]:
    """Seconds by kernel, unchanged, through the same trial; `R18Error` at the first finding."""
    took: dict[str, float] = {}
    patience = round(question.how.call_seconds)
    jobs = [_job(question, None, [name], patience) for name in kernels]
    for outcome in pool.run(jobs):
        if (finding := _result(outcome)) is not None:
            raise R18Error(
                "the unchanged kernels must pass before mutants mean anything:\n"
                + finding.describe()
            )
        (name,) = outcome.job.arguments["kernels"]
        took[name] = outcome.seconds
        progress(len(took), len(jobs), "the unchanged kernels")
    return took


def _patience(took: Mapping[str, float], kernels: Sequence[str], how: Profile) -> int:
    """The longest silence, in seconds: more than the whole campaign of the slowest kernel took."""
    return min(round(how.call_seconds), 10 + round(2 * max(took[name] for name in kernels)))


def _job(
    question: Question, mutant: Mutant | None, kernels: Sequence[str], silence_seconds: int
) -> Job:
    arguments = {
        "question": question,
        "mutant": mutant,
        "kernels": list(kernels),
        "silence_seconds": silence_seconds,
    }
    return Job(trial, arguments, question.target.backend, "", silence_seconds=NEVER)


def _result(outcome: Outcome) -> Any:
    """What a job returned; raises what it raised, or `R18Error` for a worker that was lost."""
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        raise R18Error(f"a mutation worker was lost: {outcome.finding.message}")
    return outcome.result
