"""The kinds of input: exact integers, impulses, four rounding kinds, and the edges of the format.

Every array is made in float64 from a seed and then rounded to what the kernel stores. A kind that
says nothing about an op (exact integers and a square root) is not in `kinds_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from r18.backend import Array, Kernel
from r18.errors import unknown
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
    Relayout,
    Softmax,
    parts_of,
)
from r18_oracle.cases import Case
from r18_oracle.judge.bounds import FORMATS
from r18_oracle.judge.roundings import PAIR

ROUNDING = ("normal", "positive", "cancelling", "wide")
KINDS = ("exact", "impulse", *ROUNDING, "edges")

Arrays = tuple[Array, ...]
Rng = np.random.Generator

# Integers up to 2^p are exact in a format whose significand has p bits.
_INTEGERS = {
    "float64": 2**30,
    "float32": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
    "tf32": 2**11,
    PAIR: 2**11,  # in the first half alone; see `_long`
}

LONG = 2**13
"""Integers up to this need both halves of a pair, and 3 in 4 of the larger ones have a second."""


def kinds_for(kernel: Kernel, problem: Problem) -> tuple[str, ...]:
    """The kinds of input that this kernel can be judged on for this problem."""
    algorithm, op = kernel.contract.algorithm, problem.op
    unfit: set[str] = set()
    exact = algorithm in ("sum", "winograd_f2x2", "elementwise", "exact")
    if isinstance(op, GlobalAvgPool):
        count = problem.inputs[0][2] * problem.inputs[0][3]
        exact = algorithm == "mean" and count & (count - 1) == 0  # a power of two divides exactly
    if not exact:
        unfit.add("exact")
    if not isinstance(op, Conv2d | Linear | MaxPool2d | ConvMaxPool | Relayout | Normalize):
        unfit.add("impulse")  # nothing to index but the element itself
    return tuple(kind for kind in KINDS if kind not in unfit)


def make_case(kernel: Kernel, problem: Problem, kind: str, seed: int, variant: int = 0) -> Case:
    """The case of that kind, seed and variant, for a kernel; the same arrays every time.

    Raises `UnknownName` for a kind that does not exist.
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
    if isinstance(problem.op, Normalize) and kind in PIXELS:
        return Case.of(kernel, problem, (PIXELS[kind](problem.op, problem.inputs[0], rng),), ())
    return Case.of(kernel, problem, *makers[kind](kernel, problem, rng))


def fewest_variants(kernel: Kernel, problem: Problem, kind: str) -> int:
    """How many sets of inputs it takes to show what a kind can show of a problem to a kernel."""
    if kind == "impulse":
        return IMPULSES
    fewest = 2 if isinstance(problem.op, ConvMaxPool) and kind in ("exact", "edges") else 1
    return fewest * LONGS if kind == "exact" and _splits(kernel) else fewest


def _splits(kernel: Kernel) -> bool:
    """Whether factors may be split in pairs."""
    products = issubclass(kernel.op, Conv2d | ConvMaxPool | Linear)
    return products and kernel.precision.splits


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    return [spec.shape for spec in problem.op.weights()]


def _depth(problem: Problem) -> int:
    op = problem.op
    if isinstance(op, ConvMaxPool):
        op = op.conv
    if isinstance(op, Conv2d):
        return op.depth
    return op.in_features if isinstance(op, Linear) else 1


def _batchnorm_weights(rng: Rng, channels: int) -> Arrays:
    return (
        rng.uniform(0.5, 1.5, channels) * rng.choice([-1.0, 1.0], channels, p=[0.2, 0.8]),
        rng.standard_normal(channels),
        rng.standard_normal(channels),
        rng.uniform(0.1, 3.0, channels),
    )


def _random(
    problem: Problem, rng: Rng, draw: Callable[[tuple[int, ...]], Array]
) -> tuple[Arrays, Arrays]:
    """Activations of one distribution; weights scaled so that outputs keep their size (He)."""
    inputs = tuple(draw(shape) for shape in problem.inputs)
    if isinstance(problem.op, BatchNorm):
        return inputs, _batchnorm_weights(rng, problem.op.channels)
    scale = math.sqrt(2 / _depth(problem))
    return inputs, tuple(
        draw(shape) * (scale if len(shape) > 1 else 0.5) for shape in _shapes(problem)
    )


