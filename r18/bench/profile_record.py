"""Records of the times of the drop-in's fusion levels: `profile-<device>.json`.

A group is a set of rows that took turns in one run and can be compared: one backend, precision,
batch and memory format. A later run replaces the groups that it measured, each as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import DeviceInfo
from r18.bench.profile import Report
from r18.records.kinds import Profile, ProfileGroup

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

    device: the backend's. about: facts about the whole run that every group holds: `repeat`,
    `weights`, `machine` and `skipped`. Raises `UsageError` for a damaged record.
    """
    path = records.path_of(folder, WHAT, device)
    shared = {"date": records.now(), "environment": records.environment(device), **about}
    made: dict[str, Any] = {}
    for row in report.rows:
        name = group_name(report.backend, report.precision, row.batch, channels_last)
        head = {"backend": report.backend, "precision": report.precision, "batch": row.batch}
        head |= {"channels_last": channels_last, **shared, "rows": []}
        data = row.to_json()
        del data["batch"]
        made.setdefault(name, head)["rows"].append(data)
    mine = msgspec.convert(made, dict[str, ProfileGroup])

    def with_mine(old: Profile | None) -> Profile:
        groups = (old.groups if old else {}) | mine
        ordered = dict(sorted(groups.items(), key=lambda item: _order(item[1])))
        return Profile(device=records.device_text(device), groups=ordered)

    records.update(path, Profile, with_mine)
    return path


def _order(group: ProfileGroup) -> tuple[Any, ...]:
    return group.backend, group.precision, group.channels_last, group.batch


__all__ = ["WHAT", "group_name", "save"]
