"""`r18 verify`: every backend against a float64 reference, checkpoint by checkpoint."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from tabulate import tabulate

from r18.backend import FUSION_LEVELS, Backend
from r18.cli.app import FOUND, REFUSED
from r18.cli.options import AsJson, NetworkName, WeightsSource, listed
from r18.registry import VARIABLE, Listing, get_backend, load_backend, survey
from r18.schedule import network
from r18.weights import load_weights


def verify(
    backend: Annotated[
        str | None,
        typer.Option(help=f"Names or module:attr, separated by commas; or all. [{VARIABLE}, all]"),
    ] = None,
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    batch: Annotated[int, typer.Option(help="Seeded images to run.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of the images.", min=0)] = 0,
    precision: Annotated[
        str, typer.Option(help="fp32, fp64 or both, separated by commas.")
    ] = "fp32,fp64",
    fusion: Annotated[
        str,
        typer.Option(help=f"One or more of {', '.join(FUSION_LEVELS)}, separated by commas."),
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Compare every backend with a float64 reference, checkpoint by checkpoint.

    Without --backend these are all that can run here; one that cannot is listed with its cause.

    Exit codes: 0 no difference, 1 a difference or a crash, 2 nothing could be compared.
    """
    from r18_oracle.images import seeded
    from r18_oracle.verify import text, tolerances
    from r18_oracle.verify import verify as compare_backends

    backends, listing = _backends(backend or os.environ.get(VARIABLE) or "all")
    precisions = listed(precision, "--precision")
    schedule = network(network_name)
    with Console(stderr=True).status("weights and reference") as status:
        loaded = load_weights(weights, schedule)
        found = compare_backends(
            backends,
            schedule,
            loaded,
            seeded(schedule, batch, seed),
            precisions=precisions,
            fusions=listed(fusion, "--fusion"),
            progress=status.update,
        )
    if as_json:
        head = {
            "network": network_name,
            "weights": {"source": loaded.source, "sha256": loaded.sha256},
            "batch": batch,
            "backends": [
                {"name": line.name, "device": str(line.device or ""), "cause": line.cause}
                for line in listing
            ],
        }
        typer.echo(json.dumps(head | found.to_json(), indent=2))
    else:
        lines = [(line.name, line.device or f"not available: {line.cause}") for line in listing]
        typer.echo(tabulate(lines, ("backend", "device"), disable_numparse=True))
        typer.echo(
            f"\nreference: {found.reference} in fp64, fusion 'none'\n"
            f"{network_name}, weights {loaded.source}, batch {batch}, {found.input}\n"
            f"{tolerances(precisions)}\n"
        )
        typer.echo(text(found))
    if found.comparisons == 0:
        raise typer.Exit(REFUSED)
    if not found.ok:
        raise typer.Exit(FOUND)


def _backends(asked: str) -> tuple[dict[str, Backend], list[Listing]]:
    """Backends to compare by the name to show, and a line for each that was asked for.

    A backend asked for by name that cannot run raises; with "all" it is a line with its cause.
    """
    if asked == "all":
        listing = survey()
        return {line.name: load_backend(line.name) for line in listing if line.device}, listing
    backends = {}
    for name in listed(asked, "--backend"):
        found = get_backend(name)
        backends[found.name if name == "auto" else name] = found
    return backends, [Listing(n, "", b.probe()) for n, b in backends.items()]
