"""A finding that no check could have made is refused; it is never reported as fixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import r18
from r18.errors import R18Error, UsageError
from r18.graph.ops import Conv2d, Problem
from r18_oracle.findings import RUN, Finding, load, save
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.replay import check_sound, replay_finding

KERNEL = "numpy/conv2d/im2col/fp32"
PROBLEM = Problem(Conv2d(3, 4, (3, 3)), ((1, 3, 6, 5),))
HOW = {"rounding": "normal", "light": True}
SOUND = Finding("bound", "numpy", KERNEL, PROBLEM, "normal", 0, "off", details=HOW)
RUNS = NetworkRun("tiny", "synthetic", "fp32", "all", 1, 0).finding("runs", "numpy", "raised")


def changed(one: Finding, **fields: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(one.to_json()))
    for name, value in fields.items():
        where = data
        *way, last = name.split("__")
        for step in way:
            where = where[step]
        where[last] = value
    return data


@pytest.mark.parametrize(
    ("one", "fields", "message"),
    [
        (SOUND, {"check": "bond"}, "unknown check of a finding 'bond', did you mean 'bound'?"),
        (SOUND, {"problem": None}, "it names no problem"),
        (SOUND, {"kind": "norml"}, "unknown kind of input 'norml', did you mean 'normal'?"),
        (SOUND, {"seed": -1}, "a field is not of its type"),
        (SOUND, {"seed": True}, "a field is not of its type"),
        (SOUND, {"details": []}, "its details are []"),
        (SOUND, {"details__only": "bounds"}, "unknown check 'bounds', did you mean 'bound'?"),
        (SOUND, {"details__rounding": "odd"}, "'odd' is not a rounding kind"),
        (SOUND, {"details__light": 1}, "light in its details: Expected `bool`"),
        (SOUND, {"problem__settings__stride": [1.5, 1]}, "Expected `int`, got `float`"),
        (SOUND, {"problem__settings__bias": "no"}, "Expected `bool`, got `str`"),
        (SOUND, {"problem__inputs": [[1, 3, 6]]}, "a damaged finding: "),
        (SOUND, {"problem__inputs": [[1, 3, 1 << 20, 1 << 20]]}, "is no shape of an input"),
        (SOUND, {"problem__op": "add"}, "a damaged finding: "),
        (SOUND, {"coordinate": ["0"]}, "Expected `int`, got `str`"),
        (SOUND, {"kernel": "numpy/relu/maximum/fp32"}, "refuses the finding's problem, so"),
        (SOUND, {"kernel": "numpy/conv2d/im2co/fp32"}, "unknown kernel"),
        (SOUND, {"extra": 1}, "unknown ['extra']"),
        (RUNS, {"details__run__weights": 1}, "Expected `str`, got `int`"),
        (RUNS, {"details__run__samples": 10**9}, "samples with seed 0 are none"),
        (RUNS, {"details__run": {}}, "{} is no network run"),
    ],
)  # fmt: skip
def test_a_wrong_finding_is_refused(
    one: Finding, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(changed(one, **fields)))
    with pytest.raises(R18Error) as caught:
        replayed_here(path)
    assert message in str(caught.value)


def replayed_here(path: Path) -> Finding | None:
    """Replay a finding as `r18 replay` does, in this process."""
    finding = load(path)
    check_sound(finding)
    return replay_finding(finding=finding, announce=lambda *_: None)


def test_the_command_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(changed(SOUND, check="bond")))
    done = r18("replay", path)
    assert (done.code, done.out) == (2, "")
    assert "unknown check of a finding 'bond'" in done.err


def test_a_sound_finding_that_is_gone(tmp_path: Path) -> None:
    check_sound(RUNS)
    assert replayed_here(save(SOUND, tmp_path)) is None


def test_a_damaged_run_is_no_run() -> None:
    with pytest.raises(UsageError, match="is no network run"):
        check_sound(Finding("runs", "numpy", "x", None, "network", 0, "", details={RUN: {"a": 1}}))
