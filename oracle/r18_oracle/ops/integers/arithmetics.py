"""The arithmetics by which libraries get from exact sums to integers, and which one gave an output.

The specification (`r18.graph.quantized`) is one of them. The others differ from it in known ways,
and each difference has a class: the names in `CLASSES`. An output element that differs from the
specification is computed again from its inputs by each arithmetic; the one with the fewest
departures that gives it says the class. A sum that a library adds up in float32 is no bit of any
order that we know, so it is judged by the bound of all orders: the element is explained if some
number within γ_n · Σ|w·x| of the exact one becomes it.

Sums may be others, too: CPUs without VNNI add products in pairs that saturate
(`r18_oracle.ops.integers.pairs`). Such sums are computed exactly, and are the library's own if they
explain more of an output than the exact ones do, elements that are as specified included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product

import numpy as np

from r18.backend import Array
from r18_oracle.ops.integers.requantize import RANGES

TIE = "tie"
ROUNDING = "fused or simulated"
DIVISION = "division or reciprocal"
SATURATION = "saturation"
ORDER = "residual order"
PAIRS = "pairs in int16"
AGAIN = "quantised again"
CLASSES = (TIE, ROUNDING, DIVISION, SATURATION, ORDER, PAIRS, AGAIN)
UNEXPLAINED = "unexplained"
SPECIFIED = "as specified"
IN_FLOAT32 = "sums in float32"

UNIT = 2.0**-24
"""The unit roundoff of float32."""
OTHERS = 12
"""Roundings outside the sum: of numbers, scales, products, bias, residual and quotient."""
FEW = 2
"""The most departures of an arithmetic that is taken for the library's own: with more, one of the
hundreds gives a few elements by chance."""


@dataclass(frozen=True)
class Operands:
    """The operands of an output, as arrays that broadcast over it.

    total:  exact sums with their bias, as float64. bias: of them. magnitude: Σ|w·x| + |bias|.
    terms:  how many products a sum has.
    product: fl(s_x · s_w[o]) in float32; of pooling s_x. divisor: of a mean.
    scale:  of the output; None where it is a number. stored: the output's storage format.
    residual, residual_scale: of the residual, if there is one.
    """

    total: Array
    bias: Array
    magnitude: Array
    terms: int
    product: Array
    scale: np.float32 | None
    stored: str
    divisor: int = 1
    residual: Array | None = None
    residual_scale: np.float32 | None = None
    relu: bool = False

    def at(self, places: Array) -> Operands:
        """The operands of some elements, by a mask over the output."""
        shape = places.shape

        def cut(array: Array) -> Array:
            found: Array = np.broadcast_to(array, shape)[places]
            return found

        return Operands(
            cut(self.total),
            cut(self.bias),
            cut(self.magnitude),
            self.terms,
            cut(self.product),
            self.scale,
            self.stored,
            self.divisor,
            None if self.residual is None else cut(self.residual),
            self.residual_scale,
            self.relu,
        )


@dataclass(frozen=True)
class Arithmetic:
    """One way; each field's first value is the specification's.

    quotient: "multiplier": of sums by one factor; "number": sums become numbers, which are divided.
    division: of scales or numbers, or a product with a reciprocal: of the scale, or of its range.
    bias:     an integer of the sum; or added in float32, multiplied as the sum is ("scaled"), or
              made a number first ("number").
    fused:    a multiply-add rounds once: of sum and bias, or of the residual.
    order:    where the residual comes: last, or before the bias.
    ties:     to even, away from zero, or up.
    limits:   saturation after everything; or to int8 before ReLU; or to −127.
    """

    quotient: str = "multiplier"
    division: str = "division"
    bias: str = "integer"
    fused: str = "nothing"
    order: str = "last"
    ties: str = "even"
    limits: str = "last"

    def departures(self) -> tuple[str, ...]:
        """Each field that is not as specified, in words."""
        return tuple(
            f"{f.name}: {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )

    @property
    def name(self) -> str:
        return ", ".join(self.departures()) or SPECIFIED

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of its departures, each once."""
        found = {
            TIE: self.ties != "even",
            ROUNDING: self.quotient != "multiplier"
            or self.bias != "integer"
            or self.fused != "nothing",
            DIVISION: self.division != "division",
            SATURATION: self.limits != "last",
            ORDER: self.order != "last",
        }
        return tuple(name for name, is_so in found.items() if is_so)

    def numbers(self, given: Operands) -> Array:
        """The float32 values to be rounded to integers; for an output in numbers, the output
        itself."""
        factor, unit = self._factors(given)
        if self.bias == "integer":
            value = _f32(given.total) * factor
            added = None
        else:
            value = _f32(given.total - given.bias) * factor
            added = _f32(given.bias) * factor
            if self.bias == "number" and self.quotient == "multiplier" and given.scale is not None:
                numbers = _f32(given.bias) * given.product
                added = self.quotient_of(numbers, given.scale, given.stored)
        first = self.order == "before the bias"
        if first:
            value = self._with_residual(value, given, unit)
        if added is not None and self.fused in ("sum", "both"):
            wide = (given.total - given.bias) * factor.astype(np.float64)
            value = _f32(wide + added) if not first else value + added
        elif added is not None:
            value = value + added
        if not first:
            value = self._with_residual(value, given, unit)
        if given.relu and self.limits != "before ReLU":
            value = np.maximum(value, np.float32(0))
        if self.quotient == "number" and given.scale is not None:
            return self.quotient_of(value, given.scale, given.stored)
        return value

    def outputs(self, given: Operands) -> Array:
        """The output, as float64."""
        numbers = self.numbers(given)
        if given.scale is None:
            return numbers.astype(np.float64)
        return _stored(numbers, given, self.ties, self.limits)

    def quotient_of(self, numbers: Array, scale: np.float32, stored: str) -> Array:
        """Numbers, or scales, over a scale."""
        if self.division == "division":
            return numbers / scale
        if self.division == "reciprocal":
            return numbers * (np.float32(1) / scale)
        # As OpenVINO's FakeQuantize: 255 steps from the least number to the largest.
        low, high = (np.float32(limit) * scale for limit in RANGES[stored])
        return numbers * (np.float32(255) / (high - low))

    def _factors(self, given: Operands) -> tuple[Array, np.float32 | None]:
        """The factors of the sum, and of the residual."""
        wide = given.product.astype(np.float64)
        if given.scale is None or self.quotient == "number":
            factor = _f32(wide / given.divisor) if given.divisor > 1 else given.product
            return factor, given.residual_scale
        if given.divisor > 1 and self.division == "division":  # rounded once
            return _f32(wide / (given.divisor * np.float64(given.scale))), None
        factor = self.quotient_of(given.product, given.scale, given.stored)
        if given.divisor > 1:
            factor = factor / np.float32(given.divisor)
        unit = given.residual_scale
        if unit is not None:
            unit = np.float32(self.quotient_of(np.asarray(unit), given.scale, given.stored))
        return factor, unit

    def _with_residual(self, value: Array, given: Operands, unit: np.float32 | None) -> Array:
        if given.residual is None or unit is None:
            return value
        if self.fused in ("residual", "both"):
            return _f32(given.residual * np.float64(unit) + value)
        return value + _f32(given.residual) * unit


