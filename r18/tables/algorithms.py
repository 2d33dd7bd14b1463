"""Algorithms beside one another: how long the network takes with each, at several batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r18.bench_record import group_name
from r18.errors import UsageError
from r18.peers import PEER, TORCH
from r18.tables.table import MISSING, Row, Table, needed, record_of
from r18.tables.timed import bench_caption

BEST = "PyTorch's fastest mode"


def algorithms_table(options: Mapping[str, str], folder: Path) -> Table:
    """A backend whole and by algorithm, beside PyTorch: a line each, batches side by side.

    PyTorch is there in eager mode and in whichever mode is the fastest at a batch, in each
    precision; and in eager mode on the device `cpu`, where the marker names one.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    batches = [int(batch) for batch in needed(options, "batches").split(",")]
    captions: dict[str, None] = {}
    rows: list[Row] = []

    def add(
        record: Mapping[str, Any], where: str, precision: str, names: Mapping[str, str] | None
    ) -> None:
        """The lines of a precision: of the backend's contenders, or those of `names` alone."""
        groups = {
            batch: group
            for batch in batches
            if (group := record["groups"].get(group_name("resnet18", precision, "all", batch)))
        }
        own: dict[str, str] = {}
        for group in groups.values():
            captions[bench_caption(group)] = None
            if names is None:
                mine = (row["backend"] for row in group["rows"])
                own |= {name: name for name in mine if name.split(" ")[0] == backend}
        shown = {PEER: "PyTorch eager", BEST: BEST} | own if names is None else names
        for name, words in shown.items():
            times = [_row(groups.get(batch), name) for batch in batches]
            if any(times):
                cells = (cell for row in times for cell in _cells(row))
                rows.append((words, where, precision, *cells))

    if "cpu" in options:
        cpu = options["cpu"]
        add(record_of(folder, "bench", cpu), cpu, "fp32", {PEER: "PyTorch eager"})
    for precision in needed(options, "precisions").split(","):
        add(record_of(folder, "bench", device), device, precision, None)
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' at those batches")
    heads = ["network by", "device", "precision"]
    for batch in batches:
        heads += [f"b{batch} ms/image", "images/s"]
    return Table(heads, "lll" + "rr" * len(batches), rows, "<br>\n".join(captions))


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
