"""What was timed, on which device: `bench-<device>.json`.

A group is what took turns with one another and can be compared: one network, precision, fusion
level and batch, in one run. A later run replaces the groups that it measured, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import DeviceInfo
from r18.bench import RATIO, Contender, Row
from r18.peers import PEERS

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

    field: the contenders that the rows are of. about: facts about the whole run, for every group:
    `network` and `skipped` (contender and reason) among them. Samples are left out; their median
    and percentiles stay. Raises `UsageError` for a damaged record.
    """
    written: list[Path] = []
    for kind, device in _devices(field).items():
        mine = [row for row in rows if row.device_kind == kind]
        if not mine:
            continue
        path = records.path_of(folder, WHAT, device)
        record = records.read(path, WHAT)
        groups = record.get("groups", {}) | _groups(mine, about, fusion, device)
        data = {
            "record": WHAT,
            "format": records.FORMAT,
            "device": device.name,
            "ratio": RATIO,
            "groups": dict(sorted(groups.items(), key=lambda item: _order(item[1]))),
        }
        records.write(path, data)
        written.append(path)
    return written


def _devices(field: Iterable[Contender]) -> dict[str, DeviceInfo]:
    """A device of each kind: a backend's own words for it, which say more than a peer's."""
    ranked = sorted(field, key=lambda contender: contender.name in PEERS)
    return {contender.device.kind: contender.device for contender in reversed(ranked)}


def _groups(
    rows: Iterable[Row], about: Mapping[str, Any], fusion: str, device: DeviceInfo
) -> dict[str, Any]:
    shared = {"date": records.now(), "environment": records.environment(device), **about}
    found: dict[str, Any] = {}
    for row in rows:
        head = {"precision": row.precision, "fusion": fusion, "batch": row.batch}
        head |= {"warmup": row.warmup, "repeat": row.repeat}
        name = group_name(about["network"], row.precision, fusion, row.batch)
        data = row.to_json()
        for key in ("samples_ms", "device_kind", "precision", "batch", "warmup", "repeat"):
            del data[key]
        found.setdefault(name, {**head, **shared, "rows": []})["rows"].append(data)
    return found


def _order(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (group["network"], group["precision"], group["fusion"], group["batch"])


__all__ = ["WHAT", "group_name", "save"]
