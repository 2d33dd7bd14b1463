"""A mutation run: mutants of a backend before the oracle, in an order that allows to stop."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from r18.backend import Backend, DeviceInfo
from r18.backend.registry import load_backend
from r18.errors import R18Error, UsageError, unknown
from r18.machine import cpus
from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant, sample
from r18_oracle.mutation.plan import Pace, Plan, eager, patience
from r18_oracle.mutation.reach import shown
from r18_oracle.mutation.record import Journal, Known
from r18_oracle.mutation.sanitizing import heard, sanitizer
from r18_oracle.mutation.score import Result, Score
from r18_oracle.mutation.trial import LATE, Question, copied, trial
from r18_oracle.sanitize.run import Request as SanitizeRequest
from r18_oracle.sanitize.run import version_of
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.verify import Request, suited
from r18_oracle.search.worker import Job, Outcome, Pool

REQUIRED = 97.0
"""The score, in percent, that a backend's kernels must reach."""

SHRINK_SECONDS = 0.2
"""A mutant needs to be caught, and its problem only small enough to read."""

THREADS = 2
"""Of each worker: so that kernels that share work among threads do."""

NEVER = 86_400.0
"""Seconds that a worker itself may be silent: its children, which may hang, end themselves."""

AGAIN = {
    "survived": "the mutants that survived, and their kernels unchanged: as after a change of the "
    "oracle",
    "all": "every mutant, and the unchanged kernels",
}
"""What may be run again although the record holds it."""

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
    minutes: float | None = None,
    records_folder: Path | None = None,
    again: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Score:
    """Show mutants of the backend's sources to the oracle; equivalent ones are not run.

    limit:   a sample of so many, the same for a seed; see `mutants.sample`.
    kernels: a glob over kernel ids: these are examined, on the mutants that they reach.
    files:   a glob over the files to change, such as `kernels/*`.
    minutes: when it stops; what has not been judged by then is left.
    records_folder: where the record is: it is written as mutants are judged, and what it knows is
    not run, but for `again` (one of `AGAIN`).

    The unchanged kernels come first. A simulated device gets less to do, as in `r18 verify`. What
    survives in device code runs under compute-sanitizer at last, where there is one.
    Raises `R18Error` when the unchanged do not pass, `UsageError` when nothing would be run, and
    what `Plan.of` raises.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if again is not None and again not in AGAIN:
        raise unknown("choice of what to run again", again, AGAIN)
    plan = Plan.of(backend)
    loaded = load_backend(backend)
    device = loaded.probe()
    how, network = _suited(profile(profile_name), network, device)
    here = {kernel.id for kernel in loaded.kernels()}  # those of this device
    wanted = [name for name in plan.reaches if name in here and fnmatchcase(name, kernels)]
    if not wanted:
        raise unknown("kernel", kernels, plan.reaches, hint="A glob over ids works too.")
    kernels_of = shown(plan.mutants, plan.reaches, wanted)
    candidates = [m for m in plan.mutants if kernels_of[m.id] and fnmatchcase(m.file, files)]
    chosen = sample(candidates, limit, seed)
    if all(mutant.id in plan.reasons for mutant in chosen):
        raise UsageError("no mutant to run: nothing would be measured")
    fixed = {"profile": profile_name, "seed": seed, "network": network}
    journal = None
    known = Known()
    if records_folder is not None:
        journal = Journal(records_folder, device, plan, fixed, kernels_of)
        known = _unless(journal.known(), again)
    state = _State(plan, chosen, known, backend, profile_name, seed)
    request = {"kernels": kernels, "files": files, "limit": limit}
    trials = [mutant for mutant in chosen if mutant.id not in state.fates]
    if trials:
        with (
            tempfile.TemporaryDirectory(prefix="r18-mutate-") as folder,
            Pool(workers, THREADS) as pool,
        ):
            root = Path(folder)
            unchanged = copied(plan.target, root / "unchanged", plan.texts)
            target = replace(plan.target, path=unchanged)
            question = Question(target, root, how, seed, network, deadline=deadline)
            used = [name for name in wanted if any(name in kernels_of[m.id] for m in trials)]
            if any(mutant.compiled for mutant in trials):
                question = _with_machine_code(question, loaded, device, used)
            todo = [name for name in used if name not in known.paces]
            paces = {**known.paces, **_baseline(pool, question, todo, progress)}
            if journal is not None:
                journal.passed(paces)
            if all(name in paces for name in used):
                jobs = [_job(question, m, kernels_of[m.id], paces) for m in trials]
                for outcome in pool.run(jobs):
                    result = state.judged(outcome, kernels_of)
                    if result is None:
                        continue  # late: so will be those that wait, which takes no time
                    progress(len(state.fates), len(chosen), result.mutant.id)
                    if journal is not None:
                        journal.write(request, state.score(), [result])
    for mutant in state.suspects():
        asked = SanitizeRequest(backend, kernels_of[mutant.id], profile_name, network, seed)
        result = state.sanitized(mutant, asked, workers or cpus(), deadline)
        if journal is not None:
            journal.write(request, state.score(), [result])
    if journal is not None:
        journal.write(request, state.score(), [])
    return state.score()


@dataclass
class _State:
    """What has become of the sample by now; `chosen` is in the order in which it is run."""

    plan: Plan
    chosen: Sequence[Mutant]
    known: Known
    backend: str
    profile: str
    seed: int

    def __post_init__(self) -> None:
        self.fates: dict[str, Result] = {}
        for mutant in self.chosen:
            if reason := self.plan.reasons.get(mutant.id):
                diff = self.plan.diff(mutant)
                self.fates[mutant.id] = Result(mutant, "equivalent", diff, reason=reason)
            elif mutant.id in self.known.fates:
                self.fates[mutant.id] = self.known.fates[mutant.id]

    def judged(self, outcome: Outcome, kernels_of: Mapping[str, tuple[str, ...]]) -> Result | None:
        """A mutant's fate, which is kept; None if it was late."""
        mutant, finding = outcome.job.arguments["mutant"], _result(outcome)
        if finding is not None and finding.check == LATE:
            return None
        kernels, diff = kernels_of[mutant.id], self.plan.diff(mutant)
        self.fates[mutant.id] = Result.of(mutant, diff, kernels, finding, outcome.seconds)
        return self.fates[mutant.id]

    def suspects(self) -> list[Mutant]:
        """The changes of device code that survive, and that compute-sanitizer has not run."""
        left = [
            mutant
            for mutant in self.chosen
            if mutant.compiled
            and (fate := self.fates.get(mutant.id))
            and (fate.status, fate.sanitizer) == ("survived", "")
        ]
        return left if sanitizer() else []

    def sanitized(
        self, mutant: Mutant, request: SanitizeRequest, jobs: int, deadline: float
    ) -> Result:
        """A survivor's fate after compute-sanitizer, if there is time; it is kept."""
        before, start = self.fates[mutant.id], time.monotonic()
        program = sanitizer()
        if program is None or start >= deadline:
            return before
        said = heard(program, self.plan.target, mutant, request, jobs, deadline)
        seconds = before.seconds + time.monotonic() - start
        fate = Result.of(mutant, before.diff, before.kernels, said.finding, seconds)
        if said.clean:
            fate = replace(fate, sanitizer=version_of(program))
        self.fates[mutant.id] = fate
        return fate

    def score(self) -> Score:
        places = {mutant.id: place for place, mutant in enumerate(self.plan.mutants)}
        missing = [i for i, mutant in enumerate(self.chosen) if mutant.id not in self.fates]
        first = missing[0] if missing else len(self.chosen)

        def results(mutants: Sequence[Mutant]) -> tuple[Result, ...]:
            there = [mutant.id for mutant in mutants if mutant.id in self.fates]
            return tuple(self.fates[name] for name in sorted(there, key=places.__getitem__))

        counted, further = results(self.chosen[:first]), results(self.chosen[first:])
        return Score(self.backend, self.profile, self.seed, counted, further, len(missing))


