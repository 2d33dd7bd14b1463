"""How fast and how exact a backend is next to PyTorch, by precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from r18.bench.baselines import PEER, TORCH
from r18.bench.error import NONE, error_cells
from r18.bench.record import group_name
from r18.errors import UsageError
from r18.graph.precision import FP8, INT8, PRECISIONS
from r18.report.tables.conditions import WARM, error_captions
from r18.report.tables.table import Data, Options, Row, Table, cell, needed, record_of
from r18.report.tables.timed import bench_captions

BACKEND = "cupy"
"""The backend that is compared unless another one is named."""
QUANTISED = (FP8.name, INT8.name)
VERIFIED = (
    f"Where the last column is {NONE}, both errors are those of `r18 verify --record`, of other "
    "runs and images; PyTorch's is that of its operators on the CPU."
)


@dataclass(frozen=True)
class Comparison:
    """A backend and PyTorch's fastest mode in one precision; None for a missing measurement.

    images, torch_images: images per second at one batch.
    mode:                 PyTorch's fastest mode at that batch; empty without one.
    error, torch_error:   the rms error of the logits against float64, relative to their rms: those
                          of the run that gave the times, where it measured both; else those of the
                          verification's record.
    group, row:           the benchmark's group and row that the times come from.
    """

    precision: str
    images: float
    torch_images: float | None
    mode: str
    error: float | None
    torch_error: float | None
    group: Data
    row: Data

    @property
    def speedup(self) -> float | None:
        return self.images / self.torch_images if self.torch_images else None


def comparisons(
    groups: Mapping[str, Data], networks: Mapping[str, Data], batch: int, backend: str = BACKEND
) -> list[Comparison]:
    """One for each precision in which the backend's fully fused ResNet-18 was timed.

    groups: of a benchmark's record. networks: of a verification's record of the same device.
    PyTorch's error is in the same precision (in float32 for fp16x3), on the same weights and
    images: of torchvision's module in eager mode in the same run, or, in a verification's record,
    of PyTorch's operators on the CPU. int8 and fp8 are left out: PyTorch computes float16 next to
    them, and their error is the quantisation's, which depends on the calibration.
    """
    found = []
    for precision in (name for name in PRECISIONS if name not in QUANTISED):
        group = groups.get(group_name("resnet18", precision, "all", batch), {"rows": []})
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None:
            continue
        modes = [row for row in group["rows"] if row["backend"] in TORCH]
        best = max(modes, key=lambda row: float(row["images_per_second"]), default=None)
        network = networks.get(f"{backend}/resnet18/{precision}/all")
        last = network["checkpoints"][-1] if network else {"relative": None, "own_relative": None}
        errors = _measured(own, group) or (_number(last["relative"]), _number(last["own_relative"]))
        found.append(
            Comparison(
                precision,
                own["images_per_second"],
                best and best["images_per_second"],
                _mode(best["backend"]) if best else "",
                *errors,
                group,
                own,
            )
        )
    return found


def _measured(own: Data, group: Data) -> tuple[float, float] | None:
    """A row's error and PyTorch's, if the run measured both."""
    eager = [row for row in group["rows"] if row["backend"] == PEER]
    found = [row["error"] for row in (own, *eager) if row.get("error") is not None]
    if len(found) != 2:
        return None
    ours, theirs = (float(error["relative"]) for error in found)
    return ours, theirs


def _mode(name: str) -> str:
    way = TORCH[name]
    return way.mode + (", channels-last" if way.channels_last else "")


def _number(recorded: float | str | None) -> float | None:
    """Records store infinity and NaN as text."""
    return None if recorded is None else float(recorded)


def summary_table(options: Options, folder: Path) -> Table:
    """A backend's throughput at one batch next to PyTorch's fastest mode, and both errors."""
    device, batch = needed(options, "device"), needed(options, "batch")
    backend = options.get("backend", BACKEND)
    groups = record_of(folder, "bench", device)["groups"]
    networks = record_of(folder, "verify", device)["networks"]
    found = comparisons(groups, networks, int(batch), backend)
    if not found:
        raise UsageError(f"the record of {device} has no time of '{backend}' at batch {batch}")
    heads = (
        "precision | r18 images/s | PyTorch images/s | in its fastest mode | speedup | "
        "r18 error | PyTorch error | error / PyTorch"
    )
    said = [WARM, *error_captions(one.row for one in found)]
    if not all(_measured(one.row, one.group) for one in found):
        said.append(VERIFIED)
    captions = [*bench_captions(one.group for one in found)]
    captions[-1] = " ".join((captions[-1], *said))  # README's first screen has no room for more
    return Table(heads, "lrrlrrrr", list(map(_row, found)), captions)


def _row(one: Comparison) -> Row:
    return (
        one.precision,
        cell(one.images, ",.0f"),
        cell(one.torch_images, ",.0f"),
        one.mode,
        "" if one.speedup is None else f"{one.speedup:.2f}×",
        cell(one.error, ".1e"),
        cell(one.torch_error, ".1e"),
        error_cells(one.row)[1],
    )
