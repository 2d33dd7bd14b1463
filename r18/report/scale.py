"""How numbers read on a page: the shade of an error/bound, and digits."""

from __future__ import annotations

import math

from r18.errors import beside_one

WITHIN = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""The largest error/bound of each shade within the bound, `q1` first."""
BEYOND = (10.0, 1e4, math.inf)
"""The same beyond the bound, `f1` first."""


def shade(ratio: float) -> str:
    """The CSS class of an error/bound; NaN counts as the worst fault."""
    if ratio == 0:
        return "q0"
    if fault(ratio):
        worse = (f"f{index}" for index, most in enumerate(BEYOND, start=1) if ratio <= most)
        return next(worse, f"f{len(BEYOND)}")
    return next(f"q{index}" for index, most in enumerate(WITHIN, start=1) if ratio <= most)


def fault(ratio: float) -> bool:
    """Whether an error/bound is above the bound, or not a number."""
    return not ratio <= 1


def short(number: float, digits: int = 2) -> str:
    """A number in few characters, with a typographic minus."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number != 0 and not 1e-3 <= abs(number) < 1e4:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{number:.{digits}g}" if abs(number) < 100 else f"{number:.0f}"


def ratio_text(ratio: float, digits: int = 2) -> str:
    """An error/bound; a value near 1 keeps the digits that tell which side of 1 it is on."""
    return beside_one(ratio, digits, short)


def decimal(number: float) -> str:
    """Four significant digits, no exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}"


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


__all__ = ["BEYOND", "WITHIN", "decimal", "duration", "fault", "ratio_text", "shade", "short"]
