"""The page: what was measured at a glance, a section for each kind of evidence, and what is not
there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from r18.report import (
    agreement,
    bounds,
    checkpoints,
    fusion,
    layers,
    mutants,
    sanitizers,
    speed,
)
from r18.report.evidence import Evidence, Group
from r18.report.markup import Markup, scrolled, tag
from r18.report.scale import value
from r18.report.shell import asset, document

STYLES = ("figure.css", "report.css")


def page(evidence: Evidence) -> str:
    """The whole document. What is missing is named at its end, with the command that makes it."""
    sections = list(_sections(evidence))
    if lines := list(missing(evidence)):
        items = (
            tag("li", what, ": ", tag("code", command), f" {where}".rstrip())
            for what, command, where in lines
        )
        sections.append(("missing", "Not on this page", [tag("ul", *items, class_="missing")]))
    return document(
        "r18 report",
        _header(evidence),
        sections,
        f"Made by r18 report from {evidence.folder.as_posix()}: every number is a record's.",
        [asset("r18.report", name) for name in STYLES],
    )


def missing(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """(what, the command that makes it, where to run it) of all that the page leaves out."""
    device = "on the device"
    if not evidence.groups:
        yield "throughput and latency", "r18 bench --peers all --record", device
    elif not any(row["steps"] for group in evidence.groups for row in group.data["rows"]):
        yield "time per layer", "r18 bench --per-step --record", device
    for slug in dict.fromkeys(group.device for group in evidence.groups if not group.floors):
        yield f"a roofline of {slug}", "r18 roofline --backend NAME --measure", device
    if not evidence.profiled:
        yield "fusion levels", "r18 profile --backend NAME --check --record", device
    if not evidence.verified:
        yield "error over bound", "r18 verify --record", device
    elif not any(record["networks"] for record in evidence.verified.values()):
        yield "error over bound of each step", "r18 verify --record", device
    if not evidence.mutated:
        yield "mutants", "r18 mutate --backend NAME --record", device
    for record in evidence.mutated.values():
        for name, run in record["backends"].items():
            if run["left"]:
                limit = "" if run["limit"] is None else f" --limit {run['limit']}"
                command = f"r18 mutate --backend {name}{limit} --record"
                yield f"{run['left']} more mutants of {name}", command, device
    if not evidence.sanitized:
        yield "errors of memory", "r18 sanitize --backend NAME --record", "on a GPU"
    if evidence.evaluation is None:
        command = "r18 evaluate --images DIR --out FILE; r18 report --evaluation FILE --images DIR"
        yield "agreement on photographs", command, ""
    elif evidence.images is None:
        yield "the photographs themselves", "r18 report --images DIR", ""
    if evidence.diff is None:
        yield "checkpoints of two dumps", "r18 dump; r18 report --dumps EXPECTED GOT", ""


def _sections(evidence: Evidence) -> Iterator[tuple[str, str, list[str | None]]]:
    """(id, title, contents) of each section that has something to show."""
    if evidence.groups:
        yield "speed", "Throughput and latency", list(speed.section(evidence.groups))
    if steps := list(layers.section(evidence.groups)):
        yield "layers", "Time per layer", list(steps)
    if evidence.profiled:
        yield "fusion", "Fusion levels", list(fusion.section(evidence.profiled))
    if evidence.verified:
        yield "bounds", "Error over bound", list(bounds.section(evidence.verified))
    if evidence.mutated:
        yield "mutants", "Mutants", list(mutants.section(evidence.mutated))
    if evidence.sanitized:
        yield (
            "sanitizers",
            "Memory and synchronisation",
            list(sanitizers.section(evidence.sanitized)),
        )
    if evidence.evaluation is not None:
        found = agreement.section(evidence.evaluation, evidence.images, evidence.network)
        yield "agreement", "Agreement", list(found)
    if evidence.diff is not None:
        yield "checkpoints", "Checkpoints", list(checkpoints.section(evidence.diff))


# -- the head ----------------------------------------------------------------------------------


def _header(evidence: Evidence) -> Markup:
    best = _best(evidence)
    title: Markup | str = "What was measured"
    lead = None
    if best is not None:
        group, row = best
        rate = row["images_per_second"]
        title = tag("span", value(rate, f"{rate:,.0f}"), " images a second")
        lead = f"{row['backend']} in {group.title} on {group.device_name}"
        if row["best_ratio"] is not None:
            lead += f", in {row['best_ratio']:.2f} of the time of {row['best_peer']}"
        lead += "."
    return tag(
        "header",
        tag("p", "r18 report", class_="eyebrow"),
        tag("h1", title),
        None if lead is None else tag("p", lead, class_="lead"),
        tag("ul", *_tiles(evidence), class_="tiles"),
        tag("details", tag("summary", "The records, and where they come from"), _origins(evidence)),
        class_="top",
    )


def _best(evidence: Evidence) -> tuple[Group, Any] | None:
    """The most images a second of a backend of ours, and its group."""
    ours = [
        (group, row)
        for group in evidence.groups
        for row in group.data["rows"]
        if speed.kind_of(row) == "ours"
    ]
    return max(ours, key=lambda found: float(found[1]["images_per_second"]), default=None)


def _tiles(evidence: Evidence) -> Iterator[Markup]:
    def tile(number: int, words: str) -> Markup:
        return tag("li", tag("b", value(number, f"{number:,}")), tag("span", words))

    if evidence.groups:
        rows = sum(len(group.data["rows"]) for group in evidence.groups)
        yield tile(len({group.device for group in evidence.groups}), "devices timed")
        yield tile(rows, f"times, in {len(evidence.groups)} runs in turns")
    if evidence.verified:
        right, kernels = bounds.count(evidence.verified)
        yield tile(right, f"of {kernels} recorded kernels verified")
    if evidence.mutated:
        caught, tried = mutants.count(evidence.mutated)
        yield tile(caught, f"of {tried:,} mutants caught")
    if evidence.sanitized:
        errors, runs = sanitizers.count(evidence.sanitized)
        yield tile(errors, f"errors in {runs:,} runs under a sanitizer")
    if evidence.evaluation is not None:
        found = agreement.summary(evidence.evaluation)
        yield tile(found.images, "photographs evaluated")


def _origins(evidence: Evidence) -> Markup:
    """A line a record: of what, when, with which versions."""
    rows = []
    for group in evidence.groups:
        packages = group.data["environment"]["packages"]
        words = [group.device_name, *(f"{name} {said}" for name, said in packages.items())]
        rows.append((f"bench-{group.device}", group.title, group.data["date"], ", ".join(words)))
    for slug, record in evidence.profiled.items():
        count = f"{len(record['groups'])} runs in turns"
        dates = (group["date"] for group in record["groups"].values())
        rows.append((f"profile-{slug}", count, _span(dates), record["device"]))
    for slug, record in evidence.verified.items():
        kernels = f"{len(record['kernels'])} kernels"
        dates = (entry["date"] for entry in record["kernels"].values())
        rows.append((f"verify-{slug}", kernels, _span(dates), record["device"]))
    for slug, record in evidence.mutated.items():
        backends = ", ".join(record["backends"])
        dates = (run["date"] for run in record["backends"].values())
        rows.append((f"mutate-{slug}", backends, _span(dates), record["device"]))
    for slug, record in evidence.sanitized.items():
        dates = (tool["date"] for tool in record["tools"].values())
        where = f"{record['device']}, {record['sanitizer']}"
        rows.append((f"sanitize-{slug}", f"{len(record['tools'])} tools", _span(dates), where))
    if evidence.evaluation is not None:
        identity = evidence.evaluation.about.get("identity", {})
        words = [f"{name} {identity[name]}" for name in ("version", "network") if name in identity]
        rows.append((evidence.evaluation.path.name, "evaluation", "", ", ".join(words)))
    head = tag("tr", *(tag("th", name, scope="col") for name in ("record", "of", "date", "")))
    lines = (
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", what),
            tag("td", date),
            tag("td", words, class_="words"),
        )
        for name, what, date, words in rows
    )
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="plain")
    return scrolled(table, "records")


def _span(dates: Iterable[str]) -> str:
    """The first day and the last."""
    days = sorted({date[:10] for date in dates})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


__all__ = ["missing", "page"]
