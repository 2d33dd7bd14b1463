"""Steps that a plan lets run side by side, and the streams that run them so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import r18_cupy
from r18.backend import CompileOptions, Launch, Plan, enqueue_all
from r18.backend.host import HostStream
from r18.graph.ops import Problem
from r18.graph.resnet import resnet18, tiny
from r18.runtime.plan import make_plan
from r18.weights.synthetic import synthetic_weights
from r18_numpy import Backend as Numpy

DOWNSAMPLES = [f"layer{stage}.0.downsample.0" for stage in (2, 3, 4)]


class Concurrent(Numpy):
    """NumPy's kernels, any two of which may run side by side."""

    def beside(self, first: Problem, second: Problem, precision: str) -> bool:
        return True


def besides(plan: Plan) -> list[str]:
    return [step.name for step in plan.steps if step.beside]


def test_only_what_a_backend_asks_for_runs_side_by_side() -> None:
    assert besides(make_plan(Numpy(), tiny(), CompileOptions(2, fusion="all"))) == []
    assert besides(make_plan(Concurrent(), tiny(), CompileOptions(2, fusion="all"))) == DOWNSAMPLES


@pytest.mark.parametrize("fusion", ["conv_bn_relu", "all"])
def test_what_runs_side_by_side_needs_nothing_of_the_other_and_shares_no_memory(
    fusion: str,
) -> None:
    plan = make_plan(Concurrent(), resnet18(), CompileOptions(2, fusion=fusion))
    assert besides(plan)
    for first, second in zip(plan.steps, plan.steps[1:], strict=False):
        assert not (first.beside and second.beside), "no more than two at a time"
        if not second.beside:
            continue
        assert first.output not in second.inputs
        written = [places(plan, step) for step in (first, second)]
        read = [
            (t.offset, t.nbytes)
            for key in (*first.inputs, *second.inputs)
            for t in [plan.tensors[key]]
        ]
        for mine, theirs in ((written[0], written[1]), (written[0], read), (written[1], read)):
            assert not any(meet(a, b) for a in mine for b in theirs), (first.name, second.name)


def places(plan: Plan, step: Any) -> list[tuple[int, int]]:
    """The memory that a step writes, as offsets and sizes in bytes."""
    out = plan.tensors[step.output]
    return [(out.offset, out.nbytes), (step.workspace_offset, step.workspace_nbytes)]


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def test_the_result_is_the_same() -> None:
    schedule, options = tiny(), CompileOptions(3, fusion="all")
    weights = synthetic_weights(schedule)
    images = np.random.default_rng(0).standard_normal((3, 3, 32, 32), np.float32)
    one, other = (b.compile(schedule, weights, options) for b in (Numpy(), Concurrent()))
    np.testing.assert_array_equal(one(images), other(images))


@dataclass
class Told(HostStream):
    """A stream with branches that records the launches it gets."""

    name: str = "main"
    log: list[str] = field(default_factory=list)

    @contextmanager
    def branch(self) -> Iterator[Told]:
        self.log.append("fork")
        yield Told("branch", self.log)
        self.log.append("join")


@dataclass(frozen=True)
class Named:
    """A stand-in for a kernel that records where it was enqueued."""

    name: str

    def enqueue(self, *given: Any) -> None:
        stream = given[-1]
        if isinstance(stream, Told):
            stream.log.append(f"{self.name} on {stream.name}")


def launches(*names: str) -> list[Launch]:
    """One launch per name; a name that begins with + runs in parallel with the one before."""
    none: Any = None
    kernels: list[Any] = [Named(name) for name in names]
    return [
        Launch(kernel, none, (), (), none, none, kernel.name.startswith("+")) for kernel in kernels
    ]


def test_launches_fork_before_the_first_of_two_and_join_behind_the_second() -> None:
    stream = Told()
    enqueue_all(launches("a", "b", "+c", "d"), stream)
    assert stream.log == ["a on main", "fork", "b on main", "+c on branch", "join", "d on main"]


def test_a_part_of_the_launches_may_begin_or_end_anywhere() -> None:
    stream = Told()
    enqueue_all(launches("+c", "d", "+e"), stream)
    assert stream.log == ["+c on main", "fork", "d on main", "+e on branch", "join"]


@pytest.mark.parametrize(
    ("precision", "batch", "expected"),
    [("fp16", 1, 3), ("fp16", 8, 1), ("fp16", 64, 0), ("fp32", 64, 3)],
)
def test_cupy_asks_for_it_where_neither_step_fills_the_device(
    precision: str, batch: int, expected: int
) -> None:
    options = CompileOptions(batch, precision, "all")
    assert len(besides(make_plan(r18_cupy.Backend(), resnet18(), options))) == expected
