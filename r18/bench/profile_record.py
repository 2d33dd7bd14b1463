"""What the drop-in's fusion levels take, on which device: `profile-<device>.json`.

A group is what took turns and can be compared: one backend, precision, batch and memory format, in
one run. A later run replaces the groups that it measured, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import DeviceInfo
from r18.bench.profile import Report

WHAT = "profile"


def group_name(backend: str, precision: str, batch: int, channels_last: bool) -> str:
    return f"{backend}/{precision}/b{batch}" + ("/channels-last" if channels_last else "")


def save(
    report: Report,
    device: DeviceInfo,
    about: Mapping[str, Any],
    folder: Path,
    *,
    channels_last: bool = False,
) -> Path:
    """Write a profile to the record of its device; returns the file.

    device: the backend's. about: facts about the whole run, for every group. Raises `UsageError`
    for a damaged record.
    """
    path = records.path_of(folder, WHAT, device)
    groups: dict[str, Any] = dict(records.read(path, WHAT).get("groups", {}))
    shared = {"date": records.now(), "environment": records.environment(device), **about}
    for batch in dict.fromkeys(row.batch for row in report.rows):
        rows = [row.to_json() for row in report.rows if row.batch == batch]
        for row in rows:
            del row["batch"]
        groups[group_name(report.backend, report.precision, batch, channels_last)] = {
            "backend": report.backend,
            "precision": report.precision,
            "batch": batch,
            "channels_last": channels_last,
            **shared,
            "rows": rows,
        }
    data = {
        "record": WHAT,
        "format": records.FORMAT,
        "device": device.name,
        "groups": dict(sorted(groups.items(), key=lambda item: _order(item[1]))),
    }
    records.write(path, data)
    return path


def _order(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return group["backend"], group["precision"], group["channels_last"], group["batch"]


__all__ = ["WHAT", "group_name", "save"]
