"""The bound of a convolution with its projection: that of one sum of all their products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from faults.controls import FLUSHED, ControlBackend, controls
from r18.backend import RoundingContract
from r18.graph.ops import Conv2d, ConvProjection, Linear, Problem
from r18.graph.precision import BF16, FP16, FP16X3, FP32, FP64, TF32, Precision
from r18.runtime.launch import run_kernel
from r18_oracle.cases import Case
from r18_oracle.generate.inputs import ROUNDING, make_case
from r18_oracle.judge.bias import influence, led
from r18_oracle.judge.bounds import Bound, bound, gamma, summation_error
from r18_oracle.judge.reference import reference
from r18_oracle.judge.roundings import factor_sum, runs_of, unspecified_outputs
from r18_oracle.judge.verdict import Judgement, judge
from support import Array

BACKEND = ControlBackend()
CONTROLS = {kernel.id: kernel for kernel in controls() if kernel.op is ConvProjection}
ANY = CONTROLS["control/conv2d_projection/sum_shuffled/fp32"]


def contract(precision: Precision, **more: object) -> RoundingContract:
    return replace(
        RoundingContract("sum", precision.accumulate, precision.storage),
        **more,  # type: ignore[arg-type]
    )


RULES: dict[str, tuple[Precision, dict[str, object]]] = {
    "fp32": (FP32, {}),
    "fp32, 8 blocks": (FP32, {"blocks": 8}),
    "fp32, stored sum": (FP32, {"stored_sum": True}),
    "fp32, flushed": (FLUSHED, {}),
    "fp64": (FP64, {}),
    "fp16": (FP16, {}),
    "fp16, cut off": (FP16, {"truncates": True}),
    "fp16, stored sum": (FP16, {"stored_sum": True}),
    "fp16, cut off in 4 blocks": (FP16, {"truncates": True, "blocks": 4, "stored_sum": True}),
    "bf16, promoted": (BF16, {"truncates": True, "promoted": 1}),
    "tf32": (TF32, {}),
    "tf32, cut off": (TF32, {"truncates": True}),
    "tf32, to tf32": (TF32, {"output": "tf32"}),
    "fp16x3": (FP16X3, {}),
    "fp16x3, cut off": (FP16X3, {"truncates": True}),
    "fp16x3, stored sum": (FP16X3, {"truncates": True, "stored_sum": True}),
    "fp16x3, promoted": (FP16X3, {"truncates": True, "promoted": 1}),
}
EVERY = pytest.mark.parametrize("rule", RULES)


def limits_of(rule: str, case: Case) -> Bound:
    precision, more = RULES[rule]
    y = reference(case.problem, *case.wide())
    return bound(replace(case, precision=precision), contract(precision, **more), y)


def case_of(problem: Problem, rule: str, kind: str, seed: int) -> Case:
    """Inputs of a kind for a kernel with this rule."""
    precision, more = RULES[rule]
    kernel = replace(ANY, precision=precision, contract=contract(precision, **more))
    return make_case(kernel, problem, kind, seed)


def columns(op: Conv2d, x: Array) -> Array:
    """What each output reads, as the channels of an image: (N, K, OH, OW)."""
    taps = [
        torch.from_numpy(np.ascontiguousarray(x[:, [channel]])).double()
        for channel in range(x.shape[1])
    ]
    read = [F.unfold(t, op.kernel_size, op.dilation, op.padding, op.stride) for t in taps]
    outputs = replace(op, residual=False).infer(x.shape)[2:]
    found: Array = torch.cat(read, dim=1).numpy().reshape(len(x), op.depth, *outputs)
    return found


def joined(case: Case) -> Case:
    """One convolution of a pixel with the same products: both windows side by side.

    A bias of the projection is its residual, the same in every image and pixel.
    """
    op, ((x, z), weights) = case.problem.op, case.wide()
    assert isinstance(op, ConvProjection)
    count = len(op.conv.weights())
    (w, *bias), (v, *more) = weights[:count], weights[count:]
    image = np.concatenate([columns(op.conv, x), columns(op.projection, z)], axis=1)
    filters = np.concatenate([a.reshape(len(a), -1) for a in (w, v)], axis=1)[:, :, None, None]
    residual = [np.broadcast_to(b[:, None, None], case.problem.output) for b in more]
    made = Conv2d(
        op.depth,
        op.conv.out_channels,
        (1, 1),
        bias=bool(bias),
        residual=bool(more),
        relu=op.relu,
    )
    images = image, *residual
    problem = Problem(made, tuple(a.shape for a in images))
    return Case(problem, case.precision, images, (filters, *bias))


def block(first: bool, second: bool, relu: bool, windows: bool = True) -> Problem:
    """A convolution and its projection, of several pixels or of one; which have a bias."""
    conv = Conv2d(3, 4, (3, 2), (1, 2), (1, 0), first, residual=True, relu=relu)
    shortcut = Conv2d(5, 4, (1, 2), (2, 1), (0, 1), second)
    if windows:
        return Problem(ConvProjection(conv, shortcut), ((2, 3, 5, 8), (2, 5, 10, 3)))
    conv = Conv2d(3, 4, (1, 1), bias=first, residual=True, relu=relu)
    shortcut = Conv2d(5, 4, (1, 1), bias=second)
    return Problem(ConvProjection(conv, shortcut), ((2, 3, 5, 4), (2, 5, 5, 4)))


def near(one: Array | None, other: Array | None) -> bool:
    """Equal up to the order in which the oracle's own float64 sums are added."""
    if one is None or other is None:
        return one is other
    return bool(np.allclose(one, other, rtol=1e-12, atol=0, equal_nan=True))


