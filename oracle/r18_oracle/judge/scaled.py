"""The error of scaled ops: sums of exact products, and an epilogue of a few roundings in float32.

Notation as in `r18_oracle.judge.bounds`; m is the multiplier of an output's channel.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array, RoundingContract
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
"""Of any term after the sum: its product with m, the residual's with its own, two additions."""


def sum_error(case: Case, contract: RoundingContract) -> tuple[Array, Array]:
    """The error of m·Σ w·x + b + f·r before it is stored, and the size S = m·P + |b| + |f·r|.

    With c from `summation_error` the sum is within c·P of the exact one, P = Σ|w||x|, and within
    `underflow`. Its product with m, the residual's product, and the two additions round each term
    ROUNDINGS times at most; where the four are fused, less often. The format after the sum is the
    accumulator's, rounded to nearest. So E ≤ (1 + γ)·m·(c·P + lost) + γ·S + m·η + 3η with γ of
    ROUNDINGS. ReLU and saturation do not move two numbers apart.
    """
    depth = depth_of(case)
    inputs, weights = finite_part(case)
    products = magnitude(case.problem, inputs, weights)
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
    error = (1 + after) * m * (c * products + lost) + after * size + ROUNDINGS * least + own
    return error, size
