"""Shrinking problems that were not drawn: every op, to the least that still fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from r18.graph.ops import OPS, Add, Conv2d, ConvProjection, Op, Problem, ReLU
from r18.graph.resnet import tiny
from r18_oracle.generate.corners import corners
from r18_oracle.generate.problems import schedule_problems
from r18_oracle.generate.shrink import elements, reductions, shrunk

EVERYTHING = (
    *(problem for op in OPS.values() for problem in corners(op, 10**9, 10**12)),
    *schedule_problems(tiny(), (2,)),
)


def never() -> bool:
    return False


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_what_fails_always_is_shrunk_to_one_output(op: type[Op]) -> None:
    for problem in (p for p in EVERYTHING if type(p.op) is op):
        least = shrunk(problem, lambda candidate: True, never)
        assert type(least.op) is op
        assert {extent for shape in least.inputs for extent in shape} == {1}
        assert len(least.inputs[0]) == len(problem.inputs[0])
        if isinstance(least.op, ConvProjection):
            plain = Conv2d(1, 1, (1, 1))
            assert least.op == ConvProjection(replace(plain, residual=True), plain)
        assert elements(least) <= elements(problem)


def test_what_fails_once_stays_as_it_is() -> None:
    for problem in EVERYTHING:
        assert shrunk(problem, lambda candidate: False, never) == problem


def test_a_reduction_is_another_problem_of_the_same_op_and_rank() -> None:
    for problem in EVERYTHING:
        for candidate in reductions(problem):
            assert type(candidate.op) is type(problem.op)
            assert len(candidate.inputs[0]) == len(problem.inputs[0])


def test_all_that_a_fault_needs_is_kept_and_nothing_else() -> None:
    def fails(problem: Problem) -> bool:
        op = problem.op
        assert isinstance(op, Conv2d)
        return op.residual and op.stride[0] > op.stride[1] and problem.inputs[0][1] % 4 == 0

    op = Conv2d(64, 48, (5, 3), (3, 2), (2, 1), residual=True, bias=True, relu=True)
    shape = (2, 64, 17, 23)
    start = Problem(op, (shape, Conv2d(64, 48, (5, 3), (3, 2), (2, 1)).infer(shape)))
    least = shrunk(start, fails, never)
    assert least == Problem(
        Conv2d(4, 1, (1, 1), (2, 1), (0, 0), residual=True), ((1, 4, 1, 1), (1, 1, 1, 1))
    )


@pytest.mark.parametrize("groups", [2, 3, 8, 32])
def test_a_fault_of_some_channels_needs_no_groups(groups: int) -> None:
    op = Conv2d(4 * groups, 4 * groups, (3, 3), padding=(1, 1), groups=groups)
    start = Problem(op, ((2, 4 * groups, 5, 5),))
    least = shrunk(start, lambda problem: problem.inputs[0][1] >= 2, never)
    assert least == Problem(Conv2d(2, 1, (1, 1)), ((1, 2, 1, 1),))


def test_groups_that_a_fault_needs_are_kept() -> None:
    def fails(problem: Problem) -> bool:
        assert isinstance(problem.op, Conv2d)
        return problem.op.groups % 3 == 0

    start = Problem(Conv2d(12, 24, (3, 3), groups=12), ((2, 12, 5, 5),))
    assert shrunk(start, fails, never) == Problem(Conv2d(3, 3, (1, 1), groups=3), ((1, 3, 1, 1),))


def test_a_threshold_is_found_to_the_last_element() -> None:
    least = shrunk(Problem(ReLU(), ((8, 100),)), lambda problem: problem.inputs[0][1] >= 37, never)
    assert least == Problem(ReLU(), ((1, 37),))


def test_nothing_is_tried_twice_and_nothing_when_it_is_enough() -> None:
    tried: list[Problem] = []

    def fails(problem: Problem) -> bool:
        tried.append(problem)
        return isinstance(problem.op, Add) and problem.op.relu

    start = Problem(Add(relu=True), ((3, 7, 5, 2),) * 2)
    assert shrunk(start, fails, never) == Problem(Add(relu=True), ((1, 1, 1, 1),) * 2)
    assert len(set(tried)) == len(tried)
    assert start not in tried
    tried.clear()
    assert shrunk(start, fails, lambda: True) == start
    assert tried == []


@pytest.mark.parametrize("height", [*range(5, 64, 2), 99, 1025, 4_097])
def test_a_fault_of_odd_heights_is_shrunk_to_three(height: int) -> None:
    least = shrunk(
        Problem(ReLU(), ((2, 3, height, 4),)),
        lambda problem: problem.inputs[0][2] > 1 and problem.inputs[0][2] % 2 == 1,
        never,
    )
    assert least == Problem(ReLU(), ((1, 1, 3, 1),))


@pytest.mark.parametrize("channels", [65_537, 1_033, 999, 57, 49])
def test_a_fault_of_a_remainder_is_shrunk_to_the_smallest_size_with_it(channels: int) -> None:
    wanted = channels % 8
    least = shrunk(
        Problem(ReLU(), ((1, channels, 1, 1),)),
        lambda problem: problem.inputs[0][1] >= 40 and problem.inputs[0][1] % 8 == wanted,
        never,
    )
    assert least.inputs[0][1] == 40 + wanted


def test_few_problems_are_tried_for_a_large_one() -> None:
    tried: list[Problem] = []

    def fails(problem: Problem) -> bool:
        tried.append(problem)
        return problem.inputs[0][1] >= 40 and problem.inputs[0][1] % 8 == 1

    assert shrunk(Problem(ReLU(), ((2, 65_537, 3, 3),)), fails, never).inputs == ((1, 41, 1, 1),)
    assert len(tried) < 120
