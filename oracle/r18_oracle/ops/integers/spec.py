"""The base of the specs of quantised ops: problems made of the float op's, and drawn integers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, cycle, product
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.errors import ShapeError
from r18.graph.ops import Op, Problem, Shape, WeightSpec
from r18.graph.quantized import LIMITS, MOST_SUM
from r18_oracle.ops.integers.requantize import RANGES
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng

O = TypeVar("O", bound=Op)  # noqa: E741

BITS = (8, 4, 2)
"""The bits of a weight, by the number `narrow`: 8 is the simplest."""

NUMBERS: dict[str, tuple[int, ...]] = {
    "narrow": (0, 1, 2),
    "signed": (0, 1),
    "signed_residual": (0, 1),
}
"""The possible settings of an op: how narrow a weight is (`BITS`), and whether the image, and the
residual, are int8 and not uint8."""

IMAGES = ("int8", "pixels", "numbers")
"""The source of an op's integers, by the number `image`: int8 is taken as it is."""

DRAWN = {
    "signed": st.integers(0, 1),
    "signed_residual": st.integers(0, 1),
    "narrow": st.sampled_from((0, 0, 1, 2)),
    "wide": st.sampled_from((0, 0, 0, 1)),
    "image": st.integers(0, len(IMAGES) - 1),
    "scaled": st.integers(0, 1),
}
"""How each number is drawn. `wide` says that values are float32, as a relayout's may be; `image`
is an index of `IMAGES`; `scaled` says that a scaled op's image is float32."""


FULL = 4
"""The channels with the largest sums of all."""


def pairwise(numbers: Mapping[str, Sequence[int]]) -> tuple[Numbers, ...]:
    """Few settings in which each two values of any two numbers occur together; always the same.

    Greedy: each one has as many pairs as any that the earlier ones do not have. The first has the
    first value of every number.
    """

    def pairs(row: Numbers) -> set[tuple[tuple[str, int], ...]]:
        return set(combinations(row.items(), min(2, len(row))))

    rows = [dict(zip(numbers, values, strict=True)) for values in product(*numbers.values())]
    missing = set().union(*map(pairs, rows))
    found: list[Numbers] = []
    while missing:
        found.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(found[-1])
    return tuple(found)


SETTINGS = pairwise(NUMBERS)
"""The settings of the corners, in turn."""


class QuantizedSpec(OpSpec[O]):
    """A quantised op with the problems of another op, which is the one that it quantises.

    inner: that op's spec. chosen: the numbers of `DRAWN` that a problem has in addition to its own.
    """

    algorithms = ("integer",)
    indexed = True
    inner: OpSpec[Any]
    chosen: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def part(self, op: O) -> Op:
        """The op that it quantises."""

    @abstractmethod
    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        """A problem of the inner op, quantised; the op ignores settings that it does not have.

        Raises `ShapeError`.
        """

    def settings(self, op: O) -> Numbers:
        """The settings in `chosen` that the op has."""
        return {}

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Every kind of input has an exact result: `bound` asks for equality."""
        return False

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        settings = st.fixed_dictionaries({name: DRAWN[name] for name in self.chosen})
        return st.builds(self.quantized, self.inner.draw(kernel, most, macs), settings)

    def _in_turn(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        for problem, settings in zip(problems, cycle(SETTINGS), strict=False):
            try:
                yield self.quantized(problem, settings)
            except ShapeError:  # more products than a sum holds
                continue

    def corners(self) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.corners())

    def ordinary(self, kernel: Kernel) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.ordinary(kernel))

    def many(self) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.many())

    def many_tiles(self) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.many_tiles())

    def vast(self) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.vast())

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.crossings(kernel, size))

    def beyond(self, choice: Kernel) -> Iterator[Problem]:
        yield from self._in_turn(self.inner.beyond(choice))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        for near in self.inner.nearby(self._inside(problem)):
            with suppress(ShapeError):  # more products than a sum holds
                yield self.quantized(near, self.settings(problem.op))  # type: ignore[arg-type]

    def numbers(self, problem: Problem) -> Numbers:
        settings = self.settings(problem.op)  # type: ignore[arg-type]
        return self.inner.numbers(self._inside(problem)) | settings

    def rebuild(self, op: O, numbers: Numbers) -> Problem:
        settings = {name: numbers[name] for name in self.settings(op)}
        return self.quantized(self.inner.rebuild(self.part(op), numbers), settings)

    def _inside(self, problem: Problem) -> Problem:
        return Problem(self.part(problem.op), problem.inputs)  # type: ignore[arg-type]

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        return self.inner.meeting(self._inside(problem), rng)


def stored(settings: Numbers, name: str = "signed") -> str:
    return "int8" if settings[name] else "uint8"


def whole(rng: Rng, shape: Shape, stored: str) -> Array:
    """Any integers of a storage format."""
    low, high = RANGES[stored]
    return rng.integers(low, high + 1, shape).astype(np.float64)


def ends(rng: Rng, shape: Shape, stored: str) -> Array:
    """Both ends of a storage format, what is next to them, 0 and 1."""
    low, high = RANGES[stored]
    return rng.choice([low, low + 1, 0, 1, high - 1, high], shape).astype(np.float64)


def upper(rng: Rng, shape: Shape, stored: str) -> Array:
    """The upper half of a storage format: what a signed byte cannot hold, of uint8."""
    _, high = RANGES[stored]
    return rng.integers((high + 1) // 2, high + 1, shape).astype(np.float64)


def small(rng: Rng, shape: Shape, stored: str, most: int) -> Array:
    """Integers of small magnitude, the rest of them 0."""
    low = 0 if stored == "uint8" else -most
    return rng.integers(low, most + 1, shape) * (rng.random(shape) < 0.5).astype(np.float64)


def weight(rng: Rng, shape: Shape, bits: int) -> Array:
    """Any integers that weights with this number of bits hold: they are symmetric."""
    most = LIMITS[bits]
    return rng.integers(-most, most + 1, shape).astype(np.float64)


def counted(shape: Shape, most: int = 125) -> Array:
    """1, 2, … most, repeated, with a period that divides no usual extent."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % most) + 1.0


