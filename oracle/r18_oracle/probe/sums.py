"""The width of the accumulator, and whether it rounds or cuts off.

Three products B, s and −B, with s = B·2⁻ᵏ, stand at random places of a sum, and zeros everywhere
else. Where B and −B meet first the result is s, whatever the accumulator. Elsewhere B + s has to be
held, which p bits do only for k < p. So the smallest k at which any of the placements loses s is
p, whatever the order of the sum is. Long sums show accumulators that are only narrow between parts
(a partial sum in float16), and short ones those that only short sums have.

Where s meets −B first, p is larger by one, because the numbers below B are half as far apart. So
each of the first placements is also posed with B and −B exchanged.

With k = p and s half as large again, rounding to nearest gives 2⁻ᵖ⁺¹·B or s, and cutting off 0.
Products that a tensor core adds in one step are aligned to the largest one and keep a few bits
more, which are then cut off; p is what the whole sum keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import Array
from r18_oracle.functions.arithmetic import BITS, SUMS
from r18_oracle.probe.dots import OUTPUTS, TERMS, Dots, spread

PLACEMENTS, FEWER = 24, 8
"""Placements of B, s and −B that are tried; fewer for a slow function, and in calls of few rows."""
BIG = 2.0**14
"""In the range of float16, as is s for k ≤ 38."""
MOST = {"float16": 38, "float32": 60, "bfloat16": 60, "float64": 60}
"""The largest k: s must be a number of the arrays' format."""
SHORT, LONG = (8, 63, 72), 1152
"""The lengths of sums; the long one takes several steps of every known accumulator."""
FEW = 2
"""A function may take another path for few rows, such as a matrix-vector product."""


@dataclass(frozen=True)
class Sums:
    """An accumulator, and the narrowest of the probed sums, which showed it.

    bits:      that sums keep; one more than `most` if they lost no number of the probe.
    truncates: sums are cut off.
    length:    the terms of the narrowest sum. form: its `Form.name`.
    few:       whether it showed in calls of `FEW` rows only.
    widest:    the bits that the widest of the probed sums keeps, apart from those of few rows.
    most:      the bits beyond which the probe sees no difference (`MOST`).
    """

    bits: int
    truncates: bool
    length: int
    form: str
    few: bool
    widest: int
    most: int

    @property
    def name(self) -> str:
        """The widest known format that has no more bits; "" for fewer than any known."""
        return next((name for name in SUMS if BITS[name] <= self.bits), "")

    def words(self) -> str:
        """For people: `its sums keep 11 bits (1152 terms, a 3×3 window), others up to 24`; no place
        where the probed sums keep the same bits."""
        kept = f"its sums keep {self._count(self.bits)} bits"
        kept += ", more than float64" if self.bits > BITS["float64"] else ""
        if self.bits == self.widest:
            return kept
        few, widest = f", {FEW} at a time" if self.few else "", self._count(self.widest)
        return f"{kept} ({self.length} terms, {self.form}{few}), others up to {widest}"

    def _count(self, bits: int) -> str:
        return f"{bits} or more" if bits > self.most else str(bits)


def narrowest(found: Sequence[Sums]) -> Sums:
    """The narrowest of some sums; it truncates if any of them does."""
    least = min(found, key=lambda one: one.bits)
    widest = max(one.widest for one in found)
    return replace(least, truncates=any(one.truncates for one in found), widest=widest)


def sums_of(dots: Dots, storage: str, *, long: bool = True) -> Sums:
    """The coarsest accumulator over short and long sums, many and few rows.

    long: whether long sums are posed, and many placements; not to a function that is slow.
    """
    lengths = [
        k
        for k in (*SHORT, *([LONG] if long else []))
        if k % dots.form.multiple == 0 and dots.takes(OUTPUTS, k, OUTPUTS)
    ]
    count = PLACEMENTS if long else FEWER
    found = [_accumulator(dots, storage, k, count) for k in lengths or [TERMS]]
    few = next((k for k in lengths if dots.takes(FEW, k, 1)), None)
    found += [] if few is None else [_accumulator(dots, storage, few, FEWER, few=True)]
    return narrowest(found)


