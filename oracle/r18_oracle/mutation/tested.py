"""Mutants of sources that no kernel runs, such as caches, journals and programs, judged by tests.

A table in TOML names the files to change and the tests that must notice the changes:

    [[part]]
    package = "r18"
    files = ["runtime/arena.py", "backend/program.py"]
    tests = ["tests/runtime/test_executor.py"]
    kinds = ["state"]
    classes = ["cache_key"]

`kinds` are those of the mutants that the tests are to judge, and `classes` the operators to use;
all by default. Each mutant is a change to a copy of the package, which pytest imports in a process
of its own.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock

from r18.backend import DeviceInfo
from r18.errors import R18Error, UsageError, unknown
from r18_oracle.findings import Finding
from r18_oracle.mutation.edits import KINDS
from r18_oracle.mutation.equivalents import judged
from r18_oracle.mutation.mutants import Mutant, Target, mutants_of, sample
from r18_oracle.mutation.names import Span
from r18_oracle.mutation.plan import Plan
from r18_oracle.mutation.record import Journal, Known
from r18_oracle.mutation.run import to_reuse
from r18_oracle.mutation.score import Result, Score
from r18_oracle.mutation.trial import copied

NAME = "core"
"""The name of these mutants in reports, and in the list of equivalent ones."""
SLACK = 4
"""A mutant's tests may take this many times as long as they did on the unchanged sources, and
`LEAST` seconds more."""
LEAST = 20.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)
GUARD = "r18_mutated_copy"
"""The module that pytest loads to make sure that the copy is imported."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Part:
    """Files of a package, by globs relative to it, and the tests that judge changes to them.

    classes: the operators of the changes; () for all. In files that kernels run, the oracle judges
    the other operators. kinds: those of the changes, of `KINDS`; () for all.
    """

    package: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    classes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def has(self, mutant: Mutant) -> bool:
        return (
            self.names(mutant.file)
            and (not self.classes or mutant.operator in self.classes)
            and (not self.kinds or mutant.kind in self.kinds)
        )

    def names(self, file: str) -> bool:
        return any(fnmatchcase(file, glob) for glob in self.files)


@dataclass(frozen=True)
class _Ended:
    """How a run of tests ended: pytest's exit code, or None after a time-out."""

    code: int | None
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.code == 0


def parts_of(table: Path) -> tuple[Part, ...]:
    """The parts that a table names; raises `UsageError` for a damaged one, and `UnknownName` for a
    kind that is none."""
    try:
        data = tomllib.loads(table.read_text("utf-8"))
        parts = tuple(
            Part(
                one["package"],
                tuple(one["files"]),
                tuple(one["tests"]),
                tuple(one.get("classes", ())),
                tuple(one.get("kinds", ())),
            )
            for one in data["part"]
        )
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{table} is not a table of parts: {error!r}\n"
            "  it needs [[part]] entries with package, files, tests and, if not all, kinds and "
            "classes"
        ) from None
    for kind in (kind for part in parts for kind in part.kinds):
        if kind not in KINDS:
            raise unknown("kind of mutants", kind, KINDS)
    return parts


def reasons_in(parts: tuple[Part, ...]) -> dict[str, str]:
    """The reason for each mutant of these files, of any kind, that is judged by hand, by its id.

    Raises `UsageError` for an entry whose mutant no longer exists.
    """
    mutants = [mutant for kind in KINDS for mutant in _mutants_in(parts, kind)]
    return judged(NAME, mutants, {mutant.file for mutant in mutants})


def mutants_in(parts: tuple[Part, ...], kind: str) -> dict[Mutant, Part]:
    """The mutants of a kind in these files, each with its part; raises `UsageError` for none."""
    found = _mutants_in(parts, kind)
    if not found:
        raise UsageError("no mutant to run: no file of the table has one")
    return found


def _mutants_in(parts: tuple[Part, ...], kind: str) -> dict[Mutant, Part]:
    """Raises `UsageError` if two packages have a file of one name: mutants are known by theirs."""
    found: dict[Mutant, Part] = {}
    owner: dict[str, str] = {}
    for part in parts:
        for file, source in _target(part).texts().items():
            if any(fnmatchcase(file, glob) for glob in part.files):
                changes = mutants_of(file, source, [kind])
                found |= {mutant: part for mutant in changes if part.has(mutant)}
                if owner.setdefault(file, part.package) != part.package:
                    raise UsageError(f"two packages of the table have a file '{file}' to change")
    return found


