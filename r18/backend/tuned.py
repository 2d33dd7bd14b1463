"""Tables of the kernels that measured fastest, one per device: written by `r18 tune`, read by
plans.

A backend ships tables of some devices. A user's measurement overrides the shipped one of the same
problem and batch.

A problem that the table does not hold goes to the backend's own order. The choice changes speed
only: every kernel is verified by itself.

For a problem that fuses two ops the table may say `apart`: separate kernels for the two were
faster than every kernel for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r18.atomic import output_file
from r18.backend.device import DeviceInfo
from r18.errors import UsageError, plain, show
from r18.files import JSON_LIMIT, Refused, read_object
from r18.graph.ops import Problem
from r18.machine import cache_folder

FORMAT = 1
APART = "apart"
"""In a table's file, in place of a kernel's id."""
READERS = set[str]()
"""The backends that have looked for their table in this process."""


@dataclass(frozen=True)
class Preferred:
    """The kernel of this id is the fastest for a problem.

    measured: at the problem's own batch; otherwise at the nearest one. A variant is preferred only
              where it was measured: elsewhere the kernel that it belongs to chooses.
    """

    kernel: str
    measured: bool = True


@dataclass(frozen=True)
class Apart:
    """For a problem that fuses two ops, separate kernels are the fastest."""


Fastest = Preferred | Apart | None
"""The result of `Backend.fastest`; None where nothing is known."""


@dataclass(frozen=True)
class Timing:
    """A kernel's median time on a problem, in microseconds; or `APART`, that of its two ops."""

    kernel: str
    microseconds: float


@dataclass(frozen=True)
class Table:
    """The fastest kernel: by precision, then by the problem at batch 1 as it prints itself, then
    by batch."""

    device: str
    choices: Mapping[str, Mapping[str, Mapping[int, Timing]]]

    def best(self, problem: Problem, precision: str) -> Fastest:
        """The fastest choice at the measured batch nearest by ratio."""
        found = self.choices.get(precision, {}).get(at_batch_1(problem))
        if not found:
            return None
        nearest = min(found, key=lambda batch: (abs(math.log(batch / problem.batch)), batch))
        kernel = found[nearest].kernel
        return Apart() if kernel == APART else Preferred(kernel, nearest == problem.batch)

    def timing(self, problem: Problem, precision: str) -> Timing | None:
        """The fastest kernel at the problem's own batch, if that was measured."""
        found = self.choices.get(precision, {}).get(at_batch_1(problem), {})
        return found.get(problem.batch)

    def merged(self, other: Table) -> Table:
        """This table, updated with the measurements of `other`."""
        choices = {
            name: {
                problem: {**mine.get(problem, {}), **theirs.get(problem, {})}
                for problem in sorted({*mine, *theirs})
            }
            for name in sorted({*self.choices, *other.choices})
            for mine, theirs in [(self.choices.get(name, {}), other.choices.get(name, {}))]
        }
        return Table(other.device, choices)

    def write(self, path: Path) -> None:
        """Write the table as JSON, whole or not at all."""
        head = {"format": FORMAT, "device": self.device, "unit": "microseconds"}
        choices = {
            precision: {
                problem: {
                    str(batch): [timing.kernel, round(timing.microseconds, 2)]
                    for batch, timing in sorted(batches.items())
                }
                for problem, batches in sorted(found.items())
            }
            for precision, found in self.choices.items()
        }
        with output_file(path) as draft:
            draft.write_text(json.dumps(head | {"choices": choices}, indent=1) + "\n")


def at_batch_1(problem: Problem) -> str:
    """The problem at batch 1 as it prints itself: a key of `Table.choices`."""
    inputs = tuple((1, *shape[1:]) if shape else () for shape in problem.inputs)
    return str(Problem(problem.op, inputs))


def read_table(path: Path) -> Table:
    """Read a table. Raises `UsageError` for a file that is no table, `OSError` for none."""
    try:
        data: Any = read_object(path, JSON_LIMIT, UsageError)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, expected {FORMAT}")
        choices = {
            precision: {
                problem: {_batch(batch): _timing(*timed) for batch, timed in batches.items()}
                for problem, batches in found.items()
            }
            for precision, found in data["choices"].items()
        }
        return Table(str(data["device"]), choices)
    except (Refused, UsageError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no tuning table: {plain(error)}\n  Make one with `r18 tune`."
        ) from None


def _batch(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) < 10 and int(text)):
        raise ValueError(f"{show(text)} is no batch size")
    return int(text)


def _timing(kernel: object, microseconds: object) -> Timing:
    number = type(microseconds) in (int, float)
    if not isinstance(kernel, str) or not number or not 0 <= microseconds < 1e15:  # type: ignore[operator]
        raise ValueError(f"{show([kernel, microseconds])} is no kernel and its microseconds")
    return Timing(kernel, float(microseconds))  # type: ignore[arg-type]


def users_table(backend: str, device: DeviceInfo) -> Path:
    """The path at which `r18 tune` keeps this device's table and plans find it."""
    return cache_folder() / "tuned" / f"{backend}-{device.slug}.json"


def find_table(backend: str, device: DeviceInfo, shipped: Path) -> Table | None:
    """The shipped table of a device, overridden by the user's entries. None if neither exists.

    Raises `UsageError` for a file that is no table.
    """
    READERS.add(backend)
    found = None
    for path in (shipped / f"{device.slug}.json", users_table(backend, device)):
        if path.is_file():
            table = read_table(path)
            found = table if found is None else found.merged(table)
    return found


__all__ = [
    "APART",
    "READERS",
    "Apart",
    "Fastest",
    "Preferred",
    "Table",
    "Timing",
    "at_batch_1",
    "find_table",
    "read_table",
    "users_table",
]
