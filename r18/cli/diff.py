"""`r18 diff`: compare two dumps, checkpoint by checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson


def diff(
    expected: Annotated[Path, typer.Argument(help="The dump that is taken to be right.")],
    got: Annotated[Path, typer.Argument(help="The dump to judge.")],
    atol: Annotated[float, typer.Option(help="The largest |got − expected| that is fine.")] = 1e-4,
    allow_different_input: Annotated[
        bool,
        typer.Option(
            "--allow-different-input", help="Compare even if weights or input are not the same."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two dumps in network order and name the first bad checkpoint.

    One of the two may be a folder of raw float32 files (NAME.bin) without a manifest, written by
    any program. NaN and infinity are always bad; a missing checkpoint is an error, never a skip.

    Exit codes: 0 all agree, 1 a checkpoint is bad, 2 the dumps cannot be compared.
    """
    from r18_oracle.dumps import diff_dumps

    report = diff_dumps(expected, got, atol=atol, allow_different_input=allow_different_input)
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.text())
    if not report.ok:
        raise typer.Exit(FOUND)
