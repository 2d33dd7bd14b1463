"""Pictures for a README: SVG files of their own, in light and dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from r18.report.bars import Bar, Line, content, height
from r18.report.evidence import Group
from r18.report.markup import Markup, tag
from r18.report.shell import asset
from r18.report.speed import KINDS, latency, throughput

WIDTH, MARGIN, GAP, COLUMNS = 880, 20, 30, 3
"""In pixels, but for the columns: of the picture, around it, and between its panels."""
TITLE, HEADING, FOOT = 26, 40, 30
"""In pixels: above a panel, above a device, and for the key below."""

STYLES = ("palette.css", "figure.css")

Panel = tuple[str, list[Bar], Line | None]


def pictures(groups: Sequence[Group]) -> dict[str, str]:
    """File name → SVG: throughput at the largest batch of each precision and device, and latency
    at the smallest. The whole network, fused; backends and peers, no single algorithms.

    Empty where no such group was recorded.
    """
    usual = [
        group
        for group in groups
        if (group.data["network"], group.data["fusion"]) == ("resnet18", "all")
    ]
    if not usual:
        return {}
    return {
        "throughput.svg": _picture("Images a second", _chosen(usual, max), throughput),
        "latency.svg": _picture("Milliseconds a batch", _chosen(usual, min), latency),
    }


def _chosen(
    groups: Iterable[Group], which: Callable[[Iterable[int]], int]
) -> dict[str, list[Group]]:
    """By device, of each precision the group with the largest or the smallest batch."""
    found: dict[str, list[Group]] = {}
    for (device, _), same in groupby(groups, key=lambda group: (group.device, group.precision)):
        mine = list(same)
        batch = which(group.batch for group in mine)
        found.setdefault(device, []).append(next(g for g in mine if g.batch == batch))
    return found


def _picture(
    title: str,
    devices: Mapping[str, Sequence[Group]],
    bars_of: Callable[[Group], tuple[list[Bar], Line | None]],
) -> str:
    column = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
    parts: list[Markup] = []
    seen: set[str] = set()
    y = float(MARGIN)
    for groups in devices.values():
        parts.append(_text(MARGIN, y + 18, f"{title}, {groups[0].device_name}", "heading"))
        y += HEADING
        for first in range(0, len(groups), COLUMNS):
            panels = [_panel(group, bars_of) for group in groups[first : first + COLUMNS]]
            tall = max(TITLE + height(rows, line) for _, rows, line in panels)
            seen |= {bar.kind for _, rows, _ in panels for bar in rows}
            seen |= {"roof" for _, _, line in panels if line is not None}
            for place, (name, rows, line) in enumerate(panels):
                x = MARGIN + place * (column + GAP)
                parts.append(_text(x, y + 13, name, "panel"))
                drawn = content(rows, line)
                parts.append(
                    tag("svg", drawn, x=x, y=y + TITLE, width=column, height=tall, class_="bars")
                )
            y += tall + 14
    parts.append(_key(seen, y + 14))
    y += FOOT
    picture = tag(
        "svg",
        tag("title", f"{title} of ResNet-18"),
        tag("style", Markup("".join(asset("r18.report", name) for name in STYLES) + _OWN)),
        tag("rect", width=WIDTH, height=y, class_="ground", rx=8),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {y:g}",
        width=WIDTH,
        height=f"{y:g}",
        role="img",
    )
    return f"{picture}\n"


_OWN = """
.ground { fill: var(--card); }
.heading, .panel, .said { font: 600 16px system-ui, sans-serif; fill: var(--ink); }
.panel { font-size: 13px; fill: var(--soft); } .said { font-size: 12px; font-weight: 400; }
.key .roof { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 5 3; }
"""


def _panel(group: Group, bars_of: Callable[[Group], tuple[list[Bar], Line | None]]) -> Panel:
    rows, line = bars_of(group)
    return group.title, [bar for bar in rows if bar.kind != "one"], line


def _key(seen: set[str], y: float) -> Markup:
    """What the colours mean, of those that are seen."""
    parts: list[Markup] = []
    x = float(MARGIN)
    for kind, said in (KINDS | {"roof": "roofline"}).items():
        if kind not in seen:
            continue
        mark = (
            tag("line", x1=x, x2=x + 18, y1=y - 4, y2=y - 4, class_="roof")
            if kind == "roof"
            else tag("rect", x=x, y=y - 9, width=18, height=10, rx=2, class_=kind)
        )
        parts += [mark, _text(x + 25, y, said, "said")]
        x += 60 + 6.6 * len(said)
    return tag("g", *parts, class_="key")


def _text(x: float, y: float, words: str, kind: str) -> Markup:
    return tag("text", words, x=f"{x:g}", y=f"{y:g}", class_=kind)


__all__ = ["pictures"]
