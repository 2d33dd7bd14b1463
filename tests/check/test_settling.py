"""While memory settles after a kernel's first call, the oracle computes what it needs next."""

from __future__ import annotations

from typing import Any

import pytest

from r18.backend.registry import get_backend
from r18.graph.ops import Conv2d, Linear, Problem, ReLU
from r18_oracle.check import call, checks
from r18_oracle.check.checks import LEAST_SECONDS, SETTLE_SECONDS, Tally, examine
from r18_oracle.generate.inputs import CASES
from r18_oracle.judge import verdict
from support import own_time

PROBLEMS = {
    "numpy/conv2d/im2col/fp32": Problem(Conv2d(2, 3, (3, 3), bias=True), ((1, 2, 5, 4),)),
    "numpy/linear/matmul/fp32": Problem(Linear(3, 2), ((1, 3),)),
    "numpy/relu/maximum/fp32": Problem(ReLU(), ((1, 7),)),
}


def answers(
    monkeypatch: pytest.MonkeyPatch, kernel_id: str, seconds: float
) -> tuple[list[bool], list[float]]:
    """For each answer that an examination computes, whether memory was settling; and the seconds of
    each sleep. seconds: `SETTLE_SECONDS`."""
    computed, slept, tally = list[bool](), list[float](), Tally()
    answer = verdict._answer

    def watched(*arguments: Any) -> verdict.Answer:
        computed.append(not tally.passed["completion"])
        return answer(*arguments)

    monkeypatch.setattr(checks, "SETTLE_SECONDS", seconds)
    monkeypatch.setattr(verdict, "ANSWERS", verdict.Answers(1 << 20))
    monkeypatch.setattr(verdict, "_answer", watched)
    own_time(monkeypatch, call, sleep=slept.append)
    CASES.clear()
    backend = get_backend("numpy")
    (kernel,) = (one for one in backend.kernels() if one.id == kernel_id)
    assert examine(backend, kernel, PROBLEMS[kernel_id], 0, tally)
    assert tally.passed["bound"]
    return computed, slept


@pytest.mark.parametrize("kernel_id", PROBLEMS)
def test_every_answer_may_be_computed_before_memory_has_settled(
    monkeypatch: pytest.MonkeyPatch, kernel_id: str
) -> None:
    computed, slept = answers(monkeypatch, kernel_id, 60.0)
    assert len(computed) > 4
    assert all(computed)
    assert 0 < slept[0] < 60


@pytest.mark.parametrize("kernel_id", PROBLEMS)
def test_a_rest_is_always_slept(monkeypatch: pytest.MonkeyPatch, kernel_id: str) -> None:
    """A minimum is always slept, even if the first answer takes long; others come when needed."""
    computed, slept = answers(monkeypatch, kernel_id, 0.0)
    assert computed == [True, *[False] * (len(computed) - 1)]
    assert slept[0] == LEAST_SECONDS > SETTLE_SECONDS / 20
