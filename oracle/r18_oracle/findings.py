"""Findings: one disagreement each, small enough to mail, with all that a replay needs."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from r18.atomic import write_text
from r18.errors import MOST_TEXT, R18Error, UsageError, plain, show, unknown
from r18.files import read_object
from r18.graph.all_ops import ALL_OPS
from r18.graph.ops import Layout, Op, Problem
from r18.weights.sources import is_plain
from r18_oracle.stacks import place

LIMIT = 16 << 20
"""The most bytes of a finding's file; one has a few kilobytes."""
CHOICE = "choice"
"""Key of a finding's details: the id of the kernel's choice at fault."""
RUN = "run"
"""Key of a finding's details: the fields of a network run."""
STATE = "state"
"""Key of a finding's details: the scenario of the check `state` and its first problem."""
BEFORE = "before"
"""Key of a finding's details: the calls that came before, in order."""
PERTURB = "perturb"
"""Key of the details of a finding of the check `perturb`: its seeds of delays and kinds of site."""
CAMPAIGN = "campaign"
"""Key of the details of a crash or a hang: the campaign that it was found in."""
SILENCE = "silence_seconds"
"""Key of the details of a crash or a hang: the time limit that it was found with."""

STACKS = "stacks"
"""Key of the details of a hang: the stacks of its worker's threads, as `stacks.arranged` returns
them, if it answered."""

SHOWN = 3
"""Earlier calls that a description lists."""
MOST_LINES = 20
"""Lines of stacks that a description shows."""


