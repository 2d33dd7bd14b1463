"""The drop-in's fusion levels beside torchvision's module: CPU and CUDA time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from r18.bench.profile import MODEL
from r18.report.bars import Bar, bars
from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import short, value
from r18.report.speed import digits
from r18.tables import device_words, profile_caption

KINDS = {"cuda": "CUDA milliseconds a batch", "cpu": "CPU milliseconds a batch"}
HEADS = ("", "CPU ms", f"/ {MODEL}", "CUDA ms", f"/ {MODEL}", "of what it may lose")


def section(profiled: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """The contents of the section: devices one after another, a figure a group."""
    yield tag(
        "p",
        "torchvision's module, and the drop-in at each level, by PyTorch's profiler: the best of "
        "its runs, in turns. CPU time is what the call takes on the host, on a GPU what it takes "
        "to launch the work; CUDA time is the sum over what runs on the GPU.",
    )
    for slug, record in profiled.items():
        groups = list(record["groups"].values())
        name = device_words(groups[0]) if groups else slug
        yield joined(
            [
                tag("h3", name, " ", tag("span", slug, class_="chip")),
                tag("div", *(_figure(group) for group in groups), class_="charts"),
            ]
        )


def _figure(group: Mapping[str, Any]) -> Markup:
    title = f"{group['backend']}, {group['precision']}, batch {group['batch']}"
    title += ", channels-last" if group["channels_last"] else ""
    panels = [
        tag("div", tag("p", words), bars(found, f"{words} of {title}"))
        for kind, words in KINDS.items()
        if (found := _bars(group, kind))
    ]
    return tag(
        "figure",
        tag("h3", title),
        tag("div", *panels, class_="panels"),
        tag("figcaption", profile_caption(group)),
        tag("details", tag("summary", "The numbers"), _table(group, title)),
        class_="chart",
    )


def _bars(group: Mapping[str, Any], kind: str) -> list[Bar]:
    """A bar a contender, torchvision's first; none on a device without that time."""
    return [
        Bar(
            row["contender"],
            row[f"{kind}_ms"],
            digits(row[f"{kind}_ms"]),
            "peer" if row["contender"] == MODEL else "ours",
            f"{row['contender']}\n{digits(row[f'{kind}_ms'])} ms",
            note="" if row["contender"] == MODEL else f"{row[f'{kind}_ratio']:.2f}",
        )
        for row in group["rows"]
        if row[f"{kind}_ms"] is not None
    ]


def _table(group: Mapping[str, Any], title: str) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    lines = []
    for row in group["rows"]:
        numbers = [
            (row["cpu_ms"], digits),
            (row["cpu_ratio"], "{:.2f}".format),
            (row["cuda_ms"], digits),
            (row["cuda_ratio"], "{:.2f}".format),
            (row["loss"], lambda loss: short(loss, 3)),
        ]
        cells = (tag("td", "–" if n is None else value(n, said(n))) for n, said in numbers)
        lines.append(tag("tr", tag("th", row["contender"], scope="row"), *cells))
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="plain")
    return scrolled(table, f"numbers of {title}")


__all__ = ["section"]
