"""The evidence for a page, read and checked: records, an evaluation, a comparison of two dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.bench import profile_record
from r18.bench import record as bench_record
from r18.bench.record import floors, floors_of, in_order
from r18.bench.roofline import Ceilings, Limit
from r18.errors import R18Error, UsageError, show
from r18.evaluate.rows import Row
from r18.evaluate.tables import read_table
from r18.graph.resnet import name_of
from r18.graph.resnet import network as network_named
from r18.records.kinds import CeilingsRecord
from r18.report.tables import device_words

SHOWN = (bench_record.WHAT, profile_record.WHAT, "verify", "mutate", "sanitize")
"""Records that a page shows, by the command that writes them."""
USUAL = {"network": "resnet18", "fusion": "all"}

Records = Mapping[str, Mapping[str, Any]]
"""Records of one command by the slug of their device."""


@dataclass(frozen=True)
class Group:
    """Programs timed in turns: a group of a benchmark's record, with its roofline.

    device: the slug of the record. data: the group as recorded. floors: the floor of each step by
    name and by the definition; empty where there is no roofline, and `why` gives the reason. own:
    by contender, the floors of its own steps by its own algorithms. ceiling: the ceilings that gave
    them, in words.
    """

    device: str
    data: Mapping[str, Any]
    floors: Mapping[str, Limit]
    why: str = ""
    own: Mapping[str, Mapping[str, Limit]] = field(default_factory=dict)
    ceiling: str = ""

    def floors_of(self, row: Mapping[str, Any]) -> Mapping[str, Limit]:
        """The floors of a row's own steps."""
        return self.own.get(row["backend"], self.floors)

    @property
    def precision(self) -> str:
        return str(self.data["precision"])

    @property
    def batch(self) -> int:
        return int(self.data["batch"])

    @property
    def device_name(self) -> str:
        return device_words(self.data)

    @property
    def floor_ms(self) -> float | None:
        """Milliseconds per batch at the lowest floor of a program: no time is below it."""
        if not self.floors:
            return None
        programs = (self.floors, *self.own.values())
        return min(sum(one.floor_ms for one in steps.values()) for steps in programs)

    @property
    def title(self) -> str:
        """`fp16, batch 64`, with the network and the fusion level where they are not `USUAL`."""
        odd = (f"{key} {self.data[key]}" for key, said in USUAL.items() if self.data[key] != said)
        return ", ".join((self.precision, f"batch {self.batch}", *odd))

    @property
    def usual(self) -> bool:
        """Whether this is ResNet-18, fully fused."""
        return all(self.data[key] == said for key, said in USUAL.items())

    @property
    def fastest_first(self) -> list[Mapping[str, Any]]:
        return sorted(self.data["rows"], key=lambda row: float(row["median_ms"]))


