"""Two steps side by side, in a backend made for it: workspaces, outputs, kernels in place.

Its stream runs a pair in the worst order: both kernels spoil their outputs and workspaces, then
both compute, then both look whether anybody wrote there. A byte that both may touch shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import r18.runtime.plan as planning
import r18_numpy
from r18.backend import (
    Array,
    CompileOptions,
    DeviceInfo,
    Plan,
    RoundingContract,
    Stream,
    bind,
    enqueue_all,
    prepare_plan,
)
from r18.backend.host import HostKernel, HostStream, host
from r18.graph.ops import Add, Conv2d, Op, Problem, ReLU
from r18.graph.precision import FP32
from r18.graph.schedule import Schedule, Step
from r18.runtime.plan import make_plan
from support import PoisonedMemory, check_plan, compute, images, random_weights, run_schedule

Phase = Callable[[], None]
SEEDS = range(60)
MARKS = itertools.count()
"""A new mark for each run of a kernel, with which it spoils its memory."""


class Meeting(HostStream):
    """A stream that runs one launch of a branch between the phases of the other."""

    def __init__(self, second_first: bool, pending: list[tuple[Phase, ...]] | None = None) -> None:
        self.pending = pending
        self._second_first = second_first
        self.pairs = 0

    @contextmanager
    def branch(self) -> Iterator[Stream]:
        assert self.pending is None, "more than two at a time"
        self.pending = []
        yield Meeting(self._second_first, self.pending)
        launched, self.pending = self.pending, None
        assert len(launched) == 2
        self.pairs += 1
        for phases in zip(*launched, strict=True):
            for phase in reversed(phases) if self._second_first else phases:
                phase()

    def submit(self, *phases: Phase) -> None:
        if self.pending is None:
            for phase in phases:
                phase()
        else:
            self.pending.append(phases)


@dataclass(frozen=True, eq=False)
class Phased(HostKernel):
    """A kernel that spoils what it may write, computes, and checks its workspace and output."""

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Any, ...],
        weights: tuple[Any, ...],
        output: Any,
        workspace: Any,
        stream: Stream,
    ) -> None:
        mark = 1 + next(MARKS) % 250
        over = host(output).array.ctypes.data == host(inputs[0]).array.ctypes.data
        made = bytearray()

        def spoil() -> None:
            workspace.array.fill(mark)
            if not over:
                output.array.fill(mark)

        def calculate() -> None:
            assert (workspace.array == mark).all(), "somebody wrote into a workspace"
            assert over or (output.array == mark).all(), "somebody wrote into an output"
            quiet = HostStream()
            super(Phased, self).enqueue(problem, inputs, weights, output, workspace, quiet)
            made[:] = output.array.tobytes()

        def look() -> None:
            assert output.array.tobytes() == bytes(made), "somebody wrote over an output"

        assert isinstance(stream, Meeting)
        stream.submit(spoil, calculate, look)


def run(op: Op, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    out[...] = compute(op, inputs, weights)


def scratch(problem: Problem) -> int:
    """A workspace of any size, sometimes of none."""
    return (0, 1, 64, 640, 4096)[sum(map(sum, problem.inputs)) % 5]


class Made(r18_numpy.Backend):
    """A backend whose steps may run side by side; the kernels of some ops work in place."""

    name = "made"

    def __init__(self, *in_place: type[Op]) -> None:
        contract = RoundingContract("sum", "float32", "float32")
        self._kernels = tuple(
            Phased(
                "made", op, "phased", FP32, contract, run, in_place=op in in_place, scratch=scratch
            )
            for op in (Conv2d, ReLU, Add)
        )

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "made")

    def kernels(self) -> Any:
        return self._kernels

    def beside(self, first: Problem, second: Problem, precision: str) -> bool:
        return True


IN_PLACE: list[tuple[type[Op], ...]] = [(), (ReLU,), (Add,), (ReLU, Add)]


def drawn(seed: int) -> Schedule:
    """A random schedule: chains, branches, and values that no step reads."""
    draw = random.Random(seed)
    shapes = {"image": (4, 3, 5)}
    steps: list[Step] = []
    for index in range(draw.randint(4, 14)):
        name = f"v{index}"
        source = draw.choice(list(shapes)[-5:])
        shape = shapes[source]
        alike = [value for value in shapes if shapes[value] == shape and value != source]
        kind = draw.choice([Conv2d, Conv2d, ReLU, Add])
        if kind is Add and alike:
            steps.append(Step(name, Add(draw.random() < 0.5), (source, draw.choice(alike)), name))
        elif kind is ReLU:
            steps.append(Step(name, ReLU(), (source,), name))
        else:
            op = Conv2d(shape[0], draw.choice([2, 4, 4, 9]), (1, 1))
            steps.append(Step(name, op, (source,), name, (f"{name}.weight",)))
            shape = (op.out_channels, *shape[1:])
        shapes[name] = shape
    return Schedule(f"drawn{seed}", (4, 3, 5), tuple(steps), ())


def planned(seed: int) -> tuple[Made, Plan]:
    """A backend and its unfused plan of the random schedule."""
    backend = Made(*IN_PLACE[seed % len(IN_PLACE)])
    schedule = drawn(seed)
    taps = tuple(schedule.taps)[1::5] if seed % 3 == 0 else ()
    return backend, make_plan(backend, schedule, CompileOptions(2, fusion="none", taps=taps))


def meeting(plan: Plan) -> list[str]:
    """Memory that both steps of a pair touch, one by writing, according to the plan's offsets."""

    def tensor(key: str) -> tuple[int, int]:
        return plan.tensors[key].offset, plan.tensors[key].offset + plan.tensors[key].nbytes

    found = []
    for first, second in pairwise(plan.steps):
        if not second.beside:
            continue
        wrote, read = [], []
        for step in (first, second):
            workspace = step.workspace_offset, step.workspace_offset + step.workspace_nbytes
            wrote.append([tensor(step.output), workspace])
            read.append([tensor(key) for key in step.inputs])
        for mine, theirs in ((wrote[0], wrote[1] + read[1]), (wrote[1], wrote[0] + read[0])):
            found += [
                f"{first.name} and {second.name}"
                for a in mine
                for b in theirs
                if max(a[0], b[0]) < min(a[1], b[1])
            ]
    return found