def agree(one: Bound, other: Bound, *, edges: bool = False) -> None:
    """In every part but which outputs are rounded alike, as their addends are shared differently.

    edges: an infinity in one image meets no subnormal weight of the other, so that fewer outputs
    may be NaN where both are rounded.
    """
    assert near(one.largest, other.largest)
    assert near(one.statistical, other.statistical)
    masks = [np.zeros(1, bool) if b.overflows is None else b.overflows for b in (one, other)]
    first, second = np.broadcast_arrays(*masks)
    assert not (first & ~second).any()
    assert edges or not (second & ~first).any()
    assert (one.drift is None) == (other.drift is None)
    if one.drift is not None and other.drift is not None:
        assert near(one.drift.steps, other.drift.steps)
        assert near(one.drift.certain, other.drift.certain)


def flags() -> Iterator[tuple[bool, ...]]:
    yield from product((False, True), repeat=3)


# -- one sum -----------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("kind", [*ROUNDING, "exact"])
def test_the_bound_is_that_of_one_sum_of_the_same_products(rule: str, kind: str) -> None:
    """Whatever the windows, biases and ReLU."""
    for seed, (first, second, relu) in enumerate(flags()):
        case = case_of(block(first, second, relu), rule, kind, seed)
        whole = joined(case)
        y = reference(case.problem, *case.wide())
        np.testing.assert_allclose(y, reference(whole.problem, *whole.wide()), atol=1e-9)
        agree(limits_of(rule, case), limits_of(rule, whole))


@EVERY
def test_each_part_of_a_bound_of_pixels_is_that_of_one_convolution(rule: str) -> None:
    """With windows of one pixel no pixel is in several products, so that drifts agree too; and so
    do infinities, overflows and factors that are lost."""
    for seed, (kind, (first, second, relu)) in enumerate(product(("wide", "edges"), flags())):
        case = case_of(block(first, second, relu, windows=False), rule, kind, seed)
        one, other = limits_of(rule, case), limits_of(rule, joined(case))
        agree(one, other, edges=kind == "edges" and one.overflows is not None)
        if one.drift is not None and other.drift is not None:
            assert one.drift.shared == pytest.approx(other.drift.shared, rel=1e-12)
            if not second:
                assert near(one.drift.alike, other.drift.alike)
        inputs, weights = case.wide()
        if all(np.isfinite(a).all() for a in (*inputs, *weights)):
            whole = joined(case)
            lead = led(case.problem, inputs, weights)
            np.testing.assert_array_equal(lead, led(whole.problem, *whole.wide()))


