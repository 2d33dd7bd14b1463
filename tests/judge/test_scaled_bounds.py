"""The bound of scaled ops: its derivation, and that correct arithmetic stays within it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faults import scaled
from faults.controls import ControlBackend
from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.errors import UsageError
from r18.graph.ops import Conv2d, GlobalAvgPool, Linear, MaxPool2d, Op, Problem, parts_of
from r18.graph.precision import E4M3, FP8, FP16, round_to_e4m3
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18.runtime.launch import run_kernel
from r18_oracle.cases import Case
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.bounds import bound, gamma, summation_error
from r18_oracle.judge.declared import objection
from r18_oracle.judge.reference import reference
from r18_oracle.judge.roundings import runs_of, stored
from r18_oracle.judge.scaled import moved_pixels
from r18_oracle.judge.verdict import Judgement, judge

BACKEND = ControlBackend()
U = 2.0**-24
PLAIN = RoundingContract("scaled_sum", "float32", FP8.storage)
EVERY = np.arange(256, dtype=np.uint8).view(E4M3)


def judged(kernel: HostKernel, case: Case) -> Judgement:
    got = run_kernel(BACKEND, kernel, case.problem, *case.inputs, *case.weights)
    return judge(case, kernel.contract, got)


def deep(channels: int) -> Problem:
    conv = Conv2d(channels, 8, (3, 3), (1, 1), (1, 1), bias=True)
    return Problem(ScaledConv2d(conv), ((1, channels, 5, 5),))


# -- storing -----------------------------------------------------------------------------------


def test_rounding_is_that_of_the_format() -> None:
    """Rounding is e4m3's for every float16, with all ties; it saturates, and NaN stays NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    found = round_to_e4m3(halves)
    within = np.abs(halves) <= 448
    assert np.array_equal(found[within], halves[within].astype(E4M3).astype(np.float64))
    assert np.array_equal(np.isnan(found), np.isnan(halves))
    beyond = ~within & ~np.isnan(halves)
    assert np.array_equal(found[beyond], np.copysign(448.0, halves[beyond]))
    numbers = EVERY.astype(np.float64)
    assert np.array_equal(round_to_e4m3(numbers), numbers, equal_nan=True)


def test_an_exact_result_is_stored_as_the_one_number() -> None:
    """An exact result has one right number: no neighbour of it is within the bound."""
    numbers = np.sort(EVERY.astype(np.float64)[~np.isnan(EVERY.astype(np.float64))])
    numbers = np.unique(numbers)
    y = np.random.default_rng(0).uniform(-448, 448, 10_000)
    right = round_to_e4m3(y)
    largest = stored(np.zeros_like(y), y, PLAIN)
    assert (np.abs(right - y) <= largest).all()
    place = np.searchsorted(numbers, right)
    for step in (-1, 1):
        other = numbers[np.clip(place + step, 0, len(numbers) - 1)]
        ties = np.abs(other - y) == np.abs(right - y)
        assert (np.abs(other - y) > largest)[(other != right) & ~ties].all()


def test_near_a_tie_either_number_is_right() -> None:
    tie = 1.0625  # between 1 and 1.125
    y = np.array([tie - 1e-4, tie + 1e-4, 1.02])
    found = stored(np.full(3, 1e-3), y, PLAIN)
    assert found == pytest.approx([1.125 - y[0], y[1] - 1, 0.02])


def test_saturation_is_part_of_the_result() -> None:
    """A result of 448 ± E saturates: it is at most 448, and as far below as E reaches."""
    found = stored(np.array([1.0, 20.0]), np.array([448.0, 448.0]), PLAIN)
    assert found.tolist() == [0.0, 32.0]


# -- sums --------------------------------------------------------------------------------------


def test_the_formula_by_hand() -> None:
    """By hand: a unit with f fraction bits loses 2^−f of the sum; sums are promoted in float32."""
    problem = deep(200)
    case = make_case(scaled.CONTROLS[0], problem, "normal", 0)
    assert runs_of(case, scaled.NARROW) == 9 * 2
    found = summation_error(1800, scaled.NARROW, runs=18)
    assert found == gamma((128 + 32) * 2.0**-13 / U + 18, U)
    assert summation_error(32, replace(scaled.NARROW, promoted=0)) == gamma(32 + 8, 2.0**-13)
    assert summation_error(32, replace(scaled.NARROW, promoted=0, fraction=0)) == gamma(40, 2 * U)


def test_the_bound_of_one_product() -> None:
    """The bound of m·(w·x) + b with exact products has 4 roundings, and c of one product."""
    op = ScaledConv2d(Conv2d(1, 1, (1, 1), bias=True))
    arrays = [np.full((1, 1, 1, 1), v) for v in (3.0, 5.0)] + [np.array([0.25]), np.array([2.0])]
    case = Case(Problem(op, ((1, 1, 1, 1),)), FP8, (arrays[0],), tuple(arrays[1:]))
    wide = replace(PLAIN, output="float32")
    y = reference(case.problem, *case.wide())
    assert y.item() == 30.25
    size, after = 30.25, gamma(4, U)
    expected = (1 + after) * 30 * gamma(1, U) + after * size
    assert bound(case, wide, y).largest.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("channels", [64, 512])
