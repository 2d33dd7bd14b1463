"""`r18 convert`: a QDQ model of another tool as weights in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.options import NetworkName
from r18.graph.resnet import network
from r18.weights.manifest import write_manifest

Model = Annotated[Path, typer.Argument(help="An ONNX file, as onnxruntime.quantization writes it.")]
Out = Annotated[Path, typer.Option(help="Folder to write; it appears whole or not at all.")]
Approximate = Annotated[
    bool,
    typer.Option(
        "--approximate",
        help="Leave out what the quantised ops do not compute, and say what: roundings before a "
        "residual is added, before a ReLU and of logits; saturation at 127 behind a ReLU.",
    ),
]


def convert(
    model: Model,
    out: Out,
    network_name: NetworkName = "resnet18",
    approximate: Approximate = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Convert a QDQ model: its integers and scales, in a folder that --weights takes.

    The arithmetic is that of `r18 quantize`: weights symmetric, zero points 0, a sum rounded once.
    A model that says something else is refused by name.
    """
    from r18.qdq.read import read_qdq

    schedule = network(network_name)
    found = read_qdq(model, schedule, approximate=approximate)
    write_manifest(out, found.weights, schedule, overwrite=force)
    for one in found.left_out:
        typer.echo(f"left out: {one}", err=True)
    quantization = found.weights.quantization
    assert quantization is not None  # read_qdq reads one
    count = len(quantization.weights)
    typer.echo(f"converted: {count} weights of {quantization.bits} bits -> {out}")
