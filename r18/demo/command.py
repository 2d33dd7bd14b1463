"""`r18 demo`: the first minute with r18."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, BackendName, NetworkName, asked_backend
from r18.demo.part import Request
from r18.demo.parts import demo as parts_of
from r18.stopwatch import stopwatch
from r18.weights import SOURCES

Source = Annotated[
    str,
    typer.Option(
        "--weights",
        help=f"One of: {', '.join(SOURCES)}. [imagenet if it is cached or can be downloaded in 20 "
        "seconds, else synthetic]",
    ),
]


def demo(
    network_name: NetworkName = "resnet18",
    weights: Source = "",
    backend: BackendName = None,
    as_json: AsJson = False,
) -> None:
    """Classify a picture, find a planted bug, and time the network next to PyTorch.

    Needs no file and writes none, except to the caches of weights and of compiled code. What needs
    a package that is not installed is left out and says so. The second start is faster, because
    compiled code is cached; the table at the end says what takes the time.

    Exit codes: 0 success, 1 the oracle missed the bug or rejects a right kernel, 2 the network
    cannot run.
    """
    done = []
    with stopwatch("start of Python, imports") as watch:
        for part in parts_of(Request(network_name, weights, asked_backend(backend))):
            done.append(part)
            if not as_json:
                typer.echo(f"{part.text()}\n")
    if as_json:
        seconds = {name: round(value, 3) for name, value in watch.rows()}
        data = {"parts": [part.to_json() for part in done], "seconds": seconds}
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        typer.echo(watch.text())
    if not all(part.ok for part in done):
        raise typer.Exit(FOUND)
