"""`r18 tune`: measure which kernel is fastest for each problem of a network on this device."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from r18.backend.tuned import read_table, users_table
from r18.bench.tuning import TUNED_OPS, tuned_schedules
from r18.bench.tuning import tune as tuned
from r18.cli.options import (
    BackendName,
    BatchSizes,
    NetworkName,
    PrecisionNames,
    chosen_backend,
    chosen_schedule,
    integers,
    listed,
)
from r18.errors import UsageError, unknown
from r18.graph.passes import FUSION_LEVELS
from r18.graph.precision import INT8
from r18.graph.precision import precision as precision_named
from r18.graph.quantized import QUANTIZED_OPS
from r18.progress import progress_bar


def tune(
    backend: BackendName = None,
    network_name: NetworkName = "resnet18",
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8,64,256",
    fusion: Annotated[
        str, typer.Option(help=f"Some of: {', '.join(FUSION_LEVELS)}; separated by commas.")
    ] = "all",
    steps: Annotated[
        str, typer.Option(metavar="GLOB", help="Only steps whose name matches.")
    ] = "*",
    bits: Annotated[int, typer.Option(help="Of a weight in int8: 8, 4 or 2.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="The table's file. [where plans on this device look]")
    ] = None,
) -> None:
    """Time every kernel that takes a problem of the network, and keep the fastest as data.

    The table keeps what it holds of other problems. Plans on this device then use it; it changes
    only speed. At level all, kernels that compute max-pooling with its
    convolution are measured next to separate ones. In int8 the network is measured in integers, at
    level all. Exit code 2 when there was nothing to measure.
    """
    chosen, device = chosen_backend(backend)
    path = out or users_table(chosen.name, device)
    names = listed(precision, "--precision")
    for name in names:
        precision_named(name)
    schedule = chosen_schedule(network_name, None)
    levels = listed(fusion, "--fusion")
    schedules = tuned_schedules(chosen, schedule, levels, names, bits)
    known = sorted({step.name for fused in schedules for step in fused.steps})
    if not any(fnmatchcase(name, steps) for name in known):
        raise unknown("step", steps, known, hint="A glob over names works too.")
    problems = [
        problem
        for size in integers(batch, "--batch")
        for fused in schedules
        for name, problem in fused.problems(size).items()
        if isinstance(problem.op, TUNED_OPS) and fnmatchcase(name, steps)
    ]
    integer = [isinstance(problem.op, QUANTIZED_OPS) for problem in set(problems)]
    with progress_bar() as bar:
        bar.start(sum(integer.count(name == INT8.name) for name in names))
        table = tuned(chosen, problems, names, bar.advance)
    rows = [
        (name, problem, size, timing.kernel, f"{timing.microseconds:.1f}")
        for name, found in table.choices.items()
        for problem, batches in found.items()
        for size, timing in batches.items()
    ]
    if not rows:
        raise UsageError(f"'{chosen.name}' has no kernel in {precision} for any of the problems")
    if path.is_file():
        table = read_table(path).merged(table)
    table.write(path)
    typer.echo(tabulate(rows, ("precision", "problem", "batch", "fastest kernel", "µs")))
    typer.echo(f"\nwritten: {path}")
