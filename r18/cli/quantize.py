"""`r18 quantize`: weights in integers, calibrated on photographs, and what that loses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from r18.calibration.adaround import Settings
from r18.calibration.calibrate import IMAGES, ROUNDINGS
from r18.calibration.observers import METHODS
from r18.cli.options import (
    AsJson,
    BackendName,
    NetworkName,
    WeightsSource,
    chosen_backend,
    print_result,
)
from r18.progress import run_progress
from r18.quantize import Request
from r18.quantize import quantize as quantize_weights

Images = Annotated[Path, typer.Option(help="Folder of photographs; labels do not count.")]
Out = Annotated[Path, typer.Option(help="Folder to write; it appears whole or not at all.")]
Method = Annotated[str, typer.Option(help=f"Of activations; one of: {', '.join(METHODS)}.")]
Bits = Annotated[int, typer.Option(help="Of a weight: 8, 4 or 2. Activations have 8.")]
Rounding = Annotated[
    str | None,
    typer.Option(
        help=f"Of weights; one of: {', '.join(ROUNDINGS)}. If not said: nearest with 8 bits, "
        "adaround with 4 and 2, where nearest loses many points of top-1."
    ),
]
Calibrate = Annotated[int, typer.Option(help="Images to calibrate with, at most.", min=1)]
Measure = Annotated[
    int, typer.Option(help="Images on which losses are measured, at most; others if there are any.")
]
Iterations = Annotated[int, typer.Option(help="Of AdaRound, for each layer.", min=1)]


def quantize(
    images: Images,
    out: Out,
    weights: WeightsSource = "imagenet",
    method: Method = "mse",
    bits: Bits = 8,
    rounding: Rounding = None,
    network_name: NetworkName = "resnet18",
    backend: BackendName = None,
    calibrate: Calibrate = IMAGES,
    measure: Measure = IMAGES,
    iterations: Iterations = Settings.iterations,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Quantise weights: integers and scales next to the float tensors, in one folder.

    Activations get a scale for each tensor, from what the calibration images bring; weights get one
    for each output channel. Then the network runs in float64 and in integers: printed are the error
    of every layer, the signal to noise of the logits, the agreement of top-1, and the images that
    changed class.

    The other commands take the folder as --weights, in every precision; --precision int8 computes
    with its integers.
    """
    request = Request(
        images,
        out,
        weights,
        network_name,
        method,
        bits,
        rounding,
        calibrate,
        measure,
        force,
        Settings(iterations=iterations),
    )
    chosen, _ = chosen_backend(backend)
    with run_progress() as progress:
        result = quantize_weights(request, chosen, partial(typer.echo, err=True), progress)
    print_result(result, as_json)
    typer.echo(f"quantised: {out}", err=True)
