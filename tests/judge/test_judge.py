"""Judging: an answer that is remembered is the one that would be computed again."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

import mutation_toy
from r18.backend import Kernel
from r18.backend.host import HostKernel
from r18.graph.ops import Problem, ReLU
from r18_oracle.cases import Case
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge import verdict as judge_module
from r18_oracle.judge.bounds import Bound
from r18_oracle.judge.reference import KernelRunning, kernel_running
from r18_oracle.judge.verdict import Answer, Answers, judge, ratio_text
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.profiles import profile

PROBLEM = Problem(ReLU(), ((2, 5),))


@pytest.fixture
def kernel() -> Kernel:
    return mutation_toy.Backend().kernels()[0]


@pytest.fixture
def answers() -> Answers:
    return Answers(1 << 20)


@pytest.fixture(autouse=True)
def _remembers_nothing(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "ANSWERS", answers)


def answer(elements: int) -> Answer:
    return Answer(np.zeros(elements), Bound(np.zeros(elements)))


def right(case: Case) -> np.ndarray:
    return np.maximum(case.inputs[0], 0)


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_remembered_judges_alike(kernel: Kernel, exact: bool) -> None:
    case = make_case(kernel, PROBLEM, "exact", 0)
    wrong = right(case) + 1
    fresh = [judge(case, kernel.contract, got, exact=exact) for got in (right(case), wrong)]
    assert [judgement.ok for judgement in fresh] == [True, False]
    with patch.object(judge_module, "reference", wraps=judge_module.reference) as asked:
        kept = [
            judge(case, kernel.contract, got, exact=exact, key="this")
            for got in (right(case), wrong)
        ]
    assert kept == fresh
    assert asked.call_count == 1


def test_a_campaign_finds_the_same_of_what_is_remembered() -> None:
    backend, how = mutation_toy.Backend(), profile("quick")
    first, again = (
        run_campaign(backend, backend.kernels()[0], how, 3, network_name="tiny") for _ in range(2)
    )
    assert first.tally == again.tally
    assert first.tally.problems > how.examples


def test_a_kernel_of_another_contract_is_asked_questions_of_its_own() -> None:
    backend = mutation_toy.Backend()
    kernel: HostKernel = backend.kernels()[0]
    other = replace(kernel, contract=replace(kernel.contract, blocks=2))
    asked = []
    for one in (kernel, other, kernel, other):
        with patch.object(judge_module, "reference", wraps=judge_module.reference) as reference:
            run_campaign(backend, one, profile("quick"), 0, network_name=None)
        asked.append(reference.call_count)
    assert asked[0] == asked[1] > asked[2] == asked[3]


def test_the_answers_that_were_asked_for_longest_ago_are_forgotten() -> None:
    answers = Answers(3 * answer(100).nbytes)
    for key in "abc":
        answers.put(key, answer(100))
    assert answers.get("a") is not None
    answers.put("d", answer(100))
    assert answers.get("b") is None
    assert all(answers.get(key) is not None for key in "acd")
    answers.put("huge", answer(1000))
    assert all(answers.get(key) is None for key in ("a", "c", "d", "huge"))


def test_no_kernel_can_ask_for_an_answer(answers: Answers) -> None:
    answers.put("this", answer(1))
    with kernel_running(), pytest.raises(KernelRunning):
        answers.get("this")


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.99951, "0.9995"),
        (1.0, "1"),
        (1.0027, "1.003"),
        (1.00000004, "1.00000004"),
        (np.nextafter(1, 2), "1.0000000000000002"),
        (12.345, "12.3"),
        (np.inf, "inf"),
        (np.nan, "nan"),
    ],
)
def test_a_ratio_above_one_is_never_shown_as_one(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text
