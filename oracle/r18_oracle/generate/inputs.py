"""The kinds of input: exact integers, impulses, four rounding kinds, and the edges of the format.

Every array is drawn in float64 from a seed and then rounded to the kernel's storage format.
`kinds_for` omits kinds that say nothing about an op (exact integers and a square root).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np

from r18.backend import Array, Kernel
from r18.errors import unknown
from r18.graph.ops import Problem
from r18.graph.precision import holder_of
from r18_oracle.cases import Case
from r18_oracle.judge.roundings import FORMATS, PAIR
from r18_oracle.ops.spec import Arrays, Draw, Rng, pick
from r18_oracle.ops.table import spec_of

ROUNDING = ("normal", "positive", "cancelling", "wide")
KINDS = ("exact", "impulse", *ROUNDING, "edges")

# Integers up to 2^p are exact in a format whose significand has p bits.
_INTEGERS = {
    "float64": 2**30,
    "float32": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
    "float8_e4m3fn": 2**4,
    "tf32": 2**11,
    PAIR: 2**11,  # in the first half alone; see `_long`
}

LONG = 2**13
"""The largest long integer: 3 in 4 of those above 2¹¹ need the second half of a pair."""


def kinds_for(kernel: Kernel, problem: Problem) -> tuple[str, ...]:
    """The kinds of input that this kernel can be judged on for this problem."""
    spec = spec_of(problem.op)
    unfit: set[str] = set()
    if not spec.exact(problem, kernel.contract.algorithm):
        unfit.add("exact")
    if not spec.indexed:
        unfit.add("impulse")
    return tuple(kind for kind in KINDS if kind not in unfit)


def make_case(kernel: Kernel, problem: Problem, kind: str, seed: int, variant: int = 0) -> Case:
    """The case of this kind, seed and variant for a kernel; always the same arrays.

    Raises `UnknownName` for an unknown kind.
    """
    makers: dict[str, Callable[[Kernel, Problem, Rng], tuple[Arrays, Arrays]]] = {
        "exact": lambda k, p, g: _exact(k, p, g, variant),
        "impulse": lambda k, p, g: _impulse(k, p, g, variant),
        "normal": lambda k, p, g: _random(p, g, lambda s: g.standard_normal(s)),
        "positive": lambda k, p, g: _random(p, g, lambda s: g.random(s)),
        "cancelling": _cancelling,
        "wide": _wide,
        "edges": lambda k, p, g: _edges(k, p, g, variant),
    }
    if kind not in makers:
        raise unknown("kind of input", kind, makers)
    rng = np.random.default_rng([seed, KINDS.index(kind), variant])
    given = spec_of(problem.op).given(problem, kind, rng, variant)
    if given is not None:
        return Case.of(kernel, problem, *given)
    return Case.of(kernel, problem, *makers[kind](kernel, problem, rng))


class Cases:
    """Cases that `make_case` has made, up to a limit in bytes.

    The kernels of one op and precision get the same corners and the same problems of the network,
    one kernel after another in a worker. The first cases stay until the op or the precision
    changes: what is read in the same order each time must not be dropped in that order.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: Hashable = None
        self._nbytes = 0
        self._known: dict[Hashable, Case] = {}

    def made(self, kernel: Kernel, problem: Problem, kind: str, seed: int, variant: int) -> Case:
        """The case from `make_case`, with arrays that are shared and must not be written to."""
        if (kernel.op, kernel.precision) != self._of:
            self.clear()
            self._of = kernel.op, kernel.precision
        key: tuple[Hashable, ...] = problem, kind, seed, variant
        if kind == "exact":  # the only kind that depends on the contract
            contract = kernel.contract
            key += contract.algorithm, contract.accumulate, contract.output, contract.fraction
        case = self._known.get(key)
        if case is None:
            case = make_case(kernel, problem, kind, seed, variant)
            nbytes = sum(array.nbytes for array in (*case.inputs, *case.weights))
            if self._nbytes + nbytes > self._most:
                return case
            self._known[key] = case
            self._nbytes += nbytes
        return replace(case)  # without what it has widened to float64

    def clear(self) -> None:
        """Forget them all, as after a fault that may have written to their arrays."""
        self._known.clear()
        self._nbytes = 0


CASES = Cases(192 << 20)  # all that is drawn, and ResNet-18's convolutions in fp32 at batch 1


def fewest_variants(kernel: Kernel, problem: Problem, kind: str) -> int:
    """How many sets of inputs it takes to show what a kind can show."""
    if kind == "impulse":
        return IMPULSES * len(spec_of(problem.op).summands(problem))
    fewest = spec_of(problem.op).variants(kind)
    if kind != "exact":
        return fewest
    if _splits(kernel):
        return fewest * LONGS * len(spec_of(problem.op).summands(problem))
    return fewest * (ROUNDED if _rounds(kernel) else 1)


