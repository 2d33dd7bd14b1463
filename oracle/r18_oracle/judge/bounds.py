"""Error bounds: the largest error that rounding can cause in each element of an output.

Every bound is a pure function of a case and the kernel's rounding contract. Notation: y the
float64 result, S = Σ|w||x| + |b| + |r| the sum of the magnitudes of all terms of an output, K the
number of products in it, u the unit roundoff of a format, η its smallest subnormal,
γ_n = nu/(1−nu).

Sources
- Higham, *Accuracy and Stability of Numerical Algorithms*, SIAM 2002: Lemma 3.1 (γ_n), §3.1 and
  §4.2 (inner products and sums in any order), §2.2 (the model with underflow).
- Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, Theorem 3.1: the statistical line.
- Fasi, Higham, Mikaitis, Pranesh, PeerJ CS 7:e330, 2021: tensor cores truncate sums.
- Lavin and Gray, arXiv:1509.09308: the Winograd transforms.
- Intel, *64 and IA-32 Architectures Software Developer's Manual*, volume 2: VDPBF16PS, TDPBF16PS.

Each bound also covers the float64 reference's own error, by the same formula at u = 2⁻⁵³.

Infinities and NaN are judged by the semantics, not by a bound. Sizes are sums over the finite
terms only, so that an element which ReLU brings back from −∞ to 0 still has a finite bound, and
so that a finite part which may overflow next to an infinity is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import Array, RoundingContract
from r18.errors import UsageError, unknown
from r18.graph.ops import BatchNorm, Conv2d, ConvMaxPool, Normalize, Op, Problem, parts_of
from r18.graph.scaled import ScaledConvMaxPool, ScaledLinear
from r18_oracle.cases import Case
from r18_oracle.judge import fourier, winograd
from r18_oracle.judge.bias import Drift, influence
from r18_oracle.judge.reference import magnitude, reference
from r18_oracle.judge.roundings import (
    F64,
    FORMATS,
    TENSOR_CORE_BLOCK,
    Format,
    addends_of,
    beyond_range,
    depth_of,
    factor_format,
    factor_hazards,
    factor_rounding,
    factor_underflow,
    finite_part,
    format_of,
    gamma,
    is_split,
    least_loss,
    may_overflow,
    over_window,
    roundoff,
    runs_of,
    split_sum_error,
    stored,
    summation_error,
    underflow,
    unspecified_outputs,
    window_sum,
    with_epilogue,
)
from r18_oracle.judge.scaled import (
    moved_pixels,
    quotient_error,
    reciprocal_leaves,
    sum_error,
)
from r18_oracle.ops.table import SPECS, spec_of

__all__ = [
    "DELTA",
    "DERIVATIONS",
    "FORMATS",
    "STAGE_ERROR",
    "TENSOR_CORE_BLOCK",
    "Bound",
    "Format",
    "bound",
    "derivation",
    "factor_rounding",
    "folding_error",
    "format_of",
    "gamma",
    "stored",
    "summation_error",
    "underflow",
]

DELTA = 1e-6
"""The probability, per call, that a correct kernel exceeds the statistical line."""


@dataclass(frozen=True, eq=False)
class Bound:
    """Per element of the output.

    largest:     |ŷ − y| cannot exceed this; 0 requires equality.
    statistical: the sharper line that a round-to-nearest kernel exceeds with probability DELTA,
                 never above `largest`; None where no such line is known (truncated sums, ops
                 without sums).
    drift:       what the errors of all elements may add up to (`r18_oracle.judge.bias`); None
                 where the contract does not say that every operation rounds to nearest.
    overflows:   elements at which an intermediate may leave the accumulator's range, so that an
                 infinity or NaN is not a fault; None if there are none. Where the float64
                 reference or bound itself may have overflowed, `largest` is not finite.
    """

    largest: Array
    statistical: Array | None = None
    overflows: Array | None = None
    drift: Drift | None = None

    @classmethod
    def of(
        cls,
        error: Array,
        mask: Array,
        y: Array,
        contract: RoundingContract,
        statistical: Array | None = None,
        drift: Drift | None = None,
    ) -> Bound:
        """The bound `error` of the result `y`; `mask` (broadcast to y) marks what may overflow."""
        if contract.accumulate == "float64":
            mask = mask | ~np.isfinite(error)
            error = np.where(mask & ~np.isfinite(y), np.inf, error)
        if not mask.any():
            return cls(error, statistical, None, drift)
        return cls(error, statistical, np.broadcast_to(mask, y.shape), drift)


def bound(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """The bound of a kernel with this contract on this case, whose float64 result is `y`.

    Raises what `derivation` does: a kernel that cannot be bounded cannot be judged.
    """
    derive = derivation(type(case.problem.op), contract.algorithm)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(case.problem.op, ConvMaxPool | ScaledConvMaxPool):
            return pooled(case, contract, y, derive)
        return derive(case, contract, y)


Derivation = Callable[[Case, RoundingContract, Array], Bound]


def derivation(op: type[Op], algorithm: str) -> Derivation:
    """The derivation of an algorithm's bound for an op.

    Raises `UnknownName` for an algorithm without a derivation, and `UsageError` for one that is not
    an algorithm of this op. `exact` asks for equality, which any op can be held to.
    """
    spec = spec_of(op)
    known: dict[str, Derivation] = DERIVATIONS | dict(spec.derivations)
    if algorithm not in known:
        raise unknown(
            "algorithm in a rounding contract",
            algorithm,
            known,
            hint="Give it a derivation in r18_oracle.judge.bounds before a kernel declares it.",
        )
    if algorithm not in ("exact", *spec.algorithms):
        *others, last = (s.op.name for s in SPECS.values() if algorithm in s.algorithms)
        users = f"{', '.join(others)} and {last}" if others else last
        raise UsageError(f"'{algorithm}' is a contract of {users}, not of {op.name}")
    return known[algorithm]


# -- the derivations ---------------------------------------------------------------------------


def sum_of_products(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Convolution and linear, direct or as a matrix product, summed in any order.

    With factors ŵx̂ = wx(1 + θ), |θ| ≤ f = (1+u_in)² − 1, and c from `summation_error` over K
    products and the addends, E ≤ c·S + (1+c)(f·Σ|w||x| + underflow), and the rounding to storage.
    For products of pairs: `split_sum_error`. `factor_hazards` never turn a NaN into anything else.
    Statistical line: λ√K·u·S with λ = √(2 ln(2NK/δ)) over N outputs (Higham and Mary 2019), where
    sums are rounded to nearest and factors are not rounded.
    """
    depth = depth_of(case)
    inputs, weights = finite_part(case)
    addends = addends_of(case)
    products = magnitude(case.problem, inputs, weights)
    size = products + sum(np.abs(a) for a in addends)
    fused = 0 if contract.stored_sum else len(addends)
    weighed = size if fused else products
    c = summation_error(depth + fused, contract, fused, runs=runs_of(case, contract))
    factors = factor_rounding(case, contract)
    least = underflow(depth + fused, case, contract)
    lost = least + factor_underflow(case, contract, inputs, weights)
    own = gamma(depth + len(addends) + 1, F64) * size
    if is_split(case):
        added = weighed - products if fused else 0.0
        made = split_sum_error(case, contract, products, added, fused, inputs, weights)
    else:
        made = c * weighed + (1 + c) * (factors * products + lost)
    error = made + own
    largest, beyond = with_epilogue(case, contract, y, error)
    statistical = None
    if not contract.truncates and not factors:
        terms = depth + fused + 1
        chance = math.sqrt(2 * math.log(2 * max(1, y.size) * terms / DELTA))
        sharp = chance * math.sqrt(terms) * roundoff(contract) * weighed + (1 + c) * lost + own
        statistical = np.minimum(with_epilogue(case, contract, y, sharp)[0], largest)
    hazards = factor_hazards(case, contract) & ~np.isnan(y)
    mask = may_overflow(size, contract) | beyond | hazards
    if (unspecified := unspecified_outputs(case)) is not None:
        largest = np.where(unspecified, np.inf, largest)
        mask = mask | unspecified
    drift = None
    if not contract.truncates and not is_split(case) and contract.output != "float64":
        # An addend much smaller than the sum is rounded alike in all outputs that share it.
        shared_addends = len(addends) * roundoff(contract) * size
        rest = (1 + c) * lost + own + c**2 * weighed + factors**2 * products + shared_addends
        rest = rest + format_of(contract.output).eta
        stored_size = np.abs(y) + largest
        steps = _rounding_steps(contract, depth + fused, weighed, size, stored_size)
        if contract.output != contract.accumulate and addends:
            last_bit = 2 * format_of(contract.output).u * stored_size
            rest = rest + np.where(products < 4 * math.sqrt(depth) * last_bit, last_bit / 2, 0.0)
        shared = 0.0
        if factors:
            u_in = math.sqrt(1 + factors) - 1
            shared = u_in**2 * influence(case.problem, inputs, weights)
        drift = Drift((1 + c) * steps, shared, rest, _rounded_alike(contract, y, addends))
    return Bound.of(largest, mask, y, contract, statistical, drift)


