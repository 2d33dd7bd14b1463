"""Throughput and latency of all that was timed, with the roofline as a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from r18.bench.baselines import PEER, PEERS
from r18.report.bars import Bar, Line, bars
from r18.report.evidence import Group
from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import value
from r18.tables import bench_captions

HEADS = ("", "ms / image", "images / s", "p10 ms", "p90 ms", f"/ {PEER}", "/ best peer", "roofline")
KINDS = {
    "ours": "a backend, with the kernels it prefers",
    "one": "one algorithm wherever it can be",
    "peer": "other libraries",
}


def section(groups: Sequence[Group]) -> Iterator[Markup]:
    """The contents of the section: devices one after another, a figure a group."""
    yield tag(
        "p",
        "Medians of whole batches that lie on the device already; what took turns in one run "
        "stands together. The roofline is the sum over the steps of the larger of operations at "
        "the measured rate and bytes at the measured bandwidth. Winograd, which multiplies less "
        "than the definition, may pass it.",
    )
    yield key(groups)
    for device, mine in groupby(groups, key=lambda group: group.device):
        found = list(mine)
        yield joined(
            [
                tag("h3", found[0].device_name, " ", tag("span", device, class_="chip")),
                tag("div", *(figure(group) for group in found), class_="charts"),
            ]
        )


def key(groups: Sequence[Group]) -> Markup:
    """What the colours mean, of those that are seen."""
    seen = {kind_of(row) for group in groups for row in group.data["rows"]}
    parts = [
        tag("span", tag("i", class_=kind), words) for kind, words in KINDS.items() if kind in seen
    ]
    parts.append(tag("span", tag("i", class_="spread"), "p10 to p90"))
    if any(group.floors for group in groups):
        parts.append(tag("span", tag("i", class_="roof"), "roofline"))
    return tag("p", *parts, class_="legend key")


def figure(group: Group) -> Markup:
    """One group: throughput beside latency, and the numbers to unfold."""
    rows = fastest_first(group)
    said = f"on {group.device_name}, {group.title}"
    fastest = f"fastest is {rows[0]['backend']}" if rows else "nothing was timed"
    panels = [
        tag("div", tag("p", words), bars(drawn, f"{words} {said}: {fastest}", line))
        for words, (drawn, line) in (
            ("images a second", throughput(group)),
            ("milliseconds a batch", latency(group)),
        )
    ]
    (note,) = bench_captions([group.data])
    if not group.floors:
        note += f" No roofline: {group.why}."
    return tag(
        "figure",
        tag("h3", group.title),
        tag("div", *panels, class_="panels"),
        tag("figcaption", note),
        tag("details", tag("summary", "The numbers"), _table(group, rows)),
        class_="chart",
    )


def throughput(group: Group) -> tuple[list[Bar], Line | None]:
    """Bars of images a second, the most first."""
    floor = group.floor_ms
    line = None
    if floor:
        line = Line(1e3 * group.batch / floor, f"roofline {1e3 * group.batch / floor:,.0f}")
    return [
        Bar(
            str(row["backend"]),
            row["images_per_second"],
            f"{row['images_per_second']:,.0f}",
            kind_of(row),
            tip(group, row),
            note=_part(group, row),
        )
        for row in fastest_first(group)
    ], line


def latency(group: Group) -> tuple[list[Bar], Line | None]:
    """Bars of milliseconds a batch, the least first."""
    floor = group.floor_ms
    line = None if floor is None else Line(floor, f"roofline {digits(floor)}")
    return [
        Bar(
            str(row["backend"]),
            row["median_ms"],
            digits(row["median_ms"]),
            kind_of(row),
            tip(group, row),
            (row["p10_ms"], row["p90_ms"]),
        )
        for row in fastest_first(group)
    ], line


def fastest_first(group: Group) -> list[Mapping[str, Any]]:
    return sorted(group.data["rows"], key=lambda row: float(row["median_ms"]))


def kind_of(row: Mapping[str, Any]) -> str:
    """The class of a row's bar: see `KINDS`."""
    if row["backend"] in PEERS:
        return "peer"
    return "one" if row["algorithm"] else "ours"


def tip(group: Group, row: Mapping[str, Any]) -> str:
    """What more is known of a row."""
    lines = [
        f"{row['backend']}, {group.title}",
        f"{digits(row['median_ms'])} ms a batch, "
        f"{digits(row['p10_ms'])} to {digits(row['p90_ms'])}",
    ]
    if (floor := group.floor_ms) is not None:
        lines.append(f"{floor / row['median_ms']:.0%} of the roofline")
    if row["best_ratio"] is not None and row["backend"] != row["best_peer"]:
        lines.append(f"{row['best_ratio']:.2f} of the time of {row['best_peer']}")
    return "\n".join(lines)


def digits(number: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}"


def _part(group: Group, row: Mapping[str, Any]) -> str:
    floor = group.floor_ms
    return "" if floor is None else f"{floor / row['median_ms']:.0%}"


def _table(group: Group, rows: Sequence[Mapping[str, Any]]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    lines = []
    for row in rows:
        floor = group.floor_ms
        part = None if floor is None else floor / row["median_ms"]
        numbers = [
            (row["ms_per_image"], digits),
            (row["images_per_second"], digits),
            (row["p10_ms"], digits),
            (row["p90_ms"], digits),
            (row["ratio"], "{:.2f}".format),
            (row["best_ratio"], "{:.2f}".format),
            (part, "{:.0%}".format),
        ]
        cells = (tag("td", "–" if n is None else value(n, said(n))) for n, said in numbers)
        lines.append(tag("tr", tag("th", row["backend"], scope="row"), *cells))
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="plain")
    return scrolled(table, f"numbers of {group.title}")


__all__ = [
    "digits",
    "fastest_first",
    "figure",
    "key",
    "kind_of",
    "latency",
    "section",
    "throughput",
]
