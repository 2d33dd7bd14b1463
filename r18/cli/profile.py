"""`r18 profile`: CPU and CUDA time of the drop-in at each level, beside torchvision's module."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tabulate import tabulate

from r18.backend import DeviceInfo
from r18.backend.registry import get_backend
from r18.bench import profile_record
from r18.bench.profile import BATCHES, LEVELS, MODEL, PRECISIONS, Judge, Row
from r18.bench.profile import profile as measure
from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BackendName,
    BatchSizes,
    ImageSize,
    RecordFolder,
    WeightsSource,
    asked_backend,
    integers,
    listed,
)
from r18.errors import BackendUnavailable, UsageError
from r18.graph.schedule import Schedule, resnet18
from r18.machine import machine
from r18.records import FOLDER
from r18.weights import Weights, load_weights


def profile(
    backend: BackendName = None,
    batch: BatchSizes = ",".join(map(str, BATCHES)),
    fusion: Annotated[
        str, typer.Option(help=f"Some of: {', '.join(LEVELS)}; separated by commas.")
    ] = ",".join(LEVELS),
    precision: Annotated[str, typer.Option(help=f"One of: {', '.join(PRECISIONS)}.")] = "fp32",
    repeat: Annotated[int, typer.Option(help="Rounds; the best counts.", min=1)] = 5,
    weights: WeightsSource = "synthetic",
    image_size: ImageSize = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Module and images in channels-last memory.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="A folder for Chrome traces, of the best run of each."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Judge every output against float64; a wrong one is no row."),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the times to the device's record.")
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Profile torchvision's ResNet-18 and the drop-in at each fusion level with PyTorch's profiler.

    CPU time is the host's from the call to its return, CUDA time the sum over what runs on the
    GPU; the best of the rounds, in which the contenders take turns. The ratios are to the module:
    below 1 is faster. A profiler has a cost of its own: `r18 bench` measures without.

    A level that the backend has no kernels for is left out, with the reason on stderr. A record's
    rows are replaced by those of a run with the same backend, precision, batch and memory format,
    all together: they were timed in turns.

    Exit codes: 0 success, 1 an output is wrong (--check), 2 a wrong request.
    """
    if record and image_size is not None:
        raise UsageError("--record is of the network's own images: leave out --image-size")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would log each of its starts
    name, device = _chosen(backend)
    schedule = resnet18() if image_size is None else resnet18(image_size=image_size)
    loaded = load_weights(weights, schedule)
    host = machine()
    with Console(stderr=True).status("profiling") as status:
        report = measure(
            name,
            device.kind,
            schedule,
            loaded,
            batches=integers(batch, "--batch"),
            levels=listed(fusion, "--fusion"),
            precision=precision,
            repeat=repeat,
            channels_last=channels_last,
            traces=trace,
            judge=_judge(schedule, loaded, precision) if check else None,
            progress=status.update,
        )
    for skipped in (*report.skipped, *report.wrong):
        typer.echo(f"left out: {skipped.contender}: {skipped.reason}", err=True)
    head = {"weights": {"source": loaded.source, "sha256": loaded.sha256}, "machine": host}
    if record:
        facts = {
            "repeat": repeat,
            **head,
            "skipped": [asdict(one) for one in (*report.skipped, *report.wrong)],
        }
        path = profile_record.save(report, device, facts, records, channels_last=channels_last)
        typer.echo(f"recorded in {path}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(report) | head, indent=2))
    else:
        typer.echo(
            f"{report.device}\nbackend {report.backend}, {report.precision}, weights "
            f"{loaded.source}, best of {repeat}\nhost: {host['processor']}, {host['cpus']} CPUs\n\n"
            f"{table(report.rows)}"
        )
        if trace is not None:
            typer.echo(f"\ntraces: {trace}")
    if report.wrong:
        raise typer.Exit(FOUND)


def _judge(schedule: Schedule, weights: Weights, precision: str) -> Judge:
    """The oracle's, which the core does not depend on."""
    try:
        from r18_oracle.network.outputs import drop_in_judge
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--check asks the oracle, which does not import: {error}\n  pip install 'r18[oracle]'"
        ) from None
    return drop_in_judge(schedule, weights, precision)


def _chosen(asked: str | None) -> tuple[str, DeviceInfo]:
    """The backend's name in the registry, and its device.

    `auto` is what `optimize_resnet18` takes for a model on the GPU, if PyTorch sees one.
    """
    name = asked_backend(asked)
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
    heads += ["of what it may lose"] if judged else []
    lines = []
    for row in rows:
        times = [(row.cpu_ms, row.cpu_ratio)]
        times += [(row.cuda_ms or 0.0, row.cuda_ratio or 0.0)] if cuda else []
        cells = (cell for ms, ratio in times for cell in (f"{ms:.3f}", f"{ratio:.2f}"))
        loss = ["" if row.loss is None else f"{row.loss:.3f}"] if judged else []
        lines.append((str(row.batch), row.contender, *cells, *loss))
    align = ("right", "left", *("right",) * (len(heads) - 2))
    return tabulate(lines, heads, disable_numparse=True, colalign=align)
