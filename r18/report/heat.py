"""A heat map as a table: a row a thing that was judged, a column a backend in a precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from r18.graph.precision import PRECISIONS
from r18.report.markup import Markup, tag
from r18.report.scale import fault, ratio_text, shade, value

MANY = 8
"""More columns than these are drawn narrower."""


@dataclass(frozen=True)
class Column:
    """A backend in a precision; a kernel whose id names none has the precision ''."""

    backend: str
    precision: str


@dataclass(frozen=True)
class Cell:
    """ratio: None where there is none to show. text: instead of the ratio. tip: what more is known.

    warned: above the statistical line, though within the bound.
    """

    ratio: float | None
    tip: str
    text: str = ""
    warned: bool = False


@dataclass(frozen=True)
class Row:
    """name: its heading. note: beside it. group: whose rows stand together."""

    name: str
    group: str
    note: str = ""


def heat_map(
    corner: str,
    rows: Sequence[Row],
    given: Iterable[Column],
    cells: Mapping[tuple[str, Column], Cell],
) -> Markup:
    """The table; `cells` by row name and column, a cell of row '' for all rows that lack one."""
    columns = in_order(given)
    backends = list(dict.fromkeys(column.backend for column in columns))
    top = [tag("th", corner, rowspan=2, scope="col")] + [
        tag(
            "th",
            name,
            scope="colgroup",
            colspan=sum(column.backend == name for column in columns),
        )
        for name in backends
    ]
    precisions = [tag("th", column.precision or "–", scope="col") for column in columns]
    bodies = []
    for _, group in groupby(rows, key=lambda row: row.group):
        lines = []
        for row in group:
            line = [tag("th", row.name, tag("small", row.note) if row.note else None, scope="row")]
            line += [_cell(cells.get((row.name, c), cells.get(("", c)))) for c in columns]
            lines.append(tag("tr", *line))
        bodies.append(tag("tbody", *lines))
    head = tag("thead", tag("tr", *top), tag("tr", *precisions))
    return tag("table", head, *bodies, class_="heat many" if len(columns) > MANY else "heat")


def in_order(columns: Iterable[Column]) -> list[Column]:
    """Backends in the order in which they come, of each the precisions in theirs."""
    given = list(columns)
    backends = list(dict.fromkeys(column.backend for column in given))
    known = list(PRECISIONS)

    def place(column: Column) -> tuple[int, int]:
        name = column.precision
        return backends.index(column.backend), known.index(name) if name in known else len(known)

    return sorted(given, key=place)


def split_id(kernel: str) -> tuple[str, str]:
    """(op/algorithm[/tile], precision) of a kernel's id; an id of another form, and ''."""
    parts = kernel.split("/")
    if len(parts) < 4:
        return kernel, ""
    return "/".join([*parts[1:3], *parts[4:]]), parts[3]


def merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """All names once, each after the one that comes before it where it is first seen."""
    merged: list[str] = []
    for order in orders:
        at = 0
        for name in order:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
    return merged


def _cell(cell: Cell | None) -> Markup:
    if cell is None:
        return tag("td", "·", class_="none")
    if cell.ratio is None:
        return tag("td", tag("span", cell.text), class_="hatch", title=cell.tip)
    sign = tag("b", "✕ ") if fault(cell.ratio) else None
    classes = f"{shade(cell.ratio)}{' warn' if cell.warned else ''}"
    shown = value(cell.ratio, cell.text or ratio_text(cell.ratio))
    return tag("td", sign, shown, class_=classes, title=cell.tip)


__all__ = ["Cell", "Column", "Row", "heat_map", "in_order", "merged", "split_id"]
