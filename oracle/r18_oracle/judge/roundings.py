"""The parts of bounds: formats, γ_n, and the error that each kind of rounding adds to a sum.

Sources and notation as in `r18_oracle.judge.bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Array, RoundingContract
from r18.errors import UsageError, unknown
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.precision import E4M3, E4M3_LARGEST, holder_of, round_to_e4m3, round_to_tf32
from r18.graph.scaled import ScaledConv2d, ScaledConvMaxPool
from r18_oracle.cases import Case
from r18_oracle.judge.reference import no_kernel_running, pre_epilogue, sum_spec
from r18_oracle.ops.spec import Summand
from r18_oracle.ops.table import spec_of

F64 = 2.0**-53
"""The unit roundoff of the reference."""

TENSOR_CORE_BLOCK = 4
"""The fewest products that a tensor core adds in one step (V100, T4; later ones add more). The
bound for it covers them all (Fasi et al., table 2)."""


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
    "float8_e4m3fn": Format(2.0**-4, 2.0**-9, 2.0**-6, E4M3_LARGEST),
}


PAIR = "fp16x2"
"""A factor as the sum of two float16 numbers; see `split_sum_error`."""

FACTORS = {
    "tf32": Format(2.0**-11, 2.0**-136, 2.0**-126, (2 - 2.0**-10) * 2.0**127),
    PAIR: Format(2.0**-23, 2.0**-35, 2.0**-13, 65504.0),
}
"""Formats that only factors have; nothing is summed in them. Outputs may be rounded to tf32, since
float32 holds its numbers. Below the `tiny` of a pair its second number is subnormal, and the error
is no longer relative."""


def format_of(name: str) -> Format:
    """The constants of a format of sums or outputs; raises `UnknownName` where none are known."""
    try:
        return FORMATS[name] if name != "tf32" else FACTORS[name]
    except KeyError:
        raise unknown("floating-point format", name, FORMATS) from None


def gamma(n: float, u: float) -> float:
    """γ_n = nu/(1−nu) (Higham 2002, Lemma 3.1); raises `UsageError` where nu ≥ 1."""
    if n * u >= 1:
        raise UsageError(f"no bound exists: {n:g} roundings at u = {u:g} may lose every digit")
    return n * u / (1 - n * u)


# -- sums and their factors ---------------------------------------------------------------------


def summation_error(
    terms: int, contract: RoundingContract, addends: int = 0, *, runs: int = 0
) -> float:
    """The factor c with |ŝ − s| ≤ c·S for a sum of `terms` products and addends, any order.

    The last `addends` terms (bias, residual) are not products and belong to no block. `runs` is T
    of promoted sums (`runs_of`); 0 where they are not promoted.

    - Rounded to nearest: γ_terms. A product rounds once, and it passes through at most terms − 1
      additions; an FMA only saves roundings (Higham 2002, §3.1). The same holds for the dot
      products of CPUs, vdpbf16ps and tdpbf16ps: trees of FMAs that round to nearest (Intel
      SDM, volume 2).
    - Declared blocking into T partial sums of at most ⌈K/T⌉ of the K products each, added
      pairwise: a product passes through ⌈K/T⌉ roundings in its block, ⌈log₂T⌉ above it, and one
      for each addend (Higham 2002, §4.2). T is at most the number of products.
    - Truncated, as tensor cores do: a step adds b products to the sum. All terms but the largest
      are truncated below the last bit of the largest, and normalisation truncates the result once
      more, each time by less than 2u. K products in steps of b lose at most K + ⌈K/b⌉ times 2u
      (Fasi et al. 2021, §3). Partial steps (channels padded to b at each tap) lose at most once
      per product, since normalisation only truncates a sum that is larger than any term.
    - Truncated and promoted: a run of p products loses p + ⌈p/b⌉ times t, then it passes through
      at most T additions of the T runs, and one for each addend, all rounded to nearest. t is 2u,
      or 2^−f if the unit keeps f bits of fraction. Π(1+δᵢ) with Σ|δᵢ| ≤ nu differs from 1 by at
      most γ_n (the proof of Lemma 3.1 needs nothing else), so n = (p + ⌈p/b⌉)·t/u + T + addends at
      u. Split-K adds nothing: of P parts with products, one with Tᵢ runs has Tᵢ ≤ T − P + 1, and
      Tᵢ + P − 1 additions. A part without adds zero, exactly.
    """
    u = roundoff(contract)
    products = max(1, terms - addends)
    if runs:
        run = min(contract.promoted, products)
        cut = run + math.ceil(run / TENSOR_CORE_BLOCK)
        kept = format_of(contract.accumulate).u
        return gamma(cut * u / kept + min(runs, products) + addends, kept)
    parts = min(contract.blocks, products)
    path = math.ceil(products / parts)
    if contract.truncates:
        path += math.ceil(path / TENSOR_CORE_BLOCK)
    return gamma(path + (parts - 1).bit_length() + addends, u)


def runs_of(case: Case, contract: RoundingContract) -> int:
    """T, the sums that are promoted for an output, at most; 0 if the contract promotes none.

    One for each p channels of a tap. A run that crosses taps only lowers the number.
    """
    if not contract.promoted:
        return 0

    def runs(problem: Problem) -> int:
        op = problem.op
        conv = op.conv if isinstance(op, ConvMaxPool | ScaledConvMaxPool) else op
        conv = conv.conv if isinstance(conv, ScaledConv2d) else conv
        taps = math.prod(conv.kernel_size) if isinstance(conv, Conv2d) else 1
        return taps * math.ceil(spec_of(op).depth(op) / taps / contract.promoted)

    return sum(runs(summand.problem) for summand in summands_of(case.problem))


def roundoff(contract: RoundingContract) -> float:
    """The relative error of one operation in the accumulator: u, or 2u where it truncates, or 2^−f
    where it keeps f bits of fraction."""
    if contract.fraction:
        return 2.0**-contract.fraction
    return format_of(contract.accumulate).u * (2 if contract.truncates else 1)


def factor_format(case: Case, contract: RoundingContract) -> Format | None:
    """The format that the factors of each product are rounded to; None where that is exact.

    Factors are kept in the storage format, Winograd's transformed ones in the accumulator's. A
    contract may claim a finer format than the precision's.
    """
    name = contract.factors or case.precision.multiply
    multiply = FACTORS.get(name) or format_of(name)
    transformed = contract.algorithm.startswith("winograd")
    held = format_of(contract.accumulate if transformed else case.precision.storage)
    return multiply if multiply.u > held.u else None


def factor_rounding(case: Case, contract: RoundingContract) -> float:
    """(1 + u_in)² − 1: both factors of each product are rounded, to 11 bits before tf32 units.

    u_in is 2⁻¹¹ rounded, 2⁻¹⁰ truncated. Factors that are stored in the format they are multiplied
    in lose nothing. For pairs the omitted product is added; see `split_sum_error`.
    """
    multiply = factor_format(case, contract)
    if multiply is None:
        return 0.0
    if is_split(case):
        return (1 + multiply.u) ** 2 - 1 + HALF**2
    u_in = multiply.u * (2 if contract.truncates else 1)
    return (1 + u_in) ** 2 - 1


HALF, LEAST_HALF = 2.0**-11, 2.0**-25
"""The error of a factor in float16: relative, or absolute where the float16 number is subnormal."""


def is_split(case: Case) -> bool:
    """Whether the precision lets a kernel multiply pairs of float16 in place of factors.

    As with tf32 only the precision decides. A kernel that multiplies in float32 nevertheless stays
    within the same bound.
    """
    return case.precision.splits


def split_sum_error(
    case: Case,
    contract: RoundingContract,
    products: Array,
    addends: Array | float,
    fused: int,
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Array:
    """The error of a sum of products of pairs: `products` is P = Σ|w||x|, `addends` are absolute.

    A factor v is split in h = fl₁₆(v) and l = fl₁₆(2¹¹(v − h)), both rounded to nearest; v − h is
    exact in float32. With a = 2⁻¹¹, d = 2⁻²⁵ and 2^e ≤ |v| < 2^(e+1), |v| ≤ 65504:

    - h:     |v − h| ≤ 2^(e−11) ≤ a|v|, or ≤ d where h is subnormal, so |h| ≤ (1+a)|v| + d.
    - l:     |2¹¹(v − h)| ≤ 2^e or 2⁻¹⁴, which float16 holds, and rounding keeps order:
             |2⁻¹¹l| ≤ a|v| + d.
    - h, l:  2¹¹(v − h) is 2^e, which is exact, or smaller, and then l is off by at most 2^(e−12),
             or by 2⁻²⁵ where it is subnormal: |v − h − 2⁻¹¹l| ≤ u|v| + ε with u = 2⁻²³, ε = 2⁻³⁶.

    Three products stand for wx: h·h in one accumulator, h·l and l·h in another, which is scaled
    by 2⁻¹¹ and added to the first at the end; 2⁻²²l·l is omitted. With T = Σ|x| + Σ|w| over the
    K products of an output, the lines above give

    - Σ|h·h| ≤ M = (1+a)²P + (1+a)dT + Kd²
    - 2⁻¹¹Σ(|h·l| + |l·h|) ≤ C = 2a(1+a)P + (1+2a)dT + 2Kd²
    - Σ|2⁻²²l·l| ≤ a²P + adT + Kd²
    - Σ|(h + 2⁻¹¹l)(h' + 2⁻¹¹l') − wx| ≤ ((1+u)² − 1)P + ε(1+u)T + Kε²

    Products of float16 are exact in float32, and no sum of them underflows there, scaled or not.
    The first accumulator adds K products, the second 2K, each by `summation_error`, with one
    addition more to join them: E ≤ c_K·(M + addends) + c_2K·C plus the last two lines. That is
    little more than c_K·S + 2⁻²¹·P: with more than a few products the summation dominates, as it
    does in float32. Where sums are promoted, those of the first accumulator are. A kernel that
    multiplies float32 rounds no more than that.
    """
    a, d, pair = HALF, LEAST_HALF, FACTORS[PAIR]
    count = depth_of(case)
    total = factor_sum(case.problem, inputs, weights)
    main = (1 + a) ** 2 * products + (1 + a) * d * total + count * d**2
    cross = 2 * a * (1 + a) * products + (1 + 2 * a) * d * total + 2 * count * d**2
    runs = runs_of(case, contract)
    c_main = summation_error(count + fused + 1, contract, fused + 1, runs=runs)
    c_cross = summation_error(2 * count + fused + 1, contract, fused + 1)
    summed = c_main * (main + addends) + c_cross * cross
    least = pair.eta / 2
    lost = (a * d + least * (1 + pair.u)) * total + count * (d**2 + least**2)
    error: Array = summed + factor_rounding(case, contract) * products + lost
    return error + (1 + c_main) * underflow(count + fused, case, contract)


def stored(error: Array, y: Array, contract: RoundingContract) -> Array:
    """The error after one more rounding, to the output's format: (1+u)E + u|y| + η/2.

    In e4m3, whose numbers are few, it is that of the numbers that y − E and y + E are rounded to:
    rounding and saturating keep order.
    """
    if contract.output == contract.accumulate:
        return error
    if contract.output == E4M3.name:
        ends = (np.abs(round_to_e4m3(y + side * error) - y) for side in (-1, 1))
        largest: Array = np.maximum(*ends)
        return largest
    out = format_of(contract.output)
    return (1 + out.u) * error + out.u * np.abs(y) + out.eta / 2


def rounded(values: Array, name: str) -> Array:
    """float64 values rounded to an output's format, in float64."""
    if name == E4M3.name:
        return round_to_e4m3(values)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        held = values.astype(holder_of(name))
    return (round_to_tf32(held) if name == "tf32" else held).astype(np.float64)