# -- exact -------------------------------------------------------------------------------------


def _exact(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """Integers such that every partial sum, in any order, is exact in the accumulator.

    With b bits of integers in the accumulator and a and w the largest |x| and |w|, K·a·w plus the
    addends stays at or under 2^b. Where the output format is narrower than that, the values are
    made few and small, so that most results need no rounding that could hide a lost product.
    Convolutions with their max-pooling get negative sums in every other variant. Factors that are
    split have a second half in two variants of three; see `_long`.
    """
    room = min(_INTEGERS[kernel.contract.accumulate], 2**40)
    factor = _INTEGERS[kernel.precision.multiply]
    stored = _INTEGERS[kernel.contract.output]
    depth = _depth(problem)
    unit = 1
    if kernel.contract.algorithm == "winograd_f2x2":
        # G g Gᵀ divides by 4, so weights are multiples of 4. The transforms grow |x| by 4, |w| by
        # 9/4 (so a transformed weight is at most 9 times the integer), the output by 9.
        unit, room, factor = 4, room // 81, factor // 9
    largest = min(math.isqrt(max(1, room // (2 * unit * (depth + 1)))), factor, stored)
    if isinstance(problem.op, GlobalAvgPool):
        largest = min(largest, room // math.prod(problem.inputs[0][2:]))
    density = 1.0
    if stored < room:
        largest = 1 if depth > 1 else min(largest, stored // 4)
        density = min(1.0, stored / 4 / math.sqrt(depth * max(1, largest) ** 2))

    def integers(shape: tuple[int, ...], most: int, thin: float = 1.0) -> Array:
        values = rng.integers(-max(1, most), max(1, most) + 1, shape).astype(np.float64)
        return values * (rng.random(shape) < thin)

    inputs = [integers(problem.inputs[0], largest, math.sqrt(density))]
    addend = max(1, min(largest, stored // 4))
    inputs += [integers(shape, addend) for shape in problem.inputs[1:]]
    if isinstance(problem.op, MaxPool2d):  # so that a padding of 0 would win
        inputs[0] = -np.abs(inputs[0]) - 1
    weights = [
        integers(shape, largest, math.sqrt(density)) * unit
        if len(shape) > 1
        else integers(shape, addend)
        for shape in _shapes(problem)
    ]
    if _splits(kernel) and variant % LONGS:
        inputs[0], weights[0] = _long(
            problem.inputs[0], weights[0].shape, rng, room, of_weights=variant % LONGS == 2
        )
    if isinstance(problem.op, ConvMaxPool) and variant % 2:
        return _negative_sums(problem.op, inputs[0], weights[0], rng)
    return tuple(inputs), tuple(weights)


LONGS = 3
"""Variants of integers for factors that are split: both short; long pixels; long weights."""


def _long(
    image: tuple[int, ...], shape: tuple[int, ...], rng: Rng, room: int, *, of_weights: bool
) -> tuple[Array, Array]:
    """Pixels and weights, one of them with a second half, such that all is exact in every order.

    The other has none: the product of two second halves is left out, and would be missed here.
    Each output has as many weights that are not zero as there is room for: n of them, with the
    short factor up to s, add up to n·s·LONG ≤ room/2. The first halves of long integers are no
    larger than LONG, the second ones multiples of 2¹¹, as all sums of them are.
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


def _negative_sums(op: ConvMaxPool, x: Array, weight: Array, rng: Rng) -> tuple[Arrays, Arrays]:
    """The same magnitudes, such that a padding of 0 would win, as a sum or as an output.

    No sum is above zero, and with a negative bias no output; but where a ReLU would then show
    nothing, a positive bias brings some above. Products add up to half of what is exact at most,
    and the bias is no larger.
    """
    if op.conv.relu and not op.conv.bias:
        return (x,), (weight,)
    size = np.abs(x).mean() * np.abs(weight).sum(axis=(1, 2, 3))
    bias = np.rint(size * rng.random(size.shape)) * (1 if op.conv.relu else -1)
    return (-np.abs(x),), (np.abs(weight), *([bias] if op.conv.bias else []))


# -- impulses ----------------------------------------------------------------------------------


IMPULSES = 3
"""Variants of impulse: one pixel and one weight; one weight; one pixel."""


def _impulse(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """One pixel and one weight that meet in one output: an index error moves the value.

    Or one weight, under which all pixels pass, each with a value of its own, and come out in their
    places; or one pixel, around which all weights come out. Values of factors that are split are
    such that each half tells one from the other.
    """
    whole = 1 + 2.0**-12 if _splits(kernel) else 1.0
    inputs = [np.zeros(shape) for shape in problem.inputs]
    weights = [np.zeros(shape) for shape in _shapes(problem)]
    op = problem.op
    if isinstance(op, ConvMaxPool):
        conv, pool = parts_of(problem)
        n, o, i, j = _pick(rng, problem.output)
        r, s = _pick(rng, op.pool.kernel_size)
        place = _pixel(op.pool, pool.inputs[0], (i, j), (r, s))
        pixel, weight = _meeting(op.conv, conv.inputs[0], (n, o, *place), rng)
    elif isinstance(op, Conv2d):
        pixel, weight = _meeting(op, problem.inputs[0], _pick(rng, problem.output), rng)
    elif isinstance(op, Linear):
        n, o = _pick(rng, problem.output)
        (k,) = _pick(rng, (op.in_features,))
        pixel, weight = (n, k), (o, k)
    else:  # no weights: one pixel alone, or all of them
        inputs[0][...] = _all_different(inputs[0].shape)
        if not isinstance(op, Relayout) and variant % IMPULSES != 1:
            inputs[0][...] = 0
            inputs[0][_pick(rng, inputs[0].shape)] = 3.0
        return tuple(inputs), ()
    if variant % IMPULSES == 1:
        inputs[0][...] = _all_different(inputs[0].shape) * whole
    else:
        inputs[0][pixel] = 3.0
    if variant % IMPULSES == 2:
        weights[0][...] = _all_different(weights[0].shape) * whole
    else:
        weights[0][weight] = 2.0
    return tuple(inputs), tuple(weights)


def _meeting(
    op: Conv2d, image: tuple[int, ...], output: tuple[int, ...], rng: Rng
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A pixel and a weight that meet in an output."""
    n, o, i, j = output
    c, r, s = _pick(rng, (op.in_channels, *op.kernel_size))
    return (n, c, *_pixel(op, image, (i, j), (r, s))), (o, c, r, s)


def _pixel(
    op: Conv2d | MaxPool2d, image: tuple[int, ...], output: tuple[int, int], tap: tuple[int, int]
) -> tuple[int, int]:
    """Row and column under a tap of an output's window.

    Of a tap in the padding, the nearest: which must then not be read through that tap.
    """
    row, column = (
        min(max(at * s - p + t, 0), extent - 1)
        for at, s, p, t, extent in zip(output, op.stride, op.padding, tap, image[2:], strict=True)
    )
    return row, column


def _all_different(shape: tuple[int, ...]) -> Array:
    """1, 2, 3, … in order, over again from 251: exact in every format, and prime to any extent."""
    return (np.arange(math.prod(shape)).reshape(shape) % 251) + 1.0


def _pick(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(rng.integers(extent)) for extent in shape)


# -- rounding ----------------------------------------------------------------------------------


def _cancelling(kernel: Kernel, problem: Problem, rng: Rng) -> tuple[Arrays, Arrays]:
    """Large terms whose sum nearly vanishes: activations around 100, weights of mean zero."""
    inputs, weights = _random(problem, rng, lambda shape: rng.standard_normal(shape))
    if isinstance(problem.op, Conv2d | ConvMaxPool | Linear):
        first = weights[0]
        axes = tuple(range(1, first.ndim))
        centred = first - first.mean(axis=axes, keepdims=True)
        return (inputs[0] + 100.0, *inputs[1:]), (centred, *weights[1:])
    if isinstance(problem.op, Add):
        return (inputs[0] + 100.0, inputs[1] - 100.0), weights
    if isinstance(problem.op, BatchNorm):
        scale, shift, _, var = weights
        return (inputs[0] + 100.0,), (scale, shift, np.full_like(scale, 100.0), var)
    if isinstance(problem.op, Softmax):
        return (inputs[0] + 1000.0,), weights  # where exp overflows in every format
    return (inputs[0] * 100.0, *inputs[1:]), weights


def _wide(kernel: Kernel, problem: Problem, rng: Rng) -> tuple[Arrays, Arrays]:
    """Magnitudes over many binades, as far as sums of the format stay finite."""
    narrow = kernel.precision.storage == "float16"
    low, high = (-8.0, 4.0) if narrow else (-30.0, 12.0 if _splits(kernel) else 20.0)

    def draw(shape: tuple[int, ...]) -> Array:
        values: Array = rng.standard_normal(shape) * np.exp2(rng.uniform(low, high, shape))
        return values

    inputs, weights = _random(problem, rng, draw)
    if isinstance(problem.op, Softmax):
        return (rng.standard_normal(problem.inputs[0]) * 30.0,), weights
    return inputs, weights


# -- edges -------------------------------------------------------------------------------------


def _edges(kernel: Kernel, problem: Problem, rng: Rng, variant: int) -> tuple[Arrays, Arrays]:
    """Ordinary values with a few of the format's edges among them.

    Activations get ±0, subnormals, the smallest normal, NaN, the largest value, ±Inf; weights get
    zeros and subnormals alone (a non-finite weight meets every pixel, padding included). A
    BatchNorm variance of 0 is an edge too. Few, so that most outputs must stay ordinary; but
    max-pooling must get by with little else than −Inf, behind a convolution too. Factors that are
    split have edges of their own: the largest that can be, and where a half is subnormal or zero.
    """
    inputs, weights = _random(problem, rng, lambda shape: rng.standard_normal(shape))
    stored = FORMATS[kernel.precision.storage]
    tame = np.array([0.0, -0.0, stored.eta, -stored.eta, stored.tiny, -stored.tiny])
    if kernel.precision.flush_to_zero:
        tame = np.array([0.0, -0.0])  # a subnormal times an infinity would be NaN when flushed
    largest = stored.largest
    if _splits(kernel):
        largest = FORMATS["float16"].largest
        tame = np.array([*tame, *(s * 2.0**e for s in (1, -1) for e in (-13, -14, -24, -25, -35))])
    wild = np.array([largest, -largest, np.inf, -np.inf])
    if isinstance(problem.op, ConvMaxPool) and not problem.op.conv.relu and variant % 2:
        flat = inputs[0].reshape(-1)
        flat[rng.random(flat.size) < rng.choice([0.5, 1.0])] = -np.inf
        return inputs, (np.abs(weights[0]) + stored.tiny, *weights[1:])
    for array in inputs:
        flat = array.reshape(-1)
        if isinstance(problem.op, MaxPool2d):  # so much −Inf that whole windows hold nothing else
            flat[rng.random(flat.size) < rng.choice([0.0, 0.5, 1.0])] = -np.inf
        _scatter(rng, flat, tame)
        for value in [np.nan, *rng.permutation(wild)][: min(4, max(1, flat.size // 8))]:
            flat[rng.integers(flat.size)] = value if rng.random() < 0.8 else 1.0
    for array in weights:
        if array.ndim > 1:
            _scatter(rng, array.reshape(-1), tame)
    if isinstance(problem.op, BatchNorm):
        weights[3][_pick(rng, weights[3].shape)] = 0.0
    return inputs, weights


# -- pixels ------------------------------------------------------------------------------------


def _near_the_mean(op: Normalize, shape: tuple[int, ...], rng: Rng) -> Array:
    """Bytes of which little is left when the mean is taken off."""
    mean = np.rint(np.array(op.mean) * 255)[:, None, None]
    return np.asarray(np.clip(mean + rng.integers(-2, 3, shape), 0, 255))


PIXELS: dict[str, Callable[[Normalize, tuple[int, ...], Rng], Array]] = {
    "normal": lambda op, shape, rng: rng.integers(0, 256, shape),
    "positive": lambda op, shape, rng: rng.integers(128, 256, shape),
    "cancelling": _near_the_mean,
    "wide": lambda op, shape, rng: rng.choice([0, 1, 2, 127, 128, 254, 255], shape),
    "edges": lambda op, shape, rng: (np.arange(math.prod(shape)).reshape(shape) + 255) % 256,
}
"""What the kinds are of bytes: any; those that a signed byte cannot hold; those near the mean; the
ends and the middle; every one in its turn, the largest first. No byte is NaN or infinite."""


def _scatter(rng: Rng, flat: Array, values: Array) -> None:
    """Some of the values at a sixteenth of the elements, or at one."""
    count = max(1, flat.size // 16)
    flat[rng.integers(flat.size, size=count)] = rng.choice(values, count)
