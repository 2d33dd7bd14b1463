"""Time per layer: each step of a program beside what it needs at least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r18.bench.roofline import Limit
from r18.report.bars import Bar, bars
from r18.report.evidence import Group
from r18.report.markup import Markup, scrolled, tag
from r18.report.scale import value
from r18.report.speed import digits, kind_of

HEADS = ("step", "ms / batch", "share", "floor ms", "of floor", "binds", "kernel")


def section(groups: Sequence[Group]) -> Iterator[Markup]:
    """The contents of the section; nothing where no row has the times of its steps."""
    found = [(group, row) for group in groups for row in group.data["rows"] if row["steps"]]
    own = [figure(group, row) for group, row in found if kind_of(row) == "ours"]
    others = [figure(group, row) for group, row in found if kind_of(row) != "ours"]
    if not found:
        return
    words = "Medians of each step alone, outside of any graph, in the order of the network."
    if any(group.floors for group, _ in found):
        words += (
            " The mark is the step's floor: what it needs at the measured rate and bandwidth; what "
            "lies behind it is lost time. A Winograd step, which multiplies less, may end before."
        )
    yield tag("p", words)
    if own:
        yield tag("div", *own, class_="charts")
    if others:
        drawn = tag("div", *others, class_="charts")
        yield tag("details", tag("summary", "Single algorithms"), drawn)


def figure(group: Group, row: Mapping[str, Any]) -> Markup:
    """The steps of one row."""
    steps, floors = summed(row), group.floors_of(row)
    total = sum(ms for _, _, ms in steps)
    drawn = [
        Bar(
            step,
            ms,
            digits(ms),
            kind_of(row),
            _tip(floors, step, kernel, ms),
            floor=floors[step].floor_ms if step in floors else None,
            note=_share(ms, total),
        )
        for step, kernel, ms in steps
    ]
    slowest = max(steps, key=lambda found: found[2])
    said = (
        f"time per layer of {row['backend']} on {group.device_name}, {group.title}: the most in "
        f"{slowest[0]}"
    )
    device = tag("span", group.device, class_="chip")
    caption = f"{digits(total)} ms together; a run takes {digits(row['median_ms'])} ms."
    return tag(
        "figure",
        tag("h3", f"{row['backend']}, {group.title} ", device),
        tag("div", tag("div", bars(drawn, said)), class_="panels"),
        tag("figcaption", caption),
        tag("details", tag("summary", "The numbers"), _table(floors, steps, total)),
        class_="chart",
    )


def summed(row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(step, kernel, milliseconds) of a row, the phases of a step added up."""
    found: dict[str, tuple[str, float]] = {}
    for time in row["steps"]:
        _, before = found.get(time["step"], ("", 0.0))
        found[time["step"]] = (time["kernel"], before + time["milliseconds"])
    return [(step, kernel, ms) for step, (kernel, ms) in found.items()]


def _share(ms: float, total: float) -> str:
    return f"{ms / total:.1%}" if total else "–"


def _tip(floors: Mapping[str, Limit], step: str, kernel: str, ms: float) -> str:
    lines = [step, kernel, f"{digits(ms)} ms"]
    if (floor := floors.get(step)) is not None:
        lines.append(f"floor {digits(floor.floor_ms)} ms, bound by {floor.binds}")
    return "\n".join(lines)


def _table(
    floors: Mapping[str, Limit], steps: Sequence[tuple[str, str, float]], total: float
) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    lines = []
    for step, kernel, ms in steps:
        floor = floors.get(step)
        cells: list[Markup | str] = [value(ms, digits(ms)), _share(ms, total)]
        if floor is None:
            cells += ["–", "–", "–"]
        else:
            part = f"{floor.floor_ms / ms:.0%}" if ms else "–"
            cells += [value(floor.floor_ms, digits(floor.floor_ms)), part, floor.binds]
        named = tag("td", kernel, class_="words")
        lines.append(tag("tr", tag("th", step, scope="row"), *(tag("td", c) for c in cells), named))
    foot = tag("tr", tag("th", "all", scope="row"), tag("td", value(total, digits(total))))
    table = tag(
        "table", tag("thead", head), tag("tbody", *lines), tag("tfoot", foot), class_="plain"
    )
    return scrolled(table, "numbers of each step")


__all__ = ["figure", "section", "summed"]