@cache
def arithmetics(residual: bool, sums: bool) -> tuple[Arithmetic, ...]:
    """Every arithmetic that can differ, the fewest departures first.

    residual: there is one. sums: there is a bias, so more than a quotient.
    """
    biases = ("integer", "scaled", "number") if sums else ("integer",)
    fused = ("nothing", "sum", "residual", "both") if residual else ("nothing", "sum")
    orders = ("last", "before the bias") if residual else ("last",)
    found = [
        Arithmetic(quotient, division, bias, contracted, order, ties, limits)
        for quotient, division, bias, contracted, order, ties, limits in product(
            ("multiplier", "number"),
            ("division", "reciprocal", "reciprocal of the range"),
            biases,
            fused if sums else ("nothing",),
            orders,
            ("even", "away from zero", "up"),
            ("last", "before ReLU", "symmetric"),
        )
        if bias != "integer" or (contracted not in ("sum", "both") and order == "last")
    ]
    return tuple(sorted(found, key=lambda one: len(one.departures())))


@dataclass(frozen=True)
class Explained:
    """Why an output differs from the specification, elements by class.

    arithmetic: one that gives every element of the output, also those that do not differ;
    "as specified" where none differs, `IN_FLOAT32` where elements are explained by float32 sums,
    empty where no single one was found. moved: how far float32 sums must have moved a number, at
    most, for the elements that they explain; in units of the output.
    """

    classes: Counter[str]
    arithmetic: str
    moved: float = 0.0

    @property
    def unexplained(self) -> int:
        return self.classes[UNEXPLAINED]