def _suited(how: Profile, network: str | None, device: DeviceInfo) -> tuple[Profile, str | None]:
    """The profile, to be caught in and not to be shrunk, and the network, for the device."""
    how = replace(how, shrink_seconds=SHRINK_SECONDS)
    fitting = suited(Request(how, network=network or ""), device)
    return fitting.profile, network and fitting.network


def _unless(known: Known, again: str | None) -> Known:
    """What is known and not to be run again; the unchanged kernels must pass a changed oracle."""
    if again is None:
        return known
    if again == "all":
        return Known()
    return Known({name: fate for name, fate in known.fates.items() if fate.status != again})


def _with_machine_code(
    question: Question, backend: Backend, device: DeviceInfo, kernels: Collection[str]
) -> Question:
    """With the device's architecture, and each compiled kernel's machine code for it.

    Raises `UsageError` for a backend that does not tell its device's compute capability.
    """
    capability = device.details.get("compute capability")
    if capability is None:
        name = question.target.backend
        raise UsageError(f"backend '{name}' does not say for which architecture it compiles")
    target = f"sm_{capability.replace('.', '')}"
    compiled = [kernel for kernel in backend.kernels() if kernel.id in kernels and kernel.targets]
    with _cache(question.cache), ThreadPoolExecutor(cpus()) as threads:
        codes = list(threads.map(lambda kernel: kernel.machine_code(target), compiled))
    names = (kernel.id for kernel in compiled)
    return replace(question, architecture=target, codes=dict(zip(names, codes, strict=True)))


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """`R18_CACHE` is this folder meanwhile: what is compiled here, the unchanged kernels find."""
    before = os.environ.get("R18_CACHE")
    os.environ["R18_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["R18_CACHE"]
        else:
            os.environ["R18_CACHE"] = before


def _baseline(
    pool: Pool, question: Question, kernels: Sequence[str], progress: Progress
) -> dict[str, Pace]:
    """The pace of each kernel, unchanged, through the same trial; of those that were not late.

    Raises `R18Error` at the first finding.
    """
    paces: dict[str, Pace] = {}
    jobs = [_job(question, None, [name], {}) for name in kernels]
    for outcome in pool.run(jobs):
        passed = _result(outcome)
        if isinstance(passed, Finding):
            if passed.check == LATE:
                continue
            raise R18Error(
                "the unchanged kernels must pass before mutants mean anything:\n"
                + passed.describe()
            )
        (name,) = outcome.job.arguments["kernels"]
        paces[name] = Pace(outcome.seconds, passed.silence)
        progress(len(paces), len(jobs), "the unchanged kernels")
    return paces


def _job(
    question: Question, mutant: Mutant | None, kernels: Sequence[str], paces: Mapping[str, Pace]
) -> Job:
    arguments = {
        "question": question,
        "mutant": mutant,
        "kernels": eager(kernels, paces),
        "silence_seconds": patience(kernels, paces, question.how.call_seconds),
    }
    return Job(trial, arguments, question.target.backend, "", silence_seconds=NEVER)


def _result(outcome: Outcome) -> Any:
    """What a job returned; raises what it raised, or `R18Error` for a worker that was lost."""
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        raise R18Error(f"a mutation worker was lost: {outcome.finding.message}")
    return outcome.result


__all__ = ["AGAIN", "REQUIRED", "run"]
