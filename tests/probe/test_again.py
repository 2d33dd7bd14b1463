"""Convolutions with transforms for a shape that no probe uses, right and wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import checked_kernels
from r18.graph.ops import Conv2d, Problem, ReLU
from r18_oracle import checked as module
from r18_oracle.checked import Checked, How, check, target_of
from r18_oracle.findings import Finding
from r18_oracle.functions.arithmetic import expected_of
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.kinds import KINDS
from r18_oracle.functions.likes import LIKES
from r18_oracle.probe.again import posed
from r18_oracle.probe.transforms import leaks, transformed
from r18_oracle.search.replay import replayed

HERE = Path(checked_kernels.__file__)
HOW = How("quick", network=None, isolated=False)
MOST_SECONDS = 60.0
SMALLEST = Problem(Conv2d(40, 1, (2, 2), (1, 1), (1, 1)), ((1, 40, 1, 1),))
"""A convolution that cuDNN transforms on an H100."""


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contracts of all searches that a test makes."""
    contracts, search = list[str](), module._searched

    def watched(plan: Any, target: Any, *rest: Any) -> Checked:
        contracts.append(target.contract)
        return search(plan, target, *rest)

    monkeypatch.setattr(module, "_searched", watched)
    return contracts


def judged(name: str, how: How = HOW, **options: Any) -> Checked:
    return check(target_of(f"{HERE}:{name}", "conv2d", **options), how)


def function(name: str) -> FunctionBackend:
    kernel = FunctionKernel(
        ("mine", name),
        getattr(checked_kernels, name),
        LIKES["conv2d"],
        KINDS["numpy"](),
        expected_of(LIKES["conv2d"], "float32"),
    )
    return FunctionBackend(kernel)


# -- a check as a whole ----------------------------------------------------------------------------


def test_a_rare_transform_is_right_with_its_note(searches: list[str]) -> None:
    start = time.monotonic()
    result = judged("rarely_fft")
    assert result.ok, result.text()
    assert searches == ["sum,float32", "transforms,float32"]
    assert result.target.contract == "transforms,float32"
    (note,) = (n for n in result.text().splitlines() if "transforms 2×1 windows: within" in n)
    assert note.endswith("a weight changes outputs it does not meet")
    assert time.monotonic() - start < MOST_SECONDS


def test_a_contract_that_was_given_stays(searches: list[str]) -> None:
    result = judged("rarely_fft", contract="fp32")
    assert [finding.check for finding in result.findings] == ["exact"]
    assert searches == [result.target.contract] == ["fp32"]


@pytest.mark.parametrize("name", ["rarely_row", "rarely_half"])
def test_a_transform_beyond_every_bound_keeps_its_finding(name: str, searches: list[str]) -> None:
    result = judged(name)
    (finding,) = result.findings
    assert finding.check == "exact"
    assert "windows: which none of the known bounds fits" in result.text()
    assert searches == [result.target.contract] == ["sum,float32"]


def test_a_wrong_transform_is_found_on_a_larger_problem() -> None:
    """A wrong transform is found on a larger problem; the first one has too few channels."""
    result = judged("rarely_dropped", replace(HOW, isolated=True))
    (finding,) = result.findings
    assert result.target.contract == "transforms,float32"
    assert finding.check == "bound"
    again = replayed(finding)
    assert again is not None
    assert again.same_as(finding)


def test_a_plain_wrong_kernel_is_neither_settled_nor_searched_again(searches: list[str]) -> None:
    result = judged("rarely_wrong")
    (finding,) = result.findings
    assert finding.check == "exact"
    assert "transforms" not in result.text()
    assert searches == [result.target.contract] == ["sum,float32"]


# -- the parts -------------------------------------------------------------------------------------


def test_no_probe_poses_the_rare_shape() -> None:
    assert transformed(function("rarely_fft"), "float32") == []
    assert len(transformed(function("fft_conv2d"), "float32")) == 6


@pytest.mark.parametrize(
    ("name", "transforms"),
    [("rarely_fft", True), ("fft_conv2d", True), ("einsum_conv2d", False), ("rarely_wrong", False)],
)
def test_a_weight_changes_outputs_it_does_not_meet(name: str, transforms: bool) -> None:
    larger = replace(SMALLEST, inputs=((2, 40, 5, 7),))
    unpadded = Problem(Conv2d(3, 2, (2, 3)), ((2, 3, 4, 6),))
    for problem in (SMALLEST, larger):
        assert leaks(function(name), problem, "float32") is transforms
    assert leaks(function(name), unpadded, "float32") is (name == "fft_conv2d")


def test_what_cannot_leak() -> None:
    for op in (Conv2d(3, 2, (1, 1)), Conv2d(3, 2, (3, 3), (2, 1), (1, 1))):
        assert not leaks(function("fft_conv2d"), Problem(op, ((1, 3, 5, 5),)), "float32")


def test_problems_are_posed_if_rounding_errors_may_be_all_that_was_found() -> None:
    batch = replace(SMALLEST, inputs=((3, 40, 1, 1),))
    exact = Finding("exact", "mine", "f", batch, "exact", 0, "")
    alone = replace(exact, check="batch_invariance")
    assert posed([exact]) == [batch]
    assert posed([exact, alone]) == [batch, SMALLEST]
    strided = Problem(Conv2d(3, 2, (3, 3), (2, 1), (1, 1)), ((1, 3, 5, 5),))
    for other in (
        replace(exact, check="fences"),
        replace(exact, check="crash", problem=None),
        replace(exact, problem=strided),
        replace(exact, problem=Problem(ReLU(), ((3,),))),
    ):
        assert posed([exact, other]) == []