def _accumulator(dots: Dots, storage: str, length: int, count: int, *, few: bool = False) -> Sums:
    """The accumulator that sums of one length show. count: of placements. few: `FEW` rows in a
    call, and only those k at which a known format ends, and one less: it may be narrow, but not
    wide."""
    most = MOST[storage]
    ends = {k for bits in BITS.values() for k in (bits - 1, bits)}
    shifts = np.array([k for k in range(1, most + 1) if not few or k in ends])
    rng = np.random.default_rng(length)
    placements = _placements(rng, length, count)
    found = np.stack([_triples(dots, length, places, shifts, 1.0, few) for places in placements])
    kept = (found == BIG * 2.0 ** -shifts[:, None]).all(axis=(0, 2))
    bits = most + 1 if kept.all() else int(shifts[np.argmin(kept)])
    shown = Sums(bits, False, length, dots.form.name, few, 0 if few else bits, most)
    if kept.all() or (few and bits - 1 not in shifts):  # then p may be less, and s be too small
        return shown
    one = np.array([bits])
    above = [_triples(dots, length, places, one, 1.5, few) for places in placements]
    return replace(shown, truncates=any((result == 0).any() for result in above))


def _placements(rng: np.random.Generator, length: int, count: int) -> list[Array]:
    """Places of B, s and −B; the first and the last terms are among them."""
    last = length - 1
    ends = [(0, 1, 2), (last, last - 1, last - 2), (0, 1, last), (0, last, 1)]
    found = [np.array(places) for one in ends for places in (one, one[::-1])]
    return [*found, *(rng.choice(length, 3, replace=False) for _ in range(count - len(found)))]


def _triples(
    dots: Dots, length: int, places: Array, shifts: Array, times: float, few: bool
) -> Array:
    """The sum of B, times·B·2⁻ᵏ and −B at these places, a row for each k; columns are equal."""
    x = np.zeros((len(shifts), length))
    x[:, places[0]], x[:, places[2]] = BIG, -BIG
    x[:, places[1]] = times * BIG * 2.0**-shifts
    columns = 1 if few else OUTPUTS
    rows = FEW if few else len(x) if dots.takes(len(x), length, columns) else OUTPUTS
    parts = [x[at : at + rows] for at in range(0, len(x), rows)]
    return np.concatenate([dots(part, np.ones((columns, length))) for part in parts])


def rounds_products(dots: Dots, storage: str) -> bool:
    """Whether a product is rounded to the arrays' format before it is added; its factors are not.

    (1 + e)² = 1 + 2e + e² has a bit more than the format, and of 1 + 2e nothing is left.
    """
    e = 2.0 ** -((BITS[storage] + 1) // 2)
    x, w = np.zeros((OUTPUTS, TERMS)), np.zeros((OUTPUTS, TERMS))
    x[:, 0], w[:, 0] = 1 + e, 1 + e
    x[:, 1], w[:, 1] = 1 + 2 * e, -1
    return bool((dots(x, w) == 0).any())


def flushes(dots: Dots, storage: str, *, rounded: bool) -> bool:
    """Whether a subnormal number becomes zero: a product of two normal ones, or a factor.

    rounded: factors are rounded to another format, which may not have the factor.
    """
    least = {"float64": -1060, "float32": -140, "bfloat16": -130, "float16": -20}[storage]
    pairs = [(2.0 ** (least // 2), 2.0 ** (least - least // 2))]
    pairs += [] if rounded else [(2.0**least, 1.0), (1.0, 2.0**least)]
    return any(
        (dots(spread(np.full(rows, x)), np.full((columns, TERMS), w)) == 0).any()
        for x, w in pairs
        for rows, columns in ((OUTPUTS, OUTPUTS), (1, 1))
        if dots.takes(rows, TERMS, columns)
    )


def rounds_before_bias(dots: Dots, storage: str) -> bool:
    """Whether the sum is rounded to the arrays' format before the bias is added; for few rows a
    function may take another path.

    1 + s, of two products, and a bias of −1: s is left unless the sum was rounded first.
    """
    x = np.zeros((OUTPUTS, TERMS))
    x[:, 0], x[:, 1] = 1.0, 2.0 ** -(BITS[storage] + 2)
    ones = np.ones((OUTPUTS, TERMS))
    return any(
        (dots(x[:rows], ones, bias=-1.0) == 0).any()
        for rows in (OUTPUTS, FEW, 1)
        if dots.takes(rows, TERMS, OUTPUTS)
    )


__all__ = ["Sums", "flushes", "narrowest", "rounds_before_bias", "sums_of"]
