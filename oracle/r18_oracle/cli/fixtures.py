"""`r18 fixtures`: inputs and expected outputs for parts of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.options import NetworkName
from r18.errors import UsageError, plain
from r18.graph.resnet import network
from r18.weights import SOURCES, load_weights
from r18_oracle.cli.options import ExportFolder

OUTDIR = Path("exports/fixtures")


def fixtures(
    outdir: Annotated[Path, typer.Option(help="Folder to write stepN/ into.")] = OUTDIR,
    weights: Annotated[
        str | None, typer.Option(help=f"One of: {', '.join(SOURCES)}. [default: synthetic]")
    ] = None,
    manifest: ExportFolder = None,
    steps: Annotated[str, typer.Option(help="Such as 2-7, or 2,4-6.")] = "2-7",
    network_name: NetworkName = "resnet18",
    batch: Annotated[int, typer.Option(help="Samples in each fixture.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of the inputs.", min=0)] = 0,
    reference: Annotated[
        str | None,
        typer.Option(help="The backend that computes in float64. [default: torch, else numpy]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier fixtures.")] = False,
) -> None:
    """Write step fixtures: a seeded input and its expected output, computed in float64.

    Steps: 2 is conv1, bn1 and relu; 3 to 6 are layer1 to layer4; 7 is the global average, fc and
    softmax. Each goes to its own folder stepN with input.bin, expected.bin (raw little-endian
    float32) and fixture.json. `r18 step N` runs one.
    """
    from r18_oracle.dumps.fixtures import check_places, make_fixture, reference_backend

    numbers = parse_steps(steps)
    source = weights_source(weights, manifest) or "synthetic"
    check_places(numbers, outdir, overwrite=force)
    loaded = load_weights(source, network(network_name))
    backend = reference_backend(reference)
    for number in numbers:
        made = make_fixture(
            number,
            loaded,
            outdir / f"step{number}",
            network_name=network_name,
            seed=seed,
            batch=batch,
            reference=backend,
            overwrite=force,
        )
        typer.echo(
            f"saved: step {number} {list(made.input.shape)} to {list(made.expected.shape)} "
            f"-> {made.folder}"
        )


def weights_source(weights: str | None, manifest: Path | None) -> str | Path | None:
    """The value of the option that was given, if any; raises `UsageError` for both."""
    if weights is not None and manifest is not None:
        raise UsageError(f"--weights {weights} and --manifest {manifest}: give one of them")
    return weights if manifest is None else manifest


def parse_steps(text: str) -> list[int]:
    """Step numbers from "2-7" or "2,4-6", each once; raises `UsageError`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.strip().isdecimal() and (last.strip().isdecimal() or not dash)):
            raise UsageError(
                f"--steps {plain(text)}: '{plain(part)}' is no step and no range; try 2-7 or 2,4-6"
            )
        ends = first.strip(), last.strip() if dash else first.strip()
        if max(map(len, ends)) > 2:
            raise UsageError(f"--steps {plain(text)}: '{plain(part)}' goes beyond the steps, 2-7")
        if int(ends[0]) > int(ends[1]):
            raise UsageError(f"--steps {plain(text)}: '{plain(part)}' holds no step; try 2-7")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return list(dict.fromkeys(numbers))
