"""A mutation run: the oracle examines mutants of a backend, in an order that can stop early."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from r18.backend import Backend, DeviceInfo
from r18.backend.registry import load_backend
from r18.errors import R18Error, UsageError, unknown, unknown_kernel
from r18.graph.resnet import network as schedule_of
from r18.machine import caching_in, cpus
from r18_oracle.findings import Finding
from r18_oracle.mutation.edits import KINDS
from r18_oracle.mutation.mutants import Mutant, Target, sample
from r18_oracle.mutation.plan import Pace, Plan, eager, patience
from r18_oracle.mutation.reach import shown
from r18_oracle.mutation.record import Journal, Known
from r18_oracle.mutation.sanitizing import heard, sanitizer
from r18_oracle.mutation.score import Result, Score
from r18_oracle.mutation.trial import LATE, NETWORK, Question, copied, trial
from r18_oracle.sanitize.run import Request as SanitizeRequest
from r18_oracle.sanitize.run import version_of
from r18_oracle.search.coverage import program_refusal
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.verify import Request, suited
from r18_oracle.search.worker import Job, Outcome, Pool, deadline_in

SHRINK_SECONDS = 0.2
"""Mutants only need to be caught, so their problems are hardly reduced."""

THREADS = 2
"""The threads of each worker: two, so that parallel kernels run in parallel."""

NEVER = 86_400.0
"""The silence limit of a worker in seconds. Its children have alarms of their own."""

AGAIN = {
    "survived": "the mutants that survived and their unchanged kernels, for example after a change "
    "of the oracle",
    "all": "every mutant, and the unchanged kernels",
}
"""The recorded results that can be run again."""

Progress = Callable[[int, int, str], None]
"""Called with (done, all, what)."""


def run(
    backend: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    kernels: str = "*",
    files: str = "*",
    kind: str = "tokens",
    profile_name: str = "quick",
    network: str | None = "resnet18",
    workers: int | None = None,
    minutes: float | None = None,
    records_folder: Path | None = None,
    again: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Score:
    """Run the oracle on mutants of the backend's sources; returns the share that it caught.

    limit:   the size of the sample, which is the same for a seed; see `mutants.sample`.
    kernels: a glob over kernel ids: these are examined, on the mutants that they reach.
    files:   a glob over the files to change, such as `kernels/*`.
    kind:    one of `KINDS`: `tokens` for token mutants, `state` for structural ones.
    minutes: the time limit; mutants that are not judged by then are left.
    records_folder: the folder of the record, which is written as mutants are judged. Results that
             it holds are not run again, except those of `again` (one of `AGAIN`).

    Equivalent mutants are not run. The unchanged kernels run first, and the unchanged network that
    mutants of host code are run in. A simulated device gets a
    smaller profile, as in `r18 verify`. Device code whose values are right is checked by the rules
    of `r18 ptxcheck`, and then under compute-sanitizer.

    Raises `R18Error` when an unchanged kernel fails, `UsageError` when no mutant would run, and
    what `Plan.of` raises.
    """
    deadline = deadline_in(minutes)
    if again is not None and again not in AGAIN:
        raise unknown("set of mutants to run again", again, AGAIN)
    if kind not in KINDS:
        raise unknown("kind of mutants", kind, KINDS)
    sample = _Sample.of(backend, kernels, files, kind, limit, seed, network)
    how, network = _suited(profile(profile_name), network, sample.device)
    journal = None
    known = Known()
    if records_folder is not None:
        decides = {"profile": profile_name, "seed": seed, "network": network}
        plan, device = sample.plan, sample.device
        journal = Journal(records_folder, device, plan, decides, sample.kernels_of, kind)
        known = to_reuse(journal.known(), again)
    request = {"kernels": kernels, "files": files, "limit": limit}
    state = _State(sample, known, backend, profile_name, seed, journal, request)
    if trials := state.untried():
        with (
            tempfile.TemporaryDirectory(prefix="r18-mutate-") as folder,
            Pool(workers, THREADS) as pool,
        ):
            root = Path(folder)
            unchanged = copied(sample.plan.target, root / "unchanged", sample.plan.texts)
            target = replace(sample.plan.target, path=unchanged)
            question = Question(target, root, how, seed, network, deadline=deadline)
            _run_trials(pool, question, state, trials, progress)
    for mutant in state.suspects():
        ids = sample.kernels_of[mutant.id]
        asked = SanitizeRequest(backend, ids, profile_name, network, seed)
        state.sanitize(mutant, asked, workers or cpus(), deadline)
    state.save()
    return state.score()


@dataclass(frozen=True)
class _Sample:
    """The mutants of a run, and the kernels that examine them.

    kernels: ids. kernels_of: those that each mutant is shown to, by its id. chosen: the mutants
    in the order in which they run. precision_of: that of each kernel, if a network is run in it.
    """

    plan: Plan
    backend: Backend
    device: DeviceInfo
    kernels: Sequence[str]
    kernels_of: Mapping[str, tuple[str, ...]]
    chosen: Sequence[Mutant]
    precision_of: Mapping[str, str]

    @classmethod
    def of(
        cls,
        backend: str,
        kernels: str,
        files: str,
        kind: str,
        limit: int | None,
        seed: int,
        network: str | None,
    ) -> _Sample:
        """The sample of a request. Raises `UsageError` and `UnknownName`, as `run` does."""
        plan = Plan.of(backend)
        loaded = load_backend(backend)
        device = loaded.probe()
        here = {kernel.id: kernel.precision.name for kernel in loaded.kernels()}  # on this device
        wanted = [name for name in plan.reaches if name in here and fnmatchcase(name, kernels)]
        if not wanted:
            raise unknown_kernel(kernels, plan.reaches)
        kernels_of = shown(plan.mutants, plan.reaches, wanted)
        candidates = [
            m
            for m in plan.mutants
            if m.kind == kind and kernels_of[m.id] and fnmatchcase(m.file, files)
        ]
        chosen = sample(candidates, limit, seed)
        if all(mutant.id in plan.reasons for mutant in chosen):
            raise UsageError("no mutant to run: nothing would be measured")
        programs = {p for p in here.values() if network is not None and _runs(loaded, p)}
        precision_of = {name: p for name, p in here.items() if p in programs}
        return cls(plan, loaded, device, wanted, kernels_of, chosen, precision_of)

    def examined(self, mutants: Sequence[Mutant]) -> list[str]:
        """The kernels that some of these mutants are shown to."""
        used = {name for mutant in mutants for name in self.kernels_of[mutant.id]}
        return [name for name in self.kernels if name in used]

    def precisions(self, mutant: Mutant) -> tuple[str, ...]:
        """The precisions in which a network is run with a mutant of host code, after its
        kernels."""
        if mutant.compiled:
            return ()
        kernels = self.kernels_of[mutant.id]
        found = (self.precision_of[name] for name in kernels if name in self.precision_of)
        return tuple(dict.fromkeys(found))


def _runs(backend: Backend, precision: str) -> bool:
    """Whether the backend can run the network that host code is judged in."""
    return program_refusal(backend, schedule_of(NETWORK), precision, "all") is None


def _run_trials(
    pool: Pool, question: Question, state: _State, trials: Sequence[Mutant], progress: Progress
) -> None:
    """Run the unchanged kernels, and the mutants if all of these finish before the deadline."""
    sample = state.sample
    used = sample.examined(trials)
    if any(mutant.compiled for mutant in trials):
        question = _with_machine_code(question, sample.backend, sample.device, used)
    todo = [name for name in used if name not in state.known.paces]
    # First, while nothing is in the cache: a kernel's silence has to hold its compilation, since a
    # mutant is compiled again.
    paces = {**state.known.paces, **_baseline(pool, question, todo, progress)}
    _unchanged_programs(pool, question, sample, trials)
    if state.journal is not None:
        state.journal.passed(paces)
    if any(name not in paces for name in used):
        return
    jobs = [_job(question, m, sample.kernels_of[m.id], paces, sample.precisions(m)) for m in trials]
    for outcome in pool.run(jobs):
        result = state.judge(outcome)
        if result is None:
            continue  # late; the remaining jobs will be too, and return at once
        progress(len(state.fates), len(sample.chosen), result.mutant.id)
        state.save(result)


@dataclass
class _State:
    """The fates of the sample's mutants so far, and the journal to write them to, if any."""

    sample: _Sample
    known: Known
    backend: str
    profile: str
    seed: int
    journal: Journal | None
    request: Mapping[str, Any]

    def __post_init__(self) -> None:
        plan = self.sample.plan
        self.fates: dict[str, Result] = {}
        for mutant in self.sample.chosen:
            if reason := plan.reasons.get(mutant.id):
                diff = plan.diff(mutant)
                self.fates[mutant.id] = Result(mutant, "equivalent", diff, reason=reason)
            elif mutant.id in self.known.fates:
                self.fates[mutant.id] = self.known.fates[mutant.id]

    def untried(self) -> list[Mutant]:
        return [mutant for mutant in self.sample.chosen if mutant.id not in self.fates]

    def save(self, *results: Result) -> None:
        """Write the journal with these new results."""
        if self.journal is not None:
            self.journal.write(self.request, self.score(), results)

    def judge(self, outcome: Outcome) -> Result | None:
        """Keep a mutant's fate and return it; None if it was late."""
        mutant, finding = outcome.job.arguments["mutant"], _result(outcome)
        if finding is not None and finding.check == LATE:
            return None
        kernels, diff = self.sample.kernels_of[mutant.id], self.sample.plan.diff(mutant)
        self.fates[mutant.id] = Result.of(mutant, diff, kernels, finding, outcome.seconds)
        return self.fates[mutant.id]

    def suspects(self) -> list[Mutant]:
        """The survivors in device code that have not run under compute-sanitizer."""
        left = [
            mutant
            for mutant in self.sample.chosen
            if mutant.compiled
            and (fate := self.fates.get(mutant.id))
            and (fate.status, fate.sanitizer) == ("survived", "")
        ]
        return left if sanitizer() else []

    def sanitize(
        self, mutant: Mutant, request: SanitizeRequest, jobs: int, deadline: float
    ) -> None:
        """Run a survivor under compute-sanitizer if there is time, and save its fate."""
        before, start = self.fates[mutant.id], time.monotonic()
        program = sanitizer()
        if program is not None and start < deadline:
            said = heard(program, self.sample.plan.target, mutant, request, jobs, deadline)
            seconds = before.seconds + time.monotonic() - start
            fate = Result.of(mutant, before.diff, before.kernels, said.finding, seconds)
            if said.clean:
                fate = replace(fate, sanitizer=version_of(program))
            self.fates[mutant.id] = fate
        self.save(self.fates[mutant.id])

    def score(self) -> Score:
        chosen = self.sample.chosen
        places = {mutant.id: place for place, mutant in enumerate(self.sample.plan.mutants)}
        missing = [i for i, mutant in enumerate(chosen) if mutant.id not in self.fates]
        first = missing[0] if missing else len(chosen)

        def results(mutants: Sequence[Mutant]) -> tuple[Result, ...]:
            there = [mutant.id for mutant in mutants if mutant.id in self.fates]
            return tuple(self.fates[name] for name in sorted(there, key=places.__getitem__))

        counted, further = results(chosen[:first]), results(chosen[first:])
        return Score(self.backend, self.profile, self.seed, counted, further, len(missing))


