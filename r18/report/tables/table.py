"""The type `Table`, and code shared by all tables: options, records by device, captions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.cpu import model
from r18.errors import UsageError
from r18.records.files import Kind
from r18.records.kinds import CeilingsRecord, Check

Data = Mapping[str, Any]
"""A part of a record."""
Options = Mapping[str, str]
"""The options of a marker by name."""
Row = Sequence[str]
COMMANDS: dict[type, str] = {
    CeilingsRecord: "r18 roofline --measure",
    Check: "python tools/check_foreign.py --record",
}
"""The command that makes a record, where it is not the one of its kind with `--record`."""


@dataclass(frozen=True)
class Table:
    """heads: separated by ' | '. align: `l` or `r` for each column. captions: lines below the
    table without repeats; the only content of a table without rows."""

    heads: str
    align: str
    rows: Sequence[Row]
    captions: Iterable[str]

    def markdown(self) -> str:
        caption = "<br>\n".join(dict.fromkeys(self.captions))
        if not self.rows:
            return f"{caption}\n"
        rules = ["---" if side == "l" else "--:" for side in self.align]
        cells = (" | ".join(row) for row in (rules, *self.rows))
        return "\n".join([*(f"| {line} |" for line in (self.heads, *cells)), "", caption, ""])

    def without_empty_columns(self) -> Table:
        """The table without the columns that have no number in any row."""
        kept = [at for at in range(len(self.align)) if any(row[at] for row in self.rows)]
        heads = self.heads.split(" | ")
        return Table(
            " | ".join(heads[at] for at in kept),
            "".join(self.align[at] for at in kept),
            [[row[at] for at in kept] for row in self.rows],
            self.captions,
        )


def cell(number: float | None, form: str) -> str:
    """A formatted number; empty for None, which stands for a missing measurement."""
    return "" if number is None else format(number, form)


def record_of(folder: Path, what: str, device: str) -> dict[str, Any]:
    """A device's record as plain data; raises as `loaded`."""
    data: dict[str, Any] = msgspec.to_builtins(loaded(folder, records.KINDS[what], device))
    return data


def loaded(folder: Path, kind: type[Kind], device: str) -> Kind:
    """A device's record. Raises `UsageError` with the command that makes a missing one."""
    what = kind.__struct_config__.tag
    record = records.load(path := folder / f"{what}-{device}.json", kind)
    if record is None:
        command = COMMANDS.get(kind, f"r18 {what} --record")
        raise UsageError(f"there is no record {path}: run {command} on that device")
    return record


def needed(options: Options, name: str) -> str:
    """A required option; raises `UsageError`."""
    if name not in options:
        raise UsageError(f"the table's marker lacks {name}=...")
    return options[name]


def listed(options: Options, name: str) -> list[str]:
    """A required option whose values are separated by commas; raises `UsageError`."""
    return needed(options, name).split(",")


def batches(options: Options) -> list[int]:
    """The required option `batches`; raises `UsageError`."""
    return [int(batch) for batch in listed(options, "batches")]


def device_words(group: Data) -> str:
    """The device of a record's group; for a CPU its model and threads."""
    device = group["environment"]["device"]
    if device["kind"] != "cpu":
        return str(device["name"])
    host = group["machine"]
    key, noun = ("threads", "thread") if "threads" in host else ("cpus", "CPU")
    return f"{processor(host)}, {host[key]} {noun}{'' if host[key] == 1 else 's'}"


def processor(host: Data) -> str:
    """The model of a record's CPU."""
    return model(host["processor"], host.get("cpu", {}).get("instructions", ()))


def heading(group: Data, software: Sequence[str]) -> str:
    """The start of a caption: device, software and date of a record's group."""
    return f"{setting(group, software)}, {days([group])}"


def setting(group: Data, software: Sequence[str]) -> str:
    """Device, software and driver of a record's group."""
    environment = group["environment"]
    words = [device_words(group), *software]
    if environment.get("driver"):
        words.append(f"driver {environment['driver']}")
    return ", ".join(words)


def days(entries: Iterable[Data]) -> str:
    """The first and the last day of entries with a `date`."""
    found = sorted(entry["date"][:10] for entry in entries)
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def asked_groups(groups: Data, options: Options, name: Any) -> Iterator[tuple[str, int, Data]]:
    """(precision, batch, group) for the precisions and batches of the options; `name` gives the
    key of a group from its precision and batch."""
    for precision in listed(options, "precisions"):
        for batch in batches(options):
            if (found := groups.get(name(precision, batch))) is not None:
                yield precision, batch, found
