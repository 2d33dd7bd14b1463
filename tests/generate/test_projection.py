"""Convolutions with their projection in the oracle: what is drawn, shrunk and given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

import r18_numpy
from campaigns import drawn
from faults.controls import ControlBackend, controls
from faults.summations import halves
from r18.graph.ops import Conv2d, ConvProjection, Linear, Problem
from r18.graph.precision import FP16, FP32
from r18.graph.resnet import resnet50, tiny
from r18.runtime.launch import run_kernel
from r18_oracle.findings import problem_from_json, problem_to_json
from r18_oracle.generate.corners import corners
from r18_oracle.generate.crossings import crossings
from r18_oracle.generate.inputs import fewest_variants, make_case
from r18_oracle.generate.problems import fitted, schedule_problems
from r18_oracle.generate.shrink import elements, reductions, shrunk
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import judge
from r18_oracle.ops.pairs.conv2d_projection import SHORTCUTS, windows_for
from r18_oracle.ops.spec import Summand
from r18_oracle.ops.table import spec_of
from r18_oracle.search.profiles import profile
from support import Array, compute

BACKEND = ControlBackend()
CONTROLS = {kernel.id: kernel for kernel in controls() if kernel.op is ConvProjection}
NUMPY = next(k for k in r18_numpy.Backend().kernels() if k.op is ConvProjection)
SPEC = spec_of(ConvProjection)
QUICK = profile("quick")
CORNERS = corners(ConvProjection, 10**9, 10**12)
BLOCK = Problem(
    ConvProjection(
        Conv2d(4, 6, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True),
        Conv2d(3, 6, (1, 1), (2, 2), bias=True),
    ),
    ((2, 4, 5, 7), (2, 3, 10, 13)),
)


def both(problem: Problem) -> ConvProjection:
    assert isinstance(problem.op, ConvProjection)
    return problem.op


@cache
def many_drawn() -> list[Problem]:
    """What a campaign draws; not while tests are collected, which each process does."""
    return drawn(NUMPY, 150)


# -- the spec ----------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", CORNERS, ids=str)
def test_the_reference_is_what_the_op_means(problem: Problem) -> None:
    rng = np.random.default_rng(1)
    inputs = tuple(rng.standard_normal(shape) for shape in problem.inputs)
    weights = tuple(rng.standard_normal(spec.shape) for spec in problem.op.weights())
    expected = compute(problem.op, inputs, weights)
    np.testing.assert_allclose(reference(problem, inputs, weights), expected, atol=1e-10)


def test_each_summand_is_a_convolution_of_its_own() -> None:
    assert SPEC.summands(BLOCK) == (
        Summand(Problem(replace(both(BLOCK).conv, residual=False), BLOCK.inputs[:1]), 0, 0),
        Summand(Problem(both(BLOCK).projection, BLOCK.inputs[1:]), 1, 2),
    )
    bare = replace(both(BLOCK), conv=replace(both(BLOCK).conv, bias=False))
    assert SPEC.summands(Problem(bare, BLOCK.inputs))[1].weight == 1
    linear = Problem(Linear(3, 4), ((2, 3),))
    assert spec_of(Linear).summands(linear) == (Summand(linear),)
    for problem in CORNERS:
        depths = [spec_of(s.problem.op).depth(s.problem.op) for s in SPEC.summands(problem)]
        assert sum(depths) == SPEC.depth(problem.op) == both(problem).depth
        roles = [spec.role for spec in problem.op.weights()]
        assert [roles[s.weight] for s in SPEC.summands(problem)] == [
            "weight",
            "projection_weight",
        ]


# -- problems ----------------------------------------------------------------------------------


def test_numbers_make_the_same_problem_again() -> None:
    more = (*SPEC.many(), *SPEC.many_tiles(), *SPEC.crossings(NUMPY, 9))
    network = [p for p in schedule_problems(resnet50(), (2,)) if type(p.op) is ConvProjection]
    assert len(network) == 4
    for problem in (*CORNERS, *many_drawn(), *more, *network):
        assert SPEC.rebuild(problem.op, SPEC.numbers(problem)) == problem


def test_numbers_name_both_convolutions() -> None:
    numbers = SPEC.numbers(BLOCK)
    assert (numbers["c"], numbers["projection_c"], numbers["o"]) == (4, 3, 6)
    assert (numbers["bias"], numbers["projection_bias"], numbers["relu"]) == (1, 1, 1)
    assert (numbers["projection_slack_h"], numbers["projection_slack_w"]) == (1, 0)
    assert "projection_o" not in numbers
    with_less = numbers | {"projection_bias": 0, "projection_slack_h": 0, "h": 3}
    assert SPEC.rebuild(BLOCK.op, with_less) == Problem(
        replace(both(BLOCK), projection=replace(both(BLOCK).projection, bias=False)),
        ((2, 4, 3, 7), (2, 3, 5, 13)),
    )


def test_corners_differ_in_each_convolution_and_leave_pixels_over() -> None:
    ops = [both(p) for p in CORNERS]
    for part in ("conv", "projection"):
        convolutions = [getattr(op, part) for op in ops]
        assert any(op.kernel_size[0] != op.kernel_size[1] for op in convolutions)
        assert any(op.stride[0] != op.stride[1] for op in convolutions)
        assert any(op.padding[0] != op.padding[1] for op in convolutions)
        assert any(op.groups > 1 for op in convolutions)
        assert any(op.dilation != (1, 1) for op in convolutions)
        assert {op.bias for op in convolutions} == {False, True}
    assert {op.relu for op in ops} == {False, True}
    assert any(op.projection.depth > 100 * op.conv.depth for op in ops)
    slack = [(n["projection_slack_h"], n["projection_slack_w"]) for n in map(SPEC.numbers, CORNERS)]
    assert {(0, 1), (1, 0), (0, 0), (0, 2)} <= set(slack)
    assert any(p.output[0] > 64 and p.output[0] % 64 for p in CORNERS)
    assert any(p.output[2:] == (1, 1) for p in CORNERS)


def test_drawn_problems_have_every_epilogue_window_and_remainder() -> None:
    ops = [both(p) for p in many_drawn()]
    flags = {(op.conv.bias, op.projection.bias, op.relu) for op in ops}
    assert len(flags) == 8
    shortcuts = [op.projection for op in ops]
    assert sum(op.stride == (2, 2) and op.kernel_size == (1, 1) for op in shortcuts) > 20
    assert any(op.kernel_size[0] != op.kernel_size[1] for op in shortcuts)
    assert any(op.padding != (0, 0) for op in shortcuts)
    assert any(op.projection.in_channels > op.conv.in_channels for op in ops)
    assert any(op.projection.in_channels < op.conv.in_channels for op in ops)
    assert any(SPEC.numbers(p)["projection_slack_w"] for p in many_drawn())
    assert any(SPEC.numbers(p)["projection_slack_h"] for p in many_drawn())
    assert any(op.conv.groups > 1 for op in ops)
    for problem in many_drawn():
        most = max(map(math.prod, (*problem.inputs, problem.output)))
        assert most <= 4 * QUICK.max_elements
        assert problem.macs <= 4 * QUICK.max_macs


def only_blocks(problem: Problem) -> str | None:
    """The refusal of a kernel that is written for the blocks of ResNets."""
    conv, shortcut = both(problem).conv, both(problem).projection
    if (conv.kernel_size, conv.stride) not in (((3, 3), (1, 1)), ((1, 1), (1, 1))):
        return "takes 3×3 and 1×1 windows of stride 1"
    if (shortcut.kernel_size, shortcut.padding) != ((1, 1), (0, 0)) or shortcut.stride[0] > 2:
        return "takes projections of 1×1 windows"
    if conv.padding != (conv.kernel_size[0] // 2,) * 2 or len({*shortcut.stride}) > 1:
        return "takes windows that are padded as in ResNets"
    return multiples_of(8)(problem) or (None if conv.bias and shortcut.bias else "takes biases")


def test_a_kernel_for_the_blocks_of_networks_is_drawn_such() -> None:
    kernel = replace(NUMPY, refuses=only_blocks, edges=(16,), extras=frozenset())
    assert set(windows_for(kernel)) == set(product(((3, 1, 1), (1, 1, 0)), SHORTCUTS))
    assert windows_for(replace(NUMPY, refuses=lambda problem: "nothing")) == windows_for(NUMPY)
    taken = [p for p in drawn(kernel, 100) if kernel.refusal(p) is None]
    assert len(set(taken)) >= 15
    ops = [both(p) for p in taken]
    assert {op.conv.kernel_size for op in ops} == {(1, 1), (3, 3)}
    assert {op.projection.stride for op in ops} == {(1, 1), (2, 2)}
    crossed = crossings(kernel, QUICK.max_elements, QUICK.max_macs)
    assert crossed
    assert all(kernel.refusal(p) is None for p in crossed)
    narrow = replace(kernel, refuses=lambda p: only_blocks(p) or _not_1x1(p))
    assert windows_for(narrow) == tuple(((1, 1, 0), second) for second in SHORTCUTS)
    assert {both(p).conv.kernel_size for p in SPEC.crossings(narrow, 16)} == {(1, 1)}


def _not_1x1(problem: Problem) -> str | None:
    return None if both(problem).conv.kernel_size == (1, 1) else "takes 1×1 windows"


def test_edges_are_crossed_on_every_axis() -> None:
    found = crossings(replace(NUMPY, edges=(16,)), QUICK.max_elements, QUICK.max_macs)
    assert {15, 16, 17} & {p.output[1] for p in found}
    for place in (0, 1, 2, 3):
        assert 17 in {p.output[place] for p in found}
    assert 17 in {p.inputs[0][1] for p in found}
    assert 17 in {p.inputs[1][1] for p in found}


def multiples_of(multiple: int) -> Callable[[Problem], str | None]:
    def refuses(problem: Problem) -> str | None:
        op = both(problem)
        channels = op.conv.in_channels, op.projection.in_channels, op.conv.out_channels
        return "channels" if any(c % multiple for c in channels) else None

    return refuses


def test_a_problem_nearby_has_channels_that_a_kernel_takes() -> None:
    kernel = replace(NUMPY, refuses=multiples_of(8))
    for problem in (*CORNERS, *many_drawn()):
        near = list(SPEC.nearby(problem))
        assert near[0] == problem
        assert all(both(p).projection.groups == both(problem).projection.groups for p in near)
        found = fitted(kernel, problem, 10**12)
        if both(problem).conv.groups in (1, 2, 4, 8):
            assert kernel.refusal(found) is None
            assert found.inputs[0][2:] == problem.inputs[0][2:]
            assert found.inputs[1][2:] == problem.inputs[1][2:]


def test_groups_that_no_multiple_divides_are_left_out_nearby() -> None:
    conv = Conv2d(6, 9, (3, 3), groups=3, residual=True)
    problem = Problem(
        ConvProjection(conv, Conv2d(2, 9, (1, 1), (2, 2))), ((1, 6, 5, 5), (1, 2, 5, 5))
    )
    assert list(SPEC.nearby(problem)) == [problem]


def test_plainer_problems_lose_relu_then_biases() -> None:
    op = both(BLOCK)
    without = replace(op, conv=replace(op.conv, relu=False))
    bare = ConvProjection(replace(without.conv, bias=False), replace(op.projection, bias=False))
    assert [p.op for p in SPEC.plainer(BLOCK)] == [without, bare]
    assert [p.op for p in SPEC.plainer(Problem(without, BLOCK.inputs))] == [bare]
    assert list(SPEC.plainer(Problem(bare, BLOCK.inputs))) == []
    assert list(SPEC.nearby(BLOCK))[-2:] == list(SPEC.plainer(BLOCK))


def test_a_fault_of_the_projection_is_shrunk_to_what_it_needs() -> None:
    def fails(problem: Problem) -> bool:
        op, numbers = both(problem).projection, SPEC.numbers(problem)
        return op.bias and op.stride[0] > op.stride[1] and numbers["projection_slack_h"] > 0

    conv = Conv2d(64, 48, (5, 3), (3, 2), (2, 1), residual=True, bias=True, relu=True)
    shortcut = Conv2d(24, 48, (2, 1), (3, 2), bias=True)
    start = Problem(ConvProjection(conv, shortcut), ((2, 64, 17, 23), (2, 24, 18, 23)))
    assert fails(start)
    least = shrunk(start, fails, lambda: False)
    plain = Conv2d(1, 1, (1, 1), residual=True)
    assert least == Problem(
        ConvProjection(plain, Conv2d(1, 1, (1, 1), (2, 1), bias=True)),
        ((1, 1, 1, 1), (1, 1, 2, 1)),
    )
    for problem in CORNERS[:8]:
        assert shrunk(problem, lambda candidate: False, lambda: False) == problem
        assert all(type(candidate.op) is ConvProjection for candidate in reductions(problem))
        assert elements(shrunk(problem, lambda candidate: True, lambda: False)) <= 5


def test_vast_problems_exceed_32_bits_in_each_place() -> None:
    found = list(SPEC.vast())
    sizes = [
        (*map(math.prod, p.inputs), *(math.prod(s.shape) for s in p.op.weights())) for p in found
    ]
    beyond = [[size > 2**31 - 1 for size in one] for one in sizes]
    for place in range(2):
        assert any(one[place] for one in beyond)
    assert any(len(one) == 4 and one[2] and not one[3] for one in beyond)
    assert any(len(one) == 4 and one[3] and not one[2] for one in beyond)


def test_a_finding_names_both_convolutions() -> None:
    for problem in (BLOCK, *CORNERS):
        data = problem_to_json(problem)
        assert problem_from_json(data) == problem
        assert data["op"] == "conv2d_projection"
        assert data["settings"]["projection"]["op"] == "conv2d"


def test_the_network_s_blocks_are_among_its_problems() -> None:
    found = [p for p in schedule_problems(tiny(), (2,)) if type(p.op) is ConvProjection]
    assert [p.output for p in found] == [(2, 16, 4, 4), (2, 32, 2, 2), (2, 64, 1, 1)]


# -- inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", CORNERS, ids=str)
def test_impulses_meet_both_sums(problem: Problem) -> None:
    """The first three variants are of the convolution alone, the others of the projection."""
    kernel = CONTROLS["control/conv2d_projection/kahan/fp32"]
    assert fewest_variants(kernel, problem, "impulse") == 6
    seen = {False: 0, True: 0}
    for seed in range(4):
        for variant in range(6):
            case = make_case(kernel, problem, "impulse", seed, variant)
            second = variant >= 3
            place = SPEC.summands(problem)[second]
            used = case.inputs[place.input], case.weights[place.weight]
            silent = [a for a in (*case.inputs, *case.weights) if not any(a is u for u in used)]
            assert not any(array.any() for array in silent)
            counts = [np.count_nonzero(array) for array in used]
            assert 1 in counts
            if variant % 3 == 1:
                assert counts == [used[0].size, 1]
            if variant % 3 == 2:
                assert counts == [1, used[1].size]
            y = reference(problem, *case.wide())
            seen[second] += int(y.any())
    assert seen[True] > 0
    assert seen[False] > 0


def sizes_of(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """Σ|w||x| + Σ|bias| of every output."""
    conv = replace(both(problem).conv, relu=False)
    plain = Problem(ConvProjection(conv, both(problem).projection), problem.inputs)
    return reference(plain, *(tuple(map(np.abs, arrays)) for arrays in (inputs, weights)))


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_integers_are_exact_in_every_order(name: str) -> None:
    """No partial sum exceeds what the accumulator holds, and both sums count."""
    kernel = CONTROLS[name]
    room = {"float32": 2**24, "float64": 2**53}[kernel.contract.accumulate]
    plain = [p for p in CORNERS if not both(p).extras]
    for problem in (BLOCK, *plain[:4], plain[7]):
        for variant in range(fewest_variants(kernel, problem, "exact")):
            case = make_case(kernel, problem, "exact", 3, variant)
            inputs, weights = case.wide()
            assert all((array == np.rint(array)).all() for array in (*inputs, *weights))
            assert sizes_of(problem, inputs, weights).max() <= room
            got = run_kernel(BACKEND, kernel, problem, *case.inputs, *case.weights)
            found = judge(case, kernel.contract, got, exact=True)
            assert found.ok, (problem, variant, found)
    case = make_case(kernel, BLOCK, "exact", 3)
    for arrays in (case.inputs, case.weights):
        assert all(np.asarray(array).any() for array in arrays)


@pytest.mark.parametrize("name", ["split_reversed", "split_tensor_core_16", "split_promoted"])
def test_split_factors_have_long_values_in_both_sums(name: str) -> None:
    """Pixels, then weights, of one sum and then of the other; never two that meet."""
    kernel = CONTROLS[f"control/conv2d_projection/{name}/fp16x3"]
    for problem in (BLOCK, CORNERS[0], CORNERS[4]):
        assert fewest_variants(kernel, problem, "exact") == 6
        long = []
        for variant in range(6):
            case = make_case(kernel, problem, "exact", 5, variant)
            inputs, weights = case.wide()
            factors = [
                array
                for s in SPEC.summands(problem)
                for array in (inputs[s.input], weights[s.weight])
            ]
            low = [bool(halves(a.astype(np.float32))[1].any()) for a in factors]
            assert not any(halves(w.astype(np.float32))[1].any() for w in weights if w.ndim == 1)
            long.append([place for place, found in enumerate(low) if found])
        assert long == [[], [0], [1], [], [2], [3]]


def test_other_kernels_need_no_more_variants() -> None:
    for name, count in (
        ("kahan/fp32", 1),
        ("two_sums/fp16", 1),
        ("tensor_core_8/tf32", 1),
        ("tensor_core_to_tf32/tf32", 2),
    ):
        kernel = CONTROLS[f"control/conv2d_projection/{name}"]
        assert fewest_variants(kernel, BLOCK, "exact") == count


@pytest.mark.parametrize("precision", [FP32, FP16], ids=str)
def test_both_sums_cancel(precision: object) -> None:
    kernel = replace(NUMPY, precision=precision)
    case = make_case(kernel, BLOCK, "cancelling", 1)
    for array in case.inputs:
        assert 95 < array.astype(np.float64).mean() < 105
    inputs, weights = case.wide()
    for weight in weights:
        if weight.ndim == 4:
            sums = np.abs(weight.mean(axis=(1, 2, 3)))
            assert sums.max() < 1e-3 * np.abs(weight).max()
    inside = (..., slice(1, -1), slice(1, -1))  # at the border padding takes the place of pixels
    y = reference(BLOCK, inputs, weights)[inside]
    assert np.abs(y).max() < 0.02 * sizes_of(BLOCK, inputs, weights)[inside].min()
