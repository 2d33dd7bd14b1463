"""A heat map: a row for each thing judged, a column for each backend and precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from r18.graph.precision import PRECISIONS


@dataclass(frozen=True)
class Column:
    """A backend in a precision; the precision is '' for a kernel whose id names none."""

    backend: str
    precision: str


@dataclass(frozen=True)
class Cell:
    """A cell. ratio: error/bound, None where there is none. tip: details. text: replaces the ratio.

    warned: above the statistical line, within the bound.
    """

    ratio: float | None
    tip: str
    text: str = ""
    warned: bool = False


@dataclass(frozen=True)
class Line:
    """A row: its heading, a note next to it, and a cell (or None) for each column."""

    name: str
    note: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Heat:
    """A heat map. corner: what the rows are. bodies: the rows, grouped."""

    corner: str
    caption: str
    columns: tuple[Column, ...]
    bodies: tuple[tuple[Line, ...], ...]

    @property
    def backends(self) -> list[tuple[str, int]]:
        """Each backend with the number of its columns."""
        names = [column.backend for column in self.columns]
        return [(name, names.count(name)) for name in dict.fromkeys(names)]


def heat_map(
    corner: str,
    caption: str,
    orders: Iterable[Sequence[str]],
    columns: Iterable[Column],
    cells: Mapping[tuple[str, Column], Cell],
    notes: Mapping[str, str] | None = None,
) -> Heat | None:
    """The map; None without rows.

    orders: row names as each backend orders them. cells: by row and column; a cell of row '' fills
    its column's gaps. Rows are grouped by their names up to the first '/' or '.'.
    """
    shown = tuple(in_order(dict.fromkeys(columns)))
    lines = [
        Line(
            name,
            (notes or {}).get(name, ""),
            tuple(cells.get((name, column), cells.get(("", column))) for column in shown),
        )
        for name in merged(orders)
    ]
    groups = groupby(lines, lambda line: line.name.replace("/", ".").partition(".")[0])
    bodies = tuple(tuple(group) for _, group in groups)
    return Heat(corner, caption, shown, bodies) if bodies else None


def in_order(columns: Iterable[Column]) -> list[Column]:
    """Backends in the given order, the precisions of each in the order of `PRECISIONS`."""
    given = list(columns)
    backends = list(dict.fromkeys(column.backend for column in given))
    known = [*PRECISIONS, *(column.precision for column in given)]
    return sorted(given, key=lambda c: (backends.index(c.backend), known.index(c.precision)))


def split_id(kernel: str) -> tuple[str, str]:
    """(op/algorithm[/tile], precision) of a kernel id; (id, '') for an id of another form."""
    parts = kernel.split("/")
    if len(parts) < 4:
        return kernel, ""
    return "/".join([*parts[1:3], *parts[4:]]), parts[3]


def merged(orders: Iterable[Sequence[str]]) -> list[str]:
    """Every name once, placed after the name that precedes it where it first appears."""
    names: list[str] = []
    for order in orders:
        at = 0
        for name in order:
            if name not in names:
                names.insert(at, name)
            at = names.index(name) + 1
    return names


__all__ = ["Cell", "Column", "Heat", "heat_map", "in_order", "split_id"]
