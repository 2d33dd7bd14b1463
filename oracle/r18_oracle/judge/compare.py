"""How far one tensor is from another, in numbers that no NaN slips through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from r18.backend import Array
from r18.errors import ShapeError, UsageError
from r18.graph.ops import Shape

BLOCK = 1 << 18
"""Elements that are widened to float64 at once: 2 MiB a side."""


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    max_abs, mean_abs: of |got − expected|; infinite where either side holds a NaN or infinity.
    cosine:    of the two as vectors, in [−1, 1]: 1 for two zero vectors, 0 for one, and NaN where
               either side is not finite.
    nonfinite: how many elements are NaN or infinite on either side; equal ones count too.
    worst:     the coordinate of max_abs, the first of equals; `got` and `expected` are there.
    tolerance: the largest allowed max_abs.
    """

    max_abs: float
    mean_abs: float
    cosine: float
    nonfinite: int
    worst: tuple[int, ...]
    got: float
    expected: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether everything is finite and within the tolerance."""
        return self.nonfinite == 0 and self.max_abs <= self.tolerance

    def metrics(self) -> tuple[str, str, str]:
        """The numbers that `METRICS` names, as text."""
        return f"{self.max_abs:.3e}", f"{self.mean_abs:.3e}", f"{self.cosine:.12f}"

    def reason(self) -> str:
        """The reason of the verdict: `max_abs 0.12 > atol 1e-4 at (0, 5): got …, expected …`."""
        where = f"{self.worst}: got {self.got:.9g}, expected {self.expected:.9g}"
        if self.nonfinite:
            values = "1 value is" if self.nonfinite == 1 else f"{self.nonfinite} values are"
            return f"{values} not finite, the first at {where}"
        sign = "≤" if self.ok else ">"
        return f"max_abs {self.max_abs:.3g} {sign} atol {short(self.tolerance)} at {where}"

    def to_json(self) -> dict[str, Any]:
        """The fields and `ok`; numbers that JSON lacks become "nan", "inf" and "-inf"."""
        return {key: json_number(value) for key, value in asdict(self).items()} | {"ok": self.ok}


def compare(got: Array, expected: Array, atol: float, *, scaled: bool = False) -> Comparison:
    """Compare two tensors of one shape, in float64, a block at a time.

    The tolerance is `atol`, with `scaled` times max(1, max |expected|). Raises `ShapeError` when
    the shapes differ, or there is nothing to compare; `UsageError` for an `atol` that is negative
    or not finite.
    """
    if not (math.isfinite(atol) and atol >= 0):
        raise UsageError(f"atol must be finite and at least 0, got {atol}")
    if got.shape != expected.shape:
        raise ShapeError(f"cannot compare shape {got.shape} with the expected {expected.shape}")
    if got.size == 0:
        raise ShapeError(f"nothing to compare: the shape is {got.shape}")
    nonfinite, total, max_abs, worst = 0, 0.0, -1.0, 0
    peaks = np.zeros(2)
    for start, a, b in _blocks(got, expected):
        bad = ~(np.isfinite(a) & np.isfinite(b))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(a - b)
        difference[bad] = math.inf
        nonfinite += int(bad.sum())
        total += float(difference.sum())
        index = int(difference.argmax())
        if difference[index] > max_abs:
            max_abs, worst = float(difference[index]), start + index
        peaks = np.maximum(peaks, [np.abs(a).max(), np.abs(b).max()])
    at = tuple(int(i) for i in np.unravel_index(worst, got.shape))
    return Comparison(
        max_abs=max_abs,
        mean_abs=total / got.size,
        cosine=math.nan if nonfinite else _cosine(got, expected, float(peaks[0]), float(peaks[1])),
        nonfinite=nonfinite,
        worst=at,
        got=float(got[at]),
        expected=float(expected[at]),
        tolerance=atol * max(1.0, float(peaks[1])) if scaled and not nonfinite else atol,
    )


def _blocks(
    got: Array, expected: Array
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    flat, other = got.reshape(-1), expected.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield start, flat[part].astype(np.float64), other[part].astype(np.float64)


def _cosine(got: Array, expected: Array, peak_got: float, peak_expected: float) -> float:
    """The cosine of two vectors, both divided by their peaks first, so that no square overflows or
    vanishes."""
    if peak_got == 0 or peak_expected == 0:
        return 1.0 if peak_got == peak_expected else 0.0
    dot = squares_got = squares_expected = 0.0
    for _, a, b in _blocks(got, expected):
        a /= peak_got
        b /= peak_expected
        dot += float(a @ b)
        squares_got += float(a @ a)
        squares_expected += float(b @ b)
    return max(-1.0, min(1.0, dot / math.sqrt(squares_got) / math.sqrt(squares_expected)))


# -- tables ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One checkpoint of a report."""

    checkpoint: str
    shape: Shape
    comparison: Comparison

    @property
    def ok(self) -> bool:
        return self.comparison.ok

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "BAD"

    def to_json(self) -> dict[str, Any]:
        head = {"checkpoint": self.checkpoint, "shape": list(self.shape)}
        return head | self.comparison.to_json()


METRICS = ("max_abs", "mean_abs", "cosine")


def table(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    numbers: Sequence[str] = (*METRICS, "tolerance", "ms"),
) -> str:
    """Cells in columns; those under the heads of `numbers` to the right."""
    align = ["right" if head in numbers else "left" for head in heads]
    return tabulate(lines, heads, disable_numparse=True, colalign=align if lines else None)


def first_bad(rows: tuple[Row, ...]) -> Row | None:
    """The first row that is not ok; rows are in network order, so this is where it began."""
    return next((row for row in rows if not row.ok), None)


def short(number: float) -> str:
    """Three digits at most, as people write tolerances: 1e-4, 2.5e-4, 0.1, 12."""
    if number == 0 or not math.isfinite(number) or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def json_number(value: Any) -> Any:
    """Numbers that JSON lacks as words, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [json_number(part) for part in value] if isinstance(value, tuple) else value


__all__ = ["METRICS", "Comparison", "Row", "compare", "first_bad", "json_number", "short", "table"]
