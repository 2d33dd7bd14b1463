"""The bias test: rounding to nearest stays below its line, and truncation shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faults.bias import FAULTS, TWINS
from faults.conv import linear
from faults.fault import kernel
from r18.backend import Array, Kernel
from r18.graph.ops import Conv2d, Linear, Problem
from r18.graph.precision import BF16, FP16, FP32, TF32, Precision
from r18_oracle.cases import Case
from r18_oracle.generate.inputs import ROUNDING, make_case
from r18_oracle.judge.bias import FEWEST, LINE, Drift, _numbered, influence, led
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import Judgement, expected, judge

CONV = Problem(Conv2d(16, 24, (3, 3), (1, 1), (1, 1), bias=True), ((2, 16, 13, 11),))
LINEAR = Problem(Linear(96, 40), ((24, 96),))
BROAD = kernel("toy", Linear, "in_order", lambda *arguments: None, BF16)


def judged(one: Kernel, problem: Problem, kind: str, seed: int) -> Judgement:
    case = make_case(one, problem, kind, seed)
    out = np.empty(problem.output, case.precision.dtype)
    weights = tuple(np.asarray(w) for w in case.weights)
    one.run(problem.op, case.inputs, weights, out, np.empty(0, np.uint8))  # type: ignore[attr-defined]
    return judge(case, one.contract, out)


@pytest.mark.parametrize("seed", range(4))
def test_cut_weights_are_within_the_bound_and_lean_to_one_side(seed: int) -> None:
    judgement = judged(FAULTS[0].kernel, CONV, "positive", seed)
    assert judgement.ok
    assert judgement.bias is not None
    assert judgement.bias > 1


def test_cut_outputs_are_within_the_bound_and_lean_to_one_side() -> None:
    cut, whole = FAULTS[1].kernel, FAULTS[2].kernel
    found = [judged(cut, CONV, "positive", seed) for seed in range(4)]
    assert all(one.ok and one.bias is not None and one.bias > 1 for one in found)
    # What is not rounded at all is nearer to the truth: only integers show it.
    assert all(judged(whole, CONV, "positive", seed).ok for seed in range(4))


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.id)
def test_rounded_factors_stay_far_below_the_line(twin: Kernel, kind: str) -> None:
    found = [judged(twin, LINEAR, kind, seed) for seed in range(8)]
    assert all(one.ok for one in found)
    assert max(one.bias or 0.0 for one in found) < 0.5


@pytest.mark.parametrize("precision", [FP32, FP16, BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("kind", ROUNDING)
def test_rounded_sums_stay_far_below_the_line(precision: Precision, kind: str) -> None:
    def run(op: Any, x: Any, w: Any, out: Array, scratch: Any) -> None:
        total = np.zeros(out.shape, np.float32)
        for k in range(x[0].shape[1]):
            total += x[0][:, k, None].astype(np.float32) * w[0][None, :, k].astype(np.float32)
        out[...] = (total + w[1].astype(np.float32)).astype(out.dtype)

    right = kernel("toy", Linear, "in_order", run, precision)
    found = [judged(right, LINEAR, kind, seed).bias or 0.0 for seed in range(8)]
    assert max(found) < 0.5
    assert max(found) > 0


def test_a_truncating_contract_and_float64_have_no_line() -> None:
    from r18_oracle.judge.bounds import bound

    one = TWINS[0]
    case = make_case(one, LINEAR, "normal", 0)
    y = reference(LINEAR, *case.wide())
    assert bound(case, one.contract, y).drift is not None
    assert bound(case, replace(one.contract, truncates=True), y).drift is None


def test_influence_is_the_effect_of_each_factor() -> None:
    """Each factor's influence is the effect of changing that factor alone."""
    problem = Problem(Conv2d(2, 2, (2, 2), (2, 1), (1, 0)), ((1, 2, 3, 4),))
    case: Case = make_case(TWINS[0], LINEAR, "normal", 0)
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((1, 2, 3, 4)), rng.standard_normal((2, 2, 2, 2))
    assert case.precision is TF32

    def total(x: Array, w: Array) -> float:
        return float(reference(problem, (np.abs(x),), (np.abs(w),)).sum())

    expected = 0.0
    for array in (x, w):
        for index in np.ndindex(array.shape):
            held = array[index]
            before = total(x, w)
            array[index] = held * 1.5
            expected += ((total(x, w) - before) / 0.5) ** 2
            array[index] = held
    assert influence(problem, (x,), (w,)) == pytest.approx(expected)


def test_few_elements_are_not_judged() -> None:
    drift = Drift(np.ones(FEWEST), 0.0, np.zeros(FEWEST), np.ones(FEWEST))
    error, y = np.full(FEWEST, 100.0), np.ones(FEWEST)
    chosen = np.ones(FEWEST, bool)
    assert (drift.ratio(error, y, chosen) or 0.0) > 1
    chosen[0] = False
    assert drift.ratio(error, y, chosen) is None


def test_a_small_bias_that_all_outputs_share_is_no_fault() -> None:
    """A small bias that all outputs share is no fault: each sum of one product rounds alike."""
    problem = Problem(Linear(1, 1), ((4345, 1),))
    right = kernel("toy", Linear, "plain", linear)
    found = [judged(right, problem, "positive", seed) for seed in range(12)]
    assert max(one.bias or 0.0 for one in found) <= 1