def explain(
    given: Operands,
    got: Array,
    *,
    sums: bool = True,
    saturated: Callable[[], Mapping[str, Array]] = dict,
) -> tuple[Array, Explained]:
    """The elements of an output (float64) that differ from the specification, and why.

    sums:      there is a bias, so more than a quotient.
    saturated: what pairs of products that saturate add to the totals, in each order that a library
               may have, by name; called only if exact sums leave an element unexplained.
    """
    wrong, found = _explain(given, got, sums)
    if not found.unexplained:
        return wrong, found
    best = wrong, found
    for name, extra in saturated().items():
        other = _explain_saturated(given, got, sums, name, extra)
        if other[1].unexplained < best[1].unexplained:
            best = other
    return best


def _explain_saturated(
    given: Operands, got: Array, sums: bool, name: str, extra: Array
) -> tuple[Array, Explained]:
    """`explain`, for a library whose products are added in these pairs throughout the layer."""
    wrong = got != Arithmetic().outputs(given)
    others = replace(given, total=given.total + extra, magnitude=given.magnitude + np.abs(extra))
    return from_others(PAIRS, name, wrong, _explain(others, got, sums, others.total != given.total))


def from_others(
    kind: str, name: str, wrong: Array, judged: tuple[Array, Explained]
) -> tuple[Array, Explained]:
    """The reasons of an output that follows from other sums than the dump's values give.

    kind: the class of an element that differs for that reason alone. name: of how the sums are
    made. wrong: the elements that do not follow from the dump's sums. judged: the reasons by the
    other sums. An element that follows from the dump's sums, but not from the others, is wrong too.
    """
    differ, found = judged
    classes = Counter(found.classes)
    classes[kind] += int((wrong & ~differ).sum())
    words = [name, *([found.arithmetic] if found.arithmetic != SPECIFIED else [])]
    how = ", ".join(words) if found.arithmetic else ""
    return wrong | differ, Explained(+classes, how, found.moved)


def _explain(
    given: Operands, got: Array, sums: bool, short: Array | None = None
) -> tuple[Array, Explained]:
    """`explain`, for these totals. short: elements whose totals saturated, which is a class too."""
    wrong = got != Arithmetic().outputs(given)
    if not wrong.any():
        return wrong, Explained(Counter(), SPECIFIED)
    some, values = given.at(wrong), got[wrong]
    saturates = np.zeros(values.shape, bool) if short is None else short[wrong]
    open_ = np.ones(values.shape, bool)
    classes: Counter[str] = Counter()
    for one in arithmetics(given.residual is not None, sums):
        right = one.outputs(some) == values
        hits = right & open_
        few = len(one.departures()) <= FEW
        if few and right.all() and np.array_equal(one.outputs(given), got):
            # One arithmetic for all of it: that is how the library computes.
            return wrong, Explained(_counted(one.classes, right, saturates), one.name)
        classes += _counted(one.classes, hits, saturates)
        open_ &= ~right
    in_float, far = _by_float_sums(some, values)
    everywhere, _ = _by_float_sums(given, got)
    if everywhere.all():
        # All elements are those of a sum in float32, in an order that only the library knows.
        return wrong, Explained(_counted((ROUNDING,), in_float, saturates), IN_FLOAT32, far)
    late = open_ & in_float
    classes += _counted((ROUNDING,), late, saturates)
    classes[UNEXPLAINED] += int((open_ & ~in_float).sum())
    return wrong, Explained(+classes, "", far if late.any() else 0.0)


def _counted(names: Sequence[str], places: Array, saturates: Array) -> Counter[str]:
    """Elements of one class; of those whose sums saturate it is a second reason."""
    both, alone = int((places & saturates).sum()), int((places & ~saturates).sum())
    return +Counter({" and ".join(names): alone, " and ".join((PAIRS, *names)): both})


def quotients(numbers: Array, scale: np.float32, stored: str) -> Iterator[tuple[Arithmetic, Array]]:
    """Each arithmetic and its answer, the fewest departures first, the specification's to begin
    with.

    An answer is numbers (float32) over a scale, rounded and saturated, as float64.
    """
    given = Operands(numbers, numbers, numbers, 1, np.ones(1, np.float32), scale, stored)
    divisions = ("division", "reciprocal", "reciprocal of the range")
    ways = [
        Arithmetic(division=division, ties=ties)
        for ties in ("even", "away from zero", "up")
        for division in divisions
    ]
    ways += [
        Arithmetic(division=division, bias="scaled", fused=fused)
        for fused in ("nothing", "sum")
        for division in divisions[1:]
    ]
    for way in sorted(ways, key=lambda one: len(one.departures())):
        if way.bias == "scaled":
            yield way, _shifted(numbers, way, given)
        else:
            yield way, _stored(way.quotient_of(numbers, scale, stored), given, way.ties)


