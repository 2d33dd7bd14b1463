"""`r18 tune`: measure which kernel is fastest for each problem of a network on this device."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from r18.atomic import check_file, holds_something
from r18.backend import Backend, CompileOptions, Table
from r18.backend.tuned import READERS, read_table, users_table
from r18.bench.in_network import tune_in_network
from r18.bench.tuning import TUNED_OPS, tuned_schedules
from r18.bench.tuning import tune as tuned
from r18.cli.options import (
    BackendName,
    BatchSizes,
    NetworkName,
    PrecisionNames,
    checked_place,
    chosen_backend,
    chosen_schedule,
    integers,
    listed,
)
from r18.errors import UsageError, unknown
from r18.graph.ops import Op
from r18.graph.passes import FUSION_LEVELS
from r18.graph.precision import FP8, INT8
from r18.graph.precision import precision as precision_named
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.scaled import SCALED_OPS
from r18.graph.scaling import calibrated
from r18.graph.schedule import Schedule
from r18.progress import progress_bar


def tune(
    backend: BackendName = None,
    network_name: NetworkName = "resnet18",
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8,64,256",
    fusion: Annotated[
        str | None,
        typer.Option(help=f"Some of: {', '.join(FUSION_LEVELS)}; separated by commas. [all]"),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only steps whose name matches.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Of a weight in int8: 8, 4 or 2.")] = 8,
    in_network: Annotated[
        bool,
        typer.Option("--in-network", help="Choose pairs and kernels by the time of the network."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The table's file. [where plans on this device look]",
            callback=checked_place(check_file, "--out"),
        ),
    ] = None,
) -> None:
    """Time every kernel that takes a problem of the network, and keep the fastest as data.

    The table keeps what it holds of other problems. Plans on this device then use it, if the
    backend reads tables, as cupy and numba do; it changes only speed. At level all, kernels that
    compute max-pooling with its convolution are measured next to separate ones. In int8 the network
    is measured in integers and in fp8 in scaled e4m3, both at level all. Exit code 2 when there was
    nothing to measure.

    The fastest kernel in isolation may not be the fastest in the network, where launches overlap.
    With --in-network the whole network is timed. First each pair of ops that one kernel can compute
    is planned the other way, in one step or two; then kernels and tiles replace those of this
    device's plan at level all, one problem at a time. A change stays if the network gets faster.
    Run `r18 tune` first: the plan starts from the table that plans on this device use, not from
    --out.
    """
    names = listed(precision, "--precision")
    chosen, device = chosen_backend(backend, names)
    if chosen.name not in READERS:
        typer.echo(f"plans of '{chosen.name}' read no table: it calls no find_table", err=True)
    path = out or users_table(chosen.name, device)
    _earlier(path)  # raises before anything is timed
    for name in names:
        precision_named(name)
    schedule = chosen_schedule(network_name, None)
    sizes = integers(batch, "--batch")
    if in_network:
        if steps or fusion:
            raise UsageError("--in-network times the whole network: leave out --steps and --fusion")
        for name in names:
            for size in sizes:
                _write(chosen, path, _exchanged(chosen, schedule, name, size, bits))
        return
    levels = listed(fusion or "all", "--fusion")
    _write(chosen, path, _alone(chosen, schedule, names, sizes, levels, steps or "*", bits))


def _alone(
    backend: Backend,
    schedule: Schedule,
    names: list[str],
    sizes: list[int],
    levels: list[str],
    steps: str,
    bits: int,
) -> Table:
    """The fastest kernels by themselves of the steps whose name matches the glob."""
    schedules = tuned_schedules(backend, schedule, levels, names, bits)
    known = sorted({step.name for fused in schedules for step in fused.steps})
    if not any(fnmatchcase(name, steps) for name in known):
        raise unknown("step", steps, known, hint="A glob over names works too.")
    problems = [
        problem
        for size in sizes
        for fused in schedules
        for name, problem in fused.problems(size).items()
        if isinstance(problem.op, TUNED_OPS) and fnmatchcase(name, steps)
    ]
    with progress_bar() as bar:
        bar.start(
            sum(
                _form(problem.op) == (name if name in (INT8.name, FP8.name) else None)
                for name in names
                for problem in set(problems)
            )
        )
        return tuned(backend, problems, names, bar.advance)


def _form(op: Op) -> str | None:
    """The precision that has its own form of an op, if this is one."""
    if isinstance(op, QUANTIZED_OPS):
        return INT8.name
    return FP8.name if isinstance(op, SCALED_OPS) else None


def _exchanged(backend: Backend, schedule: Schedule, name: str, size: int, bits: int) -> Table:
    """The kernels with which a network is faster; prints what it gains."""
    taken, options = calibrated(schedule, name, bits), CompileOptions(size, name)
    with progress_bar() as bar:
        found = tune_in_network(backend, taken, options, bar.advance)
    typer.echo(
        f"{name}, batch {size}: {found.before:.1f} µs before, {found.after:.1f} µs with "
        f"{len(found.pairs)} pairs of ops planned the other way and {len(found.exchanges)} kernels "
        "exchanged"
    )
    return found.table


def _earlier(path: Path) -> Table | None:
    """The table in a file, None where there is none. Raises as `read_table` for another file."""
    return read_table(path) if holds_something(path) else None


def _write(backend: Backend, path: Path, table: Table) -> None:
    """Merge into the file, and print what is new; `UsageError` if that is nothing."""
    rows = [
        (name, problem, size, timing.kernel, f"{timing.microseconds:.1f}")
        for name, found in table.choices.items()
        for problem, batches in found.items()
        for size, timing in batches.items()
    ]
    if not rows:
        names = ",".join(table.choices)
        raise UsageError(f"'{backend.name}' has no kernel in {names} for any of the problems")
    before = _earlier(path)
    (table if before is None else before.merged(table)).write(path)
    typer.echo(tabulate(rows, ("precision", "problem", "batch", "fastest kernel", "µs")))
    typer.echo(f"\nwritten: {path}")