def least_loss(case: Case, contract: RoundingContract) -> float:
    """The most that one operation loses to underflow: η, or a whole subnormal if flushed to zero.

    Rounding to nearest loses η/2; the other half is the reference's, which matters for float64.
    """
    accumulate = format_of(contract.accumulate)
    return accumulate.tiny if case.precision.flush_to_zero else accumulate.eta


def underflow(terms: int, case: Case, contract: RoundingContract) -> float:
    """The error that underflow adds to a sum of `terms` products: η per product, or 2⁻¹²⁶ if
    flushed to zero.

    Higham 2002, §2.2: fl(a·b) = ab(1+δ) + η', and an addition is exact where its result is
    subnormal. If flushed it is not, but an addition can only lose where neither operand has been
    flushed, so products and additions together lose at most once per term: in any tree, a loss
    leaves 0 in place of the terms below it, and at least one of those had not been lost.
    """
    return (terms + 1) * least_loss(case, contract)


def factor_underflow(
    case: Case, contract: RoundingContract, inputs: tuple[Array, ...], weights: tuple[Array, ...]
) -> Array | float:
    """The error of factors below the smallest normal: up to ε absolutely, by rounding or flushing.

    |ŵx̂ − wx| ≤ ε(|w| + |x|)(1 + u_in) + ε², so ε(Σ|w| + Σ|x| + Kε)(1 + u_in) for a sum.
    """
    multiply = factor_format(case, contract)
    if case.precision.flush_to_zero:
        epsilon = format_of(contract.accumulate).tiny
    elif multiply is not None:
        epsilon = multiply.eta
    else:
        return 0.0
    u_in = 0.0 if multiply is None else 2 * multiply.u
    total = factor_sum(case.problem, inputs, weights)
    lost: Array = (total + depth_of(case) * epsilon) * (epsilon * (1 + u_in))
    return lost