def explain_quotient(
    numbers: Array, scale: np.float32, stored: str, got: Array
) -> tuple[Array, Explained]:
    """`explain`, for numbers (float32) that are only divided by a scale and rounded."""
    others = quotients(numbers, scale, stored)
    _, specified = next(others)
    wrong = got != specified
    if not wrong.any():
        return wrong, Explained(Counter(), SPECIFIED)
    classes: Counter[str] = Counter()
    open_ = wrong.copy()
    for way, answer in others:
        if np.array_equal(answer, got):
            found = Counter({" and ".join(way.classes): int(wrong.sum())})
            return wrong, Explained(found, way.name)
        hits = open_ & (answer == got)
        classes[" and ".join(way.classes)] += int(hits.sum())
        open_ &= ~hits
    classes[UNEXPLAINED] += int(open_.sum())
    return wrong, Explained(+classes, "")


def _shifted(numbers: Array, way: Arithmetic, given: Operands) -> Array:
    """As a FakeQuantize node does: it subtracts the least integer in float32 before it rounds.

    With a reciprocal of the range, it subtracts the least number times that reciprocal: in float32
    the product may be no integer.
    """
    assert given.scale is not None
    low = RANGES[given.stored][0]
    unit = way.quotient_of(np.ones((), np.float32), given.scale, given.stored)
    least: Array = np.full((), low, np.float32)
    if way.division == "reciprocal of the range":
        least = least * given.scale * unit
    product = numbers.astype(np.float64) * unit
    counted = _f32((product if way.fused == "sum" else _f32(product)) - np.float64(least))
    found: Array = np.clip(np.rint(counted.astype(np.float64)) + low, *RANGES[given.stored])
    return found


def _by_float_sums(given: Operands, got: Array) -> tuple[Array, float]:
    """A mask of the elements that a float32 sum may give, in any order; the furthest it moved
    one."""
    exact, bound = exact_and_bound(given)
    if given.scale is None:
        return np.abs(got - exact) <= bound, 0.0
    low, high = (_stored(exact + side, given) for side in (-bound, bound))
    inside = (low <= got) & (got <= high)
    moved = np.abs(np.clip(exact, *RANGES[given.stored]) - got) - 0.5  # beyond the tie between them
    found = moved[inside & (_stored(exact, given) != got)]
    return inside, float(found.max(initial=0.0))


def exact_and_bound(given: Operands) -> tuple[Array, Array]:
    """The output before it is rounded, and how far float32 sums in any order may be from it.

    Each of n products and a bias is off by a few roundings, and so is their sum in any order:
    γ_{n+k} · Σ|w·x|, with k the roundings of scales, residual and quotient (Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, §3.1). In float64, which adds 2⁻⁵⁰ of it.
    """
    unit = given.product.astype(np.float64) / given.divisor
    exact, size = given.total * unit, given.magnitude * unit
    if given.residual is not None and given.residual_scale is not None:
        added = given.residual * np.float64(given.residual_scale)
        exact, size = exact + added, size + np.abs(added)
    if given.relu:
        exact = np.maximum(exact, 0)
    if given.scale is not None:
        exact, size = exact / np.float64(given.scale), size / np.float64(given.scale)
    steps = (given.terms + OTHERS) * UNIT
    return exact, size * (steps / (1 - steps)) * (1 + 2.0**-50)


def _stored(numbers: Array, given: Operands, ties: str = "even", limits: str = "last") -> Array:
    """Rounded and saturated, as float64."""
    wide = numbers.astype(np.float64)
    match ties:
        case "even":
            found = np.rint(wide)
        case "up":
            found = np.floor(wide + 0.5)
        case _:
            found = np.copysign(np.floor(np.abs(wide) + 0.5), wide)
    low, high = RANGES[given.stored]
    if limits == "before ReLU":
        low, high = RANGES["int8"]
    if limits == "symmetric":
        low = max(low, -127)
    found = np.clip(found, low, high)
    return np.maximum(found, 0) if given.relu else found


def _f32(array: Array) -> Array:
    found: Array = np.asarray(array).astype(np.float32)
    return found


__all__ = [
    "AGAIN",
    "CLASSES",
    "PAIRS",
    "TIE",
    "UNEXPLAINED",
    "Arithmetic",
    "Explained",
    "Operands",
    "arithmetics",
    "exact_and_bound",
    "explain",
    "explain_quotient",
    "from_others",
    "quotients",
]
