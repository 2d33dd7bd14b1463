"""The page of `r18 report`: a section for each kind of evidence, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from r18.report import agreement, bounds, mutants, speed
from r18.report.evidence import Evaluation, Evidence, Group
from r18.report.figures import pictures
from r18.report.heat import Heat
from r18.report.render import document, image
from r18.report.tables import device_words

SHOWN = {
    "speed-and-error.svg": "throughput and error next to PyTorch",
    "throughput.svg": "throughput at the largest batch of each precision and device",
    "latency.svg": "latency at the smallest batch of each precision and device",
}
"""The subject of each picture."""


def page(evidence: Evidence) -> str:
    """The whole document, with `missing` evidence and the commands that make it at the end."""
    layers = list(speed.layered(evidence.groups))
    absent = list(missing(evidence))
    sections = {
        "speed": ("Throughput and latency", evidence.groups),
        "layers": ("Time per layer", layers),
        "fusion": ("Fusion levels", evidence.profiled),
        "bounds": ("Error over bound", evidence.verified),
        "mutants": ("Mutants", evidence.mutated),
        "sanitizers": ("Memory and synchronisation", evidence.sanitized),
        "agreement": ("Agreement", evidence.evaluation),
        "checkpoints": ("Checkpoints", evidence.diff),
        "missing": ("Not on this page", absent),
    }
    return document(
        "report",
        [(name, title) for name, (title, shown) in sections.items() if shown],
        evidence=evidence,
        best=_best(evidence.groups),
        origins=list(_origins(evidence)),
        sources=_sources(evidence),
        pictures=_overview(evidence),
        devices=_devices(evidence.groups),
        kinds=_kinds(evidence.groups),
        timed=speed.timed,
        layers=layers,
        profiled=speed.profiled,
        device_words=device_words,
        heats=_heats(evidence),
        refused=any(map(bounds.refused, _entries(evidence.verified, "kernels"))),
        mutants=mutants,
        agreement=evidence.evaluation
        and agreement.view(evidence.evaluation, evidence.images, evidence.network),
        absent=absent,
        entries=_entries,
    )


def missing(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """(what, the command that makes it, where to run it) for everything the page leaves out."""
    device = "on the device"
    if not evidence.groups:
        yield "throughput and latency", "r18 bench --peers all --record", device
    if not any(row["steps"] for group in evidence.groups for row in group.data["rows"]):
        yield "time per layer", "r18 bench --per-step --record", device
    for slug in dict.fromkeys(group.device for group in evidence.groups if not group.floors):
        yield f"a roofline of {slug}", "r18 roofline --backend NAME --measure", device
    if not evidence.profiled:
        yield "fusion levels", "r18 profile --backend NAME --check --record", device
    if not evidence.verified:
        yield "error over bound", "r18 verify --record", device
    elif not _entries(evidence.verified, "networks"):
        yield "error over bound of each step", "r18 verify --record", device
    if not evidence.mutated:
        yield "mutants", "r18 mutate --backend NAME --record", device
    for record in evidence.mutated.values():
        for name, run in record["backends"].items():
            for files, one in {"": run, **run.get("samples", {})}.items():
                if one["left"]:
                    limit = "" if one["limit"] is None else f" --limit {one['limit']}"
                    of = "--core FILE" if name == "core" else f"--backend {name}"
                    chosen = f" --files '{files}'" if files else ""
                    command = f"r18 mutate {of}{chosen}{limit} --record"
                    yield f"{one['left']} more mutants of {name}", command, device
    if not evidence.sanitized:
        yield "errors of memory", "r18 sanitize --backend NAME --record", "on a GPU"
    if evidence.evaluation is None:
        command = "r18 evaluate --images DIR --out FILE; r18 report --evaluation FILE --images DIR"
        yield "agreement on photographs", command, ""
    elif evidence.images is None:
        yield "the photographs themselves", "r18 report --images DIR --evaluation FILE", ""
    if evidence.evaluation and not _is_named(evidence.evaluation, evidence.network):
        yield "the names of classes", "r18 report --network NAME --evaluation FILE", ""
    if evidence.diff is None:
        yield "checkpoints of two dumps", "r18 dump; r18 report --dumps EXPECTED GOT", ""


def _is_named(evaluation: Evaluation, network: str | None) -> bool:
    """Whether the evaluated network is known: a CSV does not say which it is."""
    return network is not None or "network" in evaluation.identity


def _entries(records: Any, key: str) -> list[Any]:
    """The entries of the table `key` of all devices' records."""
    return [entry for record in records.values() for entry in record[key].values()]


