"""Findings: exact, small, and equal after writing and reading."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r18.errors import UsageError
from r18.graph.ops import Conv2d, Problem
from r18.graph.resnet import tiny
from r18_oracle.findings import (
    Finding,
    load,
    problem_from_json,
    problem_to_json,
    save,
)
from r18_oracle.generate.problems import schedule_problems

PROBLEM = Problem(
    Conv2d(3, 5, (3, 1), (2, 1), (1, 0), bias=True, residual=True),
    ((2, 3, 7, 4), (2, 5, 4, 4)),
)


def finding(**changes: object) -> Finding:
    values: dict[str, object] = {
        "check": "bound",
        "backend": "numpy",
        "kernel": "numpy/conv2d/im2col/fp32",
        "problem": PROBLEM,
        "kind": "wide",
        "seed": 17,
        "message": "error exceeds the bound (error/bound 3.2)",
        "coordinate": (1, 4, 3, 0),
        "got": 0.1,
        "expected": 0.30000000000000004,
        "bound": 1e-9,
    }
    return Finding(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("got", [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan])
def test_a_finding_is_read_back_as_it_was_written(tmp_path: Path, got: float) -> None:
    path = save(finding(got=got), tmp_path)
    again = load(path)
    assert repr(again) == repr(finding(got=got))
    assert path.stat().st_size < 2_000
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_every_problem_of_the_network_survives_json() -> None:
    for problem in schedule_problems(tiny(), (1, 3)):
        assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem


def test_a_finding_says_all_that_one_needs(tmp_path: Path) -> None:
    path = save(finding(), tmp_path)
    assert finding().describe(path) == "\n".join(
        [
            "numpy/conv2d/im2col/fp32: bound: error exceeds the bound (error/bound 3.2)",
            f"  problem   {PROBLEM}",
            "  input     wide, seed 17",
            "  worst     at (1, 4, 3, 0): got 0.1",
            "            expected 0.30000000000000004, bound 1e-09",
            f"  replay    r18 replay {path}",
        ]
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"finding": 2}', '{"finding": 1}', "\x00"])
def test_a_file_that_is_no_finding_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError):
        load(tmp_path / "x.json")


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the finding"):
        load(tmp_path / "none.json")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["check", "problem", "coordinate", "got", "seed", "extra", "kind"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers())),
        max_size=3,
    )
)
def test_damage_is_never_another_exception(changes: dict[str, object]) -> None:
    data = {**finding().to_json(), **changes}
    with contextlib.suppress(UsageError):
        assert isinstance(Finding.from_json(data).describe(), str)
