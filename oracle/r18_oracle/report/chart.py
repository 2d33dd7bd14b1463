"""The error along the network: what the program has lost so far, above what each step adds alone.

Two panels share the checkpoints on x, both logarithmic. Above, the propagated error relative to
the reference, with PyTorch's own and the line of what is allowed; below, error/bound of each step
given the reference's values, with the bound at 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import fault, shade, short, value
from r18_oracle.network.checkpoint_report import CheckpointError, CheckpointReport, StepError
from r18_oracle.network.losses import Loss

LEFT, RIGHT, GAP = 52.0, 14.0, 46.0
TOP, ABOVE, BETWEEN, BELOW, FOOT = 16.0, 150.0, 38.0, 100.0, 76.0
OWN = "fp64"
"""In this precision PyTorch's own loss is that of float32, and is not drawn."""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis upwards: zero on its floor, infinity on its ceiling.

    top, height: in the picture. low, high: decades.
    """

    top: float
    height: float
    low: int
    high: int

    @classmethod
    def of(cls, top: float, height: float, numbers: Iterable[float]) -> Axis:
        """Around the numbers that have a place."""
        powers = [math.log10(n) for n in numbers if 0 < n < math.inf] or [0.0]
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        return cls(top, height, low, max(high, low + 1))

    @property
    def floor(self) -> float:
        return self.top + self.height

    def y(self, number: float) -> float:
        if number == 0:
            return self.floor
        if not number < math.inf:
            return self.top + 6
        part = (math.log10(number) - self.low) / (self.high - self.low)
        return self.floor - 14 - min(max(part, 0.0), 1.0) * (self.height - 26)

    def ticks(self, right: float) -> Markup:
        every = max(1, -(-(self.high - self.low) // max(2, int(self.height // 24))))
        lines = []
        for power in range(self.low, self.high + 1, every):
            y = self.y(10.0**power)
            lines.append(_line(LEFT, y, right, y, "grid"))
            lines.append(
                tag(
                    "text",
                    "1" if power == 0 else "10",
                    None if power == 0 else tag("tspan", _minus(power), dy=-4, class_="power"),
                    x=LEFT - 8,
                    y=_round(y + 4),
                    class_="tick",
                )
            )
        lines.append(_line(LEFT, self.floor, right, self.floor, "axis"))
        return joined(lines)


def chart(report: CheckpointReport) -> Markup:
    """The figure of one network run, and its numbers as a table to unfold."""
    rows = report.checkpoints
    right = max(LEFT + GAP * len(rows) + RIGHT, 520.0)
    width = right + RIGHT
    xs = _spread(len(rows), LEFT + 24, right - 18)
    upper = Axis.of(TOP, ABOVE, _upper_numbers(report))
    steps = {step.step: step for step in report.steps}
    lower = Axis.of(TOP + ABOVE + BETWEEN, BELOW, [1.0, *(s.ratio for s in report.steps)])
    picture = tag(
        "svg",
        upper.ticks(right),
        _propagated(report, xs, upper, right),
        tag("text", "propagated error / rms of the reference", x=LEFT, y=TOP - 6, class_="name"),
        lower.ticks(right),
        _forced(rows, steps, xs, lower, right),
        tag(
            "text",
            "each step alone: error / bound",
            x=LEFT,
            y=lower.top - 6,
            class_="name",
        ),
        _names(rows, xs, lower.floor),
        viewBox=f"0 0 {_round(width)} {_round(lower.floor + FOOT)}",
        role="img",
        aria_label=_said(report),
        style=f"--natural:{_round(width)}px",
    )
    return tag(
        "figure",
        tag("h3", report.backend, " ", tag("span", report.precision, class_="chip")),
        scrolled(picture, "chart"),
        _key(report),
        _caption(report),
        tag("details", tag("summary", "The numbers"), _table(report)),
        class_="chart",
    )


def allowed(loss: Loss) -> float:
    """What may be lost (rms) relative to the reference's rms; NaN where nothing says."""
    for relative, rms in ((loss.relative, loss.rms), (loss.own_relative, loss.own_rms)):
        if rms and math.isfinite(rms) and math.isfinite(relative):
            return loss.allowed_rms * (relative / rms)
    return math.nan


def _upper_numbers(report: CheckpointReport) -> list[float]:
    numbers: list[float] = []
    for row in report.checkpoints:
        numbers += [row.loss.relative, allowed(row.loss)]
        if report.precision != OWN:
            numbers.append(row.loss.own_relative)
    return numbers


def _propagated(report: CheckpointReport, xs: Sequence[float], axis: Axis, right: float) -> Markup:
    rows = report.checkpoints
    limit = [(x, axis.y(a)) for x, r in zip(xs, rows, strict=True) if (a := allowed(r.loss)) == a]
    parts: list[Markup] = []
    if limit:
        ends = [(LEFT, limit[0][1]), *limit, (right, limit[-1][1])]
        roof = [(LEFT, axis.top), *ends, (right, axis.top)]
        parts += [tag("path", d=_path(roof), class_="over"), _poly(ends, "limit")]
    if report.precision != OWN:
        own = [(x, axis.y(row.loss.own_relative)) for x, row in zip(xs, rows, strict=True)]
        parts.append(_poly(own, "own"))
    ours = [(x, axis.y(row.loss.relative)) for x, row in zip(xs, rows, strict=True)]
    parts.append(_poly(ours, "ours"))
    for (x, y), row in zip(ours, rows, strict=True):
        parts.append(_dot(x, y, 4.5, "ours" if row.ok else "wrong", _tip(row)))
    return joined(parts)


