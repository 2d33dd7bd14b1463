"""Plugins around a closed library that keep state between calls: found, and the state named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_sessions import FAULTS, FAULTY, Backend
from r18.backend import Kernel
from r18_oracle.check.relatives import base_problem
from r18_oracle.check.state import State
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.profiles import profile

HOW = replace(profile("quick"), examples=3, max_elements=1_000, max_macs=100_000)
RIGHT = Backend()


@pytest.mark.parametrize("name", FAULTS)
def test_state_between_calls_is_found_and_named(name: str) -> None:
    fault, backend = FAULTS[name], FAULTY.__dict__[name]()
    (kernel,) = (k for k in backend.kernels() if k.algorithm == name)
    finding = run_campaign(backend, kernel, HOW, 1, network_name=None).finding
    assert finding is not None, fault.wrong
    assert finding.check == "state", finding.describe()
    assert fault.said in finding.message


@pytest.mark.parametrize("name", FAULTS)
def test_a_single_call_of_it_is_right(name: str) -> None:
    """A single call is right; otherwise it would be another kind of fault."""
    kernel = FAULTS[name].made()
    problem = base_problem(kernel, HOW.max_macs)
    assert problem is not None
    assert State(Backend(kernel), kernel, problem, 1).right_alone()


@pytest.mark.parametrize("kernel", RIGHT.kernels(), ids=lambda kernel: kernel.op.name)
def test_sessions_kept_by_all_that_they_depend_on_raise_no_alarm(kernel: Kernel) -> None:
    report = run_campaign(RIGHT, kernel, HOW, 1, network_name=None)
    assert report.verdict == "ok", report.finding and report.finding.describe()
    assert report.tally.passed["state"] >= 5


def test_there_are_faults_enough() -> None:
    assert len(FAULTS) >= 10
    assert len({fault.wrong for fault in FAULTS.values()}) == len(FAULTS)
