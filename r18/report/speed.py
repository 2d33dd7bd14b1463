"""Times as rows and bars: contenders of a benchmark, steps of a program, levels of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r18.bench.baselines import PEERS
from r18.bench.error import error_cells
from r18.bench.profile import MODEL
from r18.bench.roofline import Limit
from r18.report.evidence import Group
from r18.report.tables import bench_captions, error_captions, profile_caption

KINDS = {
    "ours": "a backend, with the kernels it prefers",
    "one": "a backend restricted to one algorithm",
    "peer": "other libraries",
}
"""The meaning of each colour of the bars."""
FAR = 3.0
"""A mark more than this many times the longest bar is not drawn."""


def kind_of(row: Mapping[str, Any]) -> str:
    """The kind of a benchmark's row: see `KINDS`."""
    if row["backend"] in PEERS:
        return "peer"
    return "one" if row["algorithm"] else "ours"


def bars(numbers: Sequence[float], marks: Sequence[float | None] = ()) -> list[str]:
    """The CSS of each bar: its length and its mark, in hundredths of the longest one."""
    longest = max(numbers, default=0.0) or 1.0
    near = [None if mark is None or mark > FAR * longest else mark for mark in marks]
    whole = max(longest, *(mark or 0.0 for mark in near), 0.0)
    near += [None] * (len(numbers) - len(near))
    return [
        f"--part:{100 * number / whole:.2f}%"
        + ("" if mark is None else f";--mark:{100 * mark / whole:.2f}%")
        for number, mark in zip(numbers, near, strict=True)
    ]


def timed(group: Group) -> dict[str, Any]:
    """A benchmark's group: `rows`, fastest first.

    Each is (row, kind, rate's bar, time's bar, error and its ratio in words).
    """
    rows, floor = group.fastest_first, group.floor_ms
    rate = None if floor is None else 1e3 * group.batch / floor
    (caption,) = bench_captions([group.data])
    return {
        "group": group,
        "floor": floor,
        "rate": rate,
        "caption": caption,
        "errors": " ".join(error_captions(rows)),
        "rows": zip(
            rows,
            map(kind_of, rows),
            bars([row["images_per_second"] for row in rows], [rate] * len(rows)),
            bars([row["median_ms"] for row in rows], [floor] * len(rows)),
            map(error_cells, rows),
            strict=True,
        ),
    }


def layered(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Each row of a benchmark with the times of its steps, backends before single algorithms.

    `steps` are (step, kernel, milliseconds, share of the sum, `Limit` or None, bar).
    """
    found = [(group, row) for group in groups for row in group.data["rows"] if row["steps"]]
    for group, row in sorted(found, key=lambda one: kind_of(one[1]) != "ours"):
        steps, floors = summed(row), group.floors_of(row)
        total = sum(ms for _, _, ms in steps)
        limits: list[Limit | None] = [floors.get(step) for step, _, _ in steps]
        marks = [None if limit is None else limit.floor_ms for limit in limits]
        lengths = bars([ms for _, _, ms in steps], marks)
        yield {
            "group": group,
            "row": row,
            "kind": kind_of(row),
            "total": total,
            "steps": [
                (step, kernel, ms, ms / total if total else None, limit, bar)
                for (step, kernel, ms), limit, bar in zip(steps, limits, lengths, strict=True)
            ],
        }


def summed(row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(step, kernel, milliseconds) of a row, the phases of a step added up."""
    found: dict[str, tuple[str, float]] = {}
    for time in row["steps"]:
        _, before = found.get(time["step"], ("", 0.0))
        found[time["step"]] = (time["kernel"], before + time["milliseconds"])
    return [(step, kernel, ms) for step, (kernel, ms) in found.items()]


def profiled(group: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's group: `rows` as (row, kind, the bar of its CPU time, of its CUDA time)."""
    title = f"{group['backend']}, {group['precision']}, batch {group['batch']}"
    rows = group["rows"]
    return {
        "title": title + (", channels-last" if group["channels_last"] else ""),
        "caption": profile_caption(group),
        "rows": zip(
            rows,
            ["peer" if row["contender"] == MODEL else "ours" for row in rows],
            bars([row["cpu_ms"] for row in rows]),
            bars([row["cuda_ms"] or 0.0 for row in rows]),
            strict=True,
        ),
    }


__all__ = ["KINDS", "bars", "kind_of", "layered", "profiled", "summed", "timed"]
