"""A backend next to other libraries on every CPU on record, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from r18 import records
from r18.bench.baselines import PEERS, TORCH
from r18.bench.error import error_cells
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.records.kinds import Bench
from r18.report.tables.conditions import ERROR_HEADS, WARM, error_captions
from r18.report.tables.table import (
    Data,
    Options,
    Row,
    Table,
    asked_groups,
    cell,
    device_words,
    needed,
    processor,
)
from r18.report.tables.timed import LIBRARIES, bench_captions

BACKEND = "numba-cpu"
"""The backend that is compared unless another one is named."""
COLUMNS = {
    "openvino": ("openvino",),
    "onnxruntime": ("onnxruntime",),
    "torch": tuple(TORCH),
}
"""The rows of each library, by its package: the fastest of them is shown."""


def cpus_table(options: Options, folder: Path) -> Table:
    """A row for each CPU, precision and batch in which the backend was timed; times per image.

    Combinations that were not timed have no row, and a library that was not has an empty cell.
    """
    backend = options.get("backend", BACKEND)
    groups: list[Data] = []
    owners: list[Data] = []
    rivals: list[Data] = []
    rows: list[Row] = []
    for precision, batch, group in _on_cpus(options, folder):
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None:
            continue
        rival = _fastest(group, PEERS)
        libraries = (_fastest(group, names) for names in COLUMNS.values())
        groups.append(group)
        owners.append(own)
        rivals += [rival] if rival else []
        rows.append(
            (
                device_words(group),
                precision,
                str(batch),
                *(cell(row and row["ms_per_image"], ".4g") for row in (own, *libraries)),
                cell(own["best_ratio"], ".2f"),
                error_cells(rival)[0] if rival else "",
                *error_cells(own),
            )
        )
    if not rows:
        asked = f"{needed(options, 'precisions')}, batch {needed(options, 'batches')}"
        raise UsageError(
            f"no record of a CPU has a time of '{backend}' in {asked}\n"
            "  r18 bench --record makes one"
        )
    named = " | ".join(LIBRARIES[package] for package in COLUMNS)
    heads = (
        f"CPU | precision | batch | {backend} | {named} | / best peer | its error | {ERROR_HEADS}"
    )
    captions = [
        f"Milliseconds per image. / best peer: the time of {backend} over that of the fastest "
        f"other library, whose error is next to it; then the error of {backend}.",
        *_has(groups),
        *bench_captions(groups),
        WARM,
        *error_captions([*owners, *(row for row in rivals if row.get("error") is None)]),
    ]
    return Table(heads, "llrrrrrrrrr", rows, captions)


def _on_cpus(options: Options, folder: Path) -> Iterator[tuple[str, int, Data]]:
    """The groups that a marker selects (precision, batch, group), CPU by CPU."""

    def name(precision: str, batch: int) -> str:
        return group_name("resnet18", precision, "all", batch)

    for record in records.load_all(folder, Bench).values():
        for found in asked_groups(msgspec.to_builtins(record)["groups"], options, name):
            if found[-1]["environment"]["device"]["kind"] == "cpu":
                yield found


def _fastest(group: Data, names: tuple[str, ...]) -> Data | None:
    """The fastest of a group's rows of these names."""
    found = [row for row in group["rows"] if row["backend"] in names]
    return min(found, key=lambda row: float(row["ms_per_image"]), default=None)


def _has(groups: list[Data]) -> Iterator[str]:
    """The instruction sets of each CPU, where its record has them."""
    for host in (group["machine"] for group in groups):
        if sets := host.get("cpu", {}).get("instructions"):
            yield f"{processor(host)}: {', '.join(sets)}."


__all__ = ["cpus_table"]
