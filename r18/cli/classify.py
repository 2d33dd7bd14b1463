"""`r18 classify`: the most probable classes of photographs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from r18.backend import CompileOptions
from r18.cli.options import (
    AsJson,
    BackendName,
    FusionLevel,
    NetworkName,
    PrecisionName,
    WeightsSource,
    chosen_backend,
)
from r18.graph.resnet import network
from r18.images.classify import Classification, even_batch
from r18.images.classify import classify as classify_images
from r18.stopwatch import part, stopwatch
from r18.weights import load_weights
from r18.weights.precisions import in_precision

Timings = Annotated[
    bool, typer.Option("--timings", help="Also print on stderr what the time goes into.")
]


def classify(
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGE")],
    weights: WeightsSource = "imagenet",
    network_name: NetworkName = "resnet18",
    backend: BackendName = None,
    precision: PrecisionName = "fp32",
    fusion: FusionLevel = "all",
    top: Annotated[int, typer.Option(help="Classes to show of each image.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Images at once, at most.", min=1)] = 8,
    timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Classify photographs with a ResNet: the most probable classes, with their probabilities.

    An image that cannot be read is an error that names it, and then nothing is printed.
    Probabilities are the softmax of the logits, in float64.

    Exit codes: 0 every image was classified, 2 one cannot be, or the request makes no sense.
    """
    with stopwatch("start of Python, imports") as watch:
        _classify(images, weights, network_name, backend, precision, fusion, top, batch, as_json)
    if timings:
        typer.echo(f"\n{watch.text()}", err=True)


def _classify(
    images: list[Path],
    weights: str,
    network_name: str,
    backend: str | None,
    precision: str,
    fusion: str,
    top: int,
    batch: int,
    as_json: bool,
) -> None:
    with part("backend found and probed"):
        runner, device = chosen_backend(backend, [precision])
    schedule = network(network_name)
    with part("weights read and checked"):
        loaded = load_weights(weights, schedule, precision)
    if loaded.source.startswith("synthetic"):
        typer.echo(
            "warning: synthetic weights were never trained, these classes mean nothing; "
            "--weights imagenet, or a file, gives real ones",
            err=True,
        )
    options = CompileOptions(
        batch=even_batch(len(images), batch), precision=precision, fusion=fusion
    )
    program = runner.compile(*in_precision(schedule, loaded, options), options)
    try:
        with Console(stderr=True).status("classifying") as status:
            results = classify_images(
                program,
                images,
                loaded.preprocess,
                top=top,
                on_batch=lambda done: status.update(f"classified {done} of {len(images)}"),
            )
    finally:
        program.close()
    if not as_json:
        typer.echo("\n\n".join(_text(result) for result in results))
        return
    head = {
        "network": network_name,
        "backend": runner.name,
        "device": device.name,
        "precision": precision,
        "fusion": fusion,
        "weights": {"source": loaded.source, "sha256": loaded.sha256},
    }
    found = [
        {"image": str(result.source), "top": [asdict(guess) for guess in result.top]}
        for result in results
    ]
    typer.echo(json.dumps(head | {"images": found}, indent=2))


def _text(result: Classification) -> str:
    lines = [
        f"  {guess.probability:9.4%}  {guess.index:4d}  {guess.name or ''}".rstrip()
        for guess in result.top
    ]
    return "\n".join([str(result.source), *lines])
