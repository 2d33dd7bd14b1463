"""Convolutions with max-pooling in the oracle: bounds, drawn problems, values, tolerances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r18_numpy
from campaigns import drawn
from faults import Backend as Faults
from faults.conv_maxpool import FAULTS, TILE, TWINS
from pooling_backends import Pooling, pooled, stem_alone
from r18.backend import RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import (
    AvgPoolLinear,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    MaxPool2d,
    Problem,
    parts_of,
)
from r18.graph.precision import FP16, FP32, Precision
from r18.graph.resnet import resnet18, tiny
from r18_oracle.cases import Case
from r18_oracle.findings import problem_from_json, problem_to_json
from r18_oracle.generate.corners import corners
from r18_oracle.generate.crossings import crossings
from r18_oracle.generate.inputs import fewest_variants, make_case
from r18_oracle.generate.problems import schedule_problems
from r18_oracle.generate.stems import WINDOWS, Stems
from r18_oracle.judge.bounds import bound
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import judge
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.coverage import uncovered
from r18_oracle.search.profiles import profile
from support import Array, compute

SUM = RoundingContract("sum", "float32", "float32")
QUICK = profile("quick")
POOL = MaxPool2d((1, 3), (1, 1))


def row(values: list[float], w: float, precision: Precision = FP32, **fused: bool) -> Case:
    """A case: a row of pixels times one weight, and the maximum of each three neighbours."""
    op = ConvMaxPool(Conv2d(1, 1, (1, 1), **fused), POOL)
    x = np.array(values, precision.dtype).reshape(1, 1, 1, -1)
    weight = np.full((1, 1, 1, 1), w, precision.dtype)
    return Case(Problem(op, (x.shape,)), precision, (x,), (weight,))


def bound_of(case: Case, contract: RoundingContract = SUM) -> tuple[Array, Array]:
    """The result and its largest error, flattened to one row."""
    y = reference(case.problem, *case.wide())
    return y.reshape(-1), bound(case, contract, y).largest.reshape(-1)


# -- the bound ---------------------------------------------------------------------------------


def errors_of_conv(case: Case, contract: RoundingContract = SUM) -> tuple[Array, Array]:
    conv = case.of_convolution()
    y = reference(conv.problem, *conv.wide())
    return y.reshape(-1), bound(conv, contract, y).largest.reshape(-1)


def test_a_window_errs_by_what_can_win_it() -> None:
    """A window's error is that of its possible maxima: 1000's, and nothing of 1 and 3."""
    _, own = errors_of_conv(row([1.0, 1000.0, 3.0], 0.7))
    _, found = bound_of(row([1.0, 1000.0, 3.0], 0.7))
    assert found == pytest.approx([own[1]], rel=1e-12)
    assert own[1] > 100 * own[2]


def test_what_is_near_the_maximum_and_less_exact_counts() -> None:
    """An inexact sum near the maximum counts: a sum that cancels may be computed as the larger."""
    problem = Problem(ConvMaxPool(Conv2d(2, 1, (1, 1)), POOL), ((1, 2, 1, 3),))
    x = np.array([[1.0, 0.0, 1e8], [0.0, 0.0, -1e8]], np.float32).reshape(1, 2, 1, 3)
    case = Case(problem, FP32, (x,), (np.full((1, 2, 1, 1), 0.7, np.float32),))
    made, own = errors_of_conv(case)
    assert made[0] > made[2] == 0
    (found,) = bound_of(case)[1]
    assert found == pytest.approx(own[2] - (made[0] - made[2]), rel=1e-6)
    assert 0 < found < own[2]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**16), stored_sum=st.booleans(), half=st.booleans())
def test_no_error_of_the_convolution_leaves_the_bound_and_some_reach_it(
    seed: int, stored_sum: bool, half: bool
) -> None:
    """Perturbed and pooled outputs of the convolution stay in the bound and nearly reach it."""
    rng = np.random.default_rng(seed)
    precision = FP16 if half else FP32
    contract = RoundingContract("sum", "float32", precision.storage, stored_sum=stored_sum)
    conv = Conv2d(2, 2, (3, 2), bias=True, relu=bool(rng.integers(2)))
    pool = MaxPool2d((3, 2), (2, 1), (1, 0))
    problem = Problem(ConvMaxPool(conv, pool), ((1, 2, 8, 6),))
    case = make_case(pooled(precision), problem, ("normal", "cancelling")[seed % 2], seed)
    y = reference(problem, *case.wide())
    limits = bound(case, contract, y)
    made_case = case.of_convolution()
    made = reference(made_case.problem, *made_case.wide())
    own = bound(made_case, contract, made).largest
    second = Problem(pool, (made.shape,))
    up, down = (reference(second, (made + sign * own,), ()) for sign in (1, -1))
    some = reference(second, (made + own * rng.uniform(-1, 1, made.shape),), ())
    slack = 1e-12 * (np.abs(y) + limits.largest)
    for moved in (up, down, some):
        assert (np.abs(moved - y) <= limits.largest + slack).all()
    assert np.allclose(up - y, limits.largest, rtol=1e-9, atol=slack.max())
    assert limits.statistical is not None
    assert (limits.statistical <= limits.largest).all()


def test_rounding_before_or_after_the_maximum_is_the_same() -> None:
    rng = np.random.default_rng(0)
    made = rng.standard_normal((2, 3, 9, 8)) * 100
    second = MaxPool2d((3, 3), (2, 2), (1, 1))
    for dtype in (np.float16, np.float32):
        first = compute(second, [made.astype(dtype)], ())
        after = compute(second, [made], ()).astype(dtype)
        assert np.array_equal(first, after)


def test_an_infinity_or_nan_is_where_the_semantics_say() -> None:
    inf = np.inf
    for values, expected, relu in (
        ([-inf, 1.0, 2.0, -inf], [2.0, 2.0], False),
        ([-inf, -inf, -inf, 1.0], [-inf, 1.0], False),
        ([-inf, -inf, -inf, 1.0], [0.0, 1.0], True),
        ([1.0, inf, 1.0, 1.0], [inf, inf], False),
        ([np.nan, 1.0, 1.0, 1.0], [np.nan, 1.0], True),
    ):
        case = row(values, 1.0, relu=relu)
        y, largest = bound_of(case)
        np.testing.assert_array_equal(y, expected)
        assert np.isfinite(largest).all()
        right = np.array(expected, np.float32).reshape(1, 1, 1, 2)
        assert judge(case, SUM, right).ok
        for wrong in (right[..., ::-1], np.nan_to_num(right, nan=0, posinf=9, neginf=-9)):
            if not np.array_equal(wrong, right, equal_nan=True):
                assert not judge(case, SUM, wrong.copy()).ok


def test_what_overflows_to_minus_infinity_loses_to_its_neighbours() -> None:
    """A sum that overflows to −∞ loses to its neighbours; with ±∞ or the right value it passes."""
    largest = float(np.finfo(np.float32).max)
    problem = Problem(ConvMaxPool(Conv2d(2, 1, (1, 1)), POOL), ((1, 2, 1, 3),))
    x = np.array([[largest, 1.0, 3.0], [-largest, 0.0, 0.0]], np.float32).reshape(1, 2, 1, 3)
    case = Case(problem, FP32, (x,), (np.array([2.0, 2.0], np.float32).reshape(1, 2, 1, 1),))

    def verdict(value: float) -> tuple[bool, int]:
        found = judge(case, SUM, np.full((1, 1, 1, 1), value, np.float32))
        return found.ok, found.unjudged

    for lost in (np.inf, -np.inf, np.nan, 2.0, 0.0):
        assert verdict(lost) == (True, 1)
    assert verdict(6.0) == (True, 0)
    sure = row([1.0, 2.0, 3.0], 2.0)
    assert not judge(sure, SUM, np.full((1, 1, 1, 1), 4.0, np.float32)).ok
    above = float(bound_of(case)[1][0])
    assert above > 1e30  # where it did not overflow it may be off by the last bit of `largest`


# -- inputs ------------------------------------------------------------------------------------


def stem(bias: bool, relu: bool, channels: int = 5) -> Problem:
    conv = Conv2d(3, channels, (7, 7), (2, 2), (3, 3), bias=bias, relu=relu)
    return Problem(ConvMaxPool(conv, MaxPool2d((3, 3), (2, 2), (1, 1))), ((2, 3, 15, 18),))


@pytest.mark.parametrize("precision", [FP32, FP16], ids=str)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_exact_integers_show_a_padding_that_wins(
    bias: bool, relu: bool, precision: Precision
) -> None:
    """Exact integers show padding that wins, as a zero sum before the bias or a zero output."""
    problem = stem(bias, relu)
    assert isinstance(problem.op, ConvMaxPool)
    assert fewest_variants(pooled(precision), problem, "exact") == 2
    seen: Counter[str] = Counter()
    for seed in range(5):
        for variant in range(2):
            case = make_case(pooled(precision), problem, "exact", seed, variant)
            (x,), (weight, *rest) = case.wide()
            y = reference(problem, (x,), (weight, *rest))
            bare = replace(problem.op.conv, bias=False, relu=False)
            conv = reference(Problem(bare, problem.inputs), (x,), (weight,))
            sizes = reference(Problem(bare, problem.inputs), (np.abs(x),), (np.abs(weight),))
            total = sizes + sum(np.abs(b)[:, None, None] for b in rest)
            assert total.max() <= 2**24
            sums = np.pad(conv, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0)
            unpadded = MaxPool2d((3, 3), (2, 2))
            late = compute(unpadded, [sums], ()) + (rest[0][:, None, None] if bias else 0)
            late = np.maximum(late, 0) if relu else late
            seen["as a sum"] += int((late != y).any())
            made = reference(parts_of(problem)[0], (x,), (weight, *rest))
            padded = np.pad(made, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0)
            seen["as an output"] += int((compute(unpadded, [padded], ()) != y).any())
            seen["not all alike"] += int(len(np.unique(y)) > 3)
    assert seen["not all alike"] >= 5
    assert (seen["as an output"] >= 5) == (not relu)
    if bias or not relu:
        assert seen["as a sum"] >= 5


def test_an_impulse_is_seen_in_every_variant() -> None:
    for problem in corners(ConvMaxPool, QUICK.max_elements, QUICK.max_macs):
        for seed, variant in ((s, v) for s in range(4) for v in range(3)):
            case = make_case(pooled(), problem, "impulse", seed, variant)
            assert sum(np.count_nonzero(a) == 1 for a in (case.inputs[0], case.weights[0])) >= 1
            if variant == 1:
                assert np.count_nonzero(case.weights[0]) == 1
                assert case.inputs[0].all()


def test_edges_leave_windows_with_nothing_but_minus_infinity() -> None:
    found = 0
    for seed in range(6):
        case = make_case(pooled(), stem(True, False), "edges", seed, 1)
        y = reference(case.problem, *case.wide())
        found += int(np.isneginf(y).any())
        assert not np.isnan(y).any()
    assert found >= 4


# -- problems ----------------------------------------------------------------------------------


def refusing(refuses: Callable[[Problem], str | None]) -> HostKernel:
    return replace(pooled(), refuses=refuses)


def strict(problem: Problem) -> str | None:
    op = problem.op
    assert isinstance(op, ConvMaxPool)
    if op.conv.in_channels != 3 or op.conv.out_channels % 64 or not op.conv.bias:
        return "takes 3 channels to a multiple of 64, with a bias"
    return stem_alone(problem)


def test_what_a_kernel_takes_is_found_by_asking() -> None:
    assert Stems.of(pooled()) == Stems()
    assert Stems.of(refusing(lambda p: "nothing")) == Stems()
    assert Stems.of(refusing(stem_alone)).windows == WINDOWS[:1]
    assert Stems.of(refusing(strict)) == Stems(WINDOWS[:1], (3,), 64)

    def halves(problem: Problem) -> str | None:
        assert isinstance(problem.op, ConvMaxPool)
        return "odd" if problem.op.conv.out_channels % 8 else None

    assert Stems.of(refusing(halves)) == replace(Stems(), multiple=8)
    assert Stems().room(10, 20) == (10, 20)
    elements, macs = Stems(WINDOWS[:1], (3,), 64).room(10, 20)
    assert (elements, macs) == (80 * 64 * 4, 80 * 64 * 4 * 147)


def test_drawn_problems_have_every_window_and_meet_edges_on_either_side() -> None:
    found = drawn(replace(pooled(), edges=(16,)), 300)
    ops = [p.op for p in found if isinstance(p.op, ConvMaxPool)]
    assert len(ops) == len(found)
    assert {(o.conv.bias, o.conv.relu) for o in ops} == {
        (bias, relu) for bias in (False, True) for relu in (False, True)
    }
    assert sum(o.conv.in_channels <= 4 for o in ops) > len(ops) // 3
    assert any(o.conv.in_channels > 4 for o in ops)
    assert any(o.pool.padding != (0, 0) for o in ops)
    assert any(o.pool.stride[0] > o.pool.kernel_size[0] for o in ops)
    assert any(o.pool.kernel_size[0] > o.pool.stride[0] for o in ops)
    near = {15, 16, 17}
    assert any(near & set(p.output[2:]) for p in found)
    assert any(near & set(parts_of(p)[0].output[2:]) for p in found)
    assert any(p.batch > 1 for p in found)


def test_a_kernel_for_one_stem_is_drawn_problems_of_several_tiles() -> None:
    kernel = replace(refusing(strict), edges=(TILE,))
    found = [p for p in drawn(kernel, 80) if kernel.refusal(p) is None]
    assert len(found) >= 30
    assert any(p.output[2] > TILE for p in found)
    assert any(p.output[3] > TILE for p in found)
    crossed = crossings(kernel, QUICK.max_elements, QUICK.max_macs)
    taken = [p for p in crossed if kernel.refusal(p) is None]
    assert {5} <= {p.output[2] for p in taken}
    assert {5} <= {p.output[3] for p in taken}
    assert {5} <= {parts_of(p)[0].output[2] for p in taken}


EQUIVALENT = {
    # With a ReLU that is always there, and strides that are alike.
    *("padding_wins", "finite_padding", "steps_as_the_convolution", "swapped_pool_strides"),
    # The rows that the pooling steps over are those that it needs.
    "rows_by_stride",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kernel.id)
def test_a_fault_of_a_kernel_for_one_stem_is_caught_too(fault: object) -> None:
    wrong = fault.kernel  # type: ignore[attr-defined]
    how = replace(QUICK, shrink_seconds=0.0)
    kernel = replace(wrong, refuses=strict)
    finding = run_campaign(Faults(), kernel, how, 5, network_name=None).finding
    assert (finding is None) == (wrong.algorithm in EQUIVALENT)
    if finding is not None:
        assert strict(finding.problem) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.id)
def test_a_right_kernel_for_one_stem_passes(twin: HostKernel) -> None:
    report = run_campaign(Faults(), replace(twin, refuses=strict), QUICK, 5)
    assert report.verdict == "ok", report.finding and report.finding.describe()
    assert report.network_problems == 1


def test_the_network_s_pairs_come_last_and_nobody_must_take_them() -> None:
    every = schedule_problems(resnet18(), (1, 8))
    fused = [p for p in every if isinstance(p.op, ConvMaxPool | ConvProjection | AvgPoolLinear)]
    assert [p.batch for p in fused] == [1] * 5 + [8] * 5
    assert list(every[-10:]) == fused
    blocks = [(1, 128, 28, 28), (1, 256, 14, 14), (1, 512, 7, 7)]
    assert [p.output for p in fused[:5]] == [(1, 64, 56, 56), *blocks, (1, 1000)]
    assert uncovered(r18_numpy.Backend(), tiny(), (1,)) == []
    assert uncovered(Pooling(), tiny(), (1,)) == []


def test_a_finding_names_both_ops() -> None:
    for problem in (stem(True, True), *corners(ConvMaxPool, 10**9, 10**12)):
        data = problem_to_json(problem)
        assert problem_from_json(data) == problem
        assert data["op"] == "conv2d_maxpool2d"
        assert data["settings"]["pool"]["op"] == "maxpool2d"