def check_run(seed: int, second_first: bool = False) -> int:
    """Run a plan with its pairs in the worst order; returns how many there were."""
    _, plan = planned(seed)
    weights = random_weights(plan.schedule, seed)
    x = images(plan.schedule, 2, seed)
    memory = PoisonedMemory()
    arena = memory.empty(plan.arena_nbytes)
    launches = bind(plan, prepare_plan(plan, weights), arena)
    source = plan.tensors[plan.schedule.input]
    memory.upload(x, arena.view(source.offset, source.nbytes))
    stream = Meeting(second_first)
    enqueue_all(launches, stream)
    values = run_schedule(plan.schedule, weights, x)
    for value in (
        plan.schedule.output,
        plan.schedule.input,
        *map(plan.schedule.value_of, plan.options.taps),
    ):
        place = plan.tensors[value]
        got = memory.download(arena.view(place.offset, place.nbytes), place.shape, place.dtype)
        scale = np.abs(values[value]).max()
        np.testing.assert_allclose(got, values[value], rtol=0, atol=1e-5 * scale, err_msg=value)
    return stream.pairs


def test_a_pair_never_meets_in_memory() -> None:
    """No pair of drawn schedules shares memory by the offsets, with workspaces, taps and in-place
    kernels around it."""
    pairs = in_place = 0
    for seed in SEEDS:
        backend, plan = planned(seed)
        assert meeting(plan) == [], f"seed {seed}"
        pairs += sum(step.beside for step in plan.steps)
        in_place += len(check_plan(plan, backend.memory.alignment))
        for first, second in pairwise(plan.steps):
            if second.beside:
                assert first.output not in second.inputs
                assert not first.beside
                assert not first.kernel.in_place
                assert not second.kernel.in_place
    assert pairs > 100
    assert in_place > 20


@pytest.mark.parametrize("second_first", [False, True])
def test_a_pair_computes_the_same_in_the_worst_order(second_first: bool) -> None:
    assert sum(check_run(seed, second_first) for seed in SEEDS) > 100


def test_what_a_pair_reads_lives_as_long_as_both() -> None:
    """The second step may not overwrite an input that the first reads for the last time."""
    steps = (
        Step("a", ReLU(), ("image",), "a"),
        Step("b", ReLU(), ("image",), "b"),
        Step("c", Conv2d(4, 4, (1, 1)), ("a",), "c", ("c.weight",)),
        Step("d", Conv2d(4, 4, (1, 1)), ("b",), "d", ("d.weight",)),
        Step("e", Add(), ("c", "d"), "e"),
    )
    plan = make_plan(
        Made(ReLU), Schedule("one", (4, 3, 5), steps, ()), CompileOptions(fusion="none")
    )
    assert [step.name for step in plan.steps if step.beside] == ["d"]
    offsets = {key: tensor.offset for key, tensor in plan.tensors.items()}
    assert offsets["d"] not in (offsets["a"], offsets["b"], offsets["c"])
    assert meeting(plan) == []


# -- plans that are wrong ------------------------------------------------------------------------


def _times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have planning compute lifetimes as if the second step ran after the first."""
    monkeypatch.setattr(planning, "accumulate", lambda given: range(len(list(given))))


def _in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(backend: Any, steps: Any, precision: str) -> list[bool]:
        found = [False] * len(steps)
        for index in range(1, len(steps)):
            first, second = steps[index - 1], steps[index]
            found[index] = not found[index - 1] and first.output not in second.inputs
        return found

    monkeypatch.setattr(planning, "_beside", beside)


def _needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(backend: Any, steps: Any, precision: str) -> list[bool]:
        return [index % 2 == 1 for index in range(len(steps))]

    monkeypatch.setattr(planning, "_beside", beside)


def _one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all steps share the first workspace's offset, which is right for steps in turn."""
    plan_arena = planning.plan_arena

    def shared(lives: Any, alignment: int, **how: Any) -> Any:
        arena = plan_arena(lives, alignment, **how)
        most = max(life.nbytes for life in lives if life.name.startswith("workspace"))
        offsets = {
            name: arena.nbytes if name.startswith("workspace") else offset
            for name, offset in arena.offsets.items()
        }
        return type(arena)(offsets, arena.nbytes + -(-most // alignment) * alignment)

    monkeypatch.setattr(planning, "plan_arena", shared)


@pytest.mark.parametrize("fault", [_times_of_their_own, _in_place_too, _needed_too, _one_workspace])
def test_a_wrong_plan_is_found_by_its_offsets_and_by_its_results(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert any(meeting(planned(seed)[1]) for seed in SEEDS)

    def wrong(seed: int, second_first: bool) -> bool:
        try:
            check_run(seed, second_first)
        except AssertionError:
            return True
        return False

    assert any(wrong(seed, order) for seed in SEEDS for order in (False, True))
