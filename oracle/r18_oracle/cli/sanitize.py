"""`r18 sanitize`: a backend's CUDA kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer
from tabulate import tabulate

from r18.cli.app import FOUND
from r18.cli.options import AsJson, RecordFolder, backend_names, listed
from r18.errors import UsageError, unknown
from r18.machine import cpus
from r18.records import FOLDER

if TYPE_CHECKING:
    from r18_oracle.sanitize.run import KernelResult


def sanitize(
    backend: Annotated[
        str,
        typer.Option(
            help="A name or module:attr.", envvar="R18_BACKEND", autocompletion=backend_names
        ),
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
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes side by side. [one a core]")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many; what is left is left.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run also what is recorded of the same sources.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="The longest that one kernel may take under a tool.")
    ] = 3600.0,
    sanitizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="compute-sanitizer, if it is not found.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the device's record, and go on from it.")
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Run a backend's kernels under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    Each kernel is called on the problems that `r18 verify` would call it on, with every buffer an
    allocation of its own. Values are not judged here.

    With --record each process's kernels are recorded as soon as it ends. What the record holds of
    sources that are still the same is not run, so the same command goes on where it stopped.

    Exit codes: 0 every tool is clean, 1 an error, a kernel that came to no end, or kernels that are
    left, 2 a wrong request, or no compute-sanitizer.
    """
    from r18.backend.registry import load_backend
    from r18.cli.progress import progress_bar
    from r18_oracle.sanitize.record import Record
    from r18_oracle.sanitize.run import TOOLS, Request, Runner, find, parts, version_of
    from r18_oracle.search.profiles import profile as profile_of

    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    asked = list(TOOLS) if tools == "all" else listed(tools, "--tools")
    for tool in asked:
        if tool not in TOOLS:
            raise unknown("tool", tool, TOOLS)
    profile_of(profile)
    if backend == "auto":
        raise UsageError("say whose kernels: --backend NAME")
    chosen = load_backend(backend)
    if not any(fnmatchcase(kernel.id, kernels) for kernel in chosen.kernels()):
        raise unknown("kernel", kernels, [kernel.id for kernel in chosen.kernels()])
    program = find(sanitizer)
    version = version_of(program)
    device = chosen.probe()  # from now on it lists the kernels of this device
    ids = tuple(kernel.id for kernel in chosen.kernels() if fnmatchcase(kernel.id, kernels))
    network = None if network_name == "none" else network_name
    request = Request(backend, ids, profile, network, seed, seconds)
    kept = Record(records, device, chosen, request, version) if record else None
    results = kept.fresh(asked, ids) if kept and not again else []
    known = {(result.tool, result.kernel) for result in results}
    todo = {tool: [name for name in ids if (tool, name) not in known] for tool in asked}
    workers = jobs or cpus()
    with progress_bar() as bar:
        bar.start(sum(map(len, todo.values())))
        bar.show(f"{len(known)} recorded before" if known else "starting", None)
        for found in Runner(program, request, workers, deadline).run(parts(todo, workers)):
            results += found
            if kept is not None and found:
                kept.write(found)
            for result in found:
                bar.advance(result.kernel)
                bar.show(f"{result.tool} {result.kernel}", None)
    if kept is not None and results:
        typer.echo(f"recorded in {kept.path}", err=True)
    by_tool = {tool: [r for r in results if r.tool == tool] for tool in asked}
    if as_json:
        data = [asdict(result) | {"verdict": result.verdict} for result in results]
        typer.echo(json.dumps({"sanitizer": version, "kernels": data}, indent=2))
    else:
        typer.echo(text(by_tool, len(ids), len(known), version))
    left = len(ids) * len(asked) - len(results)
    if left or any(result.verdict != "clean" for result in results):
        raise typer.Exit(FOUND)


def text(
    results: Mapping[str, Sequence[KernelResult]], asked: int, known: int, version: str
) -> str:
    """A line a tool, then what each complained of, and how much is left of what was asked."""
    from r18_oracle.sanitize.record import verdict

    rows = [
        (
            tool,
            len(found),
            asked - len(found),
            sum(result.problems for result in found),
            sum(result.errors or 0 for result in found),
            verdict(found),
        )
        for tool, found in results.items()
    ]
    heads = ("tool", "kernels", "left", "problems", "errors", "verdict")
    parts = [tabulate(rows, heads)]
    for tool, found in results.items():
        bad = [result for result in found if result.verdict != "clean"]
        lines = [line for result in bad for line in _complaints(result)]
        if lines:
            parts.append("\n".join([f"{tool}:", *lines]))
    if known:
        parts.append(f"{known} of these results are from the record")
    left = sum(row[2] for row in rows)
    if left:
        parts.append(f"STOPPED early: {left} are left; with --record the same command goes on")
    return "\n\n".join([*parts, version])


def _complaints(result: KernelResult) -> list[str]:
    """About one kernel: why it is not clean, and the first things that the tool found in it."""
    lines = [f"  {result.kernel}: {result.broken or result.verdict}"]
    lines += [f"    {complaint}" for complaint in result.complaints[:10]]
    more = len(result.complaints) - 10
    return [*lines, f"    and {more} more"] if more > 0 else lines
