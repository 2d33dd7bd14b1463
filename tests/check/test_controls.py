"""Correct kernels that compute in odd ways: the oracle never raises an alarm on them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from campaigns import IN_STATE, searched
from faults import summations
from faults.controls import ControlBackend, controls
from faults.summations import Products, Summation
from r18.backend.host import HostKernel
from r18.graph.ops import OPS, Conv2d, ConvMaxPool, Linear, MaxPool2d, Problem
from r18.graph.precision import PRECISIONS
from r18.graph.scaled import SCALED_OPS
from r18.runtime.launch import run_kernel
from r18_oracle.check.checks import examine
from r18_oracle.check.tally import Tally
from r18_oracle.generate.inputs import ROUNDING, fewest_variants, make_case
from r18_oracle.judge.bounds import DERIVATIONS
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import judge
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.profiles import Profile

BACKEND = ControlBackend()
CONTROLS = controls()
BY_ID = {kernel.id: kernel for kernel in CONTROLS}
BRIEF = Profile(
    "controls",
    examples=3,
    max_elements=512,
    max_macs=10_000,
    batches=(1,),
    whole=False,
    samples=1,
    shrink_seconds=5,
    call_seconds=60,
    every=4,
)
IS_WINOGRAD = [k for k in CONTROLS if k.algorithm.startswith("winograd")]
NOT_STRIDED = [k for k in CONTROLS if k.algorithm.startswith("fft")]
EVERY = pytest.mark.parametrize("kernel", CONTROLS, ids=lambda kernel: kernel.id)


def campaign(kernel: HostKernel, seed: int, brief: bool) -> KernelReport:
    """A campaign; `brief` has a third of the corners, and `state` for one in `IN_STATE`."""
    how = replace(BRIEF, every=3 * BRIEF.every) if brief else BRIEF
    return searched(BACKEND, kernel, how, seed, with_state=not (brief and seed % IN_STATE))


@EVERY
def test_never_an_alarm(kernel: HostKernel, pytestconfig: pytest.Config) -> None:
    """No control raises an alarm. Each has a seed of its own, so that together they see many
    problems and every corner several times."""
    seed = CONTROLS.index(kernel)
    report = campaign(kernel, seed, pytestconfig.getoption("--r18-profile") == "brief")
    assert report.finding is None, report.finding.describe()
    assert report.tally.ratio <= 1
    assert (report.tally.sharp or 0) <= 1, "a round-to-nearest kernel crossed the line"
    if kernel not in (*IS_WINOGRAD, *NOT_STRIDED):
        assert report.tally.problems >= BRIEF.examples
        # None computes groups or dilation, which the corners ask of every convolution.
        ops = "conv2d", "conv2d_projection", "sconv2d"
        said = tuple(f"computes no {op} with " for op in ops)
        assert all(reason.startswith(said) for reason in report.tally.refused)


@pytest.mark.parametrize("kernel", IS_WINOGRAD, ids=lambda kernel: kernel.id)
def test_never_an_alarm_from_winograd(kernel: HostKernel) -> None:
    """Winograd raises no alarm on 3×3 problems of stride 1, which are rarely drawn."""
    tally = Tally()
    for seed, (n, c, o, h, w, pad) in enumerate(
        [(1, 1, 1, 3, 3, 0), (2, 3, 5, 4, 7, 1), (1, 8, 2, 9, 6, 1), (3, 2, 4, 5, 5, 2)]
    ):
        op = Conv2d(c, o, (3, 3), (1, 1), (pad, pad), bias=seed % 2 == 1, relu=seed % 3 == 1)
        taken = examine(
            BACKEND, kernel, Problem(op, ((n, c, h, w),)), seed, tally, rounding=ROUNDING[seed]
        )
        assert taken
    assert tally.problems == 4


def test_there_are_enough_of_them() -> None:
    assert len(CONTROLS) >= 30
    assert len(BY_ID) == len(CONTROLS)
    assert {k.contract.algorithm for k in CONTROLS} == set(DERIVATIONS) - {"integer"}
    assert {k.op for k in CONTROLS} == {*OPS.values(), *SCALED_OPS}
    assert {k.precision.name for k in CONTROLS} == set(PRECISIONS) - {"int8"}
    assert any(k.precision.flush_to_zero for k in CONTROLS)
    assert any(k.contract.stored_sum and k.contract.output == "float16" for k in CONTROLS)
    assert BACKEND.kernels() == CONTROLS or len(BACKEND.kernels()) == len(CONTROLS)


def test_orders_of_summation_are_indeed_different() -> None:
    """Orders of summation give different bits, so that no control is there twice."""
    rng = np.random.default_rng(0)
    problem = Problem(Conv2d(70, 8, (3, 3), (1, 1), (1, 1)), ((2, 70, 6, 7),))
    x, w = rng.standard_normal((2, 70, 6, 7)), rng.standard_normal((8, 70, 3, 3))
    kernels = [k for k in CONTROLS if k.op is Conv2d and k.precision.name == "fp32"]
    results = {k.id: run_kernel(BACKEND, k, problem, x, w).tobytes() for k in kernels}
    # Without an epilogue, and with nothing subnormal, these are the forward sum.
    for name in ("sum_bias_first", "unfused", "sum_flushed"):
        same = results.pop(f"control/conv2d/{name}/fp32")
        assert same == results["control/conv2d/sum_forward/fp32"]
    assert len(set(results.values())) == len(results) >= 20


# -- the arithmetic that the controls emulate --------------------------------------------------


def products(x: list[float], w: list[float]) -> Products:
    """The products of one output."""
    return Products(np.array(x, np.float32)[:, None], np.array([w], np.float32))


def value(total: Summation, x: list[float], w: list[float] | None = None) -> float:
    return float(total(products(x, w or [1.0] * len(x)))[0, 0])


def test_fma_rounds_once() -> None:
    """An FMA rounds once: only it keeps the last bit of (1 + 2⁻¹²)² − 1 = 2⁻¹¹ + 2⁻²⁴."""
    x, w = [-1.0, 1 + 2.0**-12], [1.0, 1 + 2.0**-12]
    assert value(summations.in_order(summations.forward), x, w) == 2.0**-11
    assert value(summations.fused(summations.forward), x, w) == 2.0**-11 + 2.0**-24


def test_tensor_cores_cut_off() -> None:
    """Tensor cores truncate: products of 2⁻²⁴ next to 1 count only with guard bits."""
    terms = [1.0, *[2.0**-24] * 7]
    assert value(summations.tensor_core(4), terms) == 1.0
    assert value(summations.tensor_core(8), terms) == 1.0
    assert value(summations.tensor_core(8, guard_bits=1), terms) == 1 + 3 * 2.0**-23
    assert value(summations.tensor_core(4), [1.0, -(2.0**-25)]) == 1.0
    assert value(summations.tensor_core(4), [2.0**24, 1.0, 1.0]) == 2.0**24
    assert value(summations.tensor_core(4), [2.0**-149, 2.0**-149]) == 2.0**-148


def test_kahan_keeps_what_the_plain_sum_loses() -> None:
    terms = [1.0, *[2.0**-24] * 1000]
    assert value(summations.in_order(summations.forward), terms) == 1.0
    exact = 1 + 1000 * 2.0**-24
    assert abs(value(summations.kahan, terms) - exact) <= 2 * 2.0**-24


def test_flushing_takes_every_subnormal() -> None:
    least = 2.0**-126
    assert value(summations.flushed, [least / 2, least]) == least
    assert value(summations.flushed, [2.0**-70, least], [2.0**-60, 1.0]) == least
    assert value(summations.flushed, [1.5 * least, -least]) == 0.0


def test_pairs_and_tiles_flush_and_round_in_their_order() -> None:
    """Pairs and tiles flush and round in their own order, which a rounding on the way shows."""
    least = 2.0**-126
    pairs, tiles = summations.flushed_pairs, summations.flushed_tiles(4)
    for total in (pairs, tiles):
        assert value(total, [least / 2, least], [2.0**100, 1.0]) == least
        assert value(total, [2.0**-63, 2.0**-63], [2.0**-64, 2.0**-64]) == 0.0
        assert value(total, [1.5 * least, -least]) == 0.0
        assert value(total, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == 28.0
    # Forwards the first product is lost in the second; pairs add it after the fourth, tiles to
    # the third.
    terms = [2.0**-24, 1.0, 2.0**-24, -1.0]
    assert value(summations.fused(summations.forward), terms) == 0.0
    assert value(pairs, terms) == 2.0**-24
    assert value(tiles, terms) == 2.0**-23
    # A step is added when it is whole.
    assert value(tiles, [*terms, *(-t for t in terms)]) == 0.0


@pytest.mark.parametrize("count", range(1, 40))
def test_pairwise_trees_are_balanced(count: int) -> None:
    """Pairwise trees are balanced: each addition is one deeper than its deeper operand."""

    class Node:
        def __init__(self, depth: int, leaves: int) -> None:
            self.depth, self.leaves = depth, leaves

        def __add__(self, other: Node) -> Node:
            return Node(max(self.depth, other.depth) + 1, self.leaves + other.leaves)

    tree = summations.pairwise_sum([Node(0, 1) for _ in range(count)])  # type: ignore[misc]
    assert tree.leaves == count  # type: ignore[attr-defined]
    assert tree.depth == (count - 1).bit_length()  # type: ignore[attr-defined]


def test_rounding_to_tf32_against_fractions() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    bits[:1000] = (bits[:1000] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)  # ties
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 1e38) & (np.abs(values) > 1e-37)]
    _, exponents = np.frexp(values)
    for got, kind in (
        (summations.tf32_nearest(values), "even"),
        (summations.tf32_away(values), "away"),
        (summations.tf32_cut(values), "cut"),
    ):
        for v, g, e in zip(values.tolist(), got.tolist(), exponents.tolist(), strict=True):
            scaled = abs(Fraction(v)) / Fraction(2) ** (e - 11)  # in [2¹⁰, 2¹¹)
            whole = scaled.numerator // scaled.denominator
            rest = scaled - whole
            up = rest > Fraction(1, 2) or (
                rest == Fraction(1, 2) and (kind == "away" or whole % 2 == 1)
            )
            expected = (whole + (up and kind != "cut")) * Fraction(2) ** (e - 11)
            assert abs(Fraction(g)) == expected, (v, kind)
    wild = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    np.testing.assert_array_equal(summations.tf32_nearest(wild), wild)
    assert np.isinf(summations.tf32_nearest(np.array([np.finfo(np.float32).max])))


def test_split_products_keep_what_float16_loses() -> None:
    """Split products keep the crossed products of (1 + 2⁻¹²)², and lose only 2⁻²⁴."""
    split = summations.split(summations.in_order(summations.forward))
    near = 1 + 2.0**-12
    assert value(split, [near], [near]) == 1 + 2.0**-11
    assert value(split, [near, near], [1.0, -1.0]) == 0.0
    assert value(split, [near], [1.0]) == near
    assert value(split, [65504.0, 2.0**-30], [1.0, 2.0**10]) == 65504.0
    assert value(split, [2.0**-30], [2.0**10]) == 2.0**-20
    assert not np.isfinite(value(split, [65536.0]))
    assert not np.isfinite(value(split, [np.inf]))
    cut_off = summations.split(summations.tensor_core(16, 2), paired=True)
    assert value(cut_off, [near] * 40, [1.0] * 40) == 40 * near


# -- integers that need both halves ------------------------------------------------------------


def test_long_integers_are_exact_in_every_order_and_need_both_halves() -> None:
    conv = BY_ID["control/conv2d/split_tensor_core_16/fp16x3"]
    pooled = BY_ID["control/conv2d_maxpool2d/split_tensor_core_16/fp16x3"]
    linear = BY_ID["control/linear/split_tensor_core_16/fp16x3"]
    stem = Conv2d(3, 8, (7, 7), (2, 2), (3, 3), bias=True)
    pool = MaxPool2d((3, 3), (2, 2), (1, 1))
    for kernel, problem in (
        (conv, Problem(Conv2d(1, 2, (1, 1)), ((1, 1, 3, 3),))),
        (
            conv,
            Problem(
                Conv2d(64, 9, (3, 3), (1, 1), (1, 1), True, True), ((1, 64, 5, 5), (1, 9, 5, 5))
            ),
        ),
        (conv, Problem(Conv2d(512, 3, (3, 3), (1, 1), (1, 1)), ((1, 512, 3, 3),))),
        (linear, Problem(Linear(2048, 5), ((3, 2048),))),
        (pooled, Problem(ConvMaxPool(stem, pool), ((1, 3, 16, 16),))),
    ):
        count = fewest_variants(kernel, problem, "exact")
        assert count == (6 if kernel is pooled else 3)
        seconds = []
        for variant in range(count):
            case = make_case(kernel, problem, "exact", 5, variant)
            (x, *more), (w, *rest) = case.wide()
            op = problem.op.conv if isinstance(problem.op, ConvMaxPool) else problem.op
            bare = (
                op
                if isinstance(op, Linear)
                else replace(op, bias=False, residual=False, relu=False)
            )
            weights = [np.abs(w)] + ([np.zeros(op.out_features)] if isinstance(op, Linear) else [])
            sizes = reference(Problem(bare, (x.shape,)), (np.abs(x),), tuple(weights))
            assert 0 < sizes.max() <= 2**23
            assert sum(float(np.abs(a).max()) for a in (*more, *rest)) <= 2**23
            low = [bool(summations.halves(a.astype(np.float32))[1].any()) for a in (x, w)]
            seconds.append(tuple(low))
            got = run_kernel(BACKEND, kernel, problem, *case.inputs, *case.weights)
            assert judge(case, kernel.contract, got, exact=True).ok
        assert seconds == [(False, False), (True, False), (False, True)] * (count // 3)


def test_values_of_impulses_differ_in_both_halves() -> None:
    problem = Problem(Conv2d(2, 3, (3, 3)), ((1, 2, 5, 5),))
    for name, differ in (("split_forward/fp16x3", True), ("sum_forward/fp32", False)):
        case = make_case(BY_ID[f"control/conv2d/{name}"], problem, "impulse", 0, 1)
        high, low = summations.halves(case.inputs[0].astype(np.float32))
        assert (len(np.unique(high)), len(np.unique(low)) > 25) == (50, differ)


def test_bfloat16_controls_store_bfloat16() -> None:
    kernel = BY_ID["control/conv2d/sum_forward/bf16"]
    problem = Problem(Conv2d(1, 1, (1, 1)), ((1, 1, 1, 1),))
    y = run_kernel(BACKEND, kernel, problem, np.full((1, 1, 1, 1), 1.0), np.full((1, 1, 1, 1), 3.0))
    assert y.dtype == ml_dtypes.bfloat16
    assert y.item() == 3.0
