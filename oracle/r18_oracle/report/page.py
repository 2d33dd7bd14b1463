"""The page: its sections, in the shell of every page."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from r18.machine import machine
from r18.report.markup import Markup, joined, tag
from r18.report.shell import asset, document
from r18_oracle.report import faults, glance, heatmaps, tables
from r18_oracle.report.chart import chart
from r18_oracle.search.verify import BackendResult, Verification


def page(
    verification: Verification,
    *,
    findings: Path | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """The whole document.

    findings: the folder of the findings' files, for the lines that replay them.
    about:    versions and the like, besides what the verification knows; default this process's.
    """
    _, words = glance.verdict(verification)
    return document(
        f"r18 verify: {words}",
        glance.header(verification, surroundings() if about is None else about),
        list(_sections(verification, findings)),
        verification.closing(),
        [asset("r18_oracle.report", "verify.css")],
    )


def surroundings() -> dict[str, str]:
    """The versions and the machine of this process."""
    here = machine()
    versions = [f"r18 {here['r18']}", f"Python {here['python']}", f"NumPy {here['numpy']}"]
    versions.append(f"PyTorch {metadata.version('torch')}")
    return {
        "versions": ", ".join(versions),
        "host": f"{here['processor']}, {here['cpus']} cores, {platform.system()}",
    }


def _sections(
    verification: Verification, folder: Path | None
) -> Iterator[tuple[str, str, tuple[str | None, ...]]]:
    """(name, title, contents) of each section that has something to show."""
    results = verification.backends
    if lanes := glance.lanes(results):
        said = (
            "Every kernel and every step of the network, by its largest error over the bound "
            "derived for it."
        )
        yield "glance", "How near to the bound", (tag("p", said), lanes)
    if verification.findings:
        yield "findings", "Findings", (faults.cards(verification.findings, folder),)
    if heat := heatmaps.both(results):
        yield "heat", "Error over bound", (heat,)
    charts = [chart(report) for result in results for report in result.checkpoints]
    if charts:
        said = (
            "What the program has lost on its way from the image, and what each step adds: where "
            "the upper line jumps and no dot below is high, the fault lies between the steps."
        )
        network = tag("div", *charts, class_="charts")
        yield "network", "Along the network", (tag("p", said), network)
    if any(result.kernels for result in results):
        yield "kernels", "Time, checks, refusals", tuple(_details(results))
    if lines := list(_left_out(results)):
        yield "left-out", "Left out", (tag("ul", *lines, class_="missing"),)


def _left_out(results: list[BackendResult]) -> Iterator[Markup]:
    """What was not run, and why."""
    for result in results:
        if result.left_out:
            yield tag("li", tag("b", result.name), f": {result.left_out}")
        for precision, reason in result.skipped.items():
            yield tag("li", tag("b", result.name), f", the network in {precision}: {reason}")


def _details(results: list[BackendResult]) -> Iterator[Markup]:
    for result in results:
        if not result.kernels:
            continue
        reasons = tables.refusals(result.kernels)
        passed = tables.check_table(result.kernels)
        yield joined(
            [
                tag("h3", result.name),
                tables.kernel_table(result.kernels),
                tag("details", tag("summary", "Checks passed, by kernel"), passed),
                tag("details", tag("summary", "Refused, and why"), reasons) if reasons else None,
            ]
        )


__all__ = ["page", "surroundings"]
