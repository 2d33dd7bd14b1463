"""`r18 step`: run one step of the network on its fixture, timed and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BackendName,
    FusionLevel,
    chosen_backend,
    print_result,
    starting,
)
from r18.graph.precision import PRECISIONS
from r18.graph.resnet import NETWORKS
from r18.weights import SOURCES
from r18.weights.precisions import CALIBRATED
from r18_oracle.cli.fixtures import OUTDIR, weights_source
from r18_oracle.cli.options import ExportFolder

FLOATS = [name for name in PRECISIONS if name not in CALIBRATED]
"""The precisions that a step can run in; see `check_precision` of the fixtures."""


def step(
    number: Annotated[int, typer.Argument(help="2 to 7; see `r18 fixtures --help`.")],
    backend: BackendName = None,
    fixture: Annotated[
        Path | None,
        typer.Option(help=f"The fixture's folder, or one of stepN/. [default: {OUTDIR}]"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help=f"One of: {', '.join(SOURCES)}. A file or folder that the fixture was made with "
            "must be repeated here. [default: the fixture's]"
        ),
    ] = None,
    manifest: ExportFolder = None,
    network_name: Annotated[
        str | None,
        typer.Option(
            "--network",
            help=f"One of: {', '.join(NETWORKS)}. [default: the fixture's]",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(help=f"One of: {', '.join(FLOATS)}.", autocompletion=starting(FLOATS)),
    ] = "fp32",
    fusion: FusionLevel = "none",
    atol: Annotated[
        float | None, typer.Option(help="Tolerance. [default: the fixture's, 1e-4]")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs; the median counts.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Run one step on a backend: milliseconds for each stage, and how far it is from expected.

    Steps: 2 is conv1, bn1 and relu; 3 to 6 are layer1 to layer4; 7 is the global average, fc and
    softmax. Without a fixture in the default place, one is made there first.

    Exit codes: 0 within the tolerance, 1 not, 2 the step could not be run.
    """
    from r18_oracle.dumps.fixtures import check_precision, fixture_for, run_step

    check_precision(precision)
    source = weights_source(weights, manifest)
    runner, _ = chosen_backend(backend, [precision])
    found, loaded = fixture_for(number, fixture, OUTDIR, network_name, source, _print_err)
    result = run_step(
        found, runner, loaded, precision=precision, fusion=fusion, atol=atol, repeat=repeat
    )
    print_result(result, as_json)
    if not result.ok:
        raise typer.Exit(FOUND)


def _print_err(text: str) -> None:
    typer.echo(text, err=True)
