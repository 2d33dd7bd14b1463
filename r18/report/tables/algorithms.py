"""Algorithms side by side: how long the network takes with each, at several batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from r18.bench.baselines import PEER, TORCH
from r18.bench.error import error_cells
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.report.tables.conditions import WARM, error_captions
from r18.report.tables.table import (
    Data,
    Options,
    Row,
    Table,
    batches,
    cell,
    listed,
    needed,
    record_of,
)
from r18.report.tables.timed import bench_captions

BEST = "PyTorch's fastest mode"


def algorithms_table(options: Options, folder: Path) -> Table:
    """A backend with its preferred kernels and by algorithm, next to PyTorch, batches side by side.

    PyTorch appears in eager mode and in the fastest mode at each batch, in each precision, and in
    eager mode on the device `cpu` if the marker names one.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    places = [(device, precision) for precision in listed(options, "precisions")]
    if "cpu" in options:
        places.insert(0, (options["cpu"], "fp32"))
    timed: list[Data] = []
    judged: list[Data] = []
    rows: list[Row] = []
    for where, precision in places:
        known = record_of(folder, "bench", where)["groups"]
        names = [group_name("resnet18", precision, "all", batch) for batch in batches(options)]
        groups = [known.get(name) for name in names]
        timed += [group for group in groups if group]
        shown = {PEER: "PyTorch eager"}
        if where == device:
            shown |= {BEST: BEST} | {name: name for name in _own(groups, backend)}
        for name, words in shown.items():
            times = [_row(group, name) for group in groups]
            if any(times):
                judged += [row for row in times if row]
                numbers = [number for row in times for number in _numbers(row)]
                rows.append((words, where, precision, *numbers))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' at those batches")
    heads = " | ".join(
        f"b{batch} ms/image | images/s | error / PyTorch" for batch in batches(options)
    )
    align = "lll" + "rrr" * len(batches(options))
    captions = [*bench_captions(timed), WARM, *error_captions(judged)]
    return Table(f"network by | device | precision | {heads}", align, rows, captions)


def _numbers(row: Data | None) -> Row:
    """The cells of a batch; empty without a row."""
    if row is None:
        return "", "", ""
    rate = cell(row["images_per_second"], ",.0f")
    return cell(row["ms_per_image"], ".4g"), rate, error_cells(row)[1]


def _own(groups: Sequence[Data | None], backend: str) -> list[str]:
    """The names of a backend's contenders: with its preferred kernels, and by algorithm."""
    names = (row["backend"] for group in groups if group for row in group["rows"])
    return [name for name in names if name.split(" ")[0] == backend]


def _row(group: Data | None, name: str) -> Data | None:
    """A group's row of a contender, or of PyTorch's fastest mode."""
    rows: list[Data] = [] if group is None else group["rows"]
    named = TORCH if name == BEST else (name,)
    found = [row for row in rows if row["backend"] in named]
    return min(found, key=lambda row: float(row["ms_per_image"]), default=None)
