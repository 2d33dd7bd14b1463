"""Plans are checked at batches that no run of the oracle reaches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faulty_backends import Right
from r18.backend import Backend, CompileOptions
from r18.backend.host import HostKernel
from r18.errors import UnknownName, UsageError
from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.resnet import tiny
from r18_oracle.findings import Finding
from r18_oracle.judge.reference import KernelRunning, reference
from r18_oracle.network.plans import BATCHES, WrongPlan, check_plans
from r18_oracle.search import network_run
from r18_oracle.search.network_run import NetworkRun

LARGE = 256
"""The batch from which the backends of these tests choose otherwise."""


class Choosy(Right):
    """A right backend whose convolutions ask a function about each large problem."""

    def __init__(self, large: Callable[[Problem], str | None]) -> None:
        super().__init__()
        self.large = large

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(
            replace(kernel, refuses=self.refuses) if kernel.op is Conv2d else kernel
            for kernel in super().kernels()
        )

    def refuses(self, problem: Problem) -> str | None:
        return self.large(problem) if problem.inputs[0][0] >= LARGE else None


def no_tile(problem: Problem) -> str | None:
    raise IndexError("no tile of 512 pixels")


def cheat(problem: Problem) -> str | None:
    reference(problem, (np.zeros(problem.inputs[0]),), ())
    return None


def check(backend: Backend, **options: Any) -> None:
    schedule = tiny()
    check_plans(backend, schedule, fuse(schedule, "all"), CompileOptions(1, **options))


def test_a_plan_that_raises_at_a_large_batch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        f"backend 'faulty': planning 'tiny' at batch {LARGE} raised IndexError in no_tile "
        r"\(test_plans\.py:\d+\): no tile of 512 pixels"
    )
    with pytest.raises(WrongPlan, match=said):
        check(Choosy(no_tile))
    monkeypatch.setattr(network_run, "loaded_backend", lambda name: Choosy(no_tile))
    run = NetworkRun("tiny", "synthetic", "fp32", "all", samples=1, seed=0)
    finding = run.on("faulty", lambda problem, kind, seed: None)
    assert isinstance(finding, Finding)
    assert finding.check == "runs"
    assert re.fullmatch(said, finding.message)


def test_an_error_of_r18_is_the_plans_fault_too() -> None:
    def said(problem: Problem) -> str:
        raise UsageError("no such tile")

    with pytest.raises(WrongPlan, match=f"at batch {LARGE} raised UsageError in .*: no such tile"):
        check(Choosy(said))


def test_a_backend_may_refuse_large_batches() -> None:
    asked: list[int] = []

    def small_only(problem: Problem) -> str:
        asked.append(problem.inputs[0][0])
        return "takes no large batches"

    check(Choosy(small_only))
    assert set(asked) == {batch for batch in BATCHES if batch >= LARGE}


def test_a_plan_must_not_ask_the_reference() -> None:
    with pytest.raises(KernelRunning):
        check(Choosy(cheat))


def test_wrong_options_are_not_the_plans_fault() -> None:
    with pytest.raises(UnknownName):
        check(Right(), kernels={"conv1": "magic"})
