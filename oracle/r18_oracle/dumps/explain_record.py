"""Records of libraries' int8 arithmetic, element by element and by class: `explain-<device>.json`.

There is an entry for each network and pair of runs; a later comparison replaces its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import DeviceInfo
from r18.errors import DumpError
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.machine import machine
from r18.records.kinds import Explain, ExplainEntry
from r18_oracle.dumps.dumps import Dump, Made, read_dump
from r18_oracle.network.reasons import Reasons, StepReasons

WHAT = "explain"


def save(reasons: Reasons, expected: str | Path, got: str | Path, folder: Path) -> Path:
    """Write the reasons of two dumps to the record of this machine's CPU; returns the file.

    Only the second dump's departures are kept. Raises `UsageError` for a damaged record, and
    `DumpError` for an expected dump that departs from the specification: its elements would be
    taken for the other one's.
    """
    if reasons.total(0):
        raise DumpError(
            f"'{expected}' is not as specified, so its differences are no record of '{got}'\n"
            "  let a backend write the dump that is taken to be right: r18 dump --backend numpy"
        )
    ours, theirs = _made(read_dump(expected)), _made(read_dump(got))
    schedule = network(theirs.network)
    device = DeviceInfo("cpu", theirs.device)
    entry: dict[str, Any] = {
        "date": records.now(),
        "environment": records.environment(device),
        "machine": machine(),
        "network": schedule.name,
        "weights_sha256": theirs.weights.sha256,
        "input_sha256": theirs.input.sha256,
        "expected": ours.backend,
        "got": theirs.backend,
        "unexplained": reasons.unexplained,
        "steps": [_step(row, schedule) for row in reasons.rows],
    }
    path = records.path_of(folder, WHAT, device)
    name = f"{schedule.name}/{ours.backend}/{theirs.backend}"
    mine = {name: msgspec.convert(entry, ExplainEntry)}

    def with_mine(found: Explain | None) -> Explain:
        entries = (found.entries if found else {}) | mine
        return Explain(device=device.name, entries=dict(sorted(entries.items())))

    records.update(path, Explain, with_mine)
    return path


def _step(row: StepReasons, schedule: Schedule) -> dict[str, Any]:
    one = row.sides[1]
    return {
        "step": row.step,
        "logits": row.value == schedule.output,
        "elements": row.elements,
        "differ": row.differ,
        "inherited": row.inherited,
        "classes": dict(one.classes),
        "arithmetic": one.arithmetic,
        "moved": one.moved,
    }


def _made(dump: Dump) -> Made:
    assert dump.made is not None  # `explain_dumps` has read it
    return dump.made


__all__ = ["WHAT", "save"]
