"""`sanitize`: a backend's kernels under the tools of compute-sanitizer, from and to a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from r18.errors import unknown
from r18.machine import cpus
from r18_oracle.sanitize.record import Record, verdict
from r18_oracle.sanitize.run import TOOLS, KernelResult, Request, Runner, find, parts, version_of
from r18_oracle.search.profiles import profile
from r18_oracle.search.worker import deadline_in
from r18_oracle.session import backend_with, matching


@dataclass
class Sanitization:
    """The tools' findings, by tool.

    kernels: how many kernels each tool was to run. known: how many results are from the record.
    version: compute-sanitizer's. path: the record, if there is one.
    """

    tools: Sequence[str]
    kernels: int
    known: int
    version: str
    results: list[KernelResult] = field(default_factory=list)
    path: Path | None = None

    @property
    def left(self) -> int:
        """How many results are missing."""
        return self.kernels * len(self.tools) - len(self.results)

    @property
    def clean(self) -> bool:
        """Whether every kernel ran under every tool without a fault."""
        return not self.left and all(result.verdict == "clean" for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        data = [asdict(result) | {"verdict": result.verdict} for result in self.results]
        return {"sanitizer": self.version, "kernels": data}

    def text(self) -> str:
        """A line for each tool, then its complaints, and what is left."""
        by_tool = {tool: [r for r in self.results if r.tool == tool] for tool in self.tools}
        return text(by_tool, self.kernels, self.known, self.version)


def sanitize(
    backend: str,
    tools: Sequence[str],
    *,
    kernels: str = "*",
    profile_name: str = "quick",
    network: str | None = "resnet18",
    seed: int = 0,
    seconds: float = 3600.0,
    jobs: int | None = None,
    minutes: float | None = None,
    sanitizer: str | None = None,
    records_folder: Path | None = None,
    again: bool = False,
    on_start: Callable[[int, int], None] = lambda todo, known: None,
    on_result: Callable[[KernelResult], None] = lambda result: None,
) -> Sanitization:
    """Run a backend's kernels under tools of compute-sanitizer.

    kernels: a glob over kernel ids. seconds, network, seed: see `Request`. jobs: processes at a
    time; by default one per core. minutes: time limit of the run. sanitizer: the executable, if
    `find` does not find it. records_folder: where the record is; it is written after each process,
    and its results for the same sources are not run, except with `again`. on_start gets the number
    of runs to do and of known results.

    Raises `UnknownName` for a tool, kernel or profile, `UsageError` for backend `auto` and if there
    is no compute-sanitizer.
    """
    deadline = deadline_in(minutes)
    for tool in tools:
        if tool not in TOOLS:
            raise unknown("tool", tool, TOOLS)
    profile(profile_name)
    chosen = backend_with(backend, kernels)
    program = find(sanitizer)
    version = version_of(program)
    device = chosen.probe()  # from now on `kernels()` lists those of this device
    ids = matching(chosen, kernels)
    request = Request(backend, ids, profile_name, network, seed, seconds)
    record = None
    if records_folder is not None:
        record = Record(records_folder, device, chosen, request, version)
    results = record.fresh(tools, ids) if record and not again else []
    known = {(result.tool, result.kernel) for result in results}
    todo = {tool: [name for name in ids if (tool, name) not in known] for tool in tools}
    workers = jobs or cpus()
    on_start(sum(map(len, todo.values())), len(known))
    for found in Runner(program, request, workers, deadline).run(parts(todo, workers)):
        results += found
        if record is not None and found:
            record.write(found)
        for result in found:
            on_result(result)
    path = record.path if record is not None else None
    return Sanitization(tools, len(ids), len(known), version, results, path)


def text(
    results: Mapping[str, Sequence[KernelResult]], asked: int, known: int, version: str
) -> str:
    """A line for each tool, then its complaints, and what is left."""
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
        parts.append(f"STOPPED early: {left} are left; with --record the same command continues")
    return "\n\n".join([*parts, version])


def _complaints(result: KernelResult) -> list[str]:
    """Why one kernel is not clean, and the first complaints of the tool."""
    lines = [f"  {result.kernel}: {result.broken or result.verdict}"]
    lines += [f"    {complaint}" for complaint in result.complaints[:10]]
    more = len(result.complaints) - 10
    return [*lines, f"    and {more} more"] if more > 0 else lines
