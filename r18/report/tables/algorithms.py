"""Algorithms next to each other: how long the network takes with each, at several batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from r18.bench.baselines import PEER, TORCH
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.report.tables.table import MISSING, Row, Table, needed, record_of
from r18.report.tables.timed import bench_captions

BEST = "PyTorch's fastest mode"


def algorithms_table(options: Mapping[str, str], folder: Path) -> Table:
    """A backend whole and by algorithm, next to PyTorch: a line each, batches side by side.

    PyTorch is there in eager mode and in whichever mode is the fastest at a batch, in each
    precision; and in eager mode on the device `cpu`, where the marker names one.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    batches = [int(batch) for batch in needed(options, "batches").split(",")]
    places = [(device, precision) for precision in needed(options, "precisions").split(",")]
    if "cpu" in options:
        places.insert(0, (options["cpu"], "fp32"))
    timed: list[Mapping[str, Any]] = []
    rows: list[Row] = []
    for where, precision in places:
        known = record_of(folder, "bench", where)["groups"]
        names = [group_name("resnet18", precision, "all", batch) for batch in batches]
        groups = [known.get(name) for name in names]
        timed += [group for group in groups if group]
        shown = {PEER: "PyTorch eager"}
        if where == device:
            shown |= {BEST: BEST} | {name: name for name in _own(groups, backend)}
        for name, words in shown.items():
            times = [_row(group, name) for group in groups]
            if any(times):
                cells = (cell for row in times for cell in _cells(row))
                rows.append((words, where, precision, *cells))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' at those batches")
    heads = ["network by", "device", "precision"]
    for batch in batches:
        heads += [f"b{batch} ms/image", "images/s"]
    return Table(heads, "lll" + "rr" * len(batches), rows, "<br>\n".join(bench_captions(timed)))


def _own(groups: Sequence[Mapping[str, Any] | None], backend: str) -> Iterator[str]:
    """The names of a backend's contenders: whole, and by algorithm."""
    for group in filter(None, groups):
        for row in group["rows"]:
            if row["backend"].split(" ")[0] == backend:
                yield row["backend"]


def _row(group: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """What a group has of a contender, or of PyTorch's fastest mode."""
    rows: list[Mapping[str, Any]] = [] if group is None else group["rows"]
    if name == BEST:
        return min(
            (row for row in rows if row["backend"] in TORCH),
            key=lambda row: float(row["ms_per_image"]),
            default=None,
        )
    return next((row for row in rows if row["backend"] == name), None)


def _cells(row: Mapping[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return MISSING, MISSING
    return f"{row['ms_per_image']:.4g}", f"{row['images_per_second']:,.0f}"
