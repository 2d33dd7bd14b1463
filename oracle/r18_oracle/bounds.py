"""Error bounds, derived: the largest error that rounding alone can cause, element by element.

Every bound is a pure function of a case and the kernel's rounding contract. Notation: y the
float64 result, S = Σ|w||x| + |b| + |r| the sum of the magnitudes of all terms of an output, K the
number of products in it, u the unit roundoff of a format, η its smallest subnormal,
γ_n = nu/(1−nu).

Sources
- Higham, *Accuracy and Stability of Numerical Algorithms*, SIAM 2002: Lemma 3.1 (γ_n), §3.1 and
  §4.2 (inner products and sums in any order), §2.2 (the model with underflow).
- Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, Theorem 3.1: the statistical line.
- Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 7:e330, 2021: tensor cores cut sums off.
- Lavin and Gray, arXiv:1509.09308: the Winograd transforms.

Each bound also covers the float64 reference's own error, by the same formula at u = 2⁻⁵³.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from r18.backend import Array, RoundingContract
from r18.errors import UsageError, unknown
from r18.ops import Add, BatchNorm, Conv2d, GlobalAvgPool, Linear, Problem, Softmax
from r18_oracle import winograd
from r18_oracle.cases import Case
from r18_oracle.reference import magnitude, pre_epilogue

DELTA = 1e-6
"""The statistical line is crossed by a correct kernel with at most this probability a call."""

TENSOR_CORE_BLOCK = 4
"""The fewest products that a tensor core adds at once (V100, T4; later ones more): the bound for
it covers all (Fasi et al., table 2)."""

_F64 = 2.0**-53


@dataclass(frozen=True)
class Format:
    """A floating-point format: unit roundoff, smallest subnormal, smallest normal, largest."""

    u: float
    eta: float
    tiny: float
    largest: float


FORMATS = {
    "float64": Format(2.0**-53, 2.0**-1074, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": Format(2.0**-24, 2.0**-149, 2.0**-126, float(np.finfo(np.float32).max)),
    "float16": Format(2.0**-11, 2.0**-24, 2.0**-14, 65504.0),
    "bfloat16": Format(2.0**-8, 2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
}


def format_of(name: str) -> Format:
    """The format's constants; `UnknownName` for one that has no bound."""
    try:
        return FORMATS[name]
    except KeyError:
        raise unknown("floating-point format", name, FORMATS) from None


def gamma(n: float, u: float) -> float:
    """γ_n = nu/(1−nu) (Higham 2002, Lemma 3.1); raises `UsageError` where nu ≥ 1."""
    if n * u >= 1:
        raise UsageError(f"no bound exists: {n:g} roundings at u = {u:g} may lose every digit")
    return n * u / (1 - n * u)


@dataclass(frozen=True, eq=False)
class Bound:
    """Per element of the output.

    largest:     |ŷ − y| cannot exceed this; 0 asks for equality.
    statistical: the sharper line that a round-to-nearest kernel crosses with probability DELTA;
                 None where no such line is known (sums that are cut off, no sum at all).
    overflows:   elements at which an intermediate may leave the accumulator's range, so that an
                 infinity or NaN is no fault; None where there is no such element.
    """

    largest: Array
    statistical: Array | None = None
    overflows: Array | None = None