def run_tested(
    table: Path,
    *,
    kind: str = "state",
    limit: int | None = None,
    seed: int = 0,
    files: str = "*",
    workers: int | None = None,
    records_folder: Path | None = None,
    again: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Score:
    """Run the tests of a table on mutants of its files; returns the share that they caught.

    The tests run from the current folder. records_folder, again: as in `r18_oracle.mutation.run`; a
    result is reused as long as the files of its part and of the tests are the same, that of a
    mutant that was caught as long as the file of the test that caught it is.
    Raises `R18Error` if the tests fail on the unchanged sources, and `UsageError` for a damaged
    table or no mutants.
    """
    if kind not in KINDS:
        raise unknown("kind of mutants", kind, KINDS)
    parts = parts_of(table)
    there = mutants_in(parts, kind)
    plan = _plan(there, reasons_in(parts))
    journal, known = None, Known()
    if records_folder is not None:
        how = {"profile": "tests", "seed": seed, "network": None}
        shown = {mutant.id: part.tests for mutant, part in there.items()}
        journal = Journal(records_folder, device(), plan, how, shown, kind)
        known = to_reuse(journal.known(), again)
    chosen = sample([m for m in there if fnmatchcase(m.file, files)], limit, seed)
    fates = {m.id: known.fates[m.id] for m in chosen if m.id in known.fates} | {
        m.id: Result(m, "equivalent", plan.diff(m), reason=plan.reasons[m.id])
        for m in chosen
        if m.id in plan.reasons
    }
    untried = [mutant for mutant in chosen if mutant.id not in fates]
    paces = {part: _unchanged(part) for part in {there[mutant]: None for mutant in untried}}
    writing = Lock()

    def score() -> Score:
        judged_now = tuple(fates[m.id] for m in there if m.id in fates)
        return Score(NAME, "tests", seed, judged_now, left=len(chosen) - len(fates))

    def save(*results: Result) -> None:
        with writing:
            fates.update({result.mutant.id: result for result in results})
            if journal is not None:
                request = {"kernels": "*", "files": files, "limit": limit}
                journal.write(request, score(), results)

    def judge(mutant: Mutant) -> None:
        part = there[mutant]
        ended = _tested(part, {mutant.file: mutant.source}, LEAST + SLACK * paces[part])
        finding = _finding(ended)
        tests = _caught_by(part, finding) or part.tests
        save(Result.of(mutant, plan.diff(mutant), tests, finding, ended.seconds))
        progress(len(fates), len(chosen), mutant.id)

    with ThreadPoolExecutor(workers or 1) as threads:
        list(threads.map(judge, untried))
    save()
    return score()


def device() -> DeviceInfo:
    """Where the tests run, for the record."""
    return DeviceInfo("cpu", f"CPU ({platform.machine()})")


def _plan(there: Mapping[Mutant, Part], reasons: Mapping[str, str]) -> Plan:
    """The mutants with the sources that make a result another one: of a part, its files to change
    and those of its tests. Its package may change, since the tests must pass without the change."""
    texts: dict[str, str] = {}
    reaches: dict[str, tuple[Span, ...]] = {}
    owner = {mutant.file: part.package for mutant, part in there.items()}
    for part in dict.fromkeys(there.values()):
        sources = _target(part).texts()
        mine = [name for name in sources if owner.get(name) == part.package]
        texts |= {name: sources[name] for name in mine}
        own = tuple((name, 1, 1) for name in mine if part.names(name))
        for test in part.tests:
            path = test.partition("::")[0]
            texts[path] = Path(path).read_text("utf-8")
            held = reaches.get(test, ())
            reaches[test] = tuple(dict.fromkeys((*held, (path, 1, 1), *own)))
    return Plan(Target(NAME, NAME, Path()), tuple(there), reasons, texts, reaches)


def _target(part: Part) -> Target:
    spec = importlib.util.find_spec(part.package)
    if spec is None or spec.origin is None:
        raise UsageError(f"there is no package '{part.package}' to mutate")
    return Target(NAME, part.package, Path(spec.origin).parent)


def _unchanged(part: Part) -> float:
    """The seconds that the tests take on an unchanged copy, where they must pass."""
    ended = _tested(part, {}, None)
    if not ended.passed:
        raise R18Error(
            f"the tests of {part.package} must pass before mutants mean anything: "
            f"{' '.join(part.tests)}\n{ended.output[-2000:]}"
        )
    return ended.seconds


def _tested(part: Part, changes: Mapping[str, str], limit: float | None) -> _Ended:
    """Run the tests on a copy with these changes."""
    with tempfile.TemporaryDirectory(prefix="r18-mutate-") as folder:
        root = copied(_target(part), Path(folder), changes)
        guard = f"import {part.package} as p\nassert p.__file__.startswith({str(root)!r}), p\n"
        Path(folder, f"{GUARD}.py").write_text(guard, "utf-8")
        path = os.pathsep.join([folder, *filter(None, map(str, sys.path))])
        started = time.monotonic()
        command = (
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            GUARD,
        )
        process = subprocess.Popen(
            (*command, *part.tests),
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

        def seconds() -> float:
            return time.monotonic() - started

        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return _Ended(None, "", seconds())
        return _Ended(process.returncode, output, seconds())


def _caught_by(part: Part, finding: Finding | None) -> tuple[str, ...]:
    """The tests of the part in the file of the one that failed; none if that is unknown."""
    if finding is None or finding.check != "tests":
        return ()
    file = finding.message.partition("::")[0]
    return tuple(test for test in part.tests if test.partition("::")[0] == file)


def _finding(ended: _Ended) -> Finding | None:
    """The tests' finding, or None if they passed. Raises `R18Error` if there were no tests."""
    if ended.passed:
        return None
    if ended.code == 5:  # pytest's code if it collected no tests
        raise R18Error(f"the mutation run itself failed: no tests ran\n{ended.output[-500:]}")
    if ended.code is None:
        return Finding("hang", NAME, "", None, "none", 0, "the tests had not ended")
    said = FAILED.search(ended.output)
    message = said[1] if said else f"pytest ended with code {ended.code}"
    return Finding("tests", NAME, "", None, "none", 0, message)


__all__ = ["NAME", "Part", "device", "mutants_in", "parts_of", "reasons_in", "run_tested"]