def factor_hazards(case: Case, contract: RoundingContract) -> Array:
    """Where rounding the factors may give an infinity or NaN that exact arithmetic does not.

    A factor beyond the largest value of its format becomes infinite. A subnormal one may become
    zero, and zero times an infinity is NaN. Split into a pair, an infinite factor gives NaN (the
    difference of infinities), and a factor beyond 65504 gives two infinite halves; the output is
    then NaN or infinite. (A finite output is still judged.)
    """
    multiply = factor_format(case, contract)
    if multiply is None and not case.precision.flush_to_zero:
        return np.zeros(1, bool)
    limits = multiply or format_of(contract.accumulate)
    inputs, weights = case.wide()
    mask = np.zeros(1, bool)
    for summand in summands_of(case.problem):
        factors = inputs[summand.input], weights[summand.weight]
        mask = mask | _hazards(summand.problem, *factors, limits, is_split(case))
    return mask


def _hazards(problem: Problem, x: Array, weight: Array, limits: Format, splits: bool) -> Array:
    """`factor_hazards` of one sum of products of pixels x and weights."""

    def windows(found: Array) -> Array:
        if not found.any():
            return np.zeros(1, bool)
        return np.asarray(window_sum(problem, found.astype(np.float64)) > 0)

    def channels(found: Array) -> Array:
        return np.asarray(_weight_sum(found.astype(np.float64)) > 0)

    def far(a: Array) -> Array:
        return np.asarray(np.isfinite(a) & (np.abs(a) > limits.largest))

    def small(a: Array) -> Array:
        return np.asarray((a != 0) & (np.abs(a) < limits.tiny))

    if splits:
        split: Array = windows(far(x) | np.isinf(x)) | channels(far(weight) | np.isinf(weight))
        return split
    beyond = windows(far(x)) | channels(far(weight))
    lost = windows(~np.isfinite(x)) & channels(small(weight))
    found: Array = beyond | lost | (windows(small(x)) & channels(~np.isfinite(weight)))
    return found


