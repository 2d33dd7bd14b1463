"""`r18 profile`: CPU and CUDA time of the drop-in at each level, next to torchvision's module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from r18.atomic import check_folder
from r18.bench.profile import BATCHES, LEVELS, PRECISIONS
from r18.bench.profile_run import Request, Result, table
from r18.bench.profile_run import run as run_profile
from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BackendName,
    BatchSizes,
    Check,
    ImageSize,
    Record,
    RecordFolder,
    WeightsSource,
    asked_backend,
    checked_place,
    integers,
    listed,
    recording,
)
from r18.machine import disturbances
from r18.records import FOLDER

Levels = Annotated[str, typer.Option(help=f"Some of: {', '.join(LEVELS)}; separated by commas.")]
Precision = Annotated[str, typer.Option(help=f"One of: {', '.join(PRECISIONS)}.")]
Rounds = Annotated[int, typer.Option(help="Rounds; the best counts.", min=1)]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="Module and images in channels-last memory.")
]
Traces = Annotated[
    Path | None,
    typer.Option(
        help="A folder for Chrome traces, of the best run of each.",
        callback=checked_place(check_folder, "--trace"),
    ),
]


def profile(
    backend: BackendName = None,
    batch: BatchSizes = ",".join(map(str, BATCHES)),
    fusion: Levels = ",".join(LEVELS),
    precision: Precision = "fp32",
    repeat: Rounds = 5,
    weights: WeightsSource = "synthetic",
    image_size: ImageSize = None,
    channels_last: ChannelsLast = False,
    trace: Traces = None,
    check: Check = False,
    record: Record = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Profile torchvision's ResNet-18 and the drop-in at each fusion level with PyTorch's profiler.

    CPU time is the host's from the call to its return, CUDA time the sum over what runs on the
    GPU; the best of the rounds, in which the contenders take turns. The ratios are to the module:
    below 1 is faster. A profiler has a cost of its own: `r18 bench` measures without.

    A level that the backend has no kernels for is left out, with the reason on stderr. A run
    replaces a record's rows of the same backend, precision, batch and memory format all together,
    because they were timed in turns.

    Exit codes: 0 success, 1 an output is wrong (--check), 2 a wrong request.
    """
    request = Request(
        asked_backend(backend),
        integers(batch, "--batch"),
        listed(fusion, "--fusion"),
        precision,
        repeat,
        weights,
        image_size,
        channels_last,
        trace,
        check,
        recording(record, records),
    )
    with Console(stderr=True).status("profiling") as status:
        result = run_profile(request, progress=status.update)
    for skipped in (*result.report.skipped, *result.report.wrong):
        typer.echo(f"left out: {skipped.contender}: {skipped.reason}", err=True)
    for warning in disturbances(result.head["machine"]):
        typer.echo(f"warning: {warning}", err=True)
    if result.recorded is not None:
        typer.echo(f"recorded in {result.recorded}", err=True)
    typer.echo(json.dumps(result.to_json(), indent=2) if as_json else _text(request, result))
    if result.report.wrong:
        raise typer.Exit(FOUND)


def _text(request: Request, result: Result) -> str:
    report, host = result.report, result.head["machine"]
    text = (
        f"{report.device}\nbackend {report.backend}, {report.precision}, weights "
        f"{result.head['weights']['source']}, best of {request.repeat}\n"
        f"host: {host['processor']}, {host['cpus']} CPUs\n\n{table(report.rows)}"
    )
    return text if request.traces is None else f"{text}\n\ntraces: {request.traces}"
