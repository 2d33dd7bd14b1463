"""Error/bound as heat maps: by step of the network, and by kernel; a column a precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from r18.precision import PRECISIONS
from r18_oracle.campaign import KernelReport
from r18_oracle.checkpoint_report import StepError
from r18_oracle.report.markup import Markup, joined, tag
from r18_oracle.report.scale import fault, legend, ratio_text, severity, shade, value
from r18_oracle.verify import BackendResult

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


def both(results: Sequence[BackendResult]) -> Markup | None:
    """The two maps and what their shades mean; None when nothing was run."""
    maps = (
        ("Each step of the network alone, given the reference's values", by_step(results)),
        ("Each kernel, on drawn problems and on those of the network", by_kernel(results)),
    )
    figures = [
        tag("figure", tag("figcaption", said), _scrolled(drawn, said))
        for said, drawn in maps
        if drawn
    ]
    return joined([_key(results), tag("div", *figures, class_="pair")]) if figures else None


def by_step(results: Sequence[BackendResult]) -> Markup | None:
    """Every step of the network alone on the reference's values; None when no network was run."""
    orders: list[list[str]] = []
    notes: dict[str, str] = {}
    cells: dict[tuple[str, Column], Cell] = {}
    columns: list[Column] = []
    for result in results:
        for report in result.checkpoints:
            column = Column(result.name, report.precision)
            columns.append(column)
            orders.append([step.step for step in report.steps])
            for step in report.steps:
                shape = "×".join(map(str, step.problem.output[1:]))
                notes.setdefault(step.step, f"{step.problem.op.label} → {shape}")
                cells[step.step, column] = _step_cell(step)
        for precision, reason in result.skipped.items():
            columns.append(Column(result.name, precision))
            cells["", columns[-1]] = Cell(None, f"not run in {precision}: {reason}", "–")
    if not orders:
        return None
    rows = [Row(name, name.partition(".")[0], notes[name]) for name in _merged(orders)]
    return _heat_map("Step", rows, columns, cells)


def by_kernel(results: Sequence[BackendResult]) -> Markup | None:
    """Every kernel's search; None when there was none."""
    orders: list[list[str]] = []
    cells: dict[tuple[str, Column], Cell] = {}
    columns: dict[Column, None] = {}
    for result in results:
        for report in result.kernels:
            name, precision = split_id(report.kernel)
            column = Column(result.name, precision)
            columns.setdefault(column)
            cells[name, column] = _kernel_cell(report)
        orders.append([split_id(report.kernel)[0] for report in result.kernels])
    if not columns:
        return None
    rows = [Row(name, name.partition("/")[0]) for name in _merged(orders)]
    return _heat_map("Kernel", rows, columns, cells)


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


def _step_cell(step: StepError) -> Cell:
    lines = [step.kernel, str(step.problem)]
    if not step.ok:
        lines.append(f"{step.check}: {step.message}")
    lines.append(f"error/bound {step.ratio:.6g}")
    if step.sharp is not None:
        lines.append(f"error/statistical line {step.sharp:.6g}")
    if step.coordinate is not None:
        lines.append(f"worst at {step.coordinate}: got {step.got!r},")
        lines.append(f"expected {step.expected!r}, bound {step.bound:.3g}")
    text = "" if step.ok or step.coordinate is not None else step.check
    warned = step.ok and step.sharp is not None and step.sharp > 1
    return Cell(step.ratio, "\n".join(lines), text, warned)


def _kernel_cell(report: KernelReport) -> Cell:
    tally = report.tally
    lines = [report.kernel]
    if report.finding is not None:
        lines.append(f"{report.finding.check}: {report.finding.message}")
        return Cell(severity(report.finding), "\n".join(lines), report.finding.check)
    if not tally.problems:
        lines += [f"refused {count}: {reason}" for reason, count in tally.refused.items()]
        return Cell(None, "\n".join(lines), "refused")
    lines.append(f"error/bound {tally.ratio:.6g}, the largest of {tally.problems} problems")
    if tally.sharp is not None:
        lines.append(f"error/statistical line {tally.sharp:.6g}")
    if tally.refused:
        lines.append(f"{sum(tally.refused.values())} problems refused")
    return Cell(tally.ratio, "\n".join(lines), warned=tally.sharp is not None and tally.sharp > 1)


def _heat_map(
    corner: str,
    rows: Sequence[Row],
    given: Iterable[Column],
    cells: Mapping[tuple[str, Column], Cell],
) -> Markup:
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


def _key(results: Sequence[BackendResult]) -> Markup:
    kernels = [report for result in results for report in result.kernels]
    runs = [run for result in results for run in result.checkpoints]
    sharp = [report.tally.sharp for report in kernels if report.finding is None]
    sharp += [step.sharp for run in runs for step in run.steps if step.ok]
    void = any(report.verdict == "refused" for report in kernels)
    return legend(
        refused=void or (bool(runs) and any(result.skipped for result in results)),
        warned=any(number is not None and number > 1 for number in sharp),
    )


def _scrolled(table: Markup, said: str) -> Markup:
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=said)


def _cell(cell: Cell | None) -> Markup:
    if cell is None:
        return tag("td", "·", class_="none")
    if cell.ratio is None:
        return tag("td", tag("span", cell.text), class_="hatch", title=cell.tip)
    sign = tag("b", "✕ ") if fault(cell.ratio) else None
    classes = f"{shade(cell.ratio)}{' warn' if cell.warned else ''}"
    shown = value(cell.ratio, cell.text or ratio_text(cell.ratio))
    return tag("td", sign, shown, class_=classes, title=cell.tip)


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """All names once, each after the one that comes before it where it is first seen."""
    merged: list[str] = []
    for order in orders:
        at = 0
        for name in order:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
    return merged


__all__ = ["Cell", "Column", "Row", "both", "by_kernel", "by_step", "in_order", "split_id"]
