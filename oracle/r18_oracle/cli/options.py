"""Options that several of the oracle's commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.atomic import check_folder
from r18.backend.registry import VARIABLE
from r18.cli.options import backend_names
from r18.graph.resnet import network

BackendToCheck = Annotated[
    str,
    typer.Option(
        "--backend",
        help="A name or module:attr.",
        envvar=VARIABLE,
        autocompletion=backend_names,
    ),
]
KernelGlob = Annotated[str, typer.Option(metavar="GLOB", help="Only kernels whose id matches.")]
ProfileName = Annotated[
    str, typer.Option(help="The profile of the problems: brief, quick, ci, thorough or nightly.")
]
NetworkOrNone = Annotated[
    str, typer.Option("--network", help="The network whose problems to include, or none.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of problems and inputs.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes at a time. [one per core]")]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Stop after this time; the rest is not run.")
]
Again = Annotated[
    bool, typer.Option("--again", help="Also run what is recorded of the same sources.")
]
Continued = Annotated[
    bool, typer.Option("--record", help="Write the device's record, and continue from it.")
]
FINDINGS = Path("exports/findings")


def _folder(path: Path) -> Path:
    """A folder that is there or can be made: a search is not lost to a wrong name at its end.

    The default is not asked: where nothing is found, no folder is needed.
    """
    if path != FINDINGS:
        check_folder(path, "--findings")
    return path


FindingsFolder = Annotated[
    Path, typer.Option(help="Folder for the findings, one file each.", callback=_folder)
]
ExportFolder = Annotated[
    Path | None, typer.Option(help="A folder that `r18 export` wrote, instead of --weights.")
]


def network_or_none(name: str) -> str | None:
    """The network of `NetworkOrNone`. Raises `UnknownName` for one that r18 does not have."""
    if name == "none":
        return None
    network(name)
    return name
