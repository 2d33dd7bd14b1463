"""Error over bound from the records of verifications: heat maps by kernel and by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from r18.report.heat import Cell, Column, Heat, heat_map, split_id
from r18.report.scale import fault

BY_STEP = "Each step of the network, given the reference's values"
BY_KERNEL = "Each kernel, on generated problems and on those of the network"


def kernels(record: Mapping[str, Any]) -> Heat | None:
    """A row for each kernel without its precision, which is the column."""
    cells = {}
    for name, entry in record["kernels"].items():
        row, precision = split_id(name)
        cells[row, Column(name.partition("/")[0], precision)] = _kernel_cell(name, entry)
    order = list(dict.fromkeys(row for row, _ in cells))
    return heat_map("Kernel", BY_KERNEL, [order], [column for _, column in cells], cells)


def steps(record: Mapping[str, Any]) -> Heat | None:
    """A row for each step of the networks."""
    runs = record["networks"].values()
    cells = {
        (step["step"], Column(run["backend"], run["precision"])): _step_cell(step)
        for run in runs
        for step in run["steps"]
    }
    orders = [[step["step"] for step in run["steps"]] for run in runs]
    return heat_map("Step", BY_STEP, orders, [column for _, column in cells], cells)


def refused(entry: Mapping[str, Any]) -> bool:
    """Whether a kernel refused every problem."""
    return not entry["problems"] and not entry["findings"]


def _kernel_cell(name: str, entry: Mapping[str, Any]) -> Cell:
    if entry["findings"]:
        checks = sorted({finding["check"] for finding in entry["findings"]})
        return Cell(math.inf, "\n".join([name, *checks]), ", ".join(checks))
    lines = [f"refused {count}: {reason}" for reason, count in entry["refused"].items()]
    if refused(entry):
        return Cell(None, "\n".join([name, *lines]), "refused")
    ratio = float(entry["error_over_bound"])
    judged = f"error/bound {ratio:.6g}, the largest of {entry['problems']} problems"
    sharp = entry["error_over_statistical_line"]
    warned = sharp is not None and float(sharp) > 1
    return Cell(ratio, "\n".join([name, judged, *lines]), warned=warned)


def _step_cell(step: Mapping[str, Any]) -> Cell:
    ratio = float(step["ratio"])  # JSON holds infinity and NaN as strings
    lines = [step["kernel"], step["problem"], f"error/bound {ratio:.6g}"]
    if not step["ok"]:
        lines.append(f"{step['check']}: {step['message']}")
    text = "" if step["ok"] or fault(ratio) else step["check"]
    return Cell(ratio, "\n".join(lines), text)


__all__ = ["BY_KERNEL", "BY_STEP", "kernels", "refused", "steps"]