def _suited(how: Profile, network: str | None, device: DeviceInfo) -> tuple[Profile, str | None]:
    """The profile, with hardly any reduction, and the network, as the device allows them."""
    how = replace(how, shrink_seconds=SHRINK_SECONDS)
    fitting = suited(Request(how, network=network or ""), device)
    return fitting.profile, network and fitting.network


def to_reuse(known: Known, again: str | None) -> Known:
    """The known results that are not run again, given one of `AGAIN`. Raises `UnknownName`.

    With any `again` the unchanged kernels run again too, since the oracle may have changed.
    """
    if again is None:
        return known
    if again not in AGAIN:
        raise unknown("set of mutants to run again", again, AGAIN)
    if again == "all":
        return Known()
    return Known({name: fate for name, fate in known.fates.items() if fate.status != again})


def _with_machine_code(
    question: Question, backend: Backend, device: DeviceInfo, kernels: Collection[str]
) -> Question:
    """The question with the device's architecture and each compiled kernel's machine code.

    Raises `UsageError` for a backend that does not report its device's compute capability.
    """
    capability = device.details.get("compute capability")
    if capability is None:
        name = question.target.backend
        raise UsageError(f"backend '{name}' does not report the compute capability of its device")
    target = f"sm_{capability.replace('.', '')}"
    compiled = [kernel for kernel in backend.kernels() if kernel.id in kernels and kernel.targets]
    with caching_in(question.cache), ThreadPoolExecutor(cpus()) as threads:
        codes = list(threads.map(lambda kernel: kernel.machine_code(target), compiled))
    names = (kernel.id for kernel in compiled)
    return replace(question, architecture=target, codes=dict(zip(names, codes, strict=True)))


