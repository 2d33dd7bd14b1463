"""How fast and how exact a backend is next to PyTorch, by precision."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from r18.bench.baselines import TORCH
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.graph.precision import PRECISIONS
from r18.report.tables.table import Data, Options, Row, Table, cell, needed, record_of
from r18.report.tables.timed import bench_captions


def summary_table(options: Options, folder: Path) -> Table:
    """A backend's throughput at one batch next to PyTorch's fastest mode, and both errors.

    Times come from the benchmark's record, errors from the verification's: the rms error of the
    logits against float64, relative to their rms. PyTorch's error is that of its own operators in
    the same precision (in float32 for fp16x3), on the same weights and images.
    """
    device, batch = needed(options, "device"), needed(options, "batch")
    backend = options.get("backend", "cupy")
    groups = record_of(folder, "bench", device)["groups"]
    networks = record_of(folder, "verify", device)["networks"]
    rows: list[Row] = []
    timed: list[Data] = []
    for precision in PRECISIONS:
        group = groups.get(group_name("resnet18", precision, "all", int(batch)), {"rows": []})
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None:
            continue
        timed.append(group)
        errors = networks.get(f"{backend}/resnet18/{precision}/all")
        rows.append((precision, *_speed(own, group["rows"]), *_errors(errors)))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' at batch {batch}")
    heads = (
        "precision | r18 images/s | PyTorch images/s | in its fastest mode | speedup | "
        "r18 error | PyTorch error"
    )
    return Table(heads, "lrrlrrr", rows, bench_captions(timed))


def _speed(own: Data, rows: Iterable[Data]) -> Row:
    """Both throughputs, PyTorch's fastest mode, and the ratio."""
    images = own["images_per_second"]
    modes = [row for row in rows if row["backend"] in TORCH]
    if not modes:
        return cell(images, ",.0f"), "", "", ""
    best = max(modes, key=lambda row: float(row["images_per_second"]))
    theirs, way = best["images_per_second"], TORCH[best["backend"]]
    mode = way.mode + (", channels-last" if way.channels_last else "")
    return cell(images, ",.0f"), cell(theirs, ",.0f"), mode, f"{images / theirs:.2f}×"


def _errors(network: Data | None) -> Row:
    """The relative rms errors of the last checkpoint: the backend's and PyTorch's."""
    last = network["checkpoints"][-1] if network else {"relative": None, "own_relative": None}
    return cell(last["relative"], ".1e"), cell(last["own_relative"], ".1e")