class Subject(Enum):
    """The kind of thing that a finding is about, which decides what a replay runs."""

    KERNEL = "a kernel on one problem"
    CHOICE = "a choice of a kernel that takes no problem"
    COVERAGE = "a problem or a kernel that is not covered"
    NETWORK_RUN = "a network run"


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    check:      the check that failed: one of `r18_oracle.check.checks.CHECKS`, `crash`, `hang`,
                `coverage`, `checkpoint` or `perturb`.
    backend, kernel: what was tested; the backend as `get_backend` takes it.
    problem:    the smallest problem that still fails.
    kind, seed: the input, as `make_case` takes them.
    message:    the fault, in a sentence.
    coordinate, got, expected, bound: the worst element, where the check compares values.
    details:    further data that a replay needs.
    """

    check: str
    backend: str
    kernel: str
    problem: Problem | None
    kind: str
    seed: int
    message: str
    coordinate: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    bound: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        if RUN in self.details:
            return Subject.NETWORK_RUN
        if self.check != "coverage":
            return Subject.KERNEL
        return Subject.CHOICE if CHOICE in self.details else Subject.COVERAGE

    @property
    def depends_on_calls(self) -> bool:
        """Whether it holds calls or a scenario that it needs."""
        return STATE in self.details or bool(self.details.get(BEFORE))

    def on_kernel(self, kernel: str) -> Finding:
        """The finding on the kernel with this id; if it is on one of its choices, the details then
        name the choice."""
        if self.kernel == kernel:
            return self
        return replace(self, kernel=kernel, details=self.details | {CHOICE: self.kernel})

    def with_details(self, details: dict[str, Any]) -> Finding:
        """The finding with these details; where its worker stood stays as it is."""
        kept = {key: value for key, value in details.items() if key != STACKS}
        if STACKS in self.details:
            kept[STACKS] = self.details[STACKS]
        return replace(self, details=kept)

    def same_as(self, other: Finding) -> bool:
        """Whether both are equal to the bit, except for the place where a worker stood: what hangs
        may go round in circles."""
        return self._anywhere().to_json() == other._anywhere().to_json()

    def _anywhere(self) -> Finding:
        """The finding without the place where its worker stood."""
        details = dict(self.details)
        stood = place(details.pop(STACKS, ""))
        return replace(self, message=self.message.replace(stood, ""), details=details)

    def to_json(self) -> dict[str, Any]:
        """As plain data; the numbers as strings, since JSON has no NaN and no infinity."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["problem"] = None if self.problem is None else problem_to_json(self.problem)
        for name in ("got", "expected", "bound"):
            data[name] = None if data[name] is None else repr(float(data[name]))
        data["coordinate"] = None if self.coordinate is None else list(self.coordinate)
        return {"finding": 1, **data}

    @classmethod
    def from_json(cls, data: Any) -> Finding:
        """The inverse of `to_json`; raises `UsageError` for any other data."""
        if not isinstance(data, dict) or data.get("finding") != 1 or data["finding"] is True:
            raise UsageError("this is not a finding that this version of r18 wrote")
        known = {f.name for f in fields(cls)}
        missing = {"check", "backend", "kernel", "problem", "kind", "seed", "message"}
        missing -= data.keys()
        if missing or data.keys() - known - {"finding"}:
            more = sorted(data.keys() - known - {"finding"})
            raise UsageError(
                f"a damaged finding: missing {sorted(missing) or 'nothing'}, unknown {show(more)}"
            )
        values = {name: data[name] for name in known & data.keys()}
        texts = [values[n] for n in ("check", "backend", "kernel", "kind", "message")]
        if not all(isinstance(t, str) for t in texts) or not _is_seed(values["seed"]):
            raise UsageError("a damaged finding: a field is not of its type")
        try:
            _check_details(values.get("details", {}))
            if values.get("problem") is not None:
                values["problem"] = problem_from_json(values["problem"])
            for name in ("got", "expected", "bound"):
                if values.get(name) is not None:
                    values[name] = float(values[name])
            if values.get("coordinate") is not None:
                values["coordinate"] = msgspec.convert(values["coordinate"], tuple[int, ...])
        except R18Error as error:
            raise UsageError(f"a damaged finding: {error}") from None
        except Exception as error:  # an op's own checks expect the types that it declares
            raise UsageError(f"a damaged finding: {plain(error)}") from None
        return cls(**values)

    def describe(self, path: Path | str | None = None) -> str:
        """As text; with the path of its file, the command that replays it."""
        lines = [f"{self.kernel}: {self.check}: {self.message}"]
        if self.problem is not None:
            lines.append(f"  problem   {self.problem}")
        if CHOICE in self.details:
            lines.append(f"  choice    {self.details[CHOICE]}")
        lines += self._before()
        lines.append(f"  input     {self.kind}, seed {self.seed}")
        if self.coordinate is not None and self.got is None:
            lines.append(f"  first     at {self.coordinate}")
        elif self.coordinate is not None:
            lines.append(f"  worst     at {self.coordinate}: got {self.got!r}")
            lines.append(f"            expected {self.expected!r}, bound {self.bound!r}")
        lines += self._stacks()
        if path is not None:
            lines.append(f"  replay    {self.command(path)}")
        return "\n".join(lines)

    def _before(self) -> list[str]:
        """The calls that came before, the last ones of many."""
        try:
            problems = [problem_from_json(call["problem"]) for call in self.details.get(BEFORE, ())]
        except (TypeError, ValueError, KeyError, AttributeError, R18Error):
            return []
        shown = [f"  after     {problem}" for problem in problems[-SHOWN:]]
        more = len(problems) - len(shown)
        calls = "call" if more == 1 else "calls"
        return [f"  after     {more} more {calls}", *shown] if more else shown

    def _stacks(self) -> list[str]:
        """Where its worker stood: the first lines of many, which are the main thread's."""
        if STACKS not in self.details:
            return []
        first, *rest = (plain(line, MOST_TEXT) for line in self.details[STACKS].split("\n"))
        lines = [f"  stood     {first}", *(f"            {line}" for line in rest)]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"            … {len(lines) - MOST_LINES} more lines"]
        return lines

    def command(self, path: Path | str) -> str:
        """The command that replays the finding in a file, with what a file may not decide alone."""
        words = ["r18", "replay", shlex.quote(str(path))]
        if ":" in self.backend:
            words += ["--backend", shlex.quote(self.backend)]
        if (weights := self.weights) is not None and not is_plain(weights):
            words += ["--weights", shlex.quote(weights)]
        return " ".join(words)

    @property
    def weights(self) -> str | None:
        """The source of the weights of a network run; None for other findings."""
        run = self.details.get(RUN)
        found = run.get("weights") if isinstance(run, dict) else None
        return found if isinstance(found, str) else None

    @property
    def file_name(self) -> str:
        """A file name that is unique to this finding."""
        digest = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
        stem = f"{self.kernel}.{self.check}.{digest[:8]}"
        return "".join(c if c.isalnum() or c in ".-_" else "-" for c in stem) + ".json"