def bound(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """The bound of a kernel with this contract on this case, whose float64 result is `y`.

    Raises `UnknownName` for an algorithm that the oracle has no derivation for: a kernel that
    cannot be bounded cannot be judged.
    """
    try:
        derive = DERIVATIONS[contract.algorithm]
    except KeyError:
        raise unknown(
            "algorithm in a rounding contract",
            contract.algorithm,
            DERIVATIONS,
            hint="Give it a derivation in r18_oracle.bounds before a kernel declares it.",
        ) from None
    with np.errstate(over="ignore", invalid="ignore"):
        return derive(case, contract, y)


# -- the pieces that bounds are made of --------------------------------------------------------


def summation_error(terms: int, contract: RoundingContract) -> float:
    """The factor c with |ŝ − s| ≤ c·S for a sum of `terms` products and addends, any order.

    - Round to nearest: γ_terms: one rounding for a product and at most terms − 1 for the
      additions that it passes through; an FMA only saves roundings (Higham 2002, §3.1).
    - Declared blocking into T partial sums that are added pairwise: a term passes through at most
      ⌈terms/T⌉ + ⌈log₂T⌉ + 1 roundings (Higham 2002, §4.2).
    - Cut off instead of rounded, as tensor cores do: each of terms + ⌈terms/b⌉ additions loses up
      to 2u (Fasi et al. 2021, §3).
    """
    u = format_of(contract.accumulate).u
    if contract.truncates:
        return gamma(terms + math.ceil(terms / TENSOR_CORE_BLOCK), 2 * u)
    if contract.blocks > 1:
        run = math.ceil(terms / contract.blocks)
        terms = min(terms, run + math.ceil(math.log2(contract.blocks)) + 1)
    return gamma(terms, u)


def factor_rounding(case: Case, contract: RoundingContract) -> float:
    """(1 + u_in)² − 1: both factors of each product are rounded to 11 bits before tf32 units.

    u_in is 2⁻¹¹ rounded, 2⁻¹⁰ cut off. Formats that are stored as narrow as they are multiplied
    lose nothing here.
    """
    if case.precision.multiply != "tf32":
        return 0.0
    u_in = 2.0**-10 if contract.truncates else 2.0**-11
    return (1 + u_in) ** 2 - 1


def stored(error: Array, y: Array, contract: RoundingContract) -> Array:
    """The error after one more rounding, to the output's format: (1+u)E + u|y| + η/2."""
    if contract.output == contract.accumulate:
        return error
    out = format_of(contract.output)
    return (1 + out.u) * error + out.u * np.abs(y) + out.eta / 2


def underflow(terms: int, case: Case, contract: RoundingContract) -> float:
    """What gradual underflow adds: η/2 a product; or, flushed to zero, a smallest normal a term.

    Higham 2002, §2.2: fl(a·b) = ab(1+δ) + η'. Additions do not underflow inexactly. Flushed
    *inputs* lose up to 2⁻¹²⁶ times the other factor, which S's largest term stands for.
    """
    accumulate = format_of(contract.accumulate)
    if case.precision.flush_to_zero:
        return (terms + 1) * accumulate.tiny
    return (terms + 1) * accumulate.eta


def _flushed_inputs(case: Case, depth: int) -> float:
    """The loss from inputs and weights below the smallest normal being read as zero."""
    if not case.precision.flush_to_zero:
        return 0.0
    peak = sum(
        float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a)))
        for a in (*case.inputs, *case.weights)
    )
    return depth * FORMATS["float32"].tiny * (peak + 1.0)


def _terms(case: Case) -> int:
    """Products, and addends besides them, in one output of a convolution or linear."""
    op = case.problem.op
    if isinstance(op, Conv2d):
        return op.depth + op.bias + op.residual
    assert isinstance(op, Linear)
    return op.in_features + 1


def _addends(case: Case) -> tuple[Array, ...]:
    """Bias and residual in float64, shaped to broadcast over the output."""
    op = case.problem.op
    inputs, weights = case.wide()
    found: list[Array] = []
    if isinstance(op, Linear):
        found.append(weights[1])
    if isinstance(op, Conv2d) and op.bias:
        found.append(weights[1][:, None, None])
    if isinstance(op, Conv2d) and op.residual:
        found.append(inputs[1])
    return tuple(found)