def _forced(
    rows: Sequence[CheckpointError],
    steps: dict[str, StepError],
    xs: Sequence[float],
    axis: Axis,
    right: float,
) -> Markup:
    """A stem a step, between the checkpoint before it and its own."""
    limit = axis.y(1.0)
    box = tag(
        "rect",
        x=LEFT,
        y=_round(axis.top),
        width=_round(right - LEFT),
        height=_round(limit - axis.top),
        class_="over",
    )
    parts = [box, _line(LEFT, limit, right, limit, "limit")]
    drawn: set[str] = set()
    for index, (row, x) in enumerate(zip(rows, xs, strict=True)):
        mine = [steps[name] for name in row.steps if name in steps and name not in drawn]
        drawn.update(step.step for step in mine)
        before = xs[index - 1] if index else LEFT
        gap = min(9.0, (x - before) / (len(mine) + 1))
        for place, step in enumerate(mine):
            at = x - (len(mine) - 1 - place) * gap
            y = axis.y(step.ratio)
            tip = f"{step.step}\n{step.kernel}\nerror/bound {step.ratio:.6g}"
            parts.append(_line(at, axis.floor, at, y, "stem"))
            parts.append(_dot(at, y, 4, shade(step.ratio), tip))
    return joined(parts)


def _names(rows: Sequence[CheckpointError], xs: Sequence[float], floor: float) -> Markup:
    return joined(
        tag(
            "text",
            row.name,
            class_="checkpoint",
            transform=f"translate({_round(x + 4)} {_round(floor + 16)}) rotate(-38)",
        )
        for row, x in zip(rows, xs, strict=True)
    )


def _key(report: CheckpointReport) -> Markup:
    own = report.precision != OWN
    return tag(
        "p",
        tag("span", tag("i", class_="stroke ours"), report.backend),
        tag("span", tag("i", class_="stroke own"), "PyTorch's own") if own else None,
        tag(
            "span",
            tag("i", class_="stroke limit"),
            f"allowed, {report.multiple:g} times what PyTorch loses",
        ),
        class_="legend",
    )


def _caption(report: CheckpointReport) -> Markup:
    words = "image" if report.images == 1 else "images"
    said = [f"{report.network}, fusion '{report.fusion}', {report.images} {words}. "]
    parts: list[str | None] = list(said)
    if report.top1 is not None:
        top = report.top1
        agreed = top.decided - len(top.wrong)
        parts.append(f"Top-1: {agreed} of {top.decided} agree; {len(top.ties)} too close to call.")
        parts += [
            tag(
                "b",
                f" Image {call.image} came out as class {call.got}, not {call.first}.",
                class_="bad",
            )
            for call in top.wrong
        ]
    return tag("figcaption", *parts)


def _table(report: CheckpointReport) -> Markup:
    own = "PyTorch's float32" if report.precision == OWN else "PyTorch's"
    heads = ("checkpoint", "rms", own, "allowed", "of allowed", "max abs", "cosine")
    lines = []
    for row in report.checkpoints:
        loss = row.loss
        numbers = (loss.relative, loss.own_relative, allowed(loss), loss.ratio, loss.max_abs)
        cells = [tag("td", value(number, short(number, 3))) for number in numbers]
        cells[3] = tag(
            "td",
            None if row.ok else tag("b", "✕ ", class_="bad"),
            value(loss.ratio, short(loss.ratio, 3)),
        )
        cells.append(tag("td", value(loss.cosine, f"{loss.cosine:.9f}")))
        lines.append(tag("tr", tag("th", row.name, scope="row"), *cells))
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="plain")
    return scrolled(table, "numbers")


def _tip(row: CheckpointError) -> str:
    loss = row.loss
    return (
        f"{row.name}\nrms {loss.relative:.3g} of the reference's, PyTorch's {loss.own_relative:.3g}"
        f"\n{loss.ratio:.3g} of what is allowed\nlargest error {loss.max_abs:.3g} "
        f"at {loss.coordinate}"
    )


def _said(report: CheckpointReport) -> str:
    """The figure in a sentence, for those who do not see it."""
    wrong = [row.name for row in report.checkpoints if not row.ok]
    wrong += [step.step for step in report.steps if fault(step.ratio)]
    worst = max((row.loss.ratio for row in report.checkpoints), default=0.0)
    what = f"above what is allowed: {', '.join(wrong)}" if wrong else "all within what is allowed"
    return (
        f"Error of {report.backend} in {report.precision} at {len(report.checkpoints)} checkpoints "
        f"and {len(report.steps)} steps: at most {worst:.3g} of the allowed loss; {what}"
    )


# -- strokes -----------------------------------------------------------------------------------


def _spread(count: int, first: float, last: float) -> list[float]:
    gap = (last - first) / max(1, count - 1)
    return [first + gap * index for index in range(count)]


def _round(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _minus(power: int) -> str:
    return str(power).replace("-", "−")


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("path", d=_path([(x1, y1), (x2, y2)]), class_=kind)


def _poly(points: Sequence[tuple[float, float]], kind: str) -> Markup:
    return tag("path", d=_path(points), class_=f"line {kind}")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_round(x)} {_round(y)}" for x, y in points)


def _dot(x: float, y: float, radius: float, kind: str, tip: str) -> Markup:
    return tag(
        "circle", tag("title", tip), cx=_round(x), cy=_round(y), r=radius, class_=f"dot {kind}"
    )


__all__ = ["Axis", "allowed", "chart"]
