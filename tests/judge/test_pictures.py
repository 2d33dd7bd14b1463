"""Pictures of a fault: small, correct, and made if a check fails."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r18.backend.host import HostKernel
from r18_numpy import Backend as NumpyBackend
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, load, save
from r18_oracle.judge.pictures import CELLS, error_map, read_rows
from report_support import CONV, finding


@given(st.floats(0, 1e300) | st.just(math.inf))
def test_a_word_of_a_picture_keeps_what_it_is_about(ratio: float) -> None:
    (row,) = error_map(np.full((1, 1), ratio), (0, 0))["plane"]
    ((again,),) = read_rows([row])
    assert (again > 1) == (ratio > 1)
    assert (again == 0) == (ratio == 0)
    assert again == pytest.approx(ratio, rel=0.51, abs=5e-324)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (5,),
        (2, 3, 4),
        (2, 2, 2, 2, 3),
        (3, 1000),
        (1, 2, 5, 7),
        (64, 512, 7, 7),
        (2, 64, 112, 112),
    ],
)
def test_the_worst_element_is_in_the_cell_that_it_belongs_to(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    ratios = 10 ** rng.uniform(-4, 0, shape)
    worst = tuple(int(rng.integers(extent)) for extent in shape)
    ratios[worst] = 3e5
    picture = error_map(ratios, worst)
    for name, axes in (("plane", (-2, -1)), ("outer", (0, 1))):
        if name not in picture:
            continue
        cell = picture["cell" if name == "plane" else "outer_cell"]
        table = read_rows(picture[name])
        whole = (0, *worst)[-max(2, len(worst)) :]
        at = [whole[axis] // size for axis, size in zip(axes, cell, strict=True)]
        assert len(table) <= CELLS
        assert len(table[0]) <= CELLS
        assert [(i, j) for i, row in enumerate(table) for j, r in enumerate(row) if r > 1] == [
            tuple(at)
        ]


def test_a_finding_with_a_picture_is_a_small_file(tmp_path: Path) -> None:
    ratios = 10 ** np.random.default_rng(1).uniform(-4, 3, (4, 28, 112, 112))
    picture = error_map(ratios, (3, 27, 111, 111))
    path = save(
        finding(details={"rounding": "normal", "light": True, "picture": picture}), tmp_path
    )
    assert path.stat().st_size < 6_000
    assert load(path).details["picture"] == picture


class LastColumn(NumpyBackend):
    """A backend whose convolutions are 1 % off in the last channel's last two columns."""

    def kernels(self) -> tuple[Any, ...]:
        (kernel,) = (k for k in super().kernels() if k.id == "numpy/conv2d/direct/fp32")
        assert isinstance(kernel, HostKernel)

        def run(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
            kernel.run(op, inputs, weights, out, workspace)
            out[:, -1, :, -2:] *= np.float32(1.01)

        return (replace(kernel, run=run),)


def test_a_failed_check_leaves_a_picture_of_where_the_error_sits() -> None:
    backend = LastColumn()
    backend.probe()
    with pytest.raises(Failed) as failed:
        examine(backend, backend.kernels()[0], CONV, 0)
    found = failed.value.finding
    picture = found.details["picture"]
    assert picture["shape"] == list(CONV.output)
    assert picture["cell"] == [1, 2]
    plane, outer = read_rows(picture["plane"]), read_rows(picture["outer"])
    assert {column for row in plane for column, r in enumerate(row) if r > 1} == {19}
    assert {column for row in outer for column, r in enumerate(row) if r > 1} == {7}
    assert json.loads(json.dumps(picture, allow_nan=False)) == picture
