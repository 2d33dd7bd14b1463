"""What a report shows, read and checked: records, an evaluation, a comparison of two dumps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r18 import bench_record, records
from r18.bench_record import floors, in_order, pools
from r18.errors import R18Error, UsageError
from r18.evaluation.rows import Row
from r18.evaluation.tables import read_table
from r18.roofline import WHAT as CEILINGS
from r18.roofline import Ceilings, Limit
from r18.tables import device_words

VERIFY = "verify"


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

    folder:  of the records. verified: the devices' records of `r18 verify`, by slug.
    images:  the folder of the evaluation's photographs.
    network: of the evaluation, unless the evaluation says.
    diff:    the comparison of two dumps, as `r18 diff --json` has it.
    """

    folder: Path
    groups: tuple[Group, ...] = ()
    verified: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
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
    """Read what there is; see `Evidence`.

    Raises `UsageError` for a record or an evaluation that is damaged, for a folder of images that
    is none, and where there is nothing at all to show.
    """
    if images is not None and not images.is_dir():
        raise UsageError(f"images '{images}': no such folder; name the one that was evaluated")
    ceilings = {
        slug: Ceilings.from_record(record)
        for slug, record in records.read_all(folder, CEILINGS).items()
    }
    timed = records.read_all(folder, bench_record.WHAT)
    verified = records.read_all(folder, VERIFY)
    for slug, record in timed.items():
        _check_timed(folder / f"{bench_record.WHAT}-{slug}.json", record)
    for slug, record in verified.items():
        _check_verified(folder / f"{VERIFY}-{slug}.json", record)
    found = Evidence(
        folder,
        tuple(
            grouped(slug, group, ceilings.get(slug))
            for slug, record in timed.items()
            for group in in_order(record["groups"])
        ),
        verified,
        None if evaluation is None else read_evaluation(evaluation),
        images,
        network,
        diff,
    )
    if not (found.groups or found.verified or found.evaluation or found.diff):
        raise UsageError(
            f"there is nothing to report: '{folder}' holds no record of bench or verify, and "
            "neither --evaluation nor --dumps was given\n"
            "  r18 bench --record and r18 verify --record write records"
        )
    return found


_GROUP = (
    *("network", "precision", "fusion", "batch", "date", "warmup", "repeat"),
    *("environment", "machine", "rows"),
)
_ROW = (
    *("backend", "algorithm", "steps", "median_ms", "p10_ms", "p90_ms", "ms_per_image"),
    *("images_per_second", "ratio", "best_ratio", "best_peer"),
)
_KERNEL = (
    *("date", "verified", "findings", "problems", "refused", "error_over_bound"),
    "error_over_statistical_line",
)
_STEP = ("step", "kernel", "problem", "ratio", "ok", "check", "message")


def _check_timed(path: Path, record: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a record of times without what a page says of them."""
    _check(path, record, ("groups",))
    for group in record["groups"].values():
        _check(path, group, _GROUP)
        _check(path, group["environment"], ("device", "packages"))
        _check(path, group["environment"]["device"], ("kind", "name"))
        _check(path, group["machine"], ("processor", "cpus"))
        for row in group["rows"]:
            _check(path, row, _ROW)
            for step in row["steps"]:
                _check(path, step, ("step", "kernel", "milliseconds"))


def _check_verified(path: Path, record: Mapping[str, Any]) -> None:
    _check(path, record, ("device", "kernels", "networks"))
    for kernel in record["kernels"].values():
        _check(path, kernel, _KERNEL)
    for run in record["networks"].values():
        _check(path, run, ("backend", "precision", "steps"))
        for step in run["steps"]:
            _check(path, step, _STEP)


def _check(path: Path, data: Mapping[str, Any], keys: Iterable[str]) -> None:
    if lacking := [key for key in keys if key not in data]:
        what = path.stem.partition("-")[0]
        raise UsageError(
            f"the record '{path}' is damaged or of an older r18: it lacks {', '.join(lacking)}\n"
            f"  r18 {what} --record writes it anew; until then, take it out of the folder"
        )


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