def _rounded_alike(contract: RoundingContract, y: Array, addends: tuple[Array, ...]) -> Array:
    """A number for each output, equal where its roundings are; see `r18_oracle.judge.bias`."""
    common = [a for a in addends if a.shape != y.shape]
    if contract.stored_sum and common:
        return np.broadcast_to(sum(common), y.shape)
    return np.asarray(y - sum(a for a in addends if a.shape == y.shape))


def _rounding_steps(
    contract: RoundingContract, terms: int, weighed: Array, size: Array, stored_size: Array
) -> Array:
    """√Σ a² of the operations that round a sum of `terms` terms, its epilogue and its storage; see
    `r18_oracle.judge.bias`."""
    u, u_out = roundoff(contract), format_of(contract.output).u
    squares = (terms + 1) * np.square(u * weighed)
    if contract.stored_sum:
        squares = squares + np.square(u_out * size) + 2 * np.square(u * size)
    if contract.output != contract.accumulate:
        squares = squares + np.square(u_out * stored_size)
    return np.asarray(np.sqrt(squares))


WINOGRAD_ROUNDINGS = {2: 16, 4: 26, 6: 40}
"""Roundings of a term in addition to those of the sum over channels; see `winograd_sum`."""

WINOGRAD_UNDERFLOWS = {2: 150, 4: 150, 6: 300}
"""The gain of an operation's underflow in a transformed value; see `winograd_sum`."""