@dataclass(frozen=True)
class Evaluation:
    """The rows of an evaluation, each with whether it is a near tie; `about` is the metadata of a
    Parquet file."""

    path: Path
    rows: tuple[tuple[Row, bool | None], ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What was evaluated, as the file says; empty for a CSV, which does not."""
        found: Mapping[str, Any] = self.about.get("identity", {})
        return found


@dataclass(frozen=True)
class Evidence:
    """Everything that a page shows; missing evidence is empty or None.

    folder:  the folder of the records.
    groups:  the fastest device first.
    images:  the folder of the evaluation's photographs.
    network: the evaluated network, unless the evaluation names it; None for an unknown one, whose
             classes have no names.
    diff:    the comparison of two dumps, as `r18 diff --json` writes it.
    """

    folder: Path
    groups: tuple[Group, ...] = ()
    profiled: Records = field(default_factory=dict)
    verified: Records = field(default_factory=dict)
    mutated: Records = field(default_factory=dict)
    sanitized: Records = field(default_factory=dict)
    evaluation: Evaluation | None = None
    images: Path | None = None
    network: str | None = None
    diff: Mapping[str, Any] | None = None

    @property
    def recorded(self) -> bool:
        """Whether it has a record."""
        kinds = (self.groups, self.profiled, self.verified, self.mutated, self.sanitized)
        return any(kinds)


def gather(
    folder: Path,
    evaluation: Path | None = None,
    images: Path | None = None,
    network: str | None = None,
    diff: Mapping[str, Any] | None = None,
) -> Evidence:
    """Read and check all evidence; see `Evidence`.

    Raises `UsageError` for a damaged record or evaluation, for a folder of images that does not
    exist or does not belong to the evaluation, for another network than the evaluation names, and
    when there is nothing to show. Raises as `r18.graph.resnet.network` for a network that is none.
    """
    asked = None if network is None else name_of(network_named(network))
    evaluated = None
    if evaluation is not None:
        rows, about = read_table(evaluation)
        evaluated = Evaluation(evaluation, tuple(rows), about)
        if asked is not None:
            _check_network(asked, evaluated)
    if images is not None:
        _check_images(images, evaluated)
    ceilings = {
        slug: Ceilings.from_record(record)
        for slug, record in records.load_all(folder, CeilingsRecord).items()
    }
    timed, profiled, verified, mutated, sanitized = (_records(folder, what) for what in SHOWN)
    groups = tuple(
        grouped(slug, group, ceilings.get(slug))
        for slug, record in sorted(timed.items(), key=lambda item: -_most_images(item[1]))
        for group in in_order(record["groups"])
    )
    found = Evidence(
        folder, groups, profiled, verified, mutated, sanitized, evaluated, images, network, diff
    )
    if not any((found.recorded, evaluated, diff)):
        raise UsageError(
            f"there is nothing to report: {_empty(folder)}, and neither --evaluation nor --dumps "
            "was given\n"
            f"  r18 {', '.join(SHOWN)} write records with --record; --records names another folder"
        )
    return found


def _check_network(asked: str, evaluation: Evaluation) -> None:
    """asked: as `name_of` has it. Raises `UsageError` if the evaluation is another network's."""
    said = evaluation.identity.get("network")
    if said is None:
        return
    try:
        own = name_of(network_named(said))
    except R18Error:  # of another version of r18, say: its classes have no names
        own = said
    if own != asked:
        raise UsageError(
            f"--network {asked}: '{evaluation.path}' says that {show(own)} was evaluated\n"
            "  leave out --network, or name another evaluation"
        )


def _check_images(folder: Path, evaluation: Evaluation | None) -> None:
    if not folder.is_dir():
        raise UsageError(f"images '{folder}': no such folder; name the one that was evaluated")
    if evaluation is None:
        raise UsageError("--images shows the photographs of an evaluation: give --evaluation, too")
    files = [row.file for row, _ in evaluation.rows]
    if files and not any((folder / file).is_file() for file in files):
        raise UsageError(
            f"images '{folder}': none of the {len(files)} images of '{evaluation.path}' is in it, "
            f"such as '{files[0]}'; name the folder that was evaluated"
        )


def _empty(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder of records '{folder}'"
    return f"'{folder}' holds no record of {', '.join(SHOWN)}"


def _most_images(record: Mapping[str, Any]) -> float:
    """The highest rate in a record, in images per second."""
    rows = (row for group in record["groups"].values() for row in group["rows"])
    return max((float(row["images_per_second"]) for row in rows), default=0.0)


def _records(folder: Path, what: str) -> dict[str, dict[str, Any]]:
    """The records of `r18 <what>` by device, checked, as plain data."""
    found = records.load_all(folder, records.KINDS[what])
    return {slug: msgspec.to_builtins(record) for slug, record in found.items()}


def grouped(slug: str, data: Mapping[str, Any], ceilings: Ceilings | None) -> Group:
    """A group with its roofline, if the device's ceilings were measured alike."""
    if ceilings is None:
        return Group(slug, data, {}, "the ceilings of the device were not measured")
    name = data["precision"]
    if ceilings.has(name) and not ceilings.bounds(name):
        return Group(slug, data, {}, f"only a library's rate of {name} was measured: no bound")
    try:
        direct = floors(data, ceilings)
        own = {row["backend"]: floors_of(row, data, ceilings) for row in data["rows"]}
    except R18Error as error:
        return Group(slug, data, {}, str(error).splitlines()[0])
    return Group(slug, data, direct, own=own, ceiling=ceilings.words_of(name))


__all__ = ["SHOWN", "Evaluation", "Evidence", "Group", "gather"]