def multipliers(rng: Rng, shape: Shape, typical: float) -> Array:
    """Multipliers that bring sums of a typical size to that of a byte; none is a power of two."""
    drawn = rng.uniform(0.3, 3.0, shape) * 48 / max(typical, 1.0)
    found: Array = drawn.astype(np.float32).astype(np.float64)
    return found


def powers(rng: Rng, shape: Shape, low: int, high: int) -> Array:
    """Powers of two from 2^low to 2^high."""
    return np.exp2(rng.integers(low, high + 1, shape).astype(np.float64))


def room(depth: int, bits: int) -> int:
    """The largest bias whose sum with `depth` products of bytes and weights fits in int32."""
    return MOST_SUM - depth * 255 * LIMITS[bits]


def biases(rng: Rng, shape: Shape, most: float) -> Array:
    most = max(1.0, min(most, MOST_SUM))
    return np.rint(rng.uniform(-most, most, shape))


def counted_weights(weight: WeightSpec) -> Array:
    """Integers around 0 that its bits hold."""
    return (counted(weight.shape, 39) - 20).clip(-weight.limit, weight.limit)


def impulse(
    spec: QuantizedSpec[Any],
    problem: Problem,
    rng: Rng,
    variant: int,
    pixels: Callable[[Shape], Array] = counted,
    taps: Callable[[WeightSpec], Array] = counted_weights,
) -> Arrays:
    """As in `r18_oracle.generate.inputs`: one pixel and one weight, or all of one of them.

    pixels, taps: make all of them.
    """
    (weight, *_) = problem.op.weights()
    x, w = np.zeros(problem.inputs[0]), np.zeros(weight.shape)
    met = spec.meeting(problem, rng)
    assert met is not None
    pixel, tap = met
    if variant % 3 == 1:
        x[...] = pixels(x.shape)
    else:
        x[pixel] = 3
    if variant % 3 == 2:
        w[...] = taps(weight)
    else:
        w[tap] = 1
    return x, w


class _Asked:
    """A kernel of an op's form as the spec of the op asks it: refusals of the form's problems."""

    def __init__(self, kernel: Kernel, forms: Callable[[Problem], Iterable[Problem]]) -> None:
        self._kernel, self._forms = kernel, forms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def refusal(self, problem: Problem) -> str | None:
        found: str | None = None
        for form in self._forms(problem):
            found = self._kernel.refusal(form)
            if found is None:
                return None
        return found


def asked(kernel: Kernel, forms: Callable[[Problem], Iterable[Problem]]) -> Kernel:
    """The kernel as another op's spec asks it; it takes a problem if it takes one of its forms."""
    return cast(Kernel, _Asked(kernel, forms))


def largest(
    rng: Rng, image: Shape, stored: str, weight: WeightSpec, bits: int, *, both_signs: bool
) -> Arrays:
    """The largest sums: pixels, weights and biases.

    Every pixel is the largest of its format in magnitude. So are the weights of the first `FULL`
    channels, whose bias takes the sum to an end of int32 if pixels are uint8. Other channels have
    weights of the largest and the second largest magnitude, so that sums have low bits, and half of
    them have no bias. The sums are positive, or every second one negative with `both_signs`.
    """
    low, high = RANGES[stored]
    pixel = float(low or high)
    channels, limit = weight.shape[0], LIMITS[bits]
    w = limit - rng.integers(0, 2, weight.shape).astype(np.float64)
    w[:FULL] = limit
    most = room(math.prod(weight.shape[1:]), bits)
    bias = np.where(rng.random(channels) < 0.5, 0.0, np.rint(rng.uniform(0, most, channels)))
    bias[:FULL] = most
    sign = np.where(np.arange(channels) % 2 * both_signs, -1.0, 1.0)
    w *= (np.sign(pixel) * sign).reshape(-1, *[1] * (w.ndim - 1))
    return np.full(image, pixel), w, bias * sign


__all__ = [
    "SETTINGS",
    "Arrays",
    "QuantizedSpec",
    "biases",
    "counted",
    "ends",
    "impulse",
    "largest",
    "multipliers",
    "pairwise",
    "powers",
    "room",
    "small",
    "stored",
    "upper",
    "weight",
    "whole",
]
