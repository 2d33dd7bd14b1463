"""`r18 roofline`: how far each step is from what the device can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tabulate import tabulate

from r18 import records
from r18.backend import Backend, CompileOptions, DeviceInfo, Plan
from r18.bench import ceilings as measured
from r18.bench.contenders import Compiled, program_contender
from r18.bench.roofline import WHAT, Ceilings, Line, largest_losses, lines
from r18.bench.timing import Contender, Row, Runner, bench
from r18.cli.options import (
    AsJson,
    BackendName,
    BatchSizes,
    FusionLevel,
    NetworkName,
    PrecisionNames,
    RecordFolder,
    WeightsSource,
    chosen_backend,
    integers,
    kernel_overrides,
    listed,
)
from r18.graph.schedule import Schedule, network
from r18.machine import set_threads, thread_count
from r18.weights import Weights, load_weights

SHOWN = 5
"""Steps in the list of the largest lost time."""


def roofline(
    backend: BackendName = None,
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8",
    fusion: FusionLevel = "all",
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="STEP=KERNEL or OP=KERNEL, as for r18 plan; repeat it for several."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. [OMP_NUM_THREADS]", min=1)
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="First measure what the device can do, and write its record: rates of a large "
            "matrix product, bandwidth of a copy. While nothing else runs.",
        ),
    ] = False,
    warmup: Annotated[int, typer.Option(help="Untimed runs.", min=0)] = 3,
    repeat: Annotated[int, typer.Option(help="Timed runs.", min=1)] = 20,
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    record_folder: RecordFolder = records.FOLDER,
    as_json: AsJson = False,
) -> None:
    """Print for every step its floor, its measured time, their ratio, and what binds it.

    The floor is the larger of two times: operations over the measured rate of a matrix product in
    that precision, bytes (inputs, weights, output, once each) over the measured bandwidth. The
    list below each table is the work list: the steps that lose the most time.

    Operations are those of the definition, so a step may stand above 100 %: Winograd multiplies
    less, and tensors that are still in a cache move faster than memory does. Time is lost to what
    the kernel's own algorithm needs at least. Times of steps are medians outside of any graph; a
    run in a graph may take less than they do together.
    """
    if threads is not None:
        set_threads(threads)  # before anything is loaded that would look at it
    overrides = kernel_overrides(kernel or ())
    options = [
        CompileOptions(batch=size, precision=name, fusion=fusion, kernels=overrides)
        for name in listed(precision, "--precision")
        for size in integers(batch, "--batch")
    ]
    chosen, device = chosen_backend(backend)
    if measure:
        _measure(device, record_folder)
    ceilings = measured.read(record_folder, device)
    for one in options:
        ceilings.rate(one.precision)  # a missing one is said before minutes of timing
    if ceilings.threads not in (None, thread_count()):
        typer.echo(
            f"the ceilings were measured with {ceilings.threads} threads, this runs with "
            f"{thread_count()}: choose with --threads, or --measure anew",
            err=True,
        )
    schedule = network(network_name)
    loaded = load_weights(weights, schedule)
    with Console(stderr=True).status("timing") as status:
        found = timed(chosen, device, schedule, loaded, options, warmup, repeat, status.update)
    results = [(plan, row, lines(plan, row.steps, ceilings)) for plan, row in found]
    if as_json:
        typer.echo(json.dumps(_json(device, ceilings, schedule, loaded, results), indent=2))
        return
    typer.echo(f"{schedule.name} on {chosen.name}: {device}\n{_said(ceilings)}")
    for plan, row, steps in results:
        typer.echo(f"\n{text(plan, row, steps)}")


def timed(
    backend: Backend,
    device: DeviceInfo,
    schedule: Schedule,
    weights: Weights,
    options: Sequence[CompileOptions],
    warmup: int,
    repeat: int,
    progress: Any,
) -> list[tuple[Plan, Row]]:
    """Each program's plan, and its times step by step and as a whole."""
    plans: dict[int, Plan] = {}

    def watched(index: int, own: Contender) -> Contender:
        def make() -> Runner:
            runner = own.make()
            assert isinstance(runner, Compiled)
            plans[index] = runner.program.plan
            return runner

        return replace(own, make=make)

    field = [
        watched(index, program_contender(backend.name, device, backend, schedule, weights, one))
        for index, one in enumerate(options)
    ]
    rows = bench(
        field,
        warmup=warmup,
        repeat=repeat,
        per_step=True,
        progress=lambda what, done, total: progress(f"{what} ({done} of {total} runs)"),
    )
    return [(plans[index], row) for index, row in enumerate(rows)]


