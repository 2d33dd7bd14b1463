"""The head of the page: the verdict, what was verified, and how near to its bound it all came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from r18.report.heat import Column, in_order, split_id
from r18.report.markup import Markup, joined, tag
from r18.report.scale import fault, ratio_text, shade, value
from r18_oracle.report.faults import severity
from r18_oracle.search.verify import BackendResult, Verification, counted


@dataclass(frozen=True)
class Dot:
    """One thing that was judged: a kernel by its search, or a step of the network."""

    ratio: float
    kind: str
    tip: str


def verdict(verification: Verification) -> tuple[str, str]:
    """(class, words): `good`, `bad`, or `void` when nothing was executed, if on one backend."""
    if verification.findings:
        return "bad", counted(len(verification.findings), "finding")
    if verification.executed:
        return "good", "No finding"
    ran = any(result.executed for result in verification.backends)
    return "void", "Not all was executed" if ran else "Nothing was executed"


def header(verification: Verification, about: Mapping[str, str]) -> Markup:
    """The verdict, the numbers of the run, and what was verified where."""
    kind, words = verdict(verification)
    sign = {"good": "✓", "bad": "✕", "void": "–"}[kind]
    return tag(
        "header",
        tag("p", "r18 verify", class_="eyebrow"),
        tag("h1", tag("span", sign, class_="sign", aria_hidden="true"), words),
        tag("p", _sentence(verification, kind), class_="lead"),
        _numbers(verification),
        _facts(verification, about),
        class_=f"top {kind}",
    )


def _sentence(verification: Verification, kind: str) -> str:
    names = ", ".join(result.name for result in verification.backends)
    if kind == "void":
        idle = ", ".join(result.name for result in verification.backends if not result.executed)
        return f"Nothing ran on {idle or 'any backend'}, so nothing is verified."
    if kind == "bad":
        worst = list(dict.fromkeys(finding.kernel for finding in verification.findings))
        more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
        return f"In {', '.join(worst[:3])}{more}."
    return f"{names}: every error that was measured lies within its derived bound."


def _numbers(verification: Verification) -> Markup:
    kernels = [report for result in verification.backends for report in result.kernels]
    runs = [report for result in verification.backends for report in result.checkpoints]
    checks = sum(sum(report.tally.passed.values()) for report in kernels)
    ratios = [report.tally.ratio for report in kernels if report.tally.problems]
    tiles = [
        _tile(len(kernels), "kernel"),
        _tile(sum(report.tally.problems for report in kernels), "problem"),
        _tile(checks, "check", " passed"),
        _tile(len(runs), "network run"),
        (
            ratio_text(max(ratios), 3) if ratios else "–",
            "of its bound, the largest error that passed",
        ),
        (duration(verification.seconds), "in all"),
    ]
    return tag(
        "ul", *(tag("li", tag("b", n), tag("span", words)) for n, words in tiles), class_="tiles"
    )


def _tile(count: int, noun: str, rest: str = "") -> tuple[str, str]:
    return f"{count:,}", counted(count, noun).removeprefix(f"{count} ") + rest


def _facts(verification: Verification, about: Mapping[str, str]) -> Markup:
    request = verification.request
    kernels = "all" if request.kernels == "*" else request.kernels
    facts = {
        **{result.name: str(result.device) for result in verification.backends},
        "profile": request.profile.name,
        "kernels": kernels,
        "network": f"{request.network}, fusion '{request.fusion}'",
        "weights": request.weights,
        "precisions": ", ".join(request.precisions) or "all that each can run",
        "seed": str(request.seed),
        **about,
    }
    items = (tag("div", tag("dt", name), tag("dd", what)) for name, what in facts.items())
    return tag("details", tag("summary", "What was verified, and where"), tag("dl", *items))


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


# -- lanes -------------------------------------------------------------------------------------

TICKS = {0.0: "exact", 1e-4: "10⁻⁴", 1e-2: "1/100", 0.1: "1/10", 1.0: "bound", math.inf: "∞"}
NEAR = 2.3
"""Dots nearer than so many hundredths of the lane would hide each other."""
LEVELS = (0, 1, -1, 2, -2)
LEAST, MOST = -4, 4
"""Decades shown."""


def place(ratio: float) -> float:
    """Where error/bound lies between left (0) and right (100): exact, within by decade, beyond."""
    if ratio == 0:
        return 3.0
    if not ratio < math.inf:
        return 97.5
    decades = min(max(math.log10(ratio), LEAST), MOST)
    return 78 + decades * (70 / -LEAST if decades <= 0 else 16 / MOST)


def lanes(results: Sequence[BackendResult]) -> Markup | None:
    """A lane a backend and precision, a dot a kernel and a step, from exact to beyond the bound."""
    dots: dict[Column, list[Dot]] = {}
    reasons: dict[Column, str] = {}
    for result in results:
        for report in result.kernels:
            key = Column(result.name, split_id(report.kernel)[1])
            if report.finding is not None:
                tip = f"{report.kernel}\n{report.finding.check}: {report.finding.message}"
                dots.setdefault(key, []).append(Dot(severity(report.finding), "kernel", tip))
            elif report.tally.problems:
                tip = f"{report.kernel}\nerror/bound {report.tally.ratio:.6g}"
                dots.setdefault(key, []).append(Dot(report.tally.ratio, "kernel", tip))
        for run in result.checkpoints:
            for step in run.steps:
                tip = f"step {step.step}\n{step.kernel}\nerror/bound {step.ratio:.6g}"
                dot = Dot(step.ratio, "step", tip)
                dots.setdefault(Column(result.name, run.precision), []).append(dot)
        for precision, reason in result.skipped.items():
            reasons[Column(result.name, precision)] = reason
    keys = in_order(dict.fromkeys([*dots, *reasons]))
    if not keys:
        return None
    drawn = [_lane(key, dots.get(key, []), reasons.get(key)) for key in keys]
    ticks = (tag("span", words, style=f"left:{place(at):.1f}%") for at, words in TICKS.items())
    scale = tag("div", tag("div", *ticks, class_="ticks"), class_="lane foot", aria_hidden="true")
    signs = tag(
        "p",
        tag("span", tag("i", class_="mark kernel q5"), "kernel, the worst of its problems"),
        tag("span", tag("i", class_="mark step q5"), "step of the network"),
        class_="legend",
    )
    return joined([signs, tag("div", *drawn, scale, class_="lanes")])


def _lane(column: Column, dots: list[Dot], reason: str | None) -> Markup:
    worst = max((dot.ratio for dot in dots), default=0.0)
    wrong = sum(fault(dot.ratio) for dot in dots)
    marks = []
    for dot, level in zip(dots, _levels([place(dot.ratio) for dot in dots]), strict=True):
        where = f"left:{place(dot.ratio):.2f}%;--level:{level}"
        sign = "✕" if fault(dot.ratio) else None
        classes = f"mark {dot.kind} {shade(dot.ratio)}"
        marks.append(tag("i", sign, class_=classes, style=where, title=dot.tip))
    said: str | Markup = "nothing judged"
    if wrong:
        said = tag("b", f"{wrong} beyond", class_="bad")
    elif dots:
        said = joined(["at most ", value(worst, ratio_text(worst, 3))])
    note = None if reason is None else tag("p", f"network not run: {reason}", class_="hatch note")
    return tag(
        "div",
        tag(
            "div",
            tag("b", column.backend),
            tag("span", column.precision, class_="chip") if column.precision else None,
            tag("small", said),
        ),
        tag("div", *marks, class_="track") if marks else None,
        note,
        class_="lane",
    )


def _levels(places: Sequence[float]) -> list[int]:
    """For each dot a level at which no dot placed before it is near; the middle if all are."""
    taken: dict[int, list[float]] = {level: [] for level in LEVELS}
    levels = []
    for at in places:
        free = (n for n in LEVELS if all(abs(at - other) >= NEAR for other in taken[n]))
        level = next(free, 0)
        taken[level].append(at)
        levels.append(level)
    return levels


__all__ = ["duration", "header", "lanes", "place", "verdict"]