def winograd_sum(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Winograd F(m×m, 3×3): E ≤ γ_n·M with M = |Aᵀ|[Σ_c (|G||g||Gᵀ|)⊙(|Bᵀ||d||B|)]|A|.

    n is the number of roundings on a term's longest path, through both sides of each transform:

    |               | F(2×2)         | F(4×4)                       | F(6×6)                     |
    |---------------|----------------|------------------------------|----------------------------|
    | Bᵀ d B        | 1 addition: 2  | 2 products, 2 additions: 8   | product, 5 additions: 12   |
    | G g Gᵀ        | 2 additions: 4 | 1/N, product, 2 additions: 8 | 2/9 or 1/45, product, 2    |
    |               |                |                              | additions: 8               |
    | product, ΣC   | C              | C                            | C                          |
    | Aᵀ(·)A        | 2 additions: 4 | product, 3 additions, or 4   | 6 additions: 12            |
    |               |                | additions: 8                 |                            |
    | together      | C + 10         | C + 24                       | C + 32                     |

    C + 16, C + 26 and C + 40 leave room for kernels that round transformed filters once more, or
    scale the rows of B and G against each other (which does not change M). Bias and residual add
    one each; truncated sums count as in `summation_error`. If the transformed factors are rounded
    to a narrower format, f·M is added, as in `sum_of_products`.

    Underflow: an operation loses at most L (η, or 2⁻¹²⁶ flushed). Through |Bᵀ||·||B|, whose rows
    add up to at most r = 5.5 (F(6×6): 15), a flushed input and its sums reach a transformed value
    as at most (r² + 4r + 4)L, through G less; so `spread`, the gain of an error of 1 in every
    factor and product, is taken WINOGRAD_UNDERFLOWS·L times, which leaves room for the output
    transform.

    A transform mixes a whole tile, so a tile with an infinity or NaN, or in which a transform may
    overflow, cannot be judged.
    """
    op = case.problem.op
    assert isinstance(op, Conv2d)
    if op.kernel_size != (3, 3) or op.stride != (1, 1) or op.extras:
        asked = "".join(f" with {name}={value}" for name, value in op.extras.items())
        raise UsageError(
            f"{contract.algorithm} is a 3×3 convolution of stride 1, not {op.label}{asked}"
        )
    if is_split(case):
        raise UsageError(f"no bound is derived for {contract.algorithm} with {case.precision}")
    tile = {"winograd_f2x2": 2, "winograd_f4x4": 4, "transforms": 6}[contract.algorithm]
    inputs, weights = case.wide()
    sizes = winograd.sizes(tile, inputs[0], weights[0], op.padding)
    addends = addends_of(case)
    whole = sizes.magnitude + sum(np.abs(a) for a in addends)
    steps = math.ceil(op.in_channels / TENSOR_CORE_BLOCK) if contract.truncates else 0
    depth = op.in_channels + steps + WINOGRAD_ROUNDINGS[tile] + len(addends)
    c = gamma(depth, roundoff(contract))
    multiply = factor_format(case, contract)
    lost = WINOGRAD_UNDERFLOWS[tile] * least_loss(case, contract) * (sizes.spread + 1)
    if multiply is not None:
        lost = lost + multiply.eta * sizes.spread
    error = (
        c * whole
        + (1 + c) * (factor_rounding(case, contract) * sizes.magnitude + lost)
        + gamma(op.depth + len(addends) + 1, F64) * whole
    )
    largest, beyond = with_epilogue(case, contract, y, error)
    mask = beyond | may_overflow(np.maximum(sizes.reach, whole), contract)
    if multiply is not None:
        mask |= sizes.reach > multiply.largest / 2
    return Bound.of(largest, mask, y, contract)


def transforms(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Convolutions that go by a transform that the library chooses: the loosest of those known.

    A convolution of stride 1 may go by FFT, one of 3×3 windows by F(6×6, 3×3), as in NNPACK, and
    any as a sum. An output has no NaN or overflow that all of them must have: where one of them may
    overflow, infinities and NaN are not judged.

    Raises `UsageError` for factors that are rounded to a narrower format than the arrays', and for
    sums in less than float32: nothing says in which format such a kernel transforms.
    """
    op = case.problem.op
    assert isinstance(op, Conv2d)
    formats = format_of(case.precision.storage), format_of(contract.accumulate)
    narrow = max(one.u for one in formats) > format_of("float32").u
    if op.extras or narrow or contract.truncates or factor_format(case, contract) is not None:
        raise UsageError(f"no bound is derived for transforms of {op.label} with {case.precision}")
    found = [sum_of_products(case, contract, y)]
    if op.stride == (1, 1):
        found.append(_by_fft(case, contract, y))
        if op.kernel_size == (3, 3):
            found.append(winograd_sum(case, contract, y))
    largest = np.maximum.reduce([one.largest for one in found])
    masks = [one.overflows for one in found if one.overflows is not None]
    return Bound.of(largest, np.logical_or.reduce([*masks, np.zeros(y.shape, bool)]), y, contract)


STAGE_ERROR = 9.0
"""The relative error of an FFT's stage for each doubling of the points, in units of u. A stage of
radix r errs by √r·γ_{r+2} and the roots of unity by u (Higham, 2002, theorem 24.2, for r = 2): for
r = 2, 3, 4, 5, 7 at most 24.8u / log₂7 < 9u a doubling."""


def _by_fft(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """A convolution of stride 1 as F⁻¹[Σ_c Fx_c ⊙ Fw_c], with transforms of N = t² points.

    A transform of s stages errs by ε‖Fx‖₂ at most, ε = sη/(1 − sη) with η from `STAGE_ERROR`
    (Higham, 2002, theorem 24.2), and ‖Fx‖₂ = √N‖x‖₂. With |Fx| ≤ ‖x‖₁ and |Fw| ≤ ‖w‖₁ at each
    point, the sum of products errs in norm by at most

        √N Σ_c (ε‖x_c‖₂‖w_c‖₁ + ε‖x_c‖₁‖w_c‖₂ + γ_{C+3}‖x_c‖₂‖w_c‖₁)(1 + ε)²,

    as a complex product rounds by √2γ₂ ≤ γ₃. The way back divides by √N, and errs by
    ε Σ_c‖x_c‖₂‖w_c‖₁ more. So with A = Σ_c‖x_c‖₂‖w_c‖₁ and B = Σ_c‖x_c‖₁‖w_c‖₂, every output errs
    by

        E ≤ ((2ε + γ_{C+3})·A + ε·B)(1 + ε)³.

    The division by N rounds once, bias and residual once each, all of at most A and the addends.

    Underflow: each of s stages loses at most 4L (two products and two sums) in each of N points,
    whose transform is at most 4NL; the other factor multiplies that by at most its ‖·‖₁, products
    lose 4L and the way back as much as one transform. Together 8sN·L·`spread`.
    """
    op = case.problem.op
    assert isinstance(op, Conv2d)
    inputs, weights = case.wide()
    sizes = fourier.sizes(inputs[0], weights[0], op.padding)
    addends = addends_of(case)
    u = roundoff(contract)
    each = sizes.stages * STAGE_ERROR * u
    root = each / (1 - each)
    grown = (1 + root) ** 3
    c = gamma(1 + len(addends), u)
    made = (2 * root + gamma(op.in_channels + 3, u)) * sizes.magnitude + root * sizes.swapped
    lost = 8 * sizes.stages * sizes.points * least_loss(case, contract) * (sizes.spread + 1)
    size = sizes.magnitude + sum(np.abs(a) for a in addends)
    error = (1 + c) * (grown * made + lost) + c * size
    error = error + gamma(op.depth + len(addends) + 1, F64) * size
    error = np.broadcast_to(error, y.shape)
    largest, beyond = with_epilogue(case, contract, y, error)
    return Bound.of(largest, beyond | may_overflow(sizes.reach, contract), y, contract)


def elementwise(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Add: one rounding in the accumulator's format, u|a + b|, and one to storage.

    If flushed to zero, both operands and the sum may each lose a subnormal; otherwise nothing
    underflows. `stored_sum` (the sum is stored before the ReLU) adds nothing, as ReLU is exact.
    """
    (a, b), _ = finite_part(case)
    flushed = 3 * least_loss(case, contract) if case.precision.flush_to_zero else 0.0
    error = stored((roundoff(contract) + F64) * np.abs(a + b) + flushed, y, contract)
    return Bound.of(error, beyond_range(y, error, contract.output), y, contract)


def exact(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Ops that move or compare values (ReLU, max-pooling, relayout): no rounding.

    If flushed to zero, a subnormal value may be lost.
    """
    flush = format_of(contract.accumulate).tiny if case.precision.flush_to_zero else 0.0
    return Bound(np.full(y.shape, flush))


def integer(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Quantised ops: every rounding is specified (`r18.graph.quantized`), so the bound is 0."""
    return Bound(np.zeros(y.shape))


def scaled_sum(
    case: Case, contract: RoundingContract, y: Array, moved: Array | None = None
) -> Bound:
    """Sums of e4m3 products with their scales: `r18_oracle.judge.scaled.sum_error`, and storing.

    Nothing leaves e4m3, which saturates. In float32 a sum with its addends may. moved: by how much
    factors may differ: pixels that were made of an image, or means.
    """
    error, size = sum_error(case, contract, moved)
    largest = stored(error, y, contract)
    return Bound.of(largest, may_overflow(size, contract), y, contract)


def scale(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """x / s, or x times the rounded reciprocal of s: `quotient_error`, and storing.

    Where a reciprocal may leave float32 the output is not judged; what saturates is.
    """
    (x,), (divisor,) = finite_part(case)
    error = quotient_error(x, divisor, case, contract)
    return Bound.of(stored(error, y, contract), reciprocal_leaves(divisor, contract), y, contract)


BATCHNORM_ROUNDINGS = 10
"""Roundings of any term of a BatchNorm, in either form; see `batchnorm` and `scale_shift`."""


def batchnorm(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """(x − m) / √(v + eps) · w + b, as written, or by a reciprocal root, factors in any order.

    With every δ at most u: x − m rounds once; eps and v + eps round once each, which the root
    halves; root and reciprocal once each, or a reciprocal root within 2 ulp, which is 4u (CUDA
    C++ Programming Guide, table of `rsqrtf`); two products; the sum with b once. That is
    1 + 1 + 4 + 2 + 1 = 9, so E ≤ γ_10·(|x − m||w|/√(v+eps) + |b|).
    """
    x, _, root, weight, bias, mean = _batchnorm_parts(case, contract)
    size = np.abs(x - mean) * np.abs(weight) / root + np.abs(bias)
    return _batchnorm_bound(case, contract, y, size)


def scale_shift(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """x·a + c with a = w/√(v + eps) and c = b − m·a, computed first and kept as sums are.

    a carries at most six roundings (v + eps 1, reciprocal root 4, product 1; see `batchnorm`);
    x·a rounds once more and c twice (product, difference), the sum once: at most nine on any
    term, so E ≤ γ_10·(|x||a| + |m||a| + |b|). Where m·a cancels against x·a this is much larger
    than the bound of `batchnorm`, which is why a kernel must declare this form.
    """
    x, _, root, weight, bias, mean = _batchnorm_parts(case, contract)
    size = (np.abs(x) + np.abs(mean)) * np.abs(weight) / root + np.abs(bias)
    return _batchnorm_bound(case, contract, y, size)


def _batchnorm_bound(case: Case, contract: RoundingContract, y: Array, size: Array) -> Bound:
    """γ_10 times the size, the reference's γ_8, and underflow.

    Each of at most 8 operations may lose L, which the factors applied later (w, 1/root, x or m)
    multiply. The same factors may overflow in between, in any order. Where a weight is infinite, or
    x or m is infinite and w/root underflows, one form gives NaN and another does not.
    """
    x, inverse, _, weight, bias, mean = _batchnorm_parts(case, contract)
    reach = 1 + np.abs(x) + np.abs(mean)
    c = gamma(BATCHNORM_ROUNDINGS, roundoff(contract))
    lost = 8 * least_loss(case, contract) * (1 + inverse) * (np.abs(weight) + reach)
    error = stored((c + gamma(8, F64)) * size + (1 + c) * lost, y, contract)
    peak = reach * np.maximum(1, inverse) * np.maximum(1, np.abs(weight)) + np.abs(bias)
    given, parameters = case.wide()
    faint = np.abs(weight) * np.minimum(1, inverse) < format_of(contract.accumulate).tiny
    w, _, m, _ = (~np.isfinite(a[:, None, None]) for a in parameters)
    wild = w | (faint & (m | ~np.isfinite(given[0])))
    mask = may_overflow(peak, contract) | wild | beyond_range(y, error, contract.output)
    return Bound.of(error, mask, y, contract)


def _batchnorm_parts(case: Case, contract: RoundingContract) -> tuple[Array, ...]:
    """The finite parts of x, 1/√(v + eps), √(v + eps), w, b, m; all but x shaped (C, 1, 1)."""
    op = case.problem.op
    assert isinstance(op, BatchNorm)
    accumulate = format_of(contract.accumulate)
    if op.eps < accumulate.tiny / accumulate.u:
        raise UsageError(f"an eps of {op.eps:g} is lost in {contract.accumulate}")
    (x,), weights = finite_part(case)
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    root = np.sqrt(var + op.eps)
    return x, 1 / root, root, weight, bias, mean


NORMALIZE_ROUNDINGS = 6
"""Roundings of either term of a Normalize, in any form; see `normalize`."""


def normalize(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """(x/255 − m)/s of bytes x, as written, by reciprocals, or as x·a + c with a and c computed.

    m and s round to the accumulator's format. As written x/255 − m and its quotient by s round
    three times, with s four, and with reciprocals of 255 and s twice more. As x·a + c, a of two
    reciprocals has rounded four times (s, both, their product), x·a and the sum twice more; c three
    times (m, s, quotient) and the sum once. On the range of bytes, (x − 255m)/(255s), it is five.
    So E ≤ γ_6·(x/255 + |m|)/s. Where the mean cancels against a pixel the forms have the same
    bound, since all of them round the mean.

    Each of at most 6 operations may lose L; a loss in 1/s, a or x/255 is then multiplied by at most
    255, or divided by s. This holds while s and 255·s are normal numbers and 255·m is finite, which
    is checked.
    """
    op = case.problem.op
    assert isinstance(op, Normalize)
    accumulate = format_of(contract.accumulate)
    least, most = accumulate.tiny / accumulate.u, accumulate.largest * accumulate.u
    if not all(least <= s <= most for s in op.std) or not all(abs(m) <= most for m in op.mean):
        raise UsageError(
            f"a mean of {op.mean} or std of {op.std} is lost in {contract.accumulate}: a std must "
            f"be within {least:.0e} and {most:.0e}, a mean within ±{most:.0e}"
        )
    (x,), _ = case.wide()
    m, s = (np.array(values)[:, None, None] for values in (op.mean, op.std))
    size = (x / 255 + np.abs(m)) / s
    c = gamma(NORMALIZE_ROUNDINGS, roundoff(contract))
    lost = 6 * 255 * least_loss(case, contract) * (1 + 1 / s) * (1 + c)
    own = gamma(NORMALIZE_ROUNDINGS, F64) * size
    error = stored(c * size + lost + own, y, contract)
    mask = may_overflow(size * 255, contract) | beyond_range(y, error, contract.output)
    return Bound.of(error, mask, y, contract)


def mean(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """The sum of n values in any order, and one division or product with a rounded reciprocal.

    n − 1 additions and at most two roundings, before or after: E ≤ γ_{n+1}·Σ|x|/n. Each of n
    products, or the quotient, may underflow; flushed inputs and sums are divided by n.
    """
    (x,), _ = finite_part(case)
    n = x.shape[2] * x.shape[3]
    size = np.abs(x).sum(axis=(2, 3))
    c = summation_error(n + 1, contract, 1)
    lost = (1 + c) * underflow(n + 2, case, contract)
    error = stored((c + gamma(n + 1, F64)) * size / n + lost, y, contract)
    mask = may_overflow(size, contract) | beyond_range(y, error, contract.output)
    return Bound.of(error, mask, y, contract)


def mean_sum(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """Global average pooling and a linear layer of its means, which are kept as sums are.

    The computed means m̂ are within E_m of the means m (`mean`). The layer computes of them what it
    should within B, the bound of `sum_of_products`, and that differs by Σ|w||m̂ − m| from what it
    makes of m: E ≤ B(m̂) + Σ|w|·E_m. B depends on the magnitudes of means and result alone and
    grows with them, so it is taken of |m| + E_m and of |y| + Σ|w|·E_m.

    Blocks and truncation are those of the products; means are rounded to nearest. The layer's
    statistical line holds whatever the means are, so Σ|w|·E_m is added to it too. There is no line
    for drift: the roundings of a mean are common to all outputs of its sample. A mean that may
    overflow leaves its sample unjudged where it does.

    The layer of a `ScaledAvgPoolLinear` multiplies its sums: its B is that of `scaled_sum` of means
    that have moved by E_m. They are float32, as in the two ops: nothing is rounded to e4m3.
    """
    return _of_means(case, contract, y, contract.accumulate)


def stored_mean_sum(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """The same with means that are rounded to the storage format, as between two launches."""
    return _of_means(case, contract, y, case.precision.storage)


def _of_means(case: Case, contract: RoundingContract, y: Array, kept: str) -> Bound:
    pooling, layer = parts_of(case.problem)
    of_gap = replace(case, problem=pooling, weights=())
    one = replace(contract, algorithm="mean", output=kept, blocks=1, truncates=False)
    m = reference(pooling, *of_gap.wide())
    of_mean = mean(of_gap, one, m)
    off = np.where(np.isfinite(m), np.broadcast_to(of_mean.largest, m.shape), 0.0)
    if isinstance(layer.op, ScaledLinear):
        # No mean of e4m3 numbers overflows in float32.
        of_layer = replace(case, problem=layer, inputs=(m,))
        return scaled_sum(of_layer, replace(contract, algorithm="scaled_sum"), y, off)
    finite = np.abs(np.where(np.isfinite(m), m, 0.0)) + off
    (_, (weight, *_)) = finite_part(case)
    moved = off @ np.abs(weight).T
    inputs = (np.where(np.isfinite(m), finite, m),)
    of_linear = sum_of_products(
        replace(case, problem=layer, inputs=inputs),
        replace(contract, algorithm="sum"),
        np.abs(y) + moved,
    )
    mask = np.zeros(y.shape, bool) if of_linear.overflows is None else of_linear.overflows
    if of_mean.overflows is not None:
        mask = mask | of_mean.overflows.any(axis=1, keepdims=True)
    line = of_linear.statistical
    grown = 1 + 4 * F64  # this sum, and the products of `moved`, are computed in float64
    grown += gamma(weight.shape[1], F64)
    statistical = None if line is None else line + moved * grown
    return Bound.of(of_linear.largest + moved * grown, mask, y, contract, statistical)


EXP_ULPS = 4.0
"""The error in ulp that an implementation of exp may have; CUDA's expf and SLEEF's are within 2."""


def softmax(case: Case, contract: RoundingContract, y: Array) -> Bound:
    """exp(d_i)/Σ exp(d_j), d = x − max, formed before anything else is done to x.

    d rounds once, so exp(d) has a relative error of |d|u in addition to its own, EXP_ULPS·2u. An
    exp computed as 2^(d·log₂e) also rounds log₂e and the product, another 2|d|u, and CUDA's __expf
    is off by 2 + 1.18|d| ulp, 2.4|d|u; 4|d| covers each. So term i is off by at most
    ρ_i = (4|d_i| + 2·EXP_ULPS)u, the sum of F of them by Σ y_jρ_j + γ_F, the quotient (or
    reciprocal and product) by 2u more: E_i ≤ y_i·(ρ_i + Σ_j y_jρ_j + γ_F + 2u)·(1 + small), and
    an underflow of the smallest normal in the term and in the quotient. The reference adds the same
    in float64.
    """
    (x,), _ = case.wide()
    distance = x - x.max(axis=1, keepdims=True)
    # Beyond 800 exp is 0 in every format, and so is the error that its argument could cause.
    distance = np.where(np.isnan(distance), np.nan, np.minimum(np.abs(distance), 800.0))
    u = roundoff(contract)
    rho = (4 * distance + 2 * EXP_ULPS) * (u + F64)
    total = (y * rho).sum(axis=1, keepdims=True)
    features = x.shape[1]
    relative = rho + total + gamma(features + 2, u) + gamma(features + 2, F64)
    # e^ρ − 1 ≤ ρ + ρ² for ρ ≤ 1: products of relative errors. A quotient is at most 1.
    error = np.minimum(y * relative * (1 + relative), 1.0)
    error = error + 2 * format_of(contract.accumulate).tiny
    return Bound(stored(error, y, contract))


def pooled(case: Case, contract: RoundingContract, y: Array, derive: Derivation) -> Bound:
    """The maximum over windows of a convolution, whose own bound is `derive`'s.

    Let the convolution's outputs in a window be y_e, each computed within E_e, and m their
    maximum, at e*. No ŷ_e is above m by more than E_e − (m − y_e), and the computed maximum is not
    below ŷ_e* ≥ m − E_e*, so E ≤ max over the window of E_e − (m − y_e). That is at most max E_e,
    since the maximum is 1-Lipschitz in the maximum norm, and less where values far below m cannot
    win. E_e covers the rounding to storage, which is monotonic, so storing before or after the
    maximum gives the same. The three roundings of E_e − (m − y_e) in float64 are added to E_e.

    The statistical line holds for all outputs of the convolution together, so the same argument
    applies to it. An output that may overflow to +∞ wins every window that it is in; one that
    overflows to −∞ loses the window whose maximum it is.

    A `ScaledConvMaxPool` may make its pixels of an image, which moves some of them.
    """
    op = case.problem.op
    assert isinstance(op, ConvMaxPool | ScaledConvMaxPool)
    conv = case.of_convolution()
    made = reference(conv.problem, *conv.wide())
    of_conv = derive(conv, contract, made)
    if isinstance(op, ScaledConvMaxPool) and op.image is not None:
        assert derive is scaled_sum, "no other algorithm has moved pixels"
        of_conv = scaled_sum(conv, contract, made, moved_pixels(case, contract))
        if reciprocal_leaves(case.wide()[1][-1], contract).any():
            of_conv = replace(of_conv, overflows=np.ones(made.shape, bool))

    def of_window(error: Array) -> Array:
        wide = np.nan_to_num(np.broadcast_to(error, made.shape), nan=np.inf, posinf=np.inf)
        least = (y - below for below in over_window(op.pool, made, -np.inf))
        terms = over_window(op.pool, wide * (1 + 4 * F64), 0.0)
        found = np.zeros(y.shape)
        for term, distance in zip(terms, least, strict=True):
            # NaN where the maximum is infinite; no bound is needed there.
            found = np.fmax(found, np.where(np.isinf(term), term, term - distance))
        return found

    overflows = None
    if of_conv.overflows is not None:
        overflows = np.logical_or.reduce(list(over_window(op.pool, of_conv.overflows, False)))
    line = of_conv.statistical
    return Bound(of_window(of_conv.largest), None if line is None else of_window(line), overflows)


DERIVATIONS: dict[str, Derivation] = {
    "sum": sum_of_products,
    "winograd_f2x2": winograd_sum,
    "winograd_f4x4": winograd_sum,
    "transforms": transforms,
    "elementwise": elementwise,
    "exact": exact,
    "integer": integer,
    "scaled_sum": scaled_sum,
    "scale": scale,
    "batchnorm": batchnorm,
    "scale_shift": scale_shift,
    "mean": mean,
    "mean_sum": mean_sum,
    "stored_mean_sum": stored_mean_sum,
    "softmax": softmax,
    "normalize": normalize,
}


# -- bounds that no kernel declares ------------------------------------------------------------


def folding_error(
    problem: Problem, x: Array, weight: Array, bias: Array, u: float, eta: float = 0.0
) -> Array:
    """The change of a convolution when its folded weight and bias are rounded to unit roundoff u.

    ŵ = w(1+δ) + η' and b̂ = b(1+δ') + η'', so |Δy| ≤ u·(Σ|w||x| + |b|) + η/2·(Σ|x| + 1), with η
    the smallest subnormal of the format: folded weights are often subnormal in float16. x
    (N,C,H,W), weight OIHW, bias (O,), float64, the folded values before rounding; returns
    (N,O,OH,OW). The fold itself is computed in float64, like the reference.
    """
    size = magnitude(problem, (x,), (weight,))
    least = eta / 2 * (window_sum(problem, np.abs(x)) + 1) if eta else 0.0
    return u * (size + np.abs(bias)[:, None, None]) + least