def _with_epilogue(case: Case, contract: RoundingContract, y: Array, sum_error: Array) -> Array:
    """From the error of the sum of products to that of the stored result.

    Where bias and residual share the accumulator, `sum_error` covers them. With `stored_sum` it
    covers the products alone: the sum is rounded to storage, and each later addition rounds once.
    ReLU is 1-Lipschitz and exact: it adds nothing.
    """
    if not contract.stored_sum:
        return stored(sum_error, y, contract)
    inputs, weights = case.wide()
    raw = pre_epilogue(case.problem, inputs, weights)
    error = stored(sum_error, raw, contract)
    addends = _addends(case)
    size = np.abs(raw) + error + sum(np.abs(a) for a in addends)
    error = error + gamma(len(addends), format_of(contract.accumulate).u) * size
    return stored(error, y, contract)


def _overflow(case: Case, contract: RoundingContract, size: Array, y: Array) -> Array | None:
    """Where a partial sum, or the rounded result, may leave its format's range.

    Not where a term is infinite or NaN already: there the semantics say what must come out.
    """
    accumulate, out = format_of(contract.accumulate), format_of(contract.output)
    mask: Array = (size >= accumulate.largest / 2) | (np.abs(y) >= out.largest * (1 - 2 * out.u))
    if contract.stored_sum:
        mask |= size >= out.largest / 2
    mask = np.broadcast_to(mask & np.isfinite(size), y.shape)
    return mask if bool(mask.any()) else None


# -- the derivations ---------------------------------------------------------------------------


