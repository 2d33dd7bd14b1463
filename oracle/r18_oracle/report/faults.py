"""The findings, each a card: what is wrong, where in the output, and the line that shows it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from r18.report.markup import Markup, joined, tag
from r18.report.scale import shade, short
from r18_oracle.findings import Finding
from r18_oracle.judge.pictures import read_rows

AXES = ("sample", "channel", "row", "column")
SPAN, LEAST, MOST = 252, 6, 20
"""Of a map, in CSS pixels: its longest side at most, and a cell's side."""


def severity(finding: Finding) -> float:
    """Error/bound of a finding's worst element; infinite where it has none or the bound is 0."""
    if finding.got is None or finding.expected is None or not finding.bound:
        return math.inf
    ratio = abs(finding.got - finding.expected) / finding.bound
    return math.inf if math.isnan(ratio) else ratio


def cards(findings: Iterable[Finding], folder: Path | None) -> Markup:
    """All of them; `folder` is where their files are."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.check, finding.kernel, finding.message), []).append(finding)
    return tag("div", *(_card(same, folder) for same in alike.values()), class_="cards")


def _card(same: Sequence[Finding], folder: Path | None) -> Markup:
    """One finding, or several that differ in their problems alone."""
    finding = same[0]
    problems = [str(other.problem) for other in same if other.problem is not None]
    facts = [("" if index else "problem", problem) for index, problem in enumerate(problems)]
    facts.append(("input", f"{finding.kind}, seed {finding.seed}"))
    if finding.coordinate is not None:
        facts += [
            ("worst at", f"({', '.join(map(str, finding.coordinate))})"),
            ("got", repr(finding.got)),
            ("expected", repr(finding.expected)),
            ("bound", repr(finding.bound)),
        ]
    if folder is not None:
        line = f"r18 replay {shlex.quote((folder / finding.file_name).as_posix())}"
        facts.append(("replay", tag("code", line)))
    listed = joined(tag("div", tag("dt", name), tag("dd", what)) for name, what in facts)
    return tag(
        "article",
        tag(
            "header",
            tag("span", "✕ ", finding.check, class_="chip bad"),
            tag("h3", finding.kernel),
        ),
        tag("p", finding.message),
        _pictures(finding),
        tag("dl", listed),
        class_="card",
    )


def _pictures(finding: Finding) -> Markup | None:
    """The maps that were made when it was found; None for a finding that compares no values."""
    picture = finding.details.get("picture")
    try:
        maps = _maps(picture, finding.coordinate or ())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # a file written by hand, or none
    return tag("div", *maps, class_="maps") if maps else None


def _maps(picture: Any, worst: Sequence[int]) -> list[Markup]:
    shape = [int(extent) for extent in picture["shape"]]
    worst = (0,) * (len(shape) - len(worst)) + tuple(worst)
    axes = AXES[: len(shape)] if len(shape) in (2, 4) else [f"axis{i}" for i in range(len(shape))]
    where = ", ".join(f"{a} {i}" for a, i in list(zip(axes, worst, strict=True))[:-2])
    maps = []
    if shape[-2] * shape[-1] > 1:
        plane, cell = picture["plane"], picture["cell"]
        maps.append(_map(plane, cell, shape[-2:], axes[-2:], worst[-2:], where))
    if "outer" in picture and shape[0] * shape[1] > 1:
        outer = _map(picture["outer"], picture["outer_cell"], shape[:2], axes[:2], worst[:2], "all")
        maps.append(outer)
    return maps


def _map(
    words: Sequence[str],
    cell: Sequence[int],
    shape: Sequence[int],
    axes: Sequence[str],
    worst: Sequence[int],
    where: str,
) -> Markup:
    """One map: a square a cell, the worst one ringed."""
    table = read_rows(words)
    height, width = len(table), len(table[0])
    side = min(max(SPAN // max(height, width), LEAST), MOST)
    squares: dict[str, str] = {}
    wrong = 0
    for top, row in enumerate(table):
        for left, ratio in enumerate(row):
            kind = shade(ratio)
            wrong += kind.startswith("f")
            squares[kind] = squares.get(kind, "") + f"M{left} {top}h1v1h-1z"
    top, left = worst[0] // cell[0], worst[1] // cell[1]
    picture = tag(
        "svg",
        tag("rect", width=width, height=height, class_="ground"),
        *(tag("path", d=path, class_=kind) for kind, path in sorted(squares.items())),
        tag("rect", x=left, y=top, width=1, height=1, class_="halo"),
        tag("rect", x=left, y=top, width=1, height=1, class_="ring"),
        viewBox=f"-.2 -.2 {width + 0.4} {height + 0.4}",
        width=round(side * (width + 0.4)),
        height=round(side * (height + 0.4)),
        role="img",
        aria_label=f"error/bound by {axes[0]} and {axes[1]}, worst {short(table[top][left])} "
        f"at {axes[0]} {worst[0]}, {axes[1]} {worst[1]}; {wrong} of {height * width} cells wrong",
        data_map="|".join(words),
        data_axes=" ".join(axes),
        data_cell=" ".join(map(str, cell)),
    )
    block = "" if cell == [1, 1] else f", a square is the worst of {cell[0]}×{cell[1]}"
    return tag(
        "figure",
        tag("figcaption", f"{_count(shape[0], axes[0])} ↓ × {_count(shape[1], axes[1])} →"),
        picture,
        tag("figcaption", f"{where}{block}") if where != "all" or block else None,
    )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


__all__ = ["cards", "severity"]