def _best(groups: Sequence[Group]) -> tuple[Group, Any] | None:
    """The highest throughput of one of our backends, with its group."""
    rows = [(group, row) for group in groups for row in group.data["rows"]]
    ours = [one for one in rows if speed.kind_of(one[1]) == "ours"]
    return max(ours, key=lambda found: float(found[1]["images_per_second"]), default=None)


def _overview(evidence: Evidence) -> list[tuple[str, str]]:
    """The pictures of a README, each as its address and what it shows."""
    return [
        (image(text.encode(), "svg+xml"), SHOWN[name]) for name, text in pictures(evidence).items()
    ]


def _devices(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    return [(slug, list(found)) for slug, found in groupby(groups, lambda group: group.device)]


def _kinds(groups: Sequence[Group]) -> dict[str, str]:
    """The meaning of each colour of the bars, for the kinds shown."""
    seen = {speed.kind_of(row) for group in groups for row in group.data["rows"]}
    return {kind: words for kind, words in speed.KINDS.items() if kind in seen}


def _heats(evidence: Evidence) -> list[tuple[str, str, list[Heat]]]:
    """(slug, device, heat maps) of each record of a verification."""
    return [
        (slug, record["device"], [h for h in (bounds.kernels(record), bounds.steps(record)) if h])
        for slug, record in evidence.verified.items()
    ]


def _sources(evidence: Evidence) -> str:
    """What was read for the page, in words."""
    read = []
    if evidence.recorded:
        read.append(f"the records in {evidence.folder.as_posix()}")
    if evidence.evaluation is not None:
        read.append(f"the evaluation {evidence.evaluation.path.name}")
    if evidence.diff is not None:
        read.append("two dumps")
    *first, last = read or ["no evidence"]
    return f"{', '.join(first)} and {last}" if first else last


def _origins(evidence: Evidence) -> Iterator[tuple[str, str, str, str]]:
    """(record, what it holds, when, device and versions) of each source."""
    for group in evidence.groups:
        packages = group.data["environment"]["packages"]
        words = [group.device_name, *(f"{name} {said}" for name, said in packages.items())]
        yield f"bench-{group.device}", group.title, group.data["date"], ", ".join(words)
    for what, records, key, counted in (
        ("profile", evidence.profiled, "groups", "runs in turns"),
        ("verify", evidence.verified, "kernels", "kernels"),
        ("mutate", evidence.mutated, "backends", "backends"),
        ("sanitize", evidence.sanitized, "tools", "tools"),
    ):
        for slug, record in records.items():
            dates = (entry["date"] for entry in record[key].values())
            device = record["device"]
            if "sanitizer" in record:
                device += f", {record['sanitizer']}"
            held = f"{len(record[key])} {counted}"
            if what == "mutate":
                held = ", ".join(record[key])
            yield f"{what}-{slug}", held, _span(dates), device
    if evidence.evaluation is not None:
        identity = evidence.evaluation.identity
        words = [f"{name} {identity[name]}" for name in ("version", "network") if name in identity]
        yield evidence.evaluation.path.name, "evaluation", "", ", ".join(words)


def _span(dates: Iterable[str]) -> str:
    """The first day and the last."""
    days = sorted({date[:10] for date in dates})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


__all__ = ["missing", "page"]
