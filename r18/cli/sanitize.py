"""`r18 sanitize`: a backend's CUDA kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import json
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tabulate import tabulate

from r18.cli.app import FOUND
from r18.cli.options import AsJson, listed
from r18.errors import UsageError, unknown
from r18.records import FOLDER

if TYPE_CHECKING:
    from r18_oracle.sanitize import ToolResult


def sanitize(
    backend: Annotated[
        str, typer.Option(help="A name or module:attr.", envvar="R18_BACKEND")
    ] = "cupy",
    kernels: Annotated[
        str, typer.Option(metavar="GLOB", help="Only kernels whose id matches.")
    ] = "*",
    tools: Annotated[
        str, typer.Option(help="Some of memcheck, racecheck, initcheck, synccheck; or all.")
    ] = "all",
    profile: Annotated[str, typer.Option(help="Whose problems: quick, ci, ...")] = "quick",
    network_name: Annotated[
        str, typer.Option("--network", help="Whose problems to include, or none.")
    ] = "resnet18",
    seed: Annotated[int, typer.Option(min=0, help="Of problems and inputs.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=1, help="The longest that one kernel may take under a tool.")
    ] = 3600.0,
    sanitizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="compute-sanitizer, if it is not found.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write what was found to the device's record.")
    ] = False,
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Run a backend's kernels under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    Each kernel is called on the problems that `r18 verify` would call it on, with every buffer an
    allocation of its own. Values are not judged here.

    Exit codes: 0 every tool is clean, 1 an error or a kernel that came to no end, 2 a wrong
    request, or no compute-sanitizer.
    """
    from r18.cli.progress import progress_bar
    from r18.registry import load_backend
    from r18_oracle.campaign import profile as profile_of
    from r18_oracle.sanitize import TOOLS, Request, find, run_tool, save, version_of

    asked = list(TOOLS) if tools == "all" else listed(tools, "--tools")
    for tool in asked:
        if tool not in TOOLS:
            raise unknown("tool", tool, TOOLS)
    profile_of(profile)
    chosen = load_backend(backend)  # not probed: the device is for the process under the tool
    ids = tuple(kernel.id for kernel in chosen.kernels() if fnmatchcase(kernel.id, kernels))
    if not ids:
        raise unknown("kernel", kernels, [kernel.id for kernel in chosen.kernels()])
    if backend == "auto":
        raise UsageError("say whose kernels: --backend NAME")
    program = find(sanitizer)
    version = version_of(program)
    network = None if network_name == "none" else network_name
    request = Request(backend, ids, profile, network, seed, seconds)
    with progress_bar() as bar:
        bar.start(len(asked) * len(ids))
        results = []
        for tool in asked:
            bar.show(tool, None)
            results.append(run_tool(program, tool, request, lambda t, kernel: bar.advance(kernel)))
    if record and (path := save(results, request, chosen, version, records)) is not None:
        typer.echo(f"recorded in {path}", err=True)
    if as_json:
        data = [asdict(result) | {"verdict": result.verdict} for result in results]
        typer.echo(json.dumps({"sanitizer": version, "tools": data}, indent=2))
    else:
        typer.echo(text(results, version))
    if any(result.verdict != "clean" for result in results):
        raise typer.Exit(FOUND)


def text(results: list[ToolResult], version: str) -> str:
    """A line a tool, then the first things that each found."""
    rows = [
        (
            result.tool,
            len(result.problems),
            sum(result.problems.values()),
            result.errors,
            result.verdict,
        )
        for result in results
    ]
    parts = [tabulate(rows, ("tool", "kernels", "problems", "errors", "verdict"))]
    for result in results:
        lines = [f"  {complaint}" for complaint in result.complaints[:10]]
        more = len(result.complaints) - len(lines)
        lines += [f"  and {more} more"] if more > 0 else []
        lines += [f"  {kernel}: {why}" for kernel, why in result.broken.items()]
        if lines:
            parts.append("\n".join([f"{result.tool}:", *lines]))
    return "\n\n".join([*parts, version])
