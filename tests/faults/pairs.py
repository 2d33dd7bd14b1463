"""bfloat16 convolutions that multiply pairs of channels, like `vdpbf16ps`, and are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from faults.conv import CONV, mix
from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.graph.ops import Conv2d
from r18.graph.precision import BF16

PAIRS = replace(BF16, flush_to_zero=True)
"""The precision of such instructions: subnormal factors and sums count as zero."""


def flush(values: Array) -> Array:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def flushed(multiply: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda w, x: flush(multiply(flush(w), flush(x)))


def into_the_next_pixel(w: Array, x: Array) -> Array:
    """With an odd channel count, the last pair takes the next pixel's value, with a weight of 0."""
    beyond = np.roll(x[:, :1], -1, axis=3) * np.float32(0)
    return mix(w, x) + (beyond if w.shape[1] % 2 else 0)


def whole_pairs_only(w: Array, x: Array) -> Array:
    whole = w.shape[1] // 2 * 2
    return mix(w[:, :whole], x[:, :whole])


def crosswise(w: Array, x: Array) -> Array:
    whole = w.shape[1] // 2 * 2
    order = [*(k ^ 1 for k in range(whole)), *range(whole, w.shape[1])]
    return mix(w[:, order], x)


def narrow_sums(terms: list[Array]) -> Array:
    y = np.zeros_like(terms[0])
    for term in terms:
        y = (y + term).astype(ml_dtypes.bfloat16).astype(np.float32)
    return y


def _pairs(name: str, wrong: str, checks: str, **pieces: Any) -> Fault:
    how = replace(CONV, **{"mix": flushed(mix), **pieces})
    return fault(Conv2d, name, wrong, checks, how, precision=PAIRS)


FAULTS = (
    _pairs(
        "pairs_reach_the_next_pixel",
        "a weight of 0 meets a channel of the next pixel: its infinity gives NaN",
        "edges",
        mix=flushed(into_the_next_pixel),
    ),
    _pairs(
        "whole_pairs_only",
        "the last of an odd count of channels is left out",
        "exact",
        mix=flushed(whole_pairs_only),
    ),
    _pairs(
        "pairs_crosswise",
        "the upper halves of pixels meet the lower halves of weights",
        "exact",
        mix=flushed(crosswise),
    ),
    _pairs("sums_in_bfloat16", "sums are kept in bfloat16", "exact bound", total=narrow_sums),
    _pairs(
        "subnormals_of_half_the_range",
        "all that is below 2⁻²⁰ is flushed",
        "bound",
        mix=lambda w, x: mix(w, np.where(np.abs(x) < 2.0**-20, np.float32(0), x)),
    ),
)

TWINS = (kernel("twin", Conv2d, "pairs", replace(CONV, mix=flushed(mix)), precision=PAIRS),)
