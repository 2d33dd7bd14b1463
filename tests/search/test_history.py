"""Faults of state between calls are named so, and replayed with the calls before them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import r18
from faults import HostBackend, state
from faults.fault import kernel
from faults.others import of_inputs, relu
from r18.backend import Array
from r18.backend.registry import load_backend
from r18.errors import UsageError
from r18.graph.ops import Problem, ReLU
from r18_oracle.check.relatives import base_problem, others
from r18_oracle.check.state import State
from r18_oracle.check.tally import Tally
from r18_oracle.findings import BEFORE, STATE, Finding, save
from r18_oracle.search import history, replay
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.history import ALONE, Earlier, after, alone, confirmed, earlier_calls
from r18_oracle.search.profiles import profile

PROBLEM = Problem(ReLU(), ((1, 5),))


@pytest.fixture(autouse=True)
def _from_the_tests_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the tests' folder first on the path, and keep the rest, which may have the package."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)


def found(**changes: Any) -> Finding:
    plain = Finding("exact", "toy", "toy/relu/toy/fp32", PROBLEM, "exact", 1, "wrong")
    return replace(plain, **changes)


def call(seed: int) -> Earlier:
    return Earlier("toy/relu/toy/fp32", "toy/relu/toy/fp32", PROBLEM, seed)


# -- the check itself --------------------------------------------------------------------------


def test_each_field_has_a_neighbour_that_differs_in_it_only() -> None:
    conv = state.planted()[0].kernel
    base = base_problem(conv, 10**6)
    assert base is not None
    assert set(others(conv, base)) >= {
        *("n", "c", "h", "w", "o", "stride_h", "stride_w", "padding_h", "padding_w"),
        *("kernel_size_h", "kernel_size_w", "bias", "residual", "relu"),
    }


def test_the_tally_counts_the_scenarios() -> None:
    plain = kernel("toy", ReLU, "plain", of_inputs(relu))
    tally, base = Tally(), base_problem(plain, 10**6)
    assert base is not None
    assert State(HostBackend([plain]), plain, base, 0, tally).run() == []
    assert tally.passed["state"] == len(others(plain, base)) + 9


def test_a_kernel_that_is_always_wrong_is_left_to_the_other_checks() -> None:
    def off(op: Any, x: Any, w: Any, out: Array, scratch: Array) -> None:
        out[...] = x[0] + 1

    wrong = kernel("toy", ReLU, "off", off)
    assert State(HostBackend([wrong]), wrong, PROBLEM, 0).run() == [PROBLEM]


def test_a_field_with_an_ordinary_fault_is_left_to_the_other_checks() -> None:
    def odd(op: Any, x: Any, w: Any, out: Array, scratch: Array) -> None:
        out[...] = relu(op, x[0]) + (x[0].shape[1] % 2 == 0)

    wrong = kernel("toy", ReLU, "odd", odd)
    (suspect,) = State(HostBackend([wrong]), wrong, Problem(ReLU(), ((3, 5),)), 0).run()
    assert suspect.inputs[0][1] == 6


# -- confirming in fresh processes, with stand-ins for them --------------------------------------


def test_what_its_call_alone_shows_stays_as_it_is() -> None:
    finding = found()
    assert confirmed(finding, [call(1)], lambda again: again) is finding


def test_the_fewest_calls_that_bring_it_back_are_kept() -> None:
    tried: list[int] = []

    def replayed(finding: Finding) -> Finding | None:
        before = earlier_calls(finding)
        tried.append(len(before))
        return finding if any(one.seed == 5 for one in before) else None

    finding = confirmed(found(), [call(seed) for seed in range(16)], replayed)
    assert [one.seed for one in earlier_calls(finding)] == [5]
    assert finding.check == "state"
    assert finding.message == "right in a fresh process, wrong after another call: exact: wrong"
    assert tried[:2] == [0, 16]
    assert len(tried) < 12


def test_what_no_call_brings_back_says_so() -> None:
    finding = confirmed(found(), [call(1)], lambda again: None)
    assert finding.details[ALONE] == "right"
    assert "right in a fresh process, also after" in finding.message


def test_the_calls_before_are_those_of_the_findings_backend() -> None:
    """Calls before a finding are its backend's own; a worker takes several backends in turn."""

    def off(op: Any, x: Any, w: Any, out: Array, scratch: Array) -> None:
        out[...] = x[0] + 1

    right = kernel("one", ReLU, "plain", of_inputs(relu))
    wrong = kernel("other", ReLU, "off", off)
    how = profile("brief")
    run_campaign(HostBackend([right]), right, how, 1, backend_name="one", network_name=None)
    found = run_campaign(HostBackend([wrong]), wrong, how, 1, backend_name="other")
    assert found.finding is not None
    assert history.CALLS["one"]
    assert {call.kernel for call in history.CALLS["one"]} == {right.id}
    assert {call.kernel for call in found.history} <= {wrong.id}


