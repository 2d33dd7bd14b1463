"""`r18 export`: write weights as raw tensors with a manifest, for readers in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.options import NetworkName
from r18.errors import UsageError, unknown
from r18.graph.resnet import network
from r18.qdq import write_qdq
from r18.qdq.read import read_qdq
from r18.weights import FORMATS, SOURCES, export_weights, load_weights
from r18.weights.manifest import Entry
from r18.weights.sources import check_place

QDQ = "qdq"
SUFFIXES = {".onnx": QDQ, ".npz": "npz", ".safetensors": "safetensors"}
"""The format that a file's name asks for."""


Unpack = Annotated[
    bool,
    typer.Option("--unpack", help=f"Of {QDQ}: weights of 4 bits in int8, not in ONNX's int4."),
]
Approximate = Annotated[
    bool,
    typer.Option(
        "--approximate",
        help="Of a QDQ model: leave out what the quantised ops do not compute, and say what.",
    ),
]


def export(
    out: Annotated[
        Path,
        typer.Option(help="Folder to write, such as exports/resnet18/fp32; a file for npz, …"),
    ],
    weights: Annotated[
        str, typer.Option(help=f"One of: {', '.join(SOURCES)}; or a QDQ model, FILE.onnx.")
    ] = "imagenet",
    network_name: NetworkName = "resnet18",
    format: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(FORMATS)}; or {QDQ}, an ONNX model of quantised weights."
        ),
    ] = "bin",
    batch: Annotated[int, typer.Option(help=f"Images at once, of {QDQ}.", min=1)] = 1,
    unpack: Unpack = False,
    approximate: Approximate = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Export weights: a manifest and raw little-endian float32 tensors, whole or not at all.

    With --format qdq and weights of `r18 quantize`: an ONNX model that ONNX Runtime and OpenVINO
    run. Its input is the float image; every integer tensor has the name of its value.

    A QDQ model of another tool becomes weights in integers. One that computes what the quantised
    ops do not is refused, with all that differs: a zero point, roundings before a residual is added
    or of logits, saturation at 127 behind a ReLU. --approximate leaves out what can be left out.
    """
    if format not in (*FORMATS, QDQ):
        raise unknown("export format", format, (*FORMATS, QDQ), error=UsageError)
    schedule = network(network_name)
    if format == "bin" and (meant := SUFFIXES.get(out.suffix.lower())):
        raise UsageError(
            f"--out {out} is the name of a file, and --format bin writes a folder\n"
            f"  add --format {meant}, or name a folder"
        )
    check_place(out, format)
    if weights.endswith(".onnx"):
        found = read_qdq(weights, schedule, approximate=approximate)
        for one in found.left_out:
            typer.echo(f"left out: {one}", err=True)
        loaded = found.weights
    elif approximate:
        raise UsageError("--approximate is for weights of a QDQ model, FILE.onnx")
    else:
        loaded = load_weights(weights, schedule)
    if format == QDQ:
        written = write_qdq(out, schedule, loaded, batch=batch, unpack=unpack, overwrite=force)
        typer.echo(f"exported: {written.stat().st_size / 1e6:.1f} MB -> {written}")
        return
    if batch != 1 or unpack:
        raise UsageError(f"--batch and --unpack are for --format {QDQ}, not {format}")
    path = export_weights(
        out, loaded, schedule, format=format, overwrite=force, progress=_print_saved
    )
    size = sum(array.nbytes for array in loaded.values())
    typer.echo(f"exported: {len(loaded)} tensors, {size / 1e6:.1f} MB -> {path}")


def _print_saved(entry: Entry) -> None:
    typer.echo(f"saved: {entry.name} {list(entry.shape)} -> {entry.path}")