def _unchanged_programs(
    pool: Pool, question: Question, sample: _Sample, trials: Sequence[Mutant]
) -> None:
    """Run the network in each of the mutants' precisions; raises `R18Error` at a finding."""
    precisions = dict.fromkeys(p for mutant in trials for p in sample.precisions(mutant))
    jobs = [_job(question, None, [], {}, [precision]) for precision in precisions]
    for outcome in pool.run(jobs):
        _must_pass(_result(outcome), question.target)


def _must_pass(passed: Any, target: Target) -> bool:
    """Whether something unchanged has passed in time; raises `R18Error` for a finding."""
    if not isinstance(passed, Finding):
        return True
    if passed.check == LATE:
        return False
    message = "the unchanged kernels must pass before mutants mean anything:\n" + passed.describe()
    if target.path.is_file():
        message += (
            f"\nThey ran in a copy of {target.path.name} alone, without other files of its folder\n"
            "  if it reads one of those, make a package of them: a folder with an __init__.py"
        )
    raise R18Error(message)


def _baseline(
    pool: Pool, question: Question, kernels: Sequence[str], progress: Progress
) -> dict[str, Pace]:
    """The pace of each unchanged kernel in the same trial, without those that were late.

    Raises `R18Error` at the first finding.
    """
    paces: dict[str, Pace] = {}
    jobs = [_job(question, None, [name], {}) for name in kernels]
    for outcome in pool.run(jobs):
        passed = _result(outcome)
        if not _must_pass(passed, question.target):
            continue
        (name,) = outcome.job.arguments["kernels"]
        paces[name] = Pace(outcome.seconds, passed.silence)
        progress(len(paces), len(jobs), "the unchanged kernels")
    return paces


def _job(
    question: Question,
    mutant: Mutant | None,
    kernels: Sequence[str],
    paces: Mapping[str, Pace],
    precisions: Sequence[str] = (),
) -> Job:
    arguments = {
        "question": question,
        "mutant": mutant,
        "kernels": eager(kernels, paces),
        "silence_seconds": patience(kernels, paces, question.how.call_seconds),
        "precisions": precisions,
    }
    return Job(trial, arguments, question.target.backend, "", silence_seconds=NEVER)


def _result(outcome: Outcome) -> Any:
    """The value that a job returned; raises its exception, or `R18Error` for a lost worker."""
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if outcome.finding is not None:
        raise R18Error(f"a mutation worker was lost: {outcome.finding.message}")
    return outcome.result


__all__ = ["AGAIN", "run", "to_reuse"]
