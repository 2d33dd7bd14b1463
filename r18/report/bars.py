"""Bars in SVG: a name above each, its number behind it, and a line that all are measured by.

Lengths are percentages and texts have a size of their own, so a picture fits a phone and a desk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from r18.report.markup import Markup, joined, tag

ROW, THICK, HEAD = 33, 11, 22
"""In pixels: from bar to bar, a bar's height, and the space for what the line says."""
LONGEST, EDGE, FAR = 62.0, 96.0, 3.0
"""In hundredths of the width: the longest bar, and the line at most, unless it is `FAR` times the
longest bar away: then it stands behind a break, at the edge."""


@dataclass(frozen=True)
class Bar:
    """number: its length; text: as it is written, with a note behind. kind: a class of figure.css.

    spread: from where to where the number was seen. floor: what it could be at least, a mark.
    """

    name: str
    number: float
    text: str
    kind: str
    tip: str
    spread: tuple[float, float] | None = None
    floor: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Line:
    """number: where it stands. text: what it is and says."""

    number: float
    text: str


def height(rows: Sequence[Bar], line: Line | None) -> int:
    """Of the picture, in pixels."""
    return (HEAD if line else 0) + ROW * len(rows) + 2


def bars(rows: Sequence[Bar], said: str, line: Line | None = None) -> Markup:
    """The picture, as wide as it may be; `said` tells it to those who do not see it."""
    tall = height(rows, line)
    return tag(
        "svg",
        content(rows, line),
        class_="bars",
        width="100%",
        height=tall,
        role="img",
        aria_label=said,
    )


def content(rows: Sequence[Bar], line: Line | None = None) -> Markup:
    """What is in the picture, for an `svg` of any width and of `height`."""
    unit, broken = _unit(rows, line)
    top = HEAD if line else 0
    drawn = [_bar(row, top + index * ROW, unit) for index, row in enumerate(rows)]
    ruled = [] if line is None else [_line(line, unit, broken, height(rows, line))]
    return joined([*ruled, *drawn])


def _unit(rows: Sequence[Bar], line: Line | None) -> tuple[float, bool]:
    """Hundredths of the width for 1, and whether the line is too far away to be drawn to scale."""
    longest = max((max((row.number, *(row.spread or ()))) for row in rows), default=0.0) or 1.0
    unit = LONGEST / longest
    if line is None or line.number * unit <= EDGE:
        return unit, False
    return (unit, True) if line.number > FAR * longest else (EDGE / line.number, False)


def _bar(row: Bar, top: float, unit: float) -> Markup:
    """A name, and below it the bar with its number; all of it has the tip."""
    middle = top + 16 + THICK / 2
    end = row.number * unit
    parts = [
        tag("title", row.tip),
        tag("text", row.name, x=0, y=top + 12, class_="name"),
        tag(
            "rect",
            x=0,
            y=top + 16,
            width=_percent(end),
            height=THICK,
            rx=2,
            class_=row.kind,
            data_number=repr(float(row.number)),
        ),
    ]
    if row.spread is not None:
        low, high = (number * unit for number in row.spread)
        parts.append(_stroke(low, high, middle, middle, "spread"))
        end = max(end, high)
    if row.floor is not None:
        at = row.floor * unit
        parts.append(_stroke(at, at, top + 13, top + 19 + THICK, "roof"))
        end = max(end, at)
    note = tag("tspan", row.note, dx=5, class_="note") if row.note else None
    y = top + 16 + THICK - 1.5
    parts.append(tag("text", row.text, note, x=_percent(end), dx=6, y=y, class_="number"))
    return tag("g", *parts)


def _line(line: Line, unit: float, broken: bool, bottom: float) -> Markup:
    at = 99.0 if broken else line.number * unit
    left = at < 50
    text = f"{line.text} →" if broken else line.text
    classes = "number" if left else "number end"
    return tag(
        "g",
        _stroke(at, at, HEAD - 6, bottom, "roof far" if broken else "roof"),
        tag("text", text, x=_percent(at), y=11, class_=classes),
        data_number=repr(float(line.number)),
        class_="line",
    )


def _stroke(x1: float, x2: float, y1: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=_percent(x1), x2=_percent(x2), y1=y1, y2=y2, class_=kind)


def _percent(number: float) -> str:
    return f"{number:.2f}%"


__all__ = ["Bar", "Line", "bars", "content", "height"]
