"""Each arithmetic is identified from its own outputs, and a wrong sum by none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r18.graph.ops import Conv2d
from r18.report.tables import explained as table
from r18_oracle.ops.integers.arithmetics import (
    CLASSES,
    PAIRS,
    TIE,
    UNEXPLAINED,
    Arithmetic,
    Operands,
    arithmetics,
    exact_and_bound,
    explain,
    explain_quotient,
)
from r18_oracle.ops.integers.pairs import CHANNELS, EITHER, WINDOW, corrections
from support import compute

RNG = np.random.default_rng(3)
COUNT = 400_000
F = np.float32


def operands(*, residual: bool = True, stored: str = "int8", ties: bool = False) -> Operands:
    """Operands of sums of 9 products; with `ties` their scales make many numbers ties."""
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


def test_the_table_of_reasons_has_every_class() -> None:
    """The core's table of reasons has the oracle's classes, since it cannot import them."""
    assert (table.CLASSES, table.UNEXPLAINED) == (CLASSES, UNEXPLAINED)


# -- pairs of products that saturate -----------------------------------------------------------


def added_in_pairs(
    conv: Conv2d, image: np.ndarray, weight: np.ndarray, n: int, o: int, y: int, x: int, order: str
) -> int:
    """One sum of a convolution: its products added in pairs as `vpmaddubsw` does, then exactly."""
    offset = 128 if image.dtype == np.int8 else 0
    (_, _, height, width), (_, depth, rows, columns) = image.shape, weight.shape
    first = o // (len(weight) // conv.groups) * depth
    products: list[int] = []
    for r in range(rows):
        for s in range(columns):
            down = y * conv.stride[0] - conv.padding[0] + r * conv.dilation[0]
            right = x * conv.stride[1] - conv.padding[1] + s * conv.dilation[1]
            inside = 0 <= down < height and 0 <= right < width
            for c in range(depth):
                value = int(image[n, first + c, down, right]) if inside else 0
                products.append((value + offset) * int(weight[o, c, r, s]))
            if order == CHANNELS and depth % 2:
                products.append(0)
    total = 0
    for at in range(0, len(products), 2):
        total += min(max(sum(products[at : at + 2]), -32768), 32767)
    return total - offset * int(weight[o].astype(int).sum())


@pytest.mark.parametrize("stored", ["uint8", "int8"])
@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(3, 4, (3, 3), stride=(2, 1), padding=(1, 1)),
        Conv2d(6, 4, (3, 2), padding=(0, 1), groups=2, dilation=(2, 1)),
        Conv2d(8, 4, (1, 1), stride=(2, 2)),
    ],
)
def test_corrections_are_those_of_saturated_pairs(conv: Conv2d, stored: str) -> None:
    rng = np.random.default_rng(5)
    limits = np.iinfo(stored)
    image = rng.integers(limits.min, limits.max + 1, (2, conv.in_channels, 5, 6)).astype(stored)
    shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    weight = rng.integers(-127, 128, shape).astype(np.int8)
    weight[-1] = rng.integers(-20, 21, shape[1:])  # a channel in which nothing saturates
    exact = compute(
        replace(conv, bias=False), [image.astype(np.float64)], [weight.astype(np.float64)]
    )
    found = corrections(conv, image, weight)
    assert set(found) == ({WINDOW, CHANNELS} if shape[1] % 2 else {EITHER})
    for order, extra in found.items():
        assert extra.shape == exact.shape
        assert extra.any()
        assert not extra[:, -1].any()
        for place in np.ndindex(*exact.shape):
            expected = added_in_pairs(conv, image, weight, *place, order)
            assert exact[place] + extra[place] == expected, (order, place)


def test_a_linear_layer_saturates_and_small_weights_do_not() -> None:
    image = np.array([[255, 255, 255, 1, 9]], np.uint8)
    weight = np.array([[127, 127, -127, -1, 3], [7, 7, -7, 7, 7]], np.int8)
    (extra,) = corrections(None, image, weight).values()
    np.testing.assert_array_equal(extra, [[32767 - 255 * 254, 0]])
    assert not corrections(None, image, weight[1:])


def test_saturated_sums_explain_an_output_as_a_whole() -> None:
    """Saturated sums are named, with all other differences; a wrong element is not explained,
    and neither is one that is as specified although its sum should have saturated."""
    given = operands(residual=False, ties=True)
    extra = np.where(RNG.random(COUNT) < 0.1, 900.0, 0.0)
    other = np.where(RNG.random(COUNT) < 0.1, -900.0, 0.0)
    offered = {"another order": other, "this order": extra}
    got = Arithmetic().outputs(replace(given, total=given.total + extra))
    wrong, found = explain(given, got, saturated=lambda: offered)
    assert wrong.sum() > 1000
    assert dict(found.classes) == {PAIRS: wrong.sum()}
    assert found.arithmetic == "this order"
    assert explain(given, got)[1].unexplained > 1000
    specified = Arithmetic().outputs(given)
    place = np.flatnonzero(wrong)[:7]
    spoiled = got.copy()
    spoiled[place] = specified[place]
    marked, found = explain(given, spoiled, saturated=lambda: offered)
    assert found.unexplained == 7
    assert marked[place].all()
    assert found.classes[PAIRS] == wrong.sum() - 7
    rounded = Arithmetic(ties="away from zero")
    got = rounded.outputs(replace(given, total=given.total + extra))
    found = explain(given, got, saturated=lambda: offered)[1]
    assert found.unexplained == 0
    assert found.arithmetic == "this order, ties: away from zero"
    assert found.classes[TIE] > 1000
    assert found.classes[f"{PAIRS} and {TIE}"] > 100


def test_a_sum_that_saturates_is_named_whatever_else_is_different() -> None:
    """A sum that saturates is named next to another difference, such as logits' rounding."""
    given = replace(operands(residual=False), scale=None)
    extra = np.where(RNG.random(COUNT) < 0.1, 900.0, 0.0)
    got = Arithmetic(bias="scaled").outputs(replace(given, total=given.total + extra))
    wrong, found = explain(given, got, saturated=lambda: {"this order": extra})
    assert found.unexplained == 0
    assert found.arithmetic == "this order, bias: scaled"
    both = sum(count for name, count in found.classes.items() if PAIRS in name)
    assert both == (wrong & (extra != 0)).sum() > 1000
