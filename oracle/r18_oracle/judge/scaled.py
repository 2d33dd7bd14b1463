"""The error of scaled ops: sums of exact products, and an epilogue of a few roundings in float32.

Notation as in `r18_oracle.judge.bounds`; m is the multiplier of an output's channel.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.precision import round_to_e4m3
from r18_oracle.cases import Case
from r18_oracle.judge.reference import magnitude
from r18_oracle.judge.roundings import (
    F64,
    addends_of,
    depth_of,
    finite_part,
    format_of,
    gamma,
    runs_of,
    summation_error,
    underflow,
)

ROUNDINGS = 4
"""Roundings of any term after the sum: its product with m, the residual's with its own, two
additions."""


def sum_error(
    case: Case, contract: RoundingContract, moved: Array | None = None
) -> tuple[Array, Array]:
    """The error of m·Σ w·x + b + f·r before it is stored, and the size S = m·P + |b| + |f·r|.

    With c from `summation_error` the sum is within c·P of the exact one, P = Σ|w||x|, and within
    `underflow`. Its product with m, the residual's product, and the two additions round each term
    ROUNDINGS times at most; where the four are fused, less often. The format after the sum is the
    accumulator's, rounded to nearest. So E ≤ (1 + γ)·m·(c·P + lost) + γ·S + m·η + 3η with γ of
    ROUNDINGS. ReLU and saturation do not move two numbers apart.

    moved: by how much each pixel may differ from the case's (`moved_pixels`), d. Products may then
    differ by Q = Σ|w|d: P becomes P + Q, and (1 + γ)·m·Q is added to the error.
    """
    depth = depth_of(case)
    inputs, weights = finite_part(case)
    products = magnitude(case.problem, inputs, weights)
    shift = 0.0 if moved is None else magnitude(case.problem, (moved,), weights)
    products = products + shift
    multiplier = np.abs(weights[2])
    m = multiplier[:, None, None] if products.ndim == 4 else multiplier
    addends = addends_of(case)
    size = m * products + sum(np.abs(a) for a in addends)
    accumulate = format_of(contract.accumulate)
    c = summation_error(depth, contract, runs=runs_of(case, contract))
    after = gamma(ROUNDINGS, accumulate.u)
    least = accumulate.tiny if case.precision.flush_to_zero else accumulate.eta
    lost = (1 + c) * underflow(depth, case, contract)
    own = gamma(depth + ROUNDINGS + 1, F64) * size
    error = (1 + after) * m * (c * products + shift + lost) + after * size + ROUNDINGS * least + own
    return error, size


def quotient_error(x: Array, divisor: Array, case: Case, contract: RoundingContract) -> Array:
    """The error of x / s, or of x times the rounded reciprocal of s: γ_2·|x / s|, and 2η.

    A quotient of 0 that was not one may lose η, and the product with a reciprocal as much.
    """
    accumulate = format_of(contract.accumulate)
    lost = 2 * (accumulate.tiny if case.precision.flush_to_zero else accumulate.eta)
    relative = gamma(2, accumulate.u) + gamma(2, F64)
    return np.asarray(relative * np.abs(x / divisor) + lost)


def reciprocal_leaves(divisor: Array, contract: RoundingContract) -> Array:
    """Whether the reciprocal of a scale may leave the accumulator's range, or be subnormal."""
    tiny = format_of(contract.accumulate).tiny
    return np.asarray((divisor < tiny) | (divisor > 1 / tiny))


def moved_pixels(case: Case, contract: RoundingContract) -> Array:
    """By how much each e4m3 number of an image may differ from the rounded exact quotient: 0, or
    the distance to the number on the other side of a tie that is within the quotient's error."""
    inputs, weights = finite_part(case)
    exact = inputs[0] / weights[-1]
    error = quotient_error(inputs[0], weights[-1], case, contract)
    middle = round_to_e4m3(exact)
    ends = (np.abs(round_to_e4m3(exact + side * error) - middle) for side in (-1, 1))
    return np.asarray(np.maximum(*ends))
