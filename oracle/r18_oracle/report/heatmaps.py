"""Error/bound as heat maps: by step of the network, and by kernel; a column a precision."""

from __future__ import annotations

from collections.abc import Sequence

from r18.report.heat import Cell, Column, Row, heat_map, merged, split_id
from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import legend
from r18_oracle.network.checkpoint_report import StepError
from r18_oracle.report.faults import severity
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.verify import BackendResult


def both(results: Sequence[BackendResult]) -> Markup | None:
    """The two maps and what their shades mean; None when nothing was run."""
    maps = (
        ("Each step of the network alone, given the reference's values", by_step(results)),
        ("Each kernel, on drawn problems and on those of the network", by_kernel(results)),
    )
    figures = [
        tag("figure", tag("figcaption", said), scrolled(drawn, said))
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
    rows = [Row(name, name.partition(".")[0], notes[name]) for name in merged(orders)]
    return heat_map("Step", rows, columns, cells)


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
    rows = [Row(name, name.partition("/")[0]) for name in merged(orders)]
    return heat_map("Kernel", rows, columns, cells)


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


__all__ = ["both", "by_kernel", "by_step"]