@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
def test_narrow_sums_stay_within_the_bound_if_they_are_promoted(channels: int, kind: str) -> None:
    kernel = next(k for k in scaled.CONTROLS if k.contract == scaled.NARROW)
    for seed in range(3):
        found = judged(kernel, make_case(kernel, deep(channels), kind, seed))
        assert found.ok, (seed, found)


def test_narrow_sums_that_are_never_promoted_exceed_it() -> None:
    """Narrow sums without promotion exceed the bound: of 4,608 positive products, a unit with 13
    bits loses half of each of the last."""
    kernel = next(k for k in scaled.CONTROLS if k.contract == scaled.NARROW)
    wrong = replace(kernel, run=scaled.conv(scaled.UNIT))
    assert not judged(wrong, make_case(kernel, deep(512), "positive", 1)).ok


@pytest.mark.parametrize(
    "kernel",
    [k for k in scaled.CONTROLS if k.op not in (MaxPool2d, ScaledConvMaxPool)],
    ids=lambda kernel: kernel.id,
)
def test_any_numbers_of_the_format(kernel: HostKernel) -> None:
    """Bounds hold for each of the 256 bytes, NaN included, and factors over many binades."""
    problems: dict[type[Op], Problem] = {
        ScaledConv2d: Problem(
            ScaledConv2d(Conv2d(5, 4, (3, 2), (2, 1), (1, 1), True, True, True)),
            ((3, 5, 6, 4), (3, 4, 3, 5)),
        ),
        ScaledLinear: Problem(ScaledLinear(Linear(9, 7)), ((5, 9),)),
        ScaledGlobalAvgPool: Problem(ScaledGlobalAvgPool(), ((4, 6, 3, 5),)),
        ScaledAvgPoolLinear: classifier((4, 6, 3, 5), 7),
        Scale: Problem(Scale(), ((4, 3, 5, 6),)),
    }
    problem = problems[kernel.op]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        numbers = EVERY.astype(np.float64)
        if seed % 2:
            numbers = numbers[~np.isnan(numbers)]
        inputs = [rng.choice(numbers, shape) for shape in problem.inputs]
        weights: list[Array] = []
        for spec in problem.op.weights():
            factors = np.exp2(rng.uniform(-20, 12, spec.shape)).astype(np.float32)
            drawn = factors if spec.positive else factors * rng.choice([-1, 1], spec.shape)
            weight = rng.choice(numbers[np.isfinite(numbers)], spec.shape)
            weights.append(weight if len(spec.shape) > 1 else drawn.astype(np.float64))
        case = Case.of(kernel, problem, tuple(inputs), tuple(weights))
        with np.errstate(all="ignore"):
            found = judged(kernel, case)
        assert found.ok, (seed, found)
        assert found.unjudged == 0


def classifier(shape: tuple[int, ...], outputs: int) -> Problem:
    return Problem(ScaledAvgPoolLinear(ScaledLinear(Linear(shape[1], outputs))), (shape,))


def test_the_bound_of_one_product_of_a_mean() -> None:
    """The bound of m·w·(x₁ + x₂)/2 + b: the mean's error reaches the result times m·w. The mean is
    3.625, which e4m3 does not hold."""
    op = ScaledAvgPoolLinear(ScaledLinear(Linear(1, 1)))
    x = np.array([3.5, 3.75]).reshape(1, 1, 1, 2)
    weights = np.full((1, 1), 5.0), np.array([0.25]), np.array([2.0])
    case = Case(Problem(op, (x.shape,)), FP8, (x,), weights)
    y = reference(case.problem, *case.wide())
    assert y.item() == 2 * 5 * 3.625 + 0.25
    off = gamma(3, U) * 3.625  # of two terms: their sum, and up to two roundings
    after = gamma(4, U)
    products = 5 * (3.625 + off)
    size = 2 * products + 0.25
    expected = (1 + after) * 2 * (gamma(1, U) * products + 5 * off) + after * size
    found = bound(case, scaled.OF_MEANS, y)
    assert found.largest.item() == pytest.approx(expected, rel=1e-6)
    assert (found.statistical, found.drift) == (None, None)


