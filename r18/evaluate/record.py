"""The numbers of evaluations, on which device: `evaluate-<device>.json`.

A model of CPU has a file of its own, since models differ in speed and in the kernels that they run.

There is one entry for each backend, precision, batch, reference, set of images and number of
workers, and in int8 for each way to quantise; a later run replaces its own. The rows are in the
table that the run wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import DeviceInfo
from r18.evaluate.request import Request
from r18.evaluate.run import Evaluation
from r18.evaluate.sources import ImageSet
from r18.graph.quantization import Quantization
from r18.records.kinds import Evaluate, EvaluateEntry
from r18.weights.precisions import CALIBRATED

WHAT = "evaluate"
ROWS = ("changed", "not_read")
"""The images that a summary lists and a record counts."""


def entry_name(
    request: Request, images: str, workers: int | None, found: Quantization | None = None
) -> str:
    """The name of an entry. images: the folder's name. found: what int8 computes with."""
    against = f"{request.against}-{request.against_precision}" if request.against else "none"
    batch = f"b{request.batch}"
    precision = request.precision
    if found is not None:
        how = found.calibration
        precision += f"-w{found.bits}-{how.rounding}-{how.method}"
    parts = [request.network, request.backend, precision, batch, against, images]
    return "/".join([*parts, *([] if workers is None else [f"{workers}-workers"])])


def save(
    done: Evaluation,
    request: Request,
    images: ImageSet,
    about: Mapping[str, Any],
    folder: Path,
    *,
    workers: int | None = None,
    quantization: Quantization | None = None,
) -> Path:
    """Write an evaluation to the record of its backend's device; returns the file.

    workers: how many there were; None is this process. about: facts about the run: `machine`.
    quantization: of the weights; it counts in int8. Raises `UsageError` for a damaged record.
    """
    running = done.running[0]
    device = DeviceInfo(running.kind, running.device)
    path = records.path_of(folder, WHAT, device)
    summary = done.summary.to_json()
    new = len(images.items) - done.resumed
    entry = {
        "date": records.now(),
        "environment": records.environment(device),
        **about,
        **request.identity(),
        "workers": workers,
        "folder": images.folder.name,
        "layout": images.layout,
        "images_sha256": images.sha256,
        **{name: len(what) if name in ROWS else what for name, what in summary.items()},
        "resumed": done.resumed,
        "seconds": done.seconds,
        "images_per_second": new / done.seconds if new else None,
    }
    found = quantization if request.precision in CALIBRATED else None
    if found is not None:
        how = found.calibration
        entry["quantised"] = {
            "bits": found.bits,
            "method": how.method,
            "rounding": how.rounding,
            "images": how.images,
            "sha256": found.sha256,
        }
    name = entry_name(request, images.folder.name, workers, found)
    mine = {name: msgspec.convert(entry, EvaluateEntry)}

    def with_mine(found: Evaluate | None) -> Evaluate:
        entries = (found.entries if found else {}) | mine
        return Evaluate(device=device.name, entries=dict(sorted(entries.items())))

    records.update(path, Evaluate, with_mine)
    return path


__all__ = ["WHAT", "entry_name", "save"]