def sum_of_products(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Convolution and linear, direct or as a matrix product, in any order of summation.

    E ≤ c·S with c from `summation_error` over K terms (+ 1 each for bias, residual), the rounding
    of factors, underflow, and the rounding to storage. Statistical line: λ√K·u·S with
    λ = √(2 ln(2NK/δ)) over N outputs (Higham and Mary 2019), where sums are rounded to nearest.
    """
    inputs, weights = case.wide()
    products = magnitude(case.problem, inputs, weights)
    terms = _terms(case)
    size = products + sum(np.abs(a) for a in _addends(case))
    depth = terms if not contract.stored_sum else terms - len(_addends(case))
    weighed = products if contract.stored_sum else size
    error = (
        summation_error(depth, contract) * weighed
        + factor_rounding(case, contract) * (1 + summation_error(depth, contract)) * products
        + underflow(depth, case, contract)
        + _flushed_inputs(case, depth)
        + gamma(terms + 1, _F64) * size
    )
    statistical = None
    if not contract.truncates and case.precision.multiply != "tf32":
        u = format_of(contract.accumulate).u
        chance = math.sqrt(2 * math.log(2 * max(1, y.size) * (depth + 1) / DELTA))
        sharp = chance * math.sqrt(depth + 1) * u * weighed + underflow(depth, case, contract)
        statistical = _with_epilogue(case, contract, y, sharp + gamma(terms + 1, _F64) * size)
    return Bound(
        _with_epilogue(case, contract, y, error),
        statistical,
        _overflow(case, contract, size, y),
    )


def winograd_sum(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Winograd F(m×m, 3×3): E ≤ γ_n·M with M = |Aᵀ|[Σ_c (|G||g||Gᵀ|)⊙(|Bᵀ||d||B|)]|A|.

    n counts the roundings on the longest path of a term: C products summed, and the additions and
    constants of the three transforms: C + 16 for F(2×2), C + 26 for F(4×4), plus one for each of
    bias and residual. Overflow of a transform counts like overflow of a sum.
    """
    op = case.problem.op
    if not isinstance(op, Conv2d):
        raise UsageError(f"{contract.algorithm} is an algorithm of conv2d, not of {op.name}")
    tile = {"winograd_f2x2": 2, "winograd_f4x4": 4}[contract.algorithm]
    inputs, weights = case.wide()
    size = winograd.magnitude(tile, inputs[0], weights[0], op.padding)
    whole = size + sum(np.abs(a) for a in _addends(case))
    depth = op.in_channels + {2: 16, 4: 26}[tile] + op.bias + op.residual
    u = format_of(contract.accumulate).u * (2 if contract.truncates else 1)
    error = (
        gamma(depth, u) * whole
        + factor_rounding(case, contract) * size
        + underflow(36 * op.in_channels, case, contract) * 100  # constants of F(4×4) reach 10²
        + gamma(_terms(case) + 1, _F64) * whole
    )
    # A transform mixes a whole tile: beside an infinity or NaN nothing in the tile can be judged.
    mixed = ~(whole < format_of(contract.accumulate).largest / 200)
    return Bound(
        _with_epilogue(case, contract, y, error),
        None,
        mixed if bool(mixed.any()) else None,
    )


def elementwise(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Add: one rounding in the accumulator's format, u|a + b|, and one to storage.

    `stored_sum` says that the sum is stored before the ReLU, which is exact: nothing more.
    """
    if not isinstance(case.problem.op, Add):
        raise UsageError(f"'elementwise' is a contract of add, not of {case.problem.op.name}")
    (a, b), _ = case.wide()
    u = format_of(contract.accumulate).u
    error = (u + _F64) * np.abs(a + b) + underflow(0, case, contract) * _flushes(case)
    return Bound(stored(error, y, contract), None, _overflow(case, contract, np.abs(a + b), y))


def _flushes(case: Case) -> float:
    return 3.0 if case.precision.flush_to_zero else 0.0


def exact(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Ops that move or compare values (ReLU, max-pooling, relayout): not one rounding."""
    flush = 2 * FORMATS["float32"].tiny if case.precision.flush_to_zero else 0.0
    return Bound(np.full(y.shape, flush))


def batchnorm(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """(x − m) / √(v + eps) · w + b, as written.

    With every δ at most u: x − m rounds once; eps and v + eps round once each and the root halves
    what comes in and rounds once: (1+δ)²; division (or reciprocal and product) twice; the product
    with w once; the sum with b once. So E ≤ γ_8·(|x − m||w|/√(v+eps) + |b|).
    """
    x, scale, shift, mean, _ = _batchnorm_parts(case)
    u = format_of(contract.accumulate).u
    size = np.abs(x - mean) * np.abs(scale) + np.abs(shift)
    error = (gamma(8, u) + gamma(8, _F64)) * size + _batchnorm_underflow(case, contract, scale)
    return Bound(stored(error, y, contract), None, _overflow(case, contract, size, y))


def scale_shift(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """x·a + c with a = w/√(v + eps) and c = b − m·a, computed first.

    a carries (1+δ)⁵ (eps, sum, root, division by the root, product or reciprocal); x·a rounds
    once more, c twice (product, difference), the sum once: at most seven roundings on any term, so
    E ≤ γ_8·(|x||a| + |m||a| + |b|). Where m·a cancels against x·a this is much larger than the
    bound of the form as written: that is the price of the form, and why it is declared.
    """
    x, scale, shift, mean, _ = _batchnorm_parts(case)
    u = format_of(contract.accumulate).u
    size = (np.abs(x) + np.abs(mean)) * np.abs(scale) + np.abs(shift)
    error = (gamma(8, u) + gamma(8, _F64)) * size + _batchnorm_underflow(case, contract, scale)
    return Bound(stored(error, y, contract), None, _overflow(case, contract, size, y))


def _batchnorm_parts(case: Case) -> tuple[Array, ...]:
    op = case.problem.op
    if not isinstance(op, BatchNorm):
        raise UsageError(f"a batchnorm contract on {op.name}")
    (x,), weights = case.wide()
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    return x, weight / np.sqrt(var + op.eps), bias, mean, var


def _batchnorm_underflow(case: Case, contract: RoundingContract, scale: Array) -> Array:
    least = underflow(8, case, contract)
    return least * (1 + np.abs(scale)) * (2 if case.precision.flush_to_zero else 1)


def mean(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """The sum of n values in any order, and one division or product with a rounded reciprocal.

    n − 1 additions and at most two roundings: E ≤ γ_{n+1}·Σ|x|/n.
    """
    if not isinstance(case.problem.op, GlobalAvgPool):
        raise UsageError(f"'mean' is a contract of gap, not of {case.problem.op.name}")
    (x,), _ = case.wide()
    n = x.shape[2] * x.shape[3]
    size = np.abs(x).sum(axis=(2, 3))
    error = (
        (summation_error(n + 1, contract) + gamma(n + 1, _F64)) * size / n
        + underflow(1, case, contract)
        + _flushed_inputs(case, 1) * _flushes(case)
    )
    return Bound(stored(error, y, contract), None, _overflow(case, contract, size, y))


EXP_ULPS = 4.0
"""What an implementation of exp may be off by, in u: CUDA's expf and SLEEF's are within 2 ulp."""


def softmax(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """exp(d_i)/Σ exp(d_j), d = x − max.

    d rounds once, so exp(d) carries a relative error of |d|u besides its own, EXP_ULPS·2u; an exp
    by way of 2^(d·log₂e) rounds d·log₂e too, another 2|d|u. So term i is off by at most
    ρ_i = (3|d_i| + 2·EXP_ULPS)u, the sum of F of them by Σ y_jρ_j + γ_F, the quotient by u more:
    E_i ≤ y_i·(ρ_i + Σ_j y_jρ_j + γ_F + 2u)·(1 + small), and an underflow of η or, flushed, of the
    smallest normal a term.
    """
    if not isinstance(case.problem.op, Softmax):
        raise UsageError(f"'softmax' is a contract of softmax, not of {case.problem.op.name}")
    (x,), _ = case.wide()
    accumulate = format_of(contract.accumulate)
    distance = x - x.max(axis=1, keepdims=True)
    # Beyond 800 exp is 0 in every format, and so is the error that its argument could cause.
    distance = np.where(np.isnan(distance), np.nan, np.minimum(np.abs(distance), 800.0))
    rho = (3 * distance + 2 * EXP_ULPS) * (accumulate.u + _F64)
    total = (y * rho).sum(axis=1, keepdims=True)
    features = x.shape[1]
    relative = rho + total + gamma(features, accumulate.u) + 2 * accumulate.u
    # e^ρ − 1 ≤ ρ + ρ² for ρ ≤ 1: products of relative errors.
    error = np.minimum(y * relative * (1 + relative), 1.0) + 2 * accumulate.tiny
    return Bound(stored(error, y, contract))


DERIVATIONS: dict[str, Callable[[Case, RoundingContract, Array], Bound]] = {
    "sum": sum_of_products,
    "winograd_f2x2": winograd_sum,
    "winograd_f4x4": winograd_sum,
    "elementwise": elementwise,
    "exact": exact,
    "batchnorm": batchnorm,
    "scale_shift": scale_shift,
    "mean": mean,
    "softmax": softmax,
}


# -- bounds that no kernel declares ------------------------------------------------------------


def folding_error(problem: Problem, x: Array, weight: Array, bias: Array, u: float) -> Array:
    """What rounding a folded weight and bias to unit roundoff u changes in the convolution.

    ŵ = w(1+δ) and b̂ = b(1+δ'), so |Δy| ≤ u·(Σ|w||x| + |b|). x (N,C,H,W), weight OIHW, bias (O,),
    float64, the folded values before rounding; returns (N,O,OH,OW).
    """
    size = magnitude(problem, (x,), (weight,))
    return u * (size + np.abs(bias)[:, None, None])


def int8_sum_is_exact(depth: int) -> bool:
    """Whether `depth` products of int8 values cannot leave int32: K ≤ ⌊(2³¹−1)/2¹⁴⌋ = 131,071.

    |a·b| ≤ 2¹⁴ for a, b in [−128, 127]; integer sums in range are exact in any order, so the bound
    of an int8 convolution before requantisation is zero.
    """
    return depth <= (2**31 - 1) // 2**14
