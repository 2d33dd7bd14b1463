"""Which arithmetic gave an integer: each is found in its own outputs, and a wrong sum in none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r18_oracle.ops.integers.arithmetics import (
    CLASSES,
    UNEXPLAINED,
    Arithmetic,
    Operands,
    arithmetics,
    exact_and_bound,
    explain,
    explain_quotient,
)

RNG = np.random.default_rng(3)
COUNT = 400_000
F = np.float32


def operands(*, residual: bool = True, stored: str = "int8", ties: bool = False) -> Operands:
    """Sums of 9 products; with `ties` of scales that make many numbers ties."""
    total = RNG.integers(-3000, 3000, COUNT).astype(np.float64)
    bias = RNG.integers(-900, 900, COUNT).astype(np.float64)
    sx, sy = (F(0.25), F(4)) if ties else (F(0.1), F(0.16))
    return Operands(
        total=total,
        bias=bias,
        magnitude=np.abs(total) + 4000,
        terms=9,
        product=np.full(COUNT, sx * F(0.5) if ties else sx * F(0.02)),
        scale=sy,
        stored=stored,
        residual=RNG.integers(-128, 128, COUNT).astype(np.float64) if residual else None,
        residual_scale=(F(0.5) if ties else F(0.024)) if residual else None,
        relu=stored == "uint8",
    )


@pytest.mark.parametrize(
    ("one", "name"),
    [
        (Arithmetic(ties="away from zero"), "tie"),
        (Arithmetic(ties="up"), "tie"),
        (Arithmetic(quotient="number"), "fused or simulated"),
        (Arithmetic(fused="residual"), "fused or simulated"),
        (Arithmetic(bias="number"), "fused or simulated"),
        (Arithmetic(division="reciprocal"), "division or reciprocal"),
        (Arithmetic(limits="symmetric"), "saturation"),
        (Arithmetic(limits="before ReLU"), "saturation"),
        (
            Arithmetic(bias="scaled", order="before the bias"),
            "fused or simulated and residual order",
        ),
    ],
)
def test_an_arithmetic_is_found_in_its_outputs(one: Arithmetic, name: str) -> None:
    ties = one.ties != "even"
    stored = "uint8" if one.limits == "before ReLU" else "int8"
    given = operands(ties=ties, stored=stored)
    if one.limits != "last":
        given = replace(given, total=given.total * 40)
    got = one.outputs(given)
    wrong, found = explain(given, got)
    assert wrong.sum() > 0, "the outputs do not show it"
    assert found.unexplained == 0
    assert sum(found.classes.values()) == wrong.sum()
    if name in CLASSES:
        assert found.classes[name] == wrong.sum(), found


def test_outputs_as_specified_have_no_class() -> None:
    given = operands()
    wrong, found = explain(given, Arithmetic().outputs(given))
    assert not wrong.any()
    assert (dict(found.classes), found.arithmetic) == ({}, "as specified")


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_a_wrong_sum_is_not_explained(by: int) -> None:
    given = operands(residual=False)
    got = Arithmetic().outputs(given)
    exact, bound = exact_and_bound(given)
    apart = np.abs(np.abs(exact - np.floor(exact)) - 0.5)
    place = np.flatnonzero((np.abs(exact) < 100) & (apart > 0.2))[:50]
    assert bound.max() < 0.1
    got[place] += by
    wrong, found = explain(given, got)
    assert wrong.sum() == found.unexplained == 50
    assert found.classes[UNEXPLAINED] == 50


def test_float_sums_are_explained_by_their_bound_only() -> None:
    given = operands(residual=False)
    exact, bound = exact_and_bound(given)
    moved = np.rint(exact + np.where(RNG.random(COUNT) < 0.5, 0.5, -0.5) * bound)
    moved = np.clip(moved, -128, 127)
    wrong, found = explain(given, moved)
    assert wrong.sum() > 0
    assert found.unexplained == 0
    assert found.arithmetic == "sums in float32"
    assert 0 < found.moved <= bound.max()


def test_the_specification_comes_first_and_departures_are_few() -> None:
    found = arithmetics(True, True)
    assert found[0] == Arithmetic()
    assert found[0].name == "as specified"
    assert len(set(found)) == len(found)
    assert all(one.classes for one in found[1:])


def test_quotients_of_images() -> None:
    scale = F(0.0207)
    numbers = ((RNG.integers(-140, 140, COUNT) + 0.5) * scale).astype(np.float32)
    right = np.clip(np.rint(numbers / scale), -128, 127).astype(np.float64)
    wrong, found = explain_quotient(numbers, scale, "int8", right)
    assert (wrong.sum(), found.arithmetic) == (0, "as specified")
    other = np.clip(np.rint(numbers * (F(1) / scale)), -128, 127).astype(np.float64)
    wrong, found = explain_quotient(numbers, scale, "int8", other)
    assert wrong.sum() > 0
    assert dict(found.classes) == {"division or reciprocal": wrong.sum()}
    other[:3] += 4
    assert explain_quotient(numbers, scale, "int8", other)[1].unexplained == 3
