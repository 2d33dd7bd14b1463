"""Records of benchmarks on a device: `bench-<device>.json`.

A group is a set of rows that took turns in one run and can be compared: one network, precision,
fusion level and batch. A later run replaces the groups that it measured, each as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import DeviceInfo
from r18.bench.baselines import PEERS
from r18.bench.roofline import Ceilings, Limit, algorithm_of, limits, multiplying_less
from r18.bench.rows import RATIO, Contender, Row
from r18.errors import UsageError
from r18.graph.all_ops import CLASSIFIERS, SHORTCUTS, STEMS
from r18.graph.precision import PRECISIONS
from r18.graph.resnet import network
from r18.records.kinds import Bench, BenchGroup

WHAT = "bench"


def group_name(network: str, precision: str, fusion: str, batch: int) -> str:
    return f"{network}/{precision}/{fusion}/b{batch}"


def save(
    rows: Sequence[Row],
    field: Sequence[Contender],
    about: Mapping[str, Any],
    fusion: str,
    folder: Path,
) -> list[Path]:
    """Write rows to the records of their devices; returns the files.

    field: the contenders that were timed. about: facts about the whole run that every group
    holds: `network`, `weights`, `machine` and `skipped` (contender and reason). Samples are left
    out; their median and percentiles stay. Raises `UsageError` for a damaged record.
    """
    written: list[Path] = []
    for kind, device in _devices(field).items():
        mine = [row for row in rows if row.device_kind == kind]
        if not mine:
            continue
        path = records.path_of(folder, WHAT, device)
        added = partial(_with, records.device_text(device), _groups(mine, about, fusion, device))
        records.update(path, Bench, added)
        written.append(path)
    return written


def _with(device: str, groups: dict[str, BenchGroup], old: Bench | None) -> Bench:
    """The record with these groups in place of older ones."""
    every = (old.groups if old else {}) | groups
    ordered = dict(sorted(every.items(), key=lambda item: _order(item[1])))
    return Bench(device=device, ratio=RATIO, groups=ordered)


def _devices(field: Iterable[Contender]) -> dict[str, DeviceInfo]:
    """A device of each kind, as a backend describes it, else as a peer does."""
    ranked = sorted(field, key=lambda contender: contender.name in PEERS)
    return {contender.device.kind: contender.device for contender in reversed(ranked)}


def _groups(
    rows: Iterable[Row], about: Mapping[str, Any], fusion: str, device: DeviceInfo
) -> dict[str, BenchGroup]:
    shared = {"date": records.now(), "environment": records.environment(device), **about}
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        head = {"precision": row.precision, "fusion": fusion, "batch": row.batch}
        head |= {"warmup": row.warmup, "repeat": row.repeat, "series": row.series}
        name = group_name(about["network"], row.precision, fusion, row.batch)
        data = row.to_json()
        for key in ("samples_ms", "device_kind", *head.keys() - {"fusion"}):
            del data[key]
        if row.error is not None:
            del data["no_error"]
        found.setdefault(name, {**head, **shared, "rows": []})["rows"].append(data)
    return msgspec.convert(found, dict[str, BenchGroup])


def _order(group: BenchGroup) -> tuple[Any, ...]:
    return group.network, group.precision, group.fusion, group.batch


# -- reading -----------------------------------------------------------------------------------


def in_order(groups: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A record's groups by network, fusion level, precision in the order of `PRECISIONS`, batch."""
    known = list(PRECISIONS)

    def place(group: Mapping[str, Any]) -> tuple[Any, ...]:
        name = group["precision"]
        rank = known.index(name) if name in known else len(known)
        return group["network"], group["fusion"], rank, group["batch"]

    return sorted(groups.values(), key=place)


def fused_ops(row: Mapping[str, Any]) -> frozenset[str]:
    """The names of the fused ops in a row's program: those of floats, whatever the precision."""
    kernels = row.get("kernels") or {}
    return frozenset(
        names[0]
        for names in (tuple(op.name for op in ops) for ops in (STEMS, SHORTCUTS, CLASSIFIERS))
        if any(f"/{name}/" in kernel for kernel in kernels for name in names)
    )


def floors_of(
    row: Mapping[str, Any], group: Mapping[str, Any], ceilings: Ceilings
) -> dict[str, Limit]:
    """The floor of each step of a row's program, by the algorithms of its kernels.

    A step whose kernel was not recorded has the lowest floor of the row's algorithms. Raises as
    `floors` does.
    """
    fused, algorithms = fused_ops(row), multiplying_less(row.get("kernels") or ())
    least = floors(group, ceilings, fused=fused, algorithms=algorithms)
    kernels = {step["step"]: step["kernel"] for step in row.get("steps") or ()}
    if not (algorithms and kernels):
        return least
    found = {
        algorithm: floors(group, ceilings, fused=fused, algorithms=(algorithm,))
        for algorithm in ("", *algorithms)
    }
    own = {name: found.get(algorithm_of(kernel), found[""]) for name, kernel in kernels.items()}
    return {name: own.get(name, least)[name] for name in least}


def floors(
    group: Mapping[str, Any],
    ceilings: Ceilings,
    *,
    fused: Collection[str] = (),
    algorithms: Collection[str] = (),
) -> dict[str, Limit]:
    """The floor of each step of a group's network; see `limits`.

    Raises `UsageError` where the ceilings lack the precision, or were measured with another number
    of threads.
    """
    threads = group["machine"].get("threads")
    if ceilings.threads is not None and threads not in (None, ceilings.threads):
        raise UsageError(
            f"timed with {threads} threads, the ceilings with {ceilings.threads}\n"
            "  r18 roofline --threads N --measure measures them alike"
        )
    asked = network(group["network"]), group["precision"], group["fusion"], group["batch"]
    return limits(*asked, ceilings, fused=fused, algorithms=algorithms)


__all__ = ["WHAT", "floors", "floors_of", "fused_ops", "group_name", "in_order", "save"]