@EVERY
def test_a_bound_of_one_pixel_is_that_of_a_linear_layer(rule: str) -> None:
    conv = Conv2d(7, 4, (1, 1), bias=True, residual=True)
    shape = (3, 7, 1, 1), (3, 5, 1, 1)
    problem = Problem(ConvProjection(conv, Conv2d(5, 4, (1, 1))), shape)
    case = case_of(problem, rule, "normal", 1)
    (x, z), (w, bias, v) = case.inputs, case.weights
    image, weight = (np.concatenate(pair, axis=1)[:, :, 0, 0] for pair in ((x, z), (w, v)))
    layer = Case(Problem(Linear(12, 4), ((3, 12),)), case.precision, (image,), (weight, bias))
    found, expected = limits_of(rule, case), limits_of(rule, layer)
    assert near(found.largest[:, :, 0, 0], expected.largest)
    if expected.statistical is not None:
        assert found.statistical is not None
        assert near(found.statistical[:, :, 0, 0], expected.statistical)
    if found.drift is not None and expected.drift is not None:
        assert near(found.drift.steps[:, :, 0, 0], expected.drift.steps)
        assert found.drift.shared == pytest.approx(expected.drift.shared, rel=1e-12)


def test_the_formula_by_hand() -> None:
    """K = 2 + 1 products and two biases, in fp32 and stored in bfloat16."""
    op = ConvProjection(
        Conv2d(2, 1, (1, 1), bias=True, residual=True), Conv2d(1, 1, (1, 1), bias=True)
    )
    problem = Problem(op, ((1, 2, 1, 1), (1, 1, 1, 1)))
    arrays = [
        np.array(values, np.float64).reshape(shape)
        for values, shape in (
            ([3.0, -5.0], (1, 2, 1, 1)),
            ([4.0], (1, 1, 1, 1)),
            ([2.0, 1.0], (1, 2, 1, 1)),
            ([0.5], (1,)),
            ([-0.25], (1, 1, 1, 1)),
            ([-1.5], (1,)),
        )
    ]
    size, y = 6 + 5 + 1 + 0.5 + 1.5, 6 - 5 - 1 + 0.5 - 1.5
    inner = gamma(5, 2.0**-24) * size + gamma(6, 2.0**-53) * size
    stored = (1 + 2.0**-8) * inner + 2.0**-8 * abs(y)
    for precision, expected in ((FP32, inner), (BF16, stored)):
        case = Case(problem, precision, tuple(arrays[:2]), tuple(arrays[2:]))
        made = reference(problem, *case.wide())
        assert made.item() == y
        found = bound(case, contract(precision), made).largest.item()
        assert found == pytest.approx(expected, rel=1e-12)
    # With its sum stored first each bias rounds by itself, and once more where it is stored.
    case = Case(problem, BF16, tuple(arrays[:2]), tuple(arrays[2:]))
    own = gamma(6, 2.0**-53) * size
    of_sum = gamma(3, 2.0**-24) * 12 + own
    of_sum = (1 + 2.0**-8) * of_sum + 2.0**-8 * 0
    added = of_sum + gamma(2, 2.0**-24) * (0 + of_sum + 2.0)
    expected = (1 + 2.0**-8) * added + 2.0**-8 * abs(y)
    found = bound(case, contract(BF16, stored_sum=True), np.array(y).reshape(1, 1, 1, 1))
    assert found.largest.item() == pytest.approx(expected, rel=1e-12)


def test_what_is_multiplied_is_counted_in_both_sums() -> None:
    for first, second in product((False, True), repeat=2):
        case = case_of(block(first, second, False), "fp32", "normal", 2)
        whole = joined(case)
        parts = case.problem, *case.wide()
        np.testing.assert_allclose(
            np.broadcast_to(factor_sum(*parts), case.problem.output),
            np.broadcast_to(factor_sum(whole.problem, *whole.wide()), case.problem.output),
        )


