"""The one scale of the pages: what shade an error/bound has, and how it is written.

Within the bound a single hue from pale to deep; beyond it another, told apart by a sign as well;
exact, refused and not run are no shades at all. So it reads in grey and with any colour vision.
"""

from __future__ import annotations

import math

from r18.report.markup import Markup, joined, tag

WITHIN = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""The largest error/bound of each shade within the bound, `q1` the first."""
BEYOND = (10.0, 1e4, math.inf)
"""And beyond it, `f1` the first."""


def shade(ratio: float) -> str:
    """The class of a cell with this error/bound."""
    if ratio == 0:
        return "q0"
    for index, most in enumerate(WITHIN, start=1):
        if ratio <= most:
            return f"q{index}"
    for index, most in enumerate(BEYOND, start=1):
        if ratio <= most:
            return f"f{index}"
    return f"f{len(BEYOND)}"  # NaN


def fault(ratio: float) -> bool:
    """Above the bound, or no number at all."""
    return not ratio <= 1


def short(number: float, digits: int = 2) -> str:
    """A number for a cell."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number != 0 and not 1e-3 <= abs(number) < 1e4:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{number:.{digits}g}" if abs(number) < 100 else f"{number:.0f}"


def ratio_text(ratio: float, digits: int = 2) -> str:
    """Error/bound for a cell: what is near 1 keeps the digits that say on which side of it."""
    while short(ratio, digits) == "1" and ratio != 1 and digits < 17:
        digits += 1
    return short(ratio, digits)


def value(number: float, text: str) -> Markup:
    """A number on the page: what it is to the last digit, and what is shown of it."""
    return tag("data", text, value=repr(float(number)))


def legend(*, refused: bool = False, warned: bool = False) -> Markup:
    """What the shades mean."""
    edges = ["0", *(f"{edge:g}" for edge in WITHIN)]
    within = [
        tag("span", tag("i", class_=f"swatch q{index}"), f"≤ {edge}")
        for index, edge in enumerate(edges[1:], start=1)
    ]
    parts = [
        tag("span", tag("i", "0", class_="swatch q0"), "exact"),
        *within,
        tag("span", tag("i", "✕", class_="swatch f2"), "above 1: a fault"),
    ]
    if refused:
        parts.append(tag("span", tag("i", class_="swatch hatch"), "refused or not run"))
    if warned:
        parts.append(tag("span", tag("i", class_="swatch q4 warn"), "above the statistical line"))
    return tag("p", tag("b", "error/bound"), joined(parts), class_="legend")


__all__ = [
    "BEYOND",
    "WITHIN",
    "fault",
    "legend",
    "ratio_text",
    "shade",
    "short",
    "value",
]
