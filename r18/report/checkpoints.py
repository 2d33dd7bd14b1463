"""Two dumps side by side, checkpoint by checkpoint, as `r18 diff` compares them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import shade, short, value

HEADS = ("checkpoint", "shape", "max abs", "of tolerance", "mean abs", "cosine", "worst at")


def section(diff: Mapping[str, Any]) -> Iterator[Markup]:
    """The contents of the section. `diff` is a report of `r18 diff --json`."""
    words = "All checkpoints agree" if diff["ok"] else f"The first bad one is {diff['first_bad']}"
    yield tag(
        "p",
        f"{words}, within {float(diff['atol']):g}. Expected: {diff['expected']}. Got: "
        f"{diff['got']}.",
    )
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    rows = [_row(found) for found in diff["checkpoints"]]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    yield scrolled(table, "checkpoints")


def _row(found: Mapping[str, Any]) -> Markup:
    worst, mean, cosine = (float(found[key]) for key in ("max_abs", "mean_abs", "cosine"))
    ratio = _ratio(worst, float(found["tolerance"]))
    sign = None if found["ok"] else tag("b", "✕ ", class_="bad")
    mark = tag("i", class_=f"swatch {shade(ratio)}")
    return tag(
        "tr",
        tag("th", found["checkpoint"], scope="row"),
        tag("td", "×".join(map(str, found["shape"]))),
        tag("td", sign, value(worst, short(worst, 3))),
        tag("td", joined([mark, value(ratio, short(ratio, 3))])),
        tag("td", value(mean, short(mean, 3))),
        tag("td", value(cosine, f"{cosine:.9f}")),
        tag("td", f"({', '.join(map(str, found['worst']))})"),
    )


def _ratio(worst: float, tolerance: float) -> float:
    if worst == 0:
        return 0.0
    return worst / tolerance if tolerance else math.inf


__all__ = ["section"]