def test_a_scenario_whose_call_is_wrong_alone_is_an_ordinary_finding() -> None:
    scenario = found(check="state", details={STATE: {"scenario": "n", "base": {}}, BEFORE: []})
    ordinary = found(check="bound")
    assert confirmed(scenario, [], lambda again: None if again.details else ordinary) is ordinary


def test_a_finding_with_earlier_calls_is_read_back(tmp_path: Path) -> None:
    finding = after(found(), [call(3), replace(call(4), state=True)])
    data = json.loads(save(finding, tmp_path).read_text())
    again = Finding.from_json(data)
    assert again == finding
    assert earlier_calls(again)[1].state
    assert alone(again) == found(message=finding.message)
    assert f"  after     {PROBLEM}" in finding.describe()


@pytest.mark.parametrize("before", ["x", [1], [{}], [{"problem": {"op": "relu"}}], {"a": 1}])
def test_damaged_calls_are_a_clear_error(before: Any) -> None:
    with pytest.raises(UsageError, match="damaged"):
        earlier_calls(found(details={BEFORE: before}))


# -- the commands, in real processes -------------------------------------------------------------


def _verified(names: str, folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    done = r18(
        *("verify", "--backend", "faults:Backend", "--kernels", names, "--workers", 1),
        *("--findings", folder, "--json"),
    )
    assert done.code == 1, done.err
    for path in sorted(folder.iterdir()):
        yield path, json.loads(path.read_text())


def test_verify_names_the_state_and_replay_says_that_one_call_is_right(tmp_path: Path) -> None:
    ((path, data),) = _verified("fault/batchnorm/session_without_eps/*", tmp_path)
    assert data["check"] == "state"
    assert "differs in eps only" in data["message"]
    assert len(data["details"]["before"]) >= 1
    again = r18("replay", path, "--backend", "faults:Backend")
    assert again.code == 1
    assert "right in a fresh process" in again.out
    assert "the same finding, to the bit" in again.out


def test_a_finding_of_the_drawn_problems_keeps_the_calls_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding of drawn problems keeps the calls before it: only a 4-d and a 2-d input share this
    session, which no scenario has."""
    monkeypatch.setattr(history, "TRIALS", 1)  # a process each
    ((path, data),) = _verified("fault/relu/session_of_sizes/*", tmp_path)
    assert data["check"] == "state"
    assert data["message"].startswith("right in a fresh process, wrong after ")
    assert data["message"].endswith(
        ": exact: error is not what integers must give (error/bound inf)"
    )
    assert len(data["details"]["before"]) >= 1
    again = r18("replay", path, "--backend", "faults:Backend")
    assert again.code == 1
    assert "right in a fresh process" in again.out
    # Without the calls it is an old finding, and its call is right.
    data["details"] = {}
    data["check"] = "exact"
    path.write_text(json.dumps(data))
    assert r18("replay", path, "--backend", "faults:Backend").code == 0


@pytest.mark.parametrize("campaign", [3, {}, {"profile": {"batches": [1], "x": 1}, "seed": 1}])
def test_a_damaged_campaign_is_a_clear_error(
    campaign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "fresh", lambda finding, seconds: None)
    with pytest.raises(UsageError, match="damaged"):
        replay.replayed(found(check="crash", details={"campaign": campaign}))


def test_a_kernel_that_sets_the_threads_it_first_found_passes() -> None:
    """A kernel that resets the threads it found first passes, as NumPy's does."""
    backend = load_backend("numpy")
    one = next(k for k in backend.kernels() if k.id == "numpy/linear/matmul/fp32")
    base = base_problem(one, 10**6)
    assert base is not None
    assert State(backend, one, base, 0).run() == []
