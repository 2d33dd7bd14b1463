"""The format that factors are rounded to before they are multiplied.

A product of 1 + 2⁻ᵏ and 1 alone in a sum is what is left of 1 + 2⁻ᵏ. The largest k up to which it
is left whole says how many bits the significand keeps. One bit may be kept by luck (a tie goes to
even), so random significands are posed too: none of them may lose more than the format loses. A
format of 11 bits is float16 if it also loses the range of float32, else tf32. Factors that are
split into two numbers of 11 bits keep 22.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from r18.backend import Array
from r18_oracle.functions.arithmetic import BITS
from r18_oracle.probe.dots import OUTPUTS, TERMS, Dots, spread

RANDOM = 64
"""Random significands for each side."""
FAR = 2.0**20
"""Beyond float16, and no other format."""


@dataclass(frozen=True)
class Factors:
    """name: the coarsest format found of either side; "" for one of fewer bits than any known.

    bits:    its significand. cut_off: whether factors are cut off rather than rounded.
    witness: a factor, and what was left of it; None if nothing was lost.
    """

    name: str
    bits: int
    cut_off: bool
    witness: tuple[float, float] | None = None


def factors_of(dots: Dots, storage: str) -> Factors:
    """The format that the function rounds factors to. storage: the format of its arrays."""
    found = [_side(dots, storage, of_weights=side) for side in (False, True)]
    return min(found, key=lambda one: (one.bits, not one.cut_off))


def are_whole(dots: Dots, bits: int, *, truncates: bool) -> bool:
    """Whether a single product loses only what a `bits`-bit accumulator loses.

    A product of 1 + t and 1 is rounded there whether its factors were or not. For two factors 1 + t
    with t = 0.4 of the last bit the product is 1 + 0.8: rounded it is 1 + 1, and 1 if the factors
    were rounded first. Cut off, 1 + 0.9 twice gives 1 + 1, and 1 or 1 + 2 from rounded factors.
    """
    last = 2.0 ** (1 - bits)
    factor = 1 + (0.875 if truncates else 0.4375) * last
    terms = np.zeros((OUTPUTS, TERMS))
    terms[:, 0] = factor
    return bool((dots(terms, terms) == 1 + last).all())


def _side(dots: Dots, storage: str, *, of_weights: bool) -> Factors:
    bits = BITS[storage]
    single = 1 + 2.0 ** -np.arange(1, bits)
    rng = np.random.default_rng(0)
    drawn = 1 + rng.integers(1, 1 << (bits - 1), RANDOM) * 2.0 ** (1 - bits)
    values = np.concatenate([single, drawn])
    left = _left(dots, values, of_weights)
    off = np.abs(left - values)
    if not off.any():
        return Factors(storage, bits, False)
    lost = np.flatnonzero(off[: bits - 1])
    kept = int(lost[0]) + 1 if lost.size else bits
    # The largest loss of a significand in [1, 2): half an ulp rounded, a whole one cut off.
    peak = float(off.max())
    cut_off = bool(np.all(left <= values)) and peak >= 2.0 ** -(kept + 0.5)
    # Bits were kept by luck if more was lost than the format loses.
    while kept > 1 and peak > 2.0 ** -(kept - cut_off) * (1 + 2.0**-20):
        kept -= 1
    worst = int(np.argmax(off))
    witness = float(values[worst]), float(left[worst])
    return Factors(_format(dots, kept, storage, of_weights), kept, cut_off, witness)


def _left(dots: Dots, values: Array, of_weights: bool) -> Array:
    """Each value after it is multiplied by 1 and zeros are added; the worst of the outputs, which
    should be equal. In one call, or a few values a call where the function does not take as many
    outputs."""
    one, count = np.ones((OUTPUTS, TERMS)), len(values)
    taken = dots.takes(*((OUTPUTS, TERMS, count) if of_weights else (count, TERMS, OUTPUTS)))
    if not taken and count != OUTPUTS:
        padded = np.concatenate([values, np.repeat(values[-1:], -count % OUTPUTS)])
        parts = padded.reshape(-1, OUTPUTS)
        return np.concatenate([_left(dots, part, of_weights) for part in parts])[:count]
    left = dots(one, spread(values)) if of_weights else dots(spread(values), one).T
    off = np.abs(left - values).argmax(axis=0)
    return np.asarray(left[off, np.arange(len(values))])


def _format(dots: Dots, kept: int, storage: str, of_weights: bool) -> str:
    """The widest known format that keeps no more bits."""
    if kept >= BITS["fp16x2"] and storage == "float32":
        return "fp16x2"
    if kept >= BITS["tf32"]:
        if kept < BITS["float32"]:
            far = _left(dots, np.array([FAR]), of_weights)[0]
            return "tf32" if far == FAR and storage == "float32" else "float16"
        return "float32"
    return "bfloat16" if kept >= BITS["bfloat16"] else ""


__all__ = ["Factors", "factors_of"]
