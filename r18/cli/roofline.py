"""`r18 roofline`: how far each step is from what the device can do."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from r18 import records
from r18.atomic import check_folder
from r18.backend import Backend, CompileOptions, DeviceInfo
from r18.bench.ceilings import MEASURE
from r18.bench.roofline_run import measure as measure_ceilings
from r18.bench.roofline_run import run as run_roofline
from r18.cli.options import (
    AsJson,
    BackendName,
    BatchSizes,
    FusionLevel,
    KernelOverrides,
    NetworkName,
    PrecisionNames,
    RecordFolder,
    Threads,
    WeightsSource,
    chosen_backend,
    integers,
    is_given,
    kernel_overrides,
    listed,
    print_result,
)
from r18.machine import set_threads

Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="First measure what the device can do, and write its record: rates of its "
        "instructions, if the backend measures them, and of a large matrix product, and the "
        "bandwidth of a copy. While nothing else runs.",
    ),
]
Warmup = Annotated[int, typer.Option(help="Untimed runs.", min=0)]
Repeat = Annotated[int, typer.Option(help="Timed runs.", min=1)]


def roofline(
    context: typer.Context,
    backend: BackendName = None,
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8",
    fusion: FusionLevel = "all",
    kernel: KernelOverrides = None,
    threads: Threads = None,
    measure: Measure = False,
    warmup: Warmup = 3,
    repeat: Repeat = 20,
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    record_folder: RecordFolder = records.FOLDER,
    as_json: AsJson = False,
) -> None:
    """Print for every step its floor, its measured time, their ratio, and what binds it.

    The floor is the larger of two times: operations over the highest rate that was measured in
    that precision, bytes (inputs, weights, output, once each) over the measured bandwidth. The
    list below each table is the work list: the steps that lose the most time.

    Operations are those of the kernel's algorithm: Winograd multiplies less than the definition. A
    step may stand above 100 % where its tensors are still in a cache, which moves them faster than
    memory does. Times of steps are medians outside of any graph; a run in a graph may take less
    than they do together.
    """
    if threads is not None:
        set_threads(threads)  # before anything is loaded that would look at it
    overrides = kernel_overrides(kernel or ())
    options = [
        CompileOptions(batch=size, precision=name, fusion=fusion, kernels=overrides)
        for name in listed(precision, "--precision")
        for size in integers(batch, "--batch")
    ]
    chosen, device = chosen_backend(backend, [one.precision for one in options])
    if measure:
        check_folder(record_folder, "--records")
        _measure(chosen, device, record_folder)
    with Console(stderr=True).status("timing") as status:
        result = run_roofline(
            chosen,
            device,
            options,
            network_name=network_name,
            weights=weights,
            warmup=warmup,
            repeat=repeat,
            folder=record_folder,
            command=shlex.join([*MEASURE.split(), *_given(context)]),
            warn=lambda message: typer.echo(message, err=True),
            progress=status.update,
        )
    print_result(result, as_json)


def _given(context: typer.Context) -> list[str]:
    """The options given on the command line, with their values, except --measure."""
    words: list[str] = []
    for option in context.command.params:
        name = str(option.name)
        if name == "measure" or not is_given(context, name):
            continue
        value = context.params[name]
        if value is True:
            words.append(option.opts[0])
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option.opts[0], str(one)]
    return words


def _measure(backend: Backend, device: DeviceInfo, folder: Path) -> None:
    with Console(stderr=True).status("measuring") as status:
        path, warnings = measure_ceilings(backend, device, folder, status.update)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"recorded in {path}", err=True)
