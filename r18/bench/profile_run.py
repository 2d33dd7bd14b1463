"""`profile` from names to a report: what `r18 profile` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from r18.backend import DeviceInfo
from r18.backend.registry import get_backend
from r18.bench import profile_record
from r18.bench.profile import BATCHES, LEVELS, MODEL, Report, Row, profile
from r18.errors import BackendUnavailable, UsageError
from r18.graph.resnet import resnet18
from r18.hooks import hook
from r18.machine import machine
from r18.weights import load_weights


@dataclass(frozen=True)
class Request:
    """The runs to profile; see `r18.bench.profile.profile`.

    backend:    a name of the registry, or `auto`: what `optimize_resnet18` takes for a model on the
                GPU, if PyTorch sees one.
    image_size: None for the network's own.
    check:      compare every output with float64; the oracle's hook `drop_in_judge` does it.
    records:    the folder to record in; None records nothing.
    """

    backend: str
    batches: Sequence[int] = BATCHES
    levels: Sequence[str] = LEVELS
    precision: str = "fp32"
    repeat: int = 5
    weights: str = "synthetic"
    image_size: int | None = None
    channels_last: bool = False
    traces: Path | None = None
    check: bool = False
    records: Path | None = None

    def __post_init__(self) -> None:
        if self.records is not None and self.image_size is not None:
            raise UsageError("--record is of the network's own images: leave out --image-size")


@dataclass(frozen=True)
class Result:
    """The report, the weights and machine it is of, and the record that was written."""

    report: Report
    head: dict[str, Any]
    recorded: Path | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self.report) | self.head


def run(request: Request, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Profile, and record what was profiled. Raises as `profile` does, and `UsageError`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would log each of its starts
    name, device = _chosen(request.backend)
    size = request.image_size
    schedule = resnet18() if size is None else resnet18(image_size=size)
    weights = load_weights(request.weights, schedule)
    source = {"source": weights.source, "sha256": weights.sha256}
    head = {"weights": source, "machine": machine()}  # before this run makes it busy
    judge_of = hook("drop_in_judge", "--check") if request.check else None
    report = profile(
        name,
        device.kind,
        schedule,
        weights,
        batches=request.batches,
        levels=request.levels,
        precision=request.precision,
        repeat=request.repeat,
        channels_last=request.channels_last,
        traces=request.traces,
        judge=judge_of and judge_of(schedule, weights, request.precision),
        progress=progress,
    )
    return Result(report, head, _record(request, report, device, head))


def _record(
    request: Request, report: Report, device: DeviceInfo, head: dict[str, Any]
) -> Path | None:
    if request.records is None:
        return None
    left_out = [asdict(one) for one in (*report.skipped, *report.wrong)]
    facts = {"repeat": request.repeat, **head, "skipped": left_out}
    return profile_record.save(
        report, device, facts, request.records, channels_last=request.channels_last
    )


def _chosen(name: str) -> tuple[str, DeviceInfo]:
    """The backend's name in the registry, and its device."""
    if name != "auto":
        return name, get_backend(name).probe()
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(
            MODEL, f"it does not import: {error}", "pip install 'r18[torch]'"
        ) from error
    from r18.torch.choice import choose

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose("auto", kind, LEVELS[0], "fp32").backend
    return chosen, get_backend(chosen).probe()


def table(rows: Sequence[Row]) -> str:
    """A line a batch and contender; no columns of CUDA on a CPU, none of losses unjudged."""
    cuda = any(row.cuda_ms is not None for row in rows)
    judged = any(row.loss is not None for row in rows)
    heads = ["batch", "", "CPU ms", f"/ {MODEL}"]
    heads += ["CUDA ms", f"/ {MODEL}"] if cuda else []
    heads += ["loss / allowed"] if judged else []
    lines = []
    for row in rows:
        times = [(row.cpu_ms, row.cpu_ratio)]
        times += [(row.cuda_ms or 0.0, row.cuda_ratio or 0.0)] if cuda else []
        cells = (cell for ms, ratio in times for cell in (f"{ms:.3f}", f"{ratio:.2f}"))
        loss = ["" if row.loss is None else f"{row.loss:.3f}"] if judged else []
        lines.append((str(row.batch), row.contender, *cells, *loss))
    align = ("right", "left", *("right",) * (len(heads) - 2))
    return tabulate(lines, heads, disable_numparse=True, colalign=align)