@pytest.mark.parametrize(
    ("channels", "more", "runs"),
    [(32, 32, 9 + 1), (33, 32, 9 * 2 + 1), (32, 33, 9 + 2), (512, 256, 9 * 16 + 8), (1, 1, 10)],
)
def test_runs_that_are_promoted_are_those_of_both(channels: int, more: int, runs: int) -> None:
    """At least one for each tap of either window, and 32 of its channels."""
    rule = contract(FP16X3, truncates=True, promoted=32)
    conv = Conv2d(channels, 2, (3, 3), (1, 1), (1, 1), bias=True, residual=True)
    op = ConvProjection(conv, Conv2d(more, 2, (1, 1), (2, 2), bias=True))
    problem = Problem(op, ((1, channels, 2, 3), (1, more, 3, 5)))
    case = make_case(replace(ANY, precision=FP16X3, contract=rule), problem, "normal", 0)
    assert runs_of(case, rule) == runs
    assert runs_of(case, replace(rule, promoted=0)) == 0
    got = summation_error(op.depth + 2, rule, 2, runs=runs)
    run = min(32, op.depth)
    cut = run + math.ceil(run / 4)
    assert got == pytest.approx(gamma(2 * cut + min(runs, op.depth) + 2, 2.0**-24), rel=1e-12)


# -- a bias of the errors ----------------------------------------------------------------------


def test_influence_is_the_effect_of_each_factor_of_either_sum() -> None:
    """Against one changed factor at a time."""
    problem = block(True, True, False)
    rng = np.random.default_rng(3)
    inputs = tuple(rng.standard_normal(shape) for shape in problem.inputs)
    weights = tuple(rng.standard_normal(spec.shape) for spec in problem.op.weights())
    bare = ConvProjection(
        replace(problem.op.conv, bias=False),  # type: ignore[attr-defined]
        replace(problem.op.projection, bias=False),  # type: ignore[attr-defined]
    )

    def total() -> float:
        sizes = tuple(map(np.abs, inputs)), (np.abs(weights[0]), np.abs(weights[2]))
        return float(reference(Problem(bare, problem.inputs), *sizes).sum())

    expected = 0.0
    for array in (*inputs, weights[0], weights[2]):
        for index in np.ndindex(array.shape):
            held = array[index]
            before = total()
            array[index] = held * 1.5
            expected += ((total() - before) / 0.5) ** 2
            array[index] = held
    assert influence(problem, inputs, weights) == pytest.approx(expected)


def test_one_product_of_half_the_sum_leads_it_in_either() -> None:
    op = ConvProjection(Conv2d(4, 1, (1, 1), residual=True), Conv2d(5, 1, (1, 1)))
    problem = Problem(op, ((3, 4, 1, 1), (3, 5, 1, 1)))
    x, z = np.ones((3, 4, 1, 1)), np.ones((3, 5, 1, 1))
    weights = np.ones((1, 4, 1, 1)), np.ones((1, 5, 1, 1))
    x[1, 2], z[2, 4] = 9, 9
    assert led(problem, (x, z), weights).ravel().tolist() == [False, True, True]


# -- emulated kernels --------------------------------------------------------------------------