def test_outputs_that_see_only_padding_are_no_fault() -> None:
    """Outputs that see only padding are the bias, rounded alike, and no fault. A kernel was accused
    of this; seeds 0 to 11 cover it."""
    problem = Problem(Conv2d(1, 1, (1, 1), (1, 2), (0, 1), bias=True), ((1, 1, 67, 1),))

    def run(op: Any, x: Any, w: Any, out: Array, scratch: Any) -> None:
        out[...] = w[1].astype(out.dtype)

    right = kernel("toy", Conv2d, "only_bias", run, FP16)
    found = [judged(right, problem, "normal", seed) for seed in range(12)]
    assert all(one.ok for one in found)
    assert max(one.bias or 0.0 for one in found) <= 1


@pytest.mark.parametrize("stored_sum", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("kind", ROUNDING)
def test_a_bias_that_decides_what_storage_drops_is_no_fault(
    kind: str, channels: int, residual: bool, stored_sum: bool
) -> None:
    """A bias that decides what storage drops is no fault. Kernels were accused if products were 0
    or few multiples of one number (as of weights that add up to 0 and pixels near 100), and if the
    sum is stored before the bias."""
    op = Conv2d(channels, 3, (1, 1), bias=True, residual=residual)
    problem = Problem(op, ((4, channels, 20, 55), (4, 3, 20, 55))[: 1 + residual])

    def run(op: Any, x: Any, w: Any, out: Array, scratch: Any) -> None:
        pixels, weights, bias = (a.astype(np.float32) for a in (x[0], w[0][:, :, 0, 0], w[1]))
        total = np.einsum("nchw,oc->nohw", pixels, weights)
        total = total.astype(out.dtype).astype(np.float32) if stored_sum else total
        total += bias[:, None, None]
        out[...] = (total + x[1] if residual else total).astype(out.dtype)

    contract = replace(kernel("toy", Conv2d, "plain", run, FP16).contract, stored_sum=stored_sum)
    right = kernel("toy", Conv2d, "plain", run, FP16, contract)
    found = [judged(right, problem, kind, seed) for seed in range(3)]
    assert all(one.ok for one in found)
    assert max(one.bias or 0.0 for one in found) <= 1


def test_a_weight_that_leads_its_channel_is_no_fault() -> None:
    """A weight that leads its channel is no fault: every pixel times 255, the largest 8-bit factor,
    is rounded down to bfloat16."""
    weights = np.full((1, 8), 2.0**-3)
    weights[0, 0] = 255
    pixels = np.random.default_rng(0).integers(129, 256, (4096, 8)).astype(np.float64)
    case = replace(
        make_case(BROAD, Problem(Linear(8, 1), ((4096, 8),)), "normal", 0),
        inputs=(pixels.astype(BF16.dtype),),
        weights=(weights, np.zeros(1)),
    )
    y = reference(case.problem, *case.wide())
    judgement = judge(case, BROAD.contract, y.astype(BF16.dtype))
    assert judgement.ok
    assert judgement.bias is not None
    assert judgement.bias < 1
    drift = expected(case, BROAD.contract).limits.drift
    assert drift is not None
    chosen = np.ones(y.shape, bool)
    assert (drift.ratio(y.astype(BF16.dtype).astype(np.float64) - y, y, chosen) or 0.0) > 1


def test_one_product_of_half_the_sum_leads_it() -> None:
    x = np.array([[3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    w = np.array([[1.0, -1.0, 1.0, 1.0], [0.0, 8.0, -1.0, 1.0]])
    found = led(Problem(Linear(4, 2), ((3, 4),)), (x,), (w, np.zeros(2)))
    assert found.tolist() == [[True, True], [True, True], [True, True]]
    wider = np.ones((1, 9))
    wider[0, 0] = 9
    among = led(Problem(Linear(9, 2), ((1, 9),)), (wider,), (np.ones((2, 9)), np.zeros(2)))
    assert among.all()
    wider[0, 0] = 2
    among = led(Problem(Linear(9, 2), ((1, 9),)), (wider,), (np.ones((2, 9)), np.zeros(2)))
    assert not among.any()


@pytest.mark.parametrize("count", [1, 2, 300, 5000])
def test_equal_numbers_have_one_group_and_others_their_own(count: int) -> None:
    """Numbers that are equal as float32 share a group: both zeros do, and no NaN does."""
    rng = np.random.default_rng(count)
    values = np.array([0.0, -0.0, 1.0, 1.0 + 2.0**-30, -1.0, 2.0**-149, np.inf, -np.inf])
    some = np.concatenate([rng.choice(values, count), rng.standard_normal(count)])
    groups = _numbered(some)
    narrow = some.astype(np.float32)
    assert np.array_equal(groups[:, None] == groups, narrow[:, None] == narrow)
    assert sorted(set(groups)) == list(range(len(set(narrow))))
    assert len(set(_numbered(np.array([np.nan, 0.0, np.nan])))) == 3


def test_groups_are_those_of_the_chosen_elements_each_time() -> None:
    y = np.repeat(np.arange(1.0, 101.0), 2)
    drift = Drift(np.ones(200), 0.0, np.zeros(200), y)
    twins = np.ones(200, bool)
    single = np.tile([True, False], 100)
    error = np.ones(200)
    found = [drift.ratio(error, y, chosen) for chosen in (twins, single, twins)]
    assert found[0] == found[2] == pytest.approx(200 / (LINE * np.sqrt(100 * 2**2)))
    assert found[1] == pytest.approx(100 / (LINE * np.sqrt(100)))