def unspecified_outputs(case: Case) -> Array | None:
    """Outputs of a convolution for which an infinite or NaN weight meets padding; None without.

    They see fewer of their channel's non-finite weights than it has (`r18.backend.protocol`).
    """
    weights = case.wide()[1]
    masks = []
    for summand in summands_of(case.problem):
        op, found = summand.problem.op, ~np.isfinite(weights[summand.weight])
        if not isinstance(op, Conv2d) or not any(op.padding) or not found.any():
            continue
        plain = replace(op, bias=False, residual=False, relu=False)
        shape = (1, *summand.problem.inputs[0][1:])
        ones = np.ones(shape)
        seen = pre_epilogue(Problem(plain, (shape,)), (ones,), (found.astype(np.float64),))
        every = found.reshape(len(found), -1).sum(axis=1)[:, None, None]
        masks.append(np.broadcast_to(seen < every - 0.5, case.problem.output))
    return np.logical_or.reduce(masks) if masks else None


def window_sum(problem: Problem, x: Array) -> Array:
    """Σ x over the inputs that each output reads: (N, 1, OH, OW) for a convolution, (N, 1) for a
    linear."""
    no_kernel_running()
    return sum_spec(problem.op).window_sum(problem.op, x)


def factor_sum(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """Σ|x| + Σ|w| over the products of each output, in a shape that broadcasts over it."""
    total: Array = np.zeros(1)
    for summand in summands_of(problem):
        pixels = window_sum(summand.problem, np.abs(inputs[summand.input]))
        total = total + pixels + _weight_sum(weights[summand.weight])
    return total


def summands_of(problem: Problem) -> tuple[Summand, ...]:
    """The sums of products in each output of a problem."""
    return spec_of(problem.op).summands(problem)


def over_window(op: MaxPool2d, x: Array, outside: float) -> Iterator[Array]:
    """For each tap of the window, the pixels that the outputs read there: arrays (N, C, OH, OW)."""
    (ph, pw), (sh, sw) = op.padding, op.stride
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=outside)
    windows = sliding_window_view(padded, op.kernel_size, axis=(2, 3))[:, :, ::sh, ::sw]
    for r, s in np.ndindex(op.kernel_size):
        yield windows[..., r, s]


