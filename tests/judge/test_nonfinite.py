"""A finding with a NaN or an infinity says which input held it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from faults.fault import HostBackend, kernel
from r18.backend import Array
from r18.graph.ops import Add, Conv2d, Problem, ReLU
from r18_oracle.cases import Case
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed
from r18_oracle.judge.nonfinite import origin

CONV = Problem(Conv2d(1, 1, (3, 3), (1, 1), (1, 1), bias=True), ((1, 1, 5, 6),))


def case(*, pixel: float = 1.0, weight: float = 1.0, bias: float = 0.0) -> Case:
    conv = kernel("toy", Conv2d, "toy", lambda *a: None)
    image, taps = np.ones((1, 1, 5, 6)), np.ones((1, 1, 3, 3))
    image[0, 0, 1, 2], taps[0, 0, 0, 0] = pixel, weight
    return Case.of(conv, CONV, (image,), (taps, np.array([bias])))


@pytest.mark.parametrize(
    ("given", "at", "said"),
    [
        ({"pixel": math.nan}, (0, 0, 1, 1), "the nan of input 0 at (0, 0, 1, 2) reaches it"),
        (
            {"pixel": -math.inf},
            (0, 0, 4, 5),
            "the -inf of input 0 at (0, 0, 1, 2) does not reach it",
        ),
        (
            {"weight": math.inf},
            (0, 0, 1, 1),
            "the inf of weight 'weight' at (0, 0, 0, 0) reaches it",
        ),
        ({"bias": math.nan}, (0, 0, 0, 0), "the nan of weight 'bias' at (0,) reaches it"),
        ({}, (0, 0, 0, 0), "no input holds a NaN or an infinity"),
    ],
)
def test_it_names_the_element_that_reaches_the_output(
    given: dict[str, float], at: tuple[int, ...], said: str
) -> None:
    assert origin(case(**given), at, math.nan, 1.0) == said


def test_of_several_it_names_the_one_that_reaches() -> None:
    both = case(pixel=math.inf, bias=math.nan)
    assert "input 0" not in origin(both, (0, 0, 4, 5), 1.0, math.nan)


def test_finite_values_need_no_origin() -> None:
    assert origin(case(pixel=math.nan), (0, 0, 4, 5), 1.0, 2.0) == ""


def _ignores_nan(
    op: Add, inputs: tuple[Array, ...], weights: tuple[Array, ...], out: Array, scratch: Array
) -> None:
    np.add(np.nan_to_num(inputs[0]), inputs[1], out=out)


def test_a_finding_on_the_edges_names_the_input() -> None:
    wrong = kernel("fault", Add, "ignores_nan", _ignores_nan)
    with pytest.raises(Failed) as failure:
        examine(HostBackend([wrong]), wrong, Problem(Add(), ((2, 3, 5, 7),) * 2), 1)
    finding = failure.value.finding
    assert finding.check == "edges"
    assert f"of input 0 at {finding.coordinate} reaches it" in finding.message


def test_what_was_never_written_is_shown_without_values() -> None:
    hole = kernel("fault", ReLU, "hole", lambda op, x, w, out, s: out[..., 1:].fill(1.0))
    with pytest.raises(Failed) as failure:
        examine(HostBackend([hole]), hole, Problem(ReLU(), ((2, 3),)), 1)
    assert failure.value.finding.check == "full_write"
    assert "  first     at (0, 0)" in failure.value.finding.describe().split("\n")
    assert "None" not in failure.value.finding.describe()
