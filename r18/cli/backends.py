"""`r18 backends`: what is installed, what can run here, and what to do about the rest."""

from __future__ import annotations

import json

import typer
from tabulate import tabulate

from r18.backend.registry import VARIABLE, Listing, asked_module
from r18.cli.options import AsJson
from r18.cpu import cpu
from r18.runtime.listing import entries


def backends(as_json: AsJson = False) -> None:
    """List every installed backend: its device, or why it cannot run here and the remedy.

    A star marks the one that auto takes. Precisions are those in which it has a kernel for every
    step of ResNet-18. The line below the table is the CPU: the instructions that kernels choose
    by, and the threads, cores and caches that this process may use.
    """
    found = entries()
    listing = [entry.line for entry in found]
    precisions = {entry.line.name: entry.precisions for entry in found}
    real = (line for line in listing if line.device and not line.device.simulated)
    auto = next((line.name for line in real), None)
    if as_json:
        typer.echo(json.dumps([_json(line, auto, precisions) for line in listing], indent=2))
        return
    rows = [
        (
            f"{line.name} *" if line.name == auto else line.name,
            line.device or "unavailable",
            line.provider,
            " ".join(precisions.get(line.name, ())),
        )
        for line in listing
    ]
    typer.echo(tabulate(rows, ("backend", "device", "provider", "precisions")))
    typer.echo(f"\n{cpu()}")
    if auto is not None:
        typer.echo(f"\n* taken by auto; choose another with --backend NAME or {VARIABLE}=NAME")
    if asked := asked_module():
        about = asked.device or asked.cause + (asked.remedy and f"\n  {asked.remedy}")
        typer.echo(f"\n{VARIABLE}={asked.name}: {about}")
    for line in listing:
        if line.device is None:
            typer.echo(f"\n{line.name}: {line.cause}" + (line.remedy and f"\n  {line.remedy}"))
    if not listing:
        typer.echo("none is installed; pip install r18 brings numpy and torch")


def _json(
    line: Listing, auto: str | None, precisions: dict[str, tuple[str, ...]]
) -> dict[str, object]:
    device = line.device
    return {
        "name": line.name,
        "provider": line.provider,
        "available": device is not None,
        "auto": line.name == auto,
        "device": device and {"kind": device.kind, "name": device.name, **device.details},
        "precisions": list(precisions.get(line.name, ())),
        "cause": line.cause,
        "remedy": line.remedy,
    }