def judged(name: str, problem: Problem, *arrays: Array) -> Judgement:
    kernel = CONTROLS[f"control/conv2d_projection/{name}"]
    case = Case.of(kernel, problem, arrays[:2], arrays[2:])
    got = run_kernel(BACKEND, kernel, problem, *case.inputs, *case.weights)
    return judge(case, kernel.contract, got)


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_emulated_kernels_stay_within_it(name: str) -> None:
    """Every kind of random data on blocks of few products and of many; also the line."""
    kernel = CONTROLS[name]
    long = ConvProjection(
        Conv2d(24, 6, (3, 3), (1, 1), (1, 1), True, True, True),
        Conv2d(96, 6, (1, 1), (2, 2), bias=True),
    )
    problems = (
        block(True, True, True),
        block(False, True, False),
        Problem(long, ((2, 24, 5, 4), (2, 96, 9, 8))),
    )
    nearest = 0.0
    for seed, (problem, kind) in enumerate(product(problems, ROUNDING)):
        case = make_case(kernel, problem, kind, seed)
        got = run_kernel(BACKEND, kernel, problem, *case.inputs, *case.weights)
        found = judge(case, kernel.contract, got)
        assert found.ok, (kind, problem, found)
        assert found.unjudged == 0
        assert (found.sharp or 0) <= 1
        assert (found.bias or 0) <= 1
        nearest = max(nearest, found.ratio)
    assert nearest > 1e-3


LOST = 2.0**-24
"""What each addition to 1 loses in float32."""


@pytest.mark.parametrize("first", [0, 1], ids=["in the convolution", "in the projection"])
@pytest.mark.parametrize("name", ["sum_bias_first/fp32", "kahan/fp32", "sum_reversed/fp64"])
def test_the_bound_is_nearly_reached_by_unlucky_data(name: str, first: int) -> None:
    """1 in one sum, and what is lost next to it in the other; compensated sums lose nothing."""
    depth = 400
    rest = 2.0**-53 if "fp64" in name else LOST
    op = ConvProjection(Conv2d(depth, 1, (1, 1), residual=True), Conv2d(depth, 1, (1, 1)))
    problem = Problem(op, ((1, depth, 1, 1),) * 2)
    images = np.full((2, 1, depth, 1, 1), rest)
    backwards = "reversed" in name
    images[first, 0, -1 if backwards else 0] = 1.0
    weight = np.ones((1, depth, 1, 1))
    found = judged(name, problem, *images, weight, weight)
    assert found.ok
    if "kahan" in name:
        assert found.ratio < 0.01
    else:  # of all that come after the 1, and half the roundings of the bound
        assert found.ratio > (0.3 if (first == 0) != backwards else 0.1)


# -- what is not judged ------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True], ids=["the convolution", "the projection"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_not_finite_is_not_judged_where_it_meets_padding(
    value: float, second: bool
) -> None:
    """In either convolution, only windows that lie inside the image have a known result."""
    conv = Conv2d(2, 3, (3, 3), (1, 1), (1, 1), residual=True)
    shortcut = Conv2d(2, 3, (3, 3), (2, 2), (1, 1))
    problem = Problem(ConvProjection(conv, shortcut), ((1, 2, 4, 4), (1, 2, 7, 7)))
    rng = np.random.default_rng(0)
    inputs = tuple(np.abs(rng.standard_normal(shape)) for shape in problem.inputs)
    weights = [rng.standard_normal(spec.shape) for spec in problem.op.weights()]
    weights[second][1, 0, 0, 0] = value  # its first tap is in the padding of row 0 and column 0
    case = Case.of(ANY, problem, inputs, tuple(weights))
    expected = np.zeros((1, 3, 4, 4), bool)
    expected[0, 1, 0], expected[0, 1, :, 0] = True, True
    mask = unspecified_outputs(case)
    assert mask is not None
    np.testing.assert_array_equal(mask, expected)
    y = reference(problem, *case.wide())
    limits = bound(case, contract(FP32), y)
    assert limits.overflows is not None
    np.testing.assert_array_equal(limits.overflows, expected)
    np.testing.assert_array_equal(np.isinf(limits.largest), expected)
    right = y.astype(np.float32)
    for place, ok in (((0, 1, 0, 2), True), ((0, 1, 2, 2), False), ((0, 0, 0, 0), False)):
        wrong = right.copy()
        wrong[place] = np.nan if np.isfinite(right[place]) or np.isinf(value) else 7.0
        assert judge(case, contract(FP32), wrong).ok == ok