# -- text --------------------------------------------------------------------------------------

HEADS = ("step", "kernel", "GFLOP", "MB", "floor ms", "measured ms", "of floor", "binds", "lost ms")


def text(plan: Plan, row: Row, steps: Sequence[Line]) -> str:
    """The table of a plan, its totals, and where the most time is lost."""
    cells = [
        (
            line.step,
            line.kernel,
            f"{line.limit.operations / 1e9:.3f}",
            f"{line.limit.nbytes / 1e6:.2f}",
            f"{line.limit.floor_ms:.4f}",
            f"{line.measured_ms:.4f}",
            f"{line.ratio:.0%}",
            line.limit.binds,
            f"{line.lost_ms:.4f}",
        )
        for line in steps
    ]
    floor = sum(line.limit.floor_ms for line in steps)
    own = sum(line.own.floor_ms for line in steps)
    total = sum(line.measured_ms for line in steps)
    work = sum(line.limit.operations for line in steps)
    moved = sum(line.limit.nbytes for line in steps)
    sums = (f"{work / 1e9:.3f}", f"{moved / 1e6:.2f}", f"{floor:.4f}", f"{total:.4f}")
    cells.append(("total", "", *sums, f"{floor / total:.0%}", "", f"{total - own:.4f}"))
    align = ("left", "left", *["right"] * 5, "left", "right")
    asked = plan.options
    parts = [
        f"{asked.precision}, batch {asked.batch}, fusion {asked.fusion}: a run takes "
        f"{row.median_ms:.4f} ms; the floor is {floor:.4f}, by the kernels' algorithms {own:.4f}",
        tabulate(cells, HEADS, disable_numparse=True, colalign=align),
    ]
    if above := [line for line in steps if line.ratio > 1]:
        parts.append(f"above 100 %: {_above(above)}")
    losses = largest_losses(steps, SHOWN)
    parts.append("largest lost time" if losses else "no step loses time")
    parts += [
        f"  {place}. {line.step}: {line.lost_ms:.4f} ms of {line.measured_ms:.4f}, bound by "
        f"{line.own.binds} ({line.kernel})"
        for place, line in enumerate(losses, start=1)
    ]
    return "\n".join(parts)


def _above(found: Sequence[Line]) -> str:
    """Why steps may be faster than their floors."""
    winograd = [line for line in found if line.own.operations < line.limit.operations]
    why = []
    if winograd:
        why.append(
            f"{len(winograd)} by Winograd, which multiplies less than the definition that the "
            "floor counts"
        )
    if rest := len(found) - len(winograd):
        why.append(f"{rest} whose tensors were still in a cache, or ceilings measured too low")
    return "; ".join(why)


def _said(ceilings: Ceilings) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in ceilings.rates.items())
    threads = "" if ceilings.threads is None else f", {ceilings.threads} threads"
    return (
        f"ceilings of {ceilings.date[:10]}{threads}: {rates} GFLOP/s; copy "
        f"{ceilings.bandwidth / 1e9:,.1f} GB/s"
    )


def _json(
    device: DeviceInfo,
    ceilings: Ceilings,
    schedule: Schedule,
    weights: Weights,
    results: Sequence[tuple[Plan, Row, Sequence[Line]]],
) -> dict[str, Any]:
    return {
        "device": device.name,
        "network": schedule.name,
        "weights": {"source": weights.source, "sha256": weights.sha256},
        "ceilings": {
            "device": ceilings.device,
            "date": ceilings.date,
            "threads": ceilings.threads,
            "operations_per_second": dict(ceilings.rates),
            "bytes_per_second": ceilings.bandwidth,
        },
        "programs": [
            {
                "backend": plan.backend,
                "precision": plan.options.precision,
                "fusion": plan.options.fusion,
                "batch": plan.options.batch,
                "floor_ms": sum(line.limit.floor_ms for line in steps),
                "measured_ms": sum(line.measured_ms for line in steps),
                "run_ms": row.median_ms,
                "steps": [line.to_json() for line in steps],
                "largest_lost_time": [line.step for line in largest_losses(steps, SHOWN)],
            }
            for plan, row, steps in results
        ],
    }


def _measure(device: DeviceInfo, folder: Path) -> None:
    with Console(stderr=True).status("measuring") as status:
        record = measured.measure(device, progress=status.update)
    for warning in measured.warnings(record):
        typer.echo(warning, err=True)
    path = records.path_of(folder, WHAT, device)
    records.write(path, record)
    typer.echo(f"recorded in {path}", err=True)