def _splits(kernel: Kernel) -> bool:
    """Whether the kernel may split factors into pairs, and its sums hold what the second half of
    one adds."""
    room = _INTEGERS[kernel.contract.accumulate] // 2
    return spec_of(kernel.op).products and kernel.precision.splits and room >= LONG


def _rounds(kernel: Kernel) -> bool:
    """Whether outputs are rounded to a narrower format than they are stored in."""
    return holder_of(kernel.contract.output).name != kernel.contract.output


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    return [spec.shape for spec in problem.op.weights()]


def _random(problem: Problem, rng: Rng, draw: Draw) -> tuple[Arrays, Arrays]:
    """Activations of one distribution; weights scaled so that outputs keep their size (He)."""
    spec = spec_of(problem.op)
    inputs = tuple(draw(shape) for shape in problem.inputs)
    return inputs, spec.weights(problem, rng, draw, math.sqrt(2 / spec.depth(problem.op)))


# -- exact -------------------------------------------------------------------------------------


def _exact(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """Integers such that every partial sum, in any order, is exact in the accumulator.

    With b bits of integers in the accumulator and a and w the largest |x| and |w|, K·a·w plus the
    addends is at most 2^b. Where the output format is narrower than that, the values are few and
    small, so that most results need no rounding, which could hide a lost product. Outputs that are
    rounded to tf32, which no dtype enforces, need it in every other variant (`ROUNDED`). Split
    factors have a second half in two variants of three (`_long`).
    """
    spec = spec_of(problem.op)
    room = min(_INTEGERS[kernel.contract.accumulate], 2**40)
    if kernel.contract.fraction:
        room = min(room, 2 ** (kernel.contract.fraction + 1))
    factor = _INTEGERS[kernel.precision.multiply]
    stored = _INTEGERS[kernel.contract.output]
    if _rounds(kernel) and variant // spec.variants("exact") % ROUNDED:
        stored = room
    depth = spec.depth(problem.op)
    unit = 1
    if kernel.contract.algorithm == "winograd_f2x2":
        # G g Gᵀ divides by 4, so weights are multiples of 4. The transforms grow |x| by 4, |w| by
        # 9/4 (so a transformed weight is at most 9 times the integer), the output by 9.
        unit, room, factor = 4, room // 81, factor // 9
    largest = min(math.isqrt(max(1, room // (2 * unit * (depth + 1)))), factor, stored)
    largest = min(largest, room // spec.terms(problem))
    density = 1.0
    if stored < room:
        largest = 1 if depth > 1 else min(largest, stored // 4)
        density = min(1.0, stored / 4 / math.sqrt(depth * max(1, largest) ** 2))

    def integers(shape: tuple[int, ...], most: int, thin: float = 1.0) -> Array:
        values = rng.integers(-max(1, most), max(1, most) + 1, shape).astype(np.float64)
        return values * (rng.random(shape) < thin)

    addend = max(1, min(largest, stored // 4))
    multiplied = {summand.input for summand in spec.summands(problem)}
    inputs = [
        integers(shape, largest, math.sqrt(density))
        if place in multiplied
        else integers(shape, addend)
        for place, shape in enumerate(problem.inputs)
    ]
    weights = [
        integers(shape, largest, math.sqrt(density)) * unit
        if len(shape) > 1
        else integers(shape, addend)
        for shape in _shapes(problem)
    ]
    if _splits(kernel) and variant % LONGS:
        summands = spec.summands(problem)
        summand = summands[variant // LONGS % len(summands)]
        shapes = inputs[summand.input].shape, weights[summand.weight].shape
        inputs[summand.input], weights[summand.weight] = _long(
            *shapes, rng, room, of_weights=variant % LONGS == 2
        )
    return spec.exact_inputs(problem.op, inputs, weights, rng, variant)


ROUNDED = 2
"""Variants of integers for outputs in tf32: most need no rounding; most need it."""

LONGS = 3
"""Variants of integers for the split factors of a sum of products: both short; long pixels; long
weights."""


def _long(
    image: tuple[int, ...], shape: tuple[int, ...], rng: Rng, room: int, *, of_weights: bool
) -> tuple[Array, Array]:
    """Pixels and weights, one of them with a second half, such that sums are exact in every order.

    Only one, because kernels omit the product of two second halves. Each output has as many
    non-zero weights as there is room for: n of them, with the short factor at most s, add up to
    n·s·LONG ≤ room/2. The first halves of long integers are at most LONG; the second halves are
    multiples of 2¹¹, as are all sums of them.
    """
    depth = math.prod(shape[1:])
    kept = min(depth, room // 2 // LONG)
    short = min(room // 2 // LONG // kept, 2**11)

    def integers(extents: tuple[int, ...], most: int) -> Array:
        return rng.integers(-most, most + 1, extents).astype(np.float64)

    weight = integers((shape[0], depth), LONG if of_weights else short)
    if kept < depth:
        weight *= rng.random(weight.shape).argsort(axis=1) < kept
    return integers(image, short if of_weights else LONG), weight.reshape(shape)


# -- impulses ----------------------------------------------------------------------------------


IMPULSES = 3
"""Variants of impulse for a sum of products: one pixel and one weight; one weight; one pixel."""


def _impulse(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """One pixel and one weight whose product is in one output: an index error moves the value.

    Or one weight and all pixels, each different, which must come out in their places; or one pixel
    and all weights. The variants take several sums of products in turn. Split factors have values
    whose halves both tell one from another.
    """
    whole = 1 + 2.0**-12 if _splits(kernel) else 1.0
    inputs = [np.zeros(shape) for shape in problem.inputs]
    weights = [np.zeros(shape) for shape in _shapes(problem)]
    spec = spec_of(problem.op)
    summands = spec.summands(problem)
    summand = summands[variant // IMPULSES % len(summands)]
    met = spec_of(summand.problem.op).meeting(summand.problem, rng)
    if met is None:  # no weights: a single pixel, or all of them
        inputs[0][...] = _all_different(inputs[0].shape)
        if not spec.shuffles and variant % IMPULSES != 1:
            inputs[0][...] = 0
            inputs[0][pick(rng, inputs[0].shape)] = 3.0
        return tuple(inputs), ()
    pixel, weight = met
    pixels, filters = inputs[summand.input], weights[summand.weight]
    if variant % IMPULSES == 1:
        pixels[...] = _all_different(pixels.shape) * whole
    else:
        pixels[pixel] = 3.0
    if variant % IMPULSES == 2:
        filters[...] = _all_different(filters.shape) * whole
    else:
        filters[weight] = 2.0
    return tuple(inputs), tuple(weights)


def _all_different(shape: tuple[int, ...]) -> Array:
    """1, 2, … 251, repeated: exact in every format, with a period that divides no usual extent."""
    return (np.arange(math.prod(shape)).reshape(shape) % 251) + 1.0


# -- rounding ----------------------------------------------------------------------------------


def _cancelling(kernel: Kernel, problem: Problem, rng: Rng) -> tuple[Arrays, Arrays]:
    """Large terms whose sum nearly vanishes, each op in its own way."""
    drawn = _random(problem, rng, lambda shape: rng.standard_normal(shape))
    return spec_of(problem.op).cancelling(*drawn)


def _wide(kernel: Kernel, problem: Problem, rng: Rng) -> tuple[Arrays, Arrays]:
    """Magnitudes over many binades, as far as sums of the format stay finite."""
    narrow = kernel.precision.storage in ("float16", "float8_e4m3fn")
    low, high = (-8.0, 4.0) if narrow else (-30.0, 12.0 if _splits(kernel) else 20.0)

    def draw(shape: tuple[int, ...]) -> Array:
        values: Array = rng.standard_normal(shape) * np.exp2(rng.uniform(low, high, shape))
        return values

    return spec_of(problem.op).wide(problem, *_random(problem, rng, draw), rng)


# -- edges -------------------------------------------------------------------------------------


def _edges(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """Normal values with a few of the format's edges among them.

    Activations get ±0, subnormals, the smallest normal, NaN, the largest value, ±Inf; weights get
    only zeros and subnormals (a non-finite weight meets every pixel, padding included). They are
    few, so that most outputs stay ordinary; ops may add edges of their own (a variance of 0, or
    little else than −Inf for max-pooling). Split factors have more edges: the largest that can be
    split, and values with a subnormal or zero half.
    """
    spec = spec_of(problem.op)
    inputs, weights = _random(problem, rng, lambda shape: rng.standard_normal(shape))
    stored = FORMATS[kernel.precision.storage]
    tame = np.array([0.0, -0.0, stored.eta, -stored.eta, stored.tiny, -stored.tiny])
    of_weights = tame
    if kernel.precision.flush_to_zero:  # a subnormal weight times an infinity would be NaN
        of_weights = np.array([0.0, -0.0])
    largest = stored.largest
    if _splits(kernel):
        largest = FORMATS["float16"].largest
        tame = np.array([*tame, *(s * 2.0**e for s in (1, -1) for e in (-13, -14, -24, -25, -35))])
    wild = np.array([largest, -largest, np.inf, -np.inf])
    only = spec.only_edges(problem.op, inputs, weights, rng, variant, stored.tiny)
    if only is not None:
        return only
    for array in inputs:
        flat = array.reshape(-1)
        spec.flood(flat, rng)
        _scatter(rng, flat, tame)
        for value in [np.nan, *rng.permutation(wild)][: min(4, max(1, flat.size // 8))]:
            flat[rng.integers(flat.size)] = value if rng.random() < 0.8 else 1.0
    for array in weights:
        if array.ndim > 1:
            _scatter(rng, array.reshape(-1), of_weights)
    spec.edge_weights(weights, rng)
    return inputs, weights


def _scatter(rng: Rng, flat: Array, values: Array) -> None:
    """Write random ones of these values to a sixteenth of the elements, at least one."""
    count = max(1, flat.size // 16)
    flat[rng.integers(flat.size, size=count)] = rng.choice(values, count)
