"""`r18 plan`: which kernel takes each step, and where its tensors are in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from tabulate import tabulate

from r18.backend import Backend, CompileOptions, Plan, PlannedStep, output_layout
from r18.bench.tuning import as_on
from r18.cli.options import (
    AsJson,
    BackendName,
    FusionLevel,
    ImageSize,
    KernelOverrides,
    NetworkName,
    PrecisionName,
    chosen_schedule,
    kernel_overrides,
    planning_backend,
)
from r18.runtime.plan import make_plan
from r18.weights.precisions import calibrated_schedule

Batch = Annotated[int, typer.Option(help="Images at once.", min=1)]
Device = Annotated[
    str | None,
    typer.Option(
        help="Plan as on this device, such as nvidia-h200: the backend ships a table of the "
        "fastest kernels there."
    ),
]

Bits = Annotated[int, typer.Option(help="Of weights in int8: 8, 4 or 2.")]


def plan(
    backend: BackendName = None,
    network_name: NetworkName = "resnet18",
    precision: PrecisionName = "fp32",
    fusion: FusionLevel = "all",
    batch: Batch = 1,
    image_size: ImageSize = None,
    kernel: KernelOverrides = None,
    device: Device = None,
    bits: Bits = 8,
    as_json: AsJson = False,
) -> None:
    """Print a backend's plan for a network, without running it: no step touches a device.

    For each step it prints the kernel, the function that the kernel chooses if it has several, the
    layout, arena offset and bytes of the output, and the bytes of workspace. Below the table are
    the steps that run at the same time as the one before, and the arena's size next to the sum of
    all its buffers.
    """
    # On another device the backend may have other kernels.
    chosen = planning_backend(backend, [precision] if device is None else ())
    if device is not None:
        chosen = as_on(device, chosen)
    options = CompileOptions(
        batch=batch, precision=precision, fusion=fusion, kernels=kernel_overrides(kernel or ())
    )
    schedule = calibrated_schedule(chosen_schedule(network_name, image_size), options, bits)
    made = make_plan(chosen, schedule, options)
    naive = make_plan(chosen, schedule, replace(options, arena=False)).arena_nbytes
    steps = rows(chosen, made)
    if as_json:
        head = {
            "backend": made.backend,
            "network": schedule.name,
            "precision": precision,
            "fusion": fusion,
            "batch": batch,
            "arena_bytes": made.arena_nbytes,
            "naive_bytes": naive,
        }
        typer.echo(json.dumps(head | {"steps": steps}, indent=2))
        return
    chooses = any(step["choice"] for step in steps)
    words = ("step", "kernel", *(("choice",) if chooses else ()), "layout")
    numbers = ("offset", "bytes", "workspace")
    table = [
        (*(step[key] or "" for key in words), *(f"{step[key]:,}" for key in numbers))
        for step in steps
    ]
    align = (*("left" for _ in words), *("right" for _ in numbers))
    typer.echo(tabulate(table, (*words, *numbers), disable_numparse=True, colalign=align))
    if concurrent := [step["step"] for step in steps if step["beside"]]:
        typer.echo(f"\neach runs at the same time as the step before it: {', '.join(concurrent)}")
    typer.echo(
        f"\narena: {made.arena_nbytes:,} bytes, {made.arena_nbytes / naive:.0%} of the "
        f"{naive:,} that input, outputs and workspaces take without sharing"
    )


def rows(backend: Backend, made: Plan) -> list[dict[str, Any]]:
    """The table's row for each step, as in JSON; choice: the last part of the choice's id."""
    return [
        {
            "step": step.name,
            "kernel": step.kernel.id,
            "choice": _choice(backend, step),
            "problem": str(step.problem),
            "layout": output_layout(step.kernel, step.problem).value,
            "offset": made.tensors[step.output].offset,
            "bytes": made.tensors[step.output].nbytes,
            "workspace": step.workspace_nbytes,
            "workspace_offset": step.workspace_offset,
            "beside": step.beside,
        }
        for step in made.steps
    ]


def _choice(backend: Backend, step: PlannedStep) -> str | None:
    """The last part of its id, where the step's kernel chooses."""
    found = backend.variant(step.kernel, step.problem)
    return None if found is None else found.id.rpartition("/")[2]