DETAILS: dict[str, Any] = {
    CHOICE: str,
    RUN: dict[str, Any],
    SILENCE: int | float,
    STACKS: str,
    "rounding": str,
    "light": bool,
    "only": str | None,
    "profile": str,
    "network": str | None,
    "batches": list[int],
}
"""The types of the details that every replay reads, where they are there."""


def _check_details(details: object) -> None:
    """Raise `ValueError` for details that no replay could read."""
    if not isinstance(details, dict):
        raise ValueError(f"its details are {show(details)}, expected an object")
    for name, kind in DETAILS.items():
        if name in details:
            try:
                msgspec.convert(details[name], kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} in its details: {error}") from None
    if not 0 < details.get(SILENCE, 1) < 1e9:
        raise ValueError(f"{SILENCE} in its details is {show(details[SILENCE])}")


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


class Failed(R18Error):
    """A check failed; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding.describe())

    def __reduce__(self) -> tuple[Callable[[Finding], Failed], tuple[Finding]]:
        return failed, (self.finding,)  # pickle cannot find a type made at run time


def failed(finding: Finding) -> Failed:
    """The exception to raise. Each check has its own type, so that Hypothesis shrinks one check's
    failure and does not slip to another's."""
    return _failure_type(finding.check)(finding)


@cache
def _failure_type(check: str) -> type[Failed]:
    return type(f"Failed_{check}", (Failed,), {})


def save(finding: Finding, folder: Path) -> Path:
    """Write a finding as a small JSON file, whole or not at all; returns its path.

    Raises `R18Error` where it cannot be written.
    """
    path = folder / finding.file_name
    write_text(path, json.dumps(finding.to_json(), indent=1) + "\n")
    return path


def load(path: Path) -> Finding:
    """Read a finding; raises `UsageError` if the file does not hold one."""
    try:
        return Finding.from_json(read_object(path, LIMIT, UsageError))
    except (OSError, R18Error) as error:
        raise UsageError(f"cannot read the finding '{path}': {error}") from None


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """{"op": name, "settings": {...}, "inputs": [[...], ...]}."""
    return {**_op_to_json(problem.op), "inputs": [list(shape) for shape in problem.inputs]}


def _op_to_json(op: Op) -> dict[str, Any]:
    """A fused op holds its parts in its settings, in the same form."""

    def plain(value: Any) -> Any:
        if isinstance(value, Op):
            return _op_to_json(value)
        return value.value if isinstance(value, Layout) else value

    settings = {name: plain(value) for name, value in op.settings.items()}
    return {"op": op.name, "settings": settings}


def problem_from_json(data: dict[str, Any]) -> Problem:
    """The inverse of `problem_to_json`; raises `UnknownName` or `ShapeError`, and for other data
    `ValueError`, `TypeError`, `KeyError` or `AttributeError`.
    """
    inputs = msgspec.convert(data["inputs"], tuple[tuple[int, ...], ...])
    for shape in inputs:
        if not all(0 <= extent < 1 << 31 for extent in shape) or math.prod(shape) >= 1 << 33:
            raise ValueError(f"{show(list(shape))} is no shape of an input")
    return Problem(_op_from_json(data), inputs)


def _op_from_json(data: dict[str, Any]) -> Op:
    if not isinstance(data["op"], str) or data["op"] not in ALL_OPS:
        raise unknown("op", str(data["op"]), ALL_OPS)
    kind: type[Op] = ALL_OPS[data["op"]]
    types = get_type_hints(kind)
    settings: dict[str, Any] = {}
    for name, value in data["settings"].items():
        if isinstance(value, dict):
            settings[name] = _op_from_json(value)
        elif value is None and type(None) in get_args(types[name]):
            settings[name] = None
        else:
            settings[name] = msgspec.convert(value, types[name])
        kind_of = types[name]  # generic ones are converted, and only classes are compared
        if type(kind_of) in (type, ABCMeta) and not isinstance(settings[name], kind_of):
            raise ValueError(f"{show(name)} of {data['op']} is {show(value)}")
    return kind(**settings)
