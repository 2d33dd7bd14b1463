"""What a report shows, read and checked: records, an evaluation, a comparison of two dumps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r18 import records
from r18.bench import profile_record
from r18.bench import record as bench_record
from r18.bench.record import floors, in_order, pools
from r18.bench.roofline import WHAT as CEILINGS
from r18.bench.roofline import Ceilings, Limit
from r18.errors import R18Error, UsageError
from r18.evaluate.rows import Row
from r18.evaluate.tables import read_table
from r18.report.checked import (
    check_mutated,
    check_profiled,
    check_sanitized,
    check_timed,
    check_verified,
)
from r18.tables import device_words

VERIFY, MUTATE, SANITIZE = "verify", "mutate", "sanitize"
"""Records that the oracle writes."""
SHOWN = (bench_record.WHAT, profile_record.WHAT, VERIFY, MUTATE, SANITIZE)
"""What a page is made of, besides an evaluation and two dumps."""


Records = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Group:
    """What took turns in one benchmark: a record's group, and its roofline.

    device: the slug of its record. data: the group as recorded. floors: of each step, by name;
    empty where there is no roofline, and `why` says so. pooled: the same with max-pooling fused,
    where some program did that.
    """

    device: str
    data: Mapping[str, Any]
    floors: Mapping[str, Limit]
    why: str = ""
    pooled: Mapping[str, Limit] = field(default_factory=dict)

    def floors_of(self, row: Mapping[str, Any]) -> Mapping[str, Limit]:
        """The floors of a row's own steps."""
        return self.pooled if pools(row) else self.floors

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
        """Milliseconds of a batch at the roofline: the steps of whoever needs the least."""
        floors = self.pooled or self.floors
        return sum(one.floor_ms for one in floors.values()) if floors else None

    @property
    def title(self) -> str:
        """`fp16, batch 64`, and what is not as usual."""
        words = [self.precision, f"batch {self.batch}"]
        usual = {"network": "resnet18", "fusion": "all"}
        odd = {key: self.data[key] for key, said in usual.items() if self.data[key] != said}
        words += [f"{key} {said}" for key, said in odd.items()]
        return ", ".join(words)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's rows, and which are near ties; `about` is what a Parquet file tells."""

    path: Path
    rows: tuple[tuple[Row, bool | None], ...]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All that a page is made of; what was not given is empty or None.

    folder:  of the records.
    profiled, verified, mutated, sanitized: the devices' records of the command, by slug.
    images:  the folder of the evaluation's photographs.
    network: of the evaluation, unless the evaluation says.
    diff:    the comparison of two dumps, as `r18 diff --json` has it.
    """

    folder: Path
    groups: tuple[Group, ...] = ()
    profiled: Records = field(default_factory=dict)
    verified: Records = field(default_factory=dict)
    mutated: Records = field(default_factory=dict)
    sanitized: Records = field(default_factory=dict)
    evaluation: Evaluation | None = None
    images: Path | None = None
    network: str = "resnet18"
    diff: Mapping[str, Any] | None = None


def gather(
    folder: Path,
    evaluation: Path | None = None,
    images: Path | None = None,
    network: str = "resnet18",
    diff: Mapping[str, Any] | None = None,
) -> Evidence:
    """Read what there is; see `Evidence`. The device of the most images a second comes first.

    Raises `UsageError` for a record or an evaluation that is damaged, for a folder of images that
    is none or not of the evaluation, and where there is nothing at all to show.
    """
    evaluated = None if evaluation is None else read_evaluation(evaluation)
    if images is not None:
        _check_images(images, evaluated)
    ceilings = {
        slug: Ceilings.from_record(record)
        for slug, record in records.read_all(folder, CEILINGS).items()
    }
    timed = _records(folder, bench_record.WHAT, check_timed)
    found = Evidence(
        folder,
        tuple(
            grouped(slug, group, ceilings.get(slug))
            for slug, record in sorted(timed.items(), key=lambda item: -_most_images(item[1]))
            for group in in_order(record["groups"])
        ),
        _records(folder, profile_record.WHAT, check_profiled),
        _records(folder, VERIFY, check_verified),
        _records(folder, MUTATE, check_mutated),
        _records(folder, SANITIZE, check_sanitized),
        evaluated,
        images,
        network,
        diff,
    )
    recorded = (
        *(found.groups, found.profiled, found.verified, found.mutated, found.sanitized),
        *(found.evaluation, found.diff),
    )
    if not any(recorded):
        raise UsageError(
            f"there is nothing to report: {_empty(folder)}, and neither --evaluation nor --dumps "
            "was given\n"
            f"  r18 {', '.join(SHOWN)} write records with --record; --records names another folder"
        )
    return found


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
    """A second, of all that was timed on a device."""
    rows = (row for group in record["groups"].values() for row in group["rows"])
    return max((float(row["images_per_second"]) for row in rows), default=0.0)


def _records(
    folder: Path, what: str, check: Callable[[Path, Mapping[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """The devices' records of `what`, each checked."""
    found = records.read_all(folder, what)
    for slug, record in found.items():
        check(folder / f"{what}-{slug}.json", record)
    return found


def read_evaluation(path: Path) -> Evaluation:
    """What `r18 evaluate` wrote. Raises `UsageError`."""
    rows, about = read_table(path)
    return Evaluation(path, tuple(rows), about)


def grouped(slug: str, data: Mapping[str, Any], ceilings: Ceilings | None) -> Group:
    """A record's group with its roofline, where the device's ceilings were measured alike."""
    if ceilings is None:
        return Group(slug, data, {}, "the ceilings of the device were not measured")
    try:
        own = floors(data, ceilings)
        pooled = floors(data, ceilings, pooled=True) if any(map(pools, data["rows"])) else {}
    except R18Error as error:
        return Group(slug, data, {}, str(error).splitlines()[0])
    return Group(slug, data, own, pooled=pooled)


__all__ = ["Evaluation", "Evidence", "Group", "gather", "grouped", "read_evaluation"]
