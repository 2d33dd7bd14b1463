"""Cases are made once for the kernels of an op and a precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faulty_backends import Right, fail, kernel
from r18.backend.host import HostKernel
from r18.graph.ops import Conv2d, MatMul, Problem
from r18.graph.precision import FP16, FP32, Precision
from r18_numpy.conv import conv_kernels
from r18_oracle.cases import Case
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed
from r18_oracle.functions.target import backend_of
from r18_oracle.generate.inputs import CASES, KINDS, LONGS, Cases, fewest_variants, make_case

PROBLEM = Problem(Conv2d(3, 4, (3, 3)), ((2, 3, 5, 6),))
MUCH = 1 << 20


def kernels(precision: Precision = FP32) -> tuple[HostKernel, HostKernel]:
    one, other = conv_kernels(precision)
    return one, other


def made(cases: Cases, kernel: HostKernel, kind: str = "normal", variant: int = 0) -> Case:
    return cases.made(kernel, PROBLEM, kind, 1, variant)


def same(one: Case, other: Case) -> bool:
    """Whether they hold the same arrays, not equal ones."""
    pairs = zip((*one.inputs, *one.weights), (*other.inputs, *other.weights), strict=True)
    return all(a is b for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_case_is_the_one_that_would_be_made(kind: str) -> None:
    cases, (one, other) = Cases(MUCH), kernels()
    first, second = made(cases, one, kind), made(cases, other, kind)
    assert same(first, second)
    expected = make_case(other, PROBLEM, kind, 1)
    for array, wanted in zip(second.inputs, expected.inputs, strict=True):
        assert array.tobytes() == wanted.tobytes()
    for array, wanted in zip(second.weights, expected.weights, strict=True):
        assert array.tobytes() == wanted.tobytes()


def test_other_kinds_variants_and_seeds_are_other_cases() -> None:
    cases, (one, _) = Cases(MUCH), kernels()
    first = made(cases, one)
    assert not same(first, made(cases, one, "positive"))
    assert not same(first, made(cases, one, variant=1))
    assert not same(first, cases.made(one, PROBLEM, "normal", 2, 0))
    assert same(first, made(cases, one))


def test_integers_depend_on_what_the_contract_says_of_sums() -> None:
    cases, (one, _) = Cases(MUCH), kernels()
    winograd = replace(one, contract=replace(one.contract, algorithm="winograd_f2x2"))
    assert same(made(cases, one), made(cases, winograd))
    assert not same(made(cases, one, "exact"), made(cases, winograd, "exact"))
    assert np.all(made(cases, winograd, "exact").weights[0] % 4 == 0)


@pytest.mark.parametrize("sums", ["float32", "bfloat16"])
def test_split_factors_meet_sums_of_any_format(sums: str) -> None:
    """Split factors get exact cases for any sums; integers of two halves do not fit bfloat16."""
    place = "numpy:matmul?like=matmul&dtype=float32&arrays=numpy"
    one = backend_of(f"check:{place}&contract=sum,{sums},factors=fp16x2").kernel
    problem = Problem(MatMul(1, 1), ((1, 1),))
    for variant in range(fewest_variants(one, problem, "exact")):
        case = make_case(one, problem, "exact", 0, variant)
        assert np.isfinite(case.inputs[0]).all()
    assert fewest_variants(one, problem, "exact") == (LONGS if sums == "float32" else 1)


def test_another_precision_begins_again() -> None:
    cases, (one, _) = Cases(MUCH), kernels()
    first = made(cases, one)
    assert made(cases, kernels(FP16)[0]).inputs[0].dtype == np.float16
    assert not same(first, made(cases, one))


def test_the_first_cases_stay_beyond_the_limit() -> None:
    one, _ = kernels()
    first = make_case(one, PROBLEM, "normal", 1)
    cases = Cases(sum(array.nbytes for array in (*first.inputs, *first.weights)))
    first, second = made(cases, one), made(cases, one, variant=1)
    assert same(first, made(cases, one))
    assert not same(second, made(cases, one, variant=1))


def test_a_finding_forgets_them() -> None:
    """A finding drops the kept cases, to whose arrays the fault may have written."""
    fault = kernel(Conv2d, fail, "raising")
    before = CASES.made(fault, PROBLEM, "normal", 1, 0)
    with pytest.raises(Failed):
        examine(Right(), fault, PROBLEM, 1)
    assert not same(before, CASES.made(fault, PROBLEM, "normal", 1, 0))
