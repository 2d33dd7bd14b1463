"""What a table is, and what the tables share: records by device, devices in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r18 import records
from r18.bench.roofline import WHAT as CEILINGS
from r18.errors import UsageError

MISSING = ""
"""A cell for which there is no measurement."""

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table: `align` has `l` or `r` a column, `caption` the line below; alone, without rows."""

    heads: Row
    align: str
    rows: Sequence[Row]
    caption: str

    def markdown(self) -> str:
        if not self.rows:
            return f"{self.caption}\n"
        rules = ["---" if side == "l" else "--:" for side in self.align]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.heads, rules, *self.rows)]
        return "\n".join([*lines, "", self.caption, ""])


def record_of(folder: Path, what: str, device: str) -> dict[str, Any]:
    """A device's record; `UsageError` says how to make one that is not there."""
    path = folder / f"{what}-{device}.json"
    if not path.exists():
        command = "roofline --measure" if what == CEILINGS else f"{what} --record"
        raise UsageError(f"there is no record {path}: run r18 {command} on that device")
    return records.read(path, what)


def needed(options: Mapping[str, str], name: str) -> str:
    """An option that the marker must have; raises `UsageError`."""
    if name not in options:
        raise UsageError(f"the table's marker does not say {name}=...")
    return options[name]


def device_words(group: Mapping[str, Any]) -> str:
    """What a record's group was timed on: of a CPU the processor and threads, which all share."""
    device = group["environment"]["device"]
    if device["kind"] != "cpu":
        return str(device["name"])
    host = group["machine"]
    key, noun = ("threads", "thread") if "threads" in host else ("cpus", "CPU")
    return f"{host['processor']}, {host[key]} {noun}{'' if host[key] == 1 else 's'}"


def heading(group: Mapping[str, Any], software: Sequence[str]) -> str:
    """How a caption begins: on what a record's group was run, with which software, and when."""
    environment = group["environment"]
    words = [device_words(group), *software]
    if environment.get("driver"):
        words.append(f"driver {environment['driver']}")
    return f"{', '.join(words)}, {group['date'][:10]}"


def ends(items: Sequence[str]) -> list[str]:
    """The first and the last, once if they are the same: of dates, in words."""
    return list(dict.fromkeys((items[0], items[-1])))