def test_weights_of_both_that_meet_padding_are_both_left_out() -> None:
    conv = Conv2d(1, 2, (1, 3), (1, 1), (0, 1), residual=True)
    shortcut = Conv2d(1, 2, (3, 1), (1, 1), (1, 0))
    problem = Problem(ConvProjection(conv, shortcut), ((1, 1, 3, 3), (1, 1, 3, 3)))
    w, v = np.ones((2, 1, 1, 3)), np.ones((2, 1, 3, 1))
    finite = Case.of(ANY, problem, (np.ones((1, 1, 3, 3)),) * 2, (w.copy(), v.copy()))
    assert unspecified_outputs(finite) is None
    w[0, 0, 0, 0], v[1, 0, 2, 0] = np.inf, np.inf
    mask = unspecified_outputs(Case.of(ANY, problem, (np.ones((1, 1, 3, 3)),) * 2, (w, v)))
    assert mask is not None
    expected = np.zeros((1, 2, 3, 3), bool)
    expected[0, 0, :, 0], expected[0, 1, 2, :] = True, True
    np.testing.assert_array_equal(mask, expected)


def test_what_a_pair_cannot_hold_is_marked_in_either_image() -> None:
    op = ConvProjection(Conv2d(1, 1, (1, 1), residual=True), Conv2d(1, 1, (1, 1), (1, 2)))
    problem = Problem(op, ((1, 1, 1, 5), (1, 1, 1, 10)))
    x, z = np.ones((1, 1, 1, 5)), np.ones((1, 1, 1, 10))
    x[..., 1], z[..., 4], z[..., 5], z[..., 6] = 65536.0, 65536.0, 65536.0, np.inf
    weight = np.full((1, 1, 1, 1), 0.25)
    for name, unjudged in (("split_reversed", 3), ("split_tensor_core_16", 3)):
        found = judged(f"{name}/fp16x3", problem, x, z, weight, weight)
        assert found.ok
        assert found.unjudged == unjudged
    kernel = CONTROLS["control/conv2d_projection/split_reversed/fp16x3"]
    case = Case.of(kernel, problem, (x, z), (weight, weight))
    overflows = bound(case, kernel.contract, reference(problem, *case.wide())).overflows
    assert overflows is not None
    assert overflows.ravel().tolist() == [False, True, True, True, False]


def test_what_may_overflow_is_marked_where_both_sums_together_do() -> None:
    largest = float(np.finfo(np.float32).max)
    op = ConvProjection(Conv2d(1, 1, (1, 1), residual=True), Conv2d(1, 1, (1, 1)))
    problem = Problem(op, ((1, 1, 1, 4), (1, 1, 1, 4)))
    x = np.array([largest / 3, largest / 3, 1.0, -np.inf]).reshape(1, 1, 1, 4)
    z = np.array([largest / 3, 1.0, largest / 3, 1.0]).reshape(1, 1, 1, 4)
    one = np.ones((1, 1, 1, 1))
    case = Case.of(ANY, problem, (x, z), (one, one))
    overflows = bound(case, contract(FP32), reference(problem, *case.wide())).overflows
    assert overflows is not None
    assert overflows.ravel().tolist() == [True, False, False, False]


def test_a_kernel_that_rounds_the_projection_to_storage_exceeds_it() -> None:
    """By half a last bit of a projection that cancels with the convolution."""
    op = ConvProjection(Conv2d(1, 1, (1, 1), residual=True), Conv2d(1, 1, (1, 1)))
    problem = Problem(op, ((1, 1, 1, 1),) * 2)
    x, z, w, v = (
        np.full((1, 1, 1, 1), value, np.float16) for value in (-1.5, 1 + 2.0**-10, 1.0, 1.5)
    )
    case = Case(problem, FP16, (x, z), (w, v))
    y = reference(problem, *case.wide())
    right = y.astype(np.float16)
    assert judge(case, contract(FP16), right).ok
    between = z * v + x * w
    assert between.dtype == np.float16
    assert not judge(case, contract(FP16), between).ok
