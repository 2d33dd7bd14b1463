"""`r18 export`: write weights as raw tensors with a manifest, for readers in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.graph.resnet import NETWORKS, network
from r18.weights import FORMATS, SOURCES, export_weights, load_weights
from r18.weights.manifest import Entry


def export(
    out: Annotated[
        Path,
        typer.Option(help="Folder to write, such as exports/resnet18/fp32; a file for npz, …"),
    ],
    weights: Annotated[str, typer.Option(help=f"One of: {', '.join(SOURCES)}.")] = "imagenet",
    network_name: Annotated[
        str, typer.Option("--network", help=f"One of: {', '.join(NETWORKS)}.")
    ] = "resnet18",
    format: Annotated[str, typer.Option(help=f"One of: {', '.join(FORMATS)}.")] = "bin",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Export weights: a manifest and raw little-endian float32 tensors, whole or not at all."""
    schedule = network(network_name)
    loaded = load_weights(weights, schedule)
    path = export_weights(
        out, loaded, schedule, format=format, overwrite=force, progress=_print_saved
    )
    size = sum(array.nbytes for array in loaded.values())
    typer.echo(f"exported: {len(loaded)} tensors, {size / 1e6:.1f} MB -> {path}")


def _print_saved(entry: Entry) -> None:
    typer.echo(f"saved: {entry.name} {list(entry.shape)} -> {entry.path}")
