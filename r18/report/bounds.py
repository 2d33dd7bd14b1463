"""Error over bound as heat maps, from the records of verifications: by kernel and by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from r18.report.heat import Cell, Column, Row, heat_map, merged, split_id
from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import fault, legend


def section(verified: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """The contents of the section: devices one after another."""
    yield tag(
        "p",
        "The largest error that was seen, over the bound derived for it: at most 1 for a right "
        "kernel, whatever the order of its sums. Judged against float64.",
    )
    entries = [e for record in verified.values() for e in record["kernels"].values()]
    yield legend(refused=any(_refused(entry) for entry in entries))
    for slug, record in verified.items():
        drawn = [
            tag("figure", tag("figcaption", said), scrolled(table, said))
            for said, table in (
                ("Each kernel, on drawn problems and on those of the network", kernels(record)),
                ("Each step of the network alone, given the reference's values", steps(record)),
            )
            if table is not None
        ]
        yield joined(
            [
                tag("h3", record["device"], " ", tag("span", slug, class_="chip")),
                tag("div", *drawn, class_="pair"),
            ]
        )


def kernels(record: Mapping[str, Any]) -> Markup | None:
    """A row a kernel without its precision, which is the column."""
    cells: dict[tuple[str, Column], Cell] = {}
    for name, entry in record["kernels"].items():
        row, precision = split_id(name)
        cells[row, Column(name.partition("/")[0], precision)] = _kernel_cell(name, entry)
    if not cells:
        return None
    rows = [Row(name, name.partition("/")[0]) for name in dict.fromkeys(row for row, _ in cells)]
    return heat_map("Kernel", rows, dict.fromkeys(column for _, column in cells), cells)


def steps(record: Mapping[str, Any]) -> Markup | None:
    """A row a step of the networks that were run."""
    cells: dict[tuple[str, Column], Cell] = {}
    orders = []
    for run in record["networks"].values():
        column = Column(run["backend"], run["precision"])
        orders.append([step["step"] for step in run["steps"]])
        for step in run["steps"]:
            cells[step["step"], column] = _step_cell(step)
    if not cells:
        return None
    rows = [Row(name, name.partition(".")[0]) for name in merged(orders)]
    return heat_map("Step", rows, dict.fromkeys(column for _, column in cells), cells)


def _refused(entry: Mapping[str, Any]) -> bool:
    return not entry["problems"] and not entry["findings"]


def _kernel_cell(name: str, entry: Mapping[str, Any]) -> Cell:
    lines = [name]
    if entry["findings"]:
        checks = sorted({finding["check"] for finding in entry["findings"]})
        return Cell(math.inf, "\n".join([*lines, *checks]), ", ".join(checks))
    lines += [f"refused {count}: {reason}" for reason, count in entry["refused"].items()]
    if _refused(entry):
        return Cell(None, "\n".join(lines), "refused")
    ratio = float(entry["error_over_bound"])
    lines.insert(1, f"error/bound {ratio:.6g}, the largest of {entry['problems']} problems")
    sharp = entry["error_over_statistical_line"]
    return Cell(ratio, "\n".join(lines), warned=sharp is not None and float(sharp) > 1)


def _step_cell(step: Mapping[str, Any]) -> Cell:
    ratio = float(step["ratio"])  # infinity and NaN are words in JSON
    lines = [step["kernel"], step["problem"], f"error/bound {ratio:.6g}"]
    if not step["ok"]:
        lines.append(f"{step['check']}: {step['message']}")
    text = "" if step["ok"] or fault(ratio) else step["check"]
    return Cell(ratio, "\n".join(lines), text)


def count(verified: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """(verified, all) of the recorded kernels."""
    entries = [entry for record in verified.values() for entry in record["kernels"].values()]
    return sum(bool(entry["verified"]) for entry in entries), len(entries)


__all__ = ["count", "kernels", "section", "steps"]