def _weight_sum(weight: Array) -> Array:
    """Σ|w| of each output channel, shaped to broadcast over the output."""
    total: Array = np.abs(weight).reshape(len(weight), -1).sum(axis=1)
    return total[:, None, None] if weight.ndim == 4 else total


def finite_part(case: Case) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Inputs and weights in float64, with 0 in place of infinities and NaN."""
    inputs, weights = case.wide()
    return tuple(map(_finite, inputs)), tuple(map(_finite, weights))


def _finite(a: Array) -> Array:
    finite = np.isfinite(a)
    return a if finite.all() else np.where(finite, a, 0.0)


def depth_of(case: Case) -> int:
    """K, the number of products in one output of a convolution or linear."""
    return sum_spec(case.problem.op).depth(case.problem.op)


def addends_of(case: Case) -> tuple[Array, ...]:
    """Bias and residual in float64, shaped to broadcast over the output."""
    inputs, weights = finite_part(case)
    return sum_spec(case.problem.op).addends(case.problem.op, inputs, weights)


def with_epilogue(
    case: Case, contract: RoundingContract, y: Array, sum_error: Array
) -> tuple[Array, Array]:
    """The error of the stored result from that of the sum of products, and where the result may
    leave the range of the storage format.

    If bias and residual share the accumulator, `sum_error` covers them. With `stored_sum` it covers
    only the products: the sum is rounded to storage, and each later addition rounds once (and may
    lose a subnormal if flushed to zero). ReLU is 1-Lipschitz and exact, so it adds nothing.
    """
    if not contract.stored_sum:
        error = stored(sum_error, y, contract)
        return error, beyond_range(y, error, contract.output)
    raw = pre_epilogue(case.problem, *finite_part(case))
    error = stored(sum_error, raw, contract)
    beyond = beyond_range(raw, error, contract.output)
    addends = addends_of(case)
    size = np.abs(raw) + error + sum(np.abs(a) for a in addends)
    error = error + gamma(len(addends), roundoff(contract)) * size
    error = stored(error + underflow(len(addends), case, contract), y, contract)
    return error, beyond | beyond_range(y, error, contract.output)


def beyond_range(y: Array, error: Array, name: str) -> Array:
    """Where a finite result plus its error may exceed the largest value of the format."""
    mask: Array = np.isfinite(y) & (np.abs(y) + error >= format_of(name).largest)
    return mask


def may_overflow(size: Array, contract: RoundingContract) -> Array:
    """Where a partial sum of this size may leave the accumulator's range, or `size` did."""
    mask: Array = ~(size < format_of(contract.accumulate).largest / 2)
    return mask
