"""Images whose class rounding may change: the margin of top-1 against the allowed error.

Correct programs may return two classes in either order if their logits differ by less than twice
the allowed error of a logit: a tie. Any other change of class is a fault. A program's allowed error
is a multiple of the measured error of correct arithmetic on the same weights and images.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from r18.backend import Array
from r18.errors import unknown
from r18.graph.precision import Precision

END_TO_END_MULTIPLE = 8.0
"""A program may lose this many times what PyTorch's own arithmetic loses: √64.

Both losses are those of one correct order of summation among many. Each addition rounds the
partial sum that it makes, and of terms of either sign a partial sum of k has a size of about √k
terms: K terms one after another have an error with variance ∝ Σ k ≈ K²/2, in T partial sums of K/T
each T·(K/T)²/2, which is √T times less in rms (the model of Higham and Mary 2019, with random
data). A library may hold up to 64 partial sums of an output (16 lanes of a vector register, four
registers to hide the latency of an addition; or a pairwise or blocked sum of such depth), a plain
loop one; so a right program may lose up to √64 times what PyTorch does. A fault changes values by
parts of themselves, not by parts of their last bit.
"""

ALGORITHM_MULTIPLE = {"winograd_f4x4": 20.0}
"""Algorithms that lose more by themselves: a program with a kernel of one may, too.

F(4×4, 3×3): of random data, a sum of C products of transformed factors at (i, j) has terms with the
variance |G_i|²|G_j|²|B_i|²|B_j|² (rows of G and Bᵀ), and enters output (p, q) of a tile with the
weight A_pi·A_qj (rows of Aᵀ). With s_p = Σ_i A_pi²|G_i|²|B_i|²:

- The products' rounding errors have a variance ∝ C·s_p·s_q at (p, q), where those of a plain sum
  have 9C: √(s_p·s_q/9) times the error (the oracle's `winograd.growth`), at the worst place of a
  tile 7.5 times.
- The rounding errors of additions one after another have a variance ∝ C²/2·s_p·s_q, where those of
  a plain sum of 9C terms in 64 partial sums (see END_TO_END_MULTIPLE) have (9C)²/2/64: 8/3 times as
  much more as the products, 19.95 times. That is the larger, and less than this multiple.

F(2×2, 3×3) grows by less than END_TO_END_MULTIPLE in both.
"""

CUT_OFF_MULTIPLE = 8.0
"""The ratio of the loss of truncated sums, with factors as fine as float32, to that of rounded
ones.

A unit that adds 16 products at a time and cuts off loses u|s| of the sum s so far in the mean, and
always towards zero. With terms of either sign |s| grows as √k: K/16 steps lose ⅔·(K/16)·u times the
last |s|. Rounded, K additions one after another lose (u/√3)·√(K/2) times it (see
END_TO_END_MULTIPLE). The one is √(6K)/24 times the other: 6.9 for the longest sums of a ResNet-18,
K = 4,608, and this is the power of two above it. In the other precisions that tensor cores multiply
what is lost in factors of 11 bits is far above either.
"""

_UNIT_ROUNDOFFS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
}
_F64_IN_F32 = _UNIT_ROUNDOFFS["float64"] / _UNIT_ROUNDOFFS["float32"]


def multiple(algorithms: Iterable[str], precision: Precision) -> float:
    """The multiple for a program of kernels with these algorithms in their contracts."""
    own = (ALGORITHM_MULTIPLE.get(name, 0.0) for name in algorithms)
    cut_off = CUT_OFF_MULTIPLE if precision.splits else 1.0
    return cut_off * max([END_TO_END_MULTIPLE, *own])


def unit_roundoff(storage: str) -> float:
    """u of a storage format; raises `UnknownName` for one that is no floating-point format."""
    try:
        return _UNIT_ROUNDOFFS[storage]
    except KeyError:
        raise unknown("floating-point format", storage, _UNIT_ROUNDOFFS) from None


@dataclass(frozen=True)
class Allowance:
    """From the yardstick's loss to what is allowed: factor · max(loss, floor · size of the exact).

    factor: the multiple. The yardstick's loss in float64 cannot be seen from float64; it is taken
            as that of float32 times the ratio of the roundoffs, since there every rounding scales
            alike, and as the reference loses as much as what is compared with it, that of both is
            allowed.
    floor:  the yardstick's loss counts as that of one rounding to storage at least, however lucky
            it was: errors spread evenly over ±u/2 to ±u have a root mean square of u/√12 to u/√3.
    """

    factor: float
    floor: float

    @classmethod
    def of(cls, precision: Precision, multiple: float) -> Allowance:
        """The allowance of a precision. Raises `UnknownName` for a storage format that is no
        floating-point one."""
        u = unit_roundoff(precision.storage)
        if precision.accumulate == "float64":
            return cls(multiple * 2 * _F64_IN_F32, u / _F64_IN_F32 / 3)
        return cls(multiple, u / 3)

    def most(self, loss: float, size: float) -> float:
        """The allowed error where the yardstick's is `loss`, of exact values of that size."""
        return self.factor * max(loss, self.floor * size)


@dataclass(frozen=True)
class Call:
    """One image's classes in the reference, the first and the second, by how much; and the got."""

    image: int
    margin: float
    first: int
    second: int
    got: int

    def is_tie(self, bound: float) -> bool:
        """Whether the classes may change places; see `is_tie`."""
        return is_tie(self.margin, bound)


def is_tie(margin: float, bound: float) -> bool:
    """Whether two logits so far apart may change places where each is off by up to `bound`."""
    return margin <= 2 * bound


def calls(got: Array, expected: Array, first_image: int = 0) -> list[Call]:
    """Each image's classes, from the (N, classes) logits of a program and of the reference.

    Equal logits go to the lower class; `expected` holds no NaN, and two classes at least.
    """
    found = []
    for image, (logits, exact) in enumerate(zip(got, expected, strict=True), start=first_image):
        best, second = np.argsort(-exact, kind="stable")[:2]
        margin = float(exact[best]) - float(exact[second])
        found.append(Call(image, margin, int(best), int(second), int(np.argmax(logits))))
    return found


__all__ = [
    "ALGORITHM_MULTIPLE",
    "CUT_OFF_MULTIPLE",
    "END_TO_END_MULTIPLE",
    "Allowance",
    "Call",
    "calls",
    "is_tie",
    "multiple",
    "unit_roundoff",
]
