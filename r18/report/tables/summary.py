"""A line a precision: how fast and how exact a backend is, next to PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r18.bench.baselines import TORCH
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.graph.precision import PRECISIONS
from r18.report.tables.table import MISSING, Row, Table, needed, record_of
from r18.report.tables.timed import bench_captions


def summary_table(options: Mapping[str, str], folder: Path) -> Table:
    """A backend's throughput at one batch next to PyTorch's fastest mode, and both errors.

    Times are of the benchmark's record, errors of the network's in the verification's: the rms
    error of the logits against float64, in parts of their rms. PyTorch's error is that of its own
    operators in the same precision (in float32 for fp16x3), on the same weights and images.
    """
    device, batch = needed(options, "device"), needed(options, "batch")
    backend = options.get("backend", "cupy")
    groups = record_of(folder, "bench", device)["groups"]
    networks = record_of(folder, "verify", device)["networks"]
    rows: list[Row] = []
    timed: list[Mapping[str, Any]] = []
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
    return Table(HEADS, "lrrlrrr", rows, "<br>\n".join(bench_captions(timed)))


HEADS = (
    *("precision", "r18 images/s", "PyTorch images/s", "in its fastest mode", "speedup"),
    *("r18 error", "PyTorch error"),
)


def _speed(own: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Row:
    """Both throughputs, the mode that is PyTorch's fastest, and their ratio."""
    images = f"{own['images_per_second']:,.0f}"
    modes = [row for row in rows if row["backend"] in TORCH]
    if not modes:
        return images, MISSING, MISSING, MISSING
    best = max(modes, key=lambda row: float(row["images_per_second"]))
    way = TORCH[best["backend"]]
    mode = way.mode + (", channels-last" if way.channels_last else "")
    speedup = own["images_per_second"] / best["images_per_second"]
    return images, f"{best['images_per_second']:,.0f}", mode, f"{speedup:.2f}×"


def _errors(network: Mapping[str, Any] | None) -> Row:
    """The relative rms errors of the last checkpoint: the backend's and PyTorch's."""
    if network is None:
        return MISSING, MISSING
    last = network["checkpoints"][-1]
    return f"{last['relative']:.1e}", f"{last['own_relative']:.1e}"