def test_the_bound_of_a_classifier_is_that_of_its_two_ops() -> None:
    """A classifier's bound is that of means within their bound, then a layer within its bound."""
    rng = np.random.default_rng(3)
    problem = classifier((3, 40, 7, 7), 6)
    case = make_case(scaled.CONTROLS[0], problem, "normal", 1)
    pooling, layer = parts_of(problem)
    (x,), weights = case.wide()
    means = reference(pooling, (x,), ())
    off = bound(replace(case, problem=pooling, weights=()), scaled.MEANS, means).largest
    y = reference(problem, (x,), weights)
    allowed = bound(case, scaled.OF_MEANS, y).largest
    for _ in range(10):
        moved = means + off * rng.choice([-1.0, 1.0], off.shape)
        of_layer = replace(case, problem=layer, inputs=(moved,))
        there = reference(layer, (moved,), weights)
        layer_off = bound(of_layer, scaled.WIDE, there).largest
        assert (np.abs(there - y) + layer_off <= allowed * (1 + 1e-9)).all()


# -- a stem in one step -------------------------------------------------------------------------


def stem_case(x: Array, weight: Array, scale: float, padding: int = 0) -> Case:
    """A stem's case: one channel, bias 0, multiplier 1, 1×2 pooling with a stride of 1."""
    conv = ScaledConv2d(Conv2d(1, 1, weight.shape[2:], (1, 1), (0, padding), bias=True))
    op = ScaledConvMaxPool(conv, MaxPool2d((1, 2), (1, 1)), Scale())
    weights = (weight, np.zeros(1), np.ones(1), np.array([scale]))
    return Case.of(stem_kernel(), Problem(op, (x.shape,)), (x,), weights)


def stem_kernel() -> HostKernel:
    return next(k for k in scaled.CONTROLS if k.op is ScaledConvMaxPool)


def test_the_result_is_that_of_the_ops_one_after_the_other() -> None:
    """The result is that of the ops in turn, on stored numbers: 1.06 · 32 is 32 or 36."""
    x = np.array([1.06, 1.07, -3.0, 1e9]).reshape(1, 1, 1, 4)
    case = stem_case(x, np.full((1, 1, 1, 1), 32.0), 1.0)
    y = reference(case.problem, *case.wide())
    np.testing.assert_array_equal(y.ravel(), [36.0, 36.0, 448.0])


def test_only_pixels_near_a_tie_may_differ() -> None:
    """Only pixels near a tie may differ: by a reciprocal 1.0625 rounds to either side."""
    scale = np.float32(0.1)
    tie = np.float32(1.0625) * scale
    x = np.array([tie, 1.0 * scale, 1.05 * scale, 2e9]).reshape(1, 1, 1, 4)
    case = stem_case(x, np.full((1, 1, 1, 1), 8.0), float(scale))
    moved = moved_pixels(case, PLAIN)
    assert moved.ravel().tolist() == [0.125, 0, 0, 0]
    y = reference(case.problem, *case.wide())
    allowed = bound(case, PLAIN, y).largest.ravel()
    assert allowed[0] >= 1.0  # 8 · 0.125
    assert allowed[1] < 0.01
    assert judged(stem_kernel(), case).ok


def test_nan_is_the_result_of_every_window_that_holds_it_and_of_no_other() -> None:
    x = np.arange(8.0).reshape(1, 1, 1, 8)
    x[..., 4] = np.nan
    case = stem_case(x, np.ones((1, 1, 1, 3)), 1.0, padding=1)
    y = reference(case.problem, *case.wide())
    assert np.isnan(y.ravel()).tolist() == [False, False, True, True, True, True, False]
    assert judged(stem_kernel(), case).ok


# -- contracts ---------------------------------------------------------------------------------


def test_a_contract_claims_no_fewer_bits_than_a_unit_keeps() -> None:
    kernel = next(k for k in scaled.CONTROLS if k.contract == scaled.NARROW)
    assert objection(kernel) is None
    said = objection(replace(kernel, contract=replace(scaled.NARROW, fraction=10)))
    assert said == "units that multiply float8_e4m3fn keep 13 bits of fraction, not 10"
    other = scaled.kernel("control", Conv2d, "narrow", scaled.conv(), FP16)
    narrow = RoundingContract("sum", "float32", "float16", truncates=True, fraction=13)
    said = objection(replace(other, contract=narrow))
    assert said == "units that multiply float16 keep all bits of float32, not 13"
    with pytest.raises(UsageError, match="only sums that are truncated keep fewer bits"):
        RoundingContract("scaled_sum", "float32", FP8.storage, fraction=13)


def test_means_and_logits_are_float32() -> None:
    for kernel in scaled.CONTROLS:
        assert objection(kernel) is None, kernel.id
        if kernel.op in (ScaledGlobalAvgPool, ScaledLinear):
            said = objection(replace(kernel, contract=replace(kernel.contract, output=FP8.storage)))
            assert said == "fp8 stores float32, not float8_e4m3fn"


def test_a_mean_is_that_of_the_float_op() -> None:
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    of_floats = reference(Problem(GlobalAvgPool(), (x.shape,)), (x,), ())
    of_scaled = reference(Problem(ScaledGlobalAvgPool(), (x.shape,)), (x,), ())
    assert np.array_equal(of_floats, of_scaled)
