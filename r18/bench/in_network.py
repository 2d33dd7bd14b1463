"""Find the plan that makes a whole network fastest, by changing one thing at a time and timing all
of it.

The fastest kernel in isolation may not be the fastest in the network. Where launches overlap, what
a step costs depends on its neighbours: on the shared memory and SMs that they leave free, and on
what this kernel loads before it waits for them. So the network itself is timed, with each
kernel and each tile that fits in a step's place, and an exchange is kept if the network gains.

One exchange concerns all steps of one problem, since a table names kernels by problem.

Pairs of ops that one kernel can compute come first, such as a block's last convolution and the
projection of its shortcut. One launch fewer is not always faster: a separate projection may run at
the same time as another step. So each pair is also planned the other way, and stays so if the
network gains. A pair that the table divides is tried with the first kernel that takes it, before
kernels are exchanged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import (
    Apart,
    Backend,
    Buffer,
    CompileOptions,
    Fastest,
    Kernel,
    Launch,
    Plan,
    Table,
    Timing,
    bind,
    enqueue_all,
    input_layout,
    output_layout,
)
from r18.backend.launch import refusal_of, workspace_of
from r18.backend.tuned import at_batch_1
from r18.bench.tuning import TUNED_OPS, Range, choosing, prepared_at_random, timed_apart
from r18.errors import NoKernel
from r18.graph.ops import Problem
from r18.graph.precision import precision
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan

RUNS, MICROSECONDS = 10, 1500
"""A measurement is at most `RUNS` back-to-back runs, and about `MICROSECONDS` long."""
LOOK, CONFIRM = 5, 25
"""Pairs of measurements, with and without an exchange: to select candidates, and to accept one."""
CONFIRMED = 3
"""Candidates of a problem that are measured again."""
GAIN = 0.001
"""The share of the network's time that an exchange must save."""
SLOW = 1.5
"""A changed network that takes this many times as long in its first run is not measured again."""
SWEEPS = 3
"""The most passes over all problems: an exchange changes the best choice for its neighbours."""


@dataclass(frozen=True)
class Exchange:
    """A kernel in place of the planned one. gain: of the network, in microseconds."""

    problem: Problem
    before: str
    kernel: str
    gain: float


@dataclass(frozen=True)
class InNetwork:
    """The changes that sped up a network, and its times.

    before, after: microseconds of the plan and of the plan with all changes, taken in turns.
    pairs:         of ops that the plan computed in one kernel and now computes in two, or the other
                   way round; by the problem of both.
    table:         each problem's kernel and its time alone; for a divided pair, `APART` and the
                   time of its two kernels. What was not changed is listed too, so that plans do not
                   use another batch's.
    """

    before: float
    after: float
    pairs: tuple[Problem, ...]
    exchanges: tuple[Exchange, ...]
    table: Table


class Network:
    """A plan over memory of its own, with random weights and a random input."""

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan
        self._rng = np.random.default_rng(0)
        self._stream = backend.stream()
        self._runs = 1
        arena = backend.memory.empty(plan.arena_nbytes)
        self._weights = {
            (step.kernel.id, step.problem): prepared_at_random(step.kernel, step.problem, self._rng)
            for step in plan.steps
        }
        prepared = [self._weights[step.kernel.id, step.problem] for step in plan.steps]
        self._launches = bind(plan, prepared, arena)
        self._workspaces: dict[Problem, Buffer] = {}
        source = plan.tensors[plan.schedule.input]
        count = source.nbytes // source.dtype.itemsize
        pixels = self._rng.integers(0, 256, count, np.uint8)
        image = pixels if source.dtype == pixels.dtype else (pixels - 127.5) / 64
        place = arena.view(source.offset, source.nbytes)
        backend.memory.upload(image.astype(source.dtype), place)

    @property
    def problems(self) -> dict[Problem, Kernel]:
        """The problems whose kernels may be exchanged, in network order, and their kernels.

        Not those that have several kernels in the plan, as in several layouts.
        """
        found: dict[Problem, set[Kernel]] = {}
        for step in self._plan.steps:
            if isinstance(step.problem.op, TUNED_OPS):
                found.setdefault(step.problem, set()).add(step.kernel)
        return {problem: one for problem, (one, *more) in found.items() if not more}

    def candidates(self, problem: Problem, planned: Kernel) -> Iterator[Kernel]:
        """The kernels, and the variants of those that choose, that fit in the planned one's place.

        They read and write the same layouts, in place only where the planned one does.
        """

        def place(kernel: Kernel) -> tuple[object, ...]:
            layouts = input_layout(kernel, problem), output_layout(kernel, problem)
            return (kernel.op, kernel.precision, kernel.in_place, *layouts)

        for kernel in self._backend.kernels():
            if kernel.op is planned.op and place(kernel) == place(planned):
                for one in (kernel, *self._backend.variants(kernel)):
                    if refusal_of(one, problem) is None:
                        yield one

    def run(self, exchanged: Mapping[Problem, Kernel]) -> Callable[[], None]:
        """The network with some kernels exchanged, as a graph if streams support them."""
        launches = [self._exchanged(launch, exchanged) for launch in self._launches]

        def work() -> None:
            enqueue_all(launches, self._stream)

        return self._stream.capture(work) or work

    def _exchanged(self, launch: Launch, exchanged: Mapping[Problem, Kernel]) -> Launch:
        kernel, problem = exchanged.get(launch.problem, launch.kernel), launch.problem
        if kernel.id == launch.kernel.id:
            return launch
        key = kernel.id, problem
        if key not in self._weights:
            self._weights[key] = prepared_at_random(kernel, problem, self._rng)
        return replace(
            launch, kernel=kernel, weights=self._weights[key], workspace=self._workspace(problem)
        )

    def _workspace(self, problem: Problem) -> Buffer:
        """A workspace for every candidate. Kept, because a graph only knows its address."""
        if problem not in self._workspaces:
            candidates = self.candidates(problem, self.problems[problem])
            most = max(workspace_of(one, problem) for one in candidates)
            self._workspaces[problem] = self._backend.memory.empty(most)
        return self._workspaces[problem]

    def settle(self) -> None:
        """Warm up, and decide how many runs a measurement has."""
        run = self.run({})
        time = min(self.microseconds(run, 1) for _ in range(5))
        self._runs = max(1, min(RUNS, int(MICROSECONDS / max(time, 1))))

    def microseconds(self, run: Callable[[], None], runs: int | None = None) -> float:
        """Mean microseconds of a run, of several back to back."""
        runs = runs or self._runs
        before = self._stream.record()
        for _ in range(runs):
            run()
        after = self._stream.record()
        self._stream.synchronize()
        return after.milliseconds_since(before) * 1e3 / runs

    def compared(
        self, run: Callable[[], None], other: Callable[[], None], pairs: int
    ) -> tuple[float, float]:
        """The medians of both, taken in turns, after one untimed turn."""
        return _in_turns(lambda: self.microseconds(run), lambda: self.microseconds(other), pairs)

    def timer(self, exchanged: Mapping[Problem, Kernel]) -> Callable[[], float]:
        """A function that measures the network with some kernels exchanged, in microseconds."""
        run = self.run(exchanged)
        return lambda: self.microseconds(run)


def _in_turns(
    first: Callable[[], float], second: Callable[[], float], pairs: int
) -> tuple[float, float]:
    """The medians of two measurements, taken in turns, after one turn that warms up."""
    times = [(first(), second()) for _ in range(pairs + 1)][1:]
    before, after = zip(*times, strict=True)
    return statistics.median(before), statistics.median(after)


def tune_in_network(
    backend: Backend,
    schedule: Schedule,
    options: CompileOptions,
    progress: Callable[[str], None] = lambda text: None,
) -> InNetwork:
    """Plan pairs of ops the other way, then exchange kernels, as long as the network gets faster.

    schedule: at level `none`, or at `options.fusion`. progress: called with each problem's result.
    Raises as `make_plan` does.
    """
    pairs = _Pairs(backend, schedule, options)
    start = pairs.network(pairs.planned)
    network, joined = pairs.turned(start, progress)
    planned = network.problems
    backend.prepare(
        (one, problem)
        for problem, kernel in planned.items()
        for one in network.candidates(problem, kernel)
    )
    chosen: dict[Problem, Kernel] = {}
    gains: dict[Problem, float] = {}
    for _ in range(SWEEPS):
        before = dict(chosen)
        for problem, kernel in planned.items():
            found = _better(network, chosen, problem, kernel)
            if found is not None:
                chosen[problem], gain = found
                gains[problem] = gains.get(problem, 0.0) + gain
            progress(f"{problem}: {chosen.get(problem, kernel).id}")
        if chosen == before:
            break
    exchanged = {p: one for p, one in chosen.items() if one.id != planned[p].id}
    first, last = _in_turns(start.timer({}), network.timer(exchanged), CONFIRM)
    divided = {p: pairs.kernels[p] for p, one in joined.items() if not one}
    return InNetwork(
        first,
        last,
        tuple(problem for problem, one in joined.items() if one is not pairs.planned[problem]),
        tuple(Exchange(p, planned[p].id, k.id, gains[p]) for p, k in exchanged.items()),
        _table(backend, planned | exchanged, divided, options.precision),
    )


class _Pairs:
    """The pairs of ops that a plan may compute in one kernel or in two.

    kernels: what computes each of them, by the problem of both.
    planned: for each, whether the backend's plan computes it in one.
    """

    def __init__(self, backend: Backend, schedule: Schedule, options: CompileOptions) -> None:
        self._backend, self._schedule, self._options = backend, schedule, options
        planned = {step.problem for step in self._plan(backend).steps}
        steps = self._plan(_joining(backend, lambda problem: _is_pair(problem) or None)).steps
        self.kernels = {
            step.problem: step.kernel
            for step in steps
            if _is_pair(step.problem) and self._divides(step.problem)
        }
        self.planned = {problem: problem in planned for problem in self.kernels}

    def _plan(self, backend: Backend) -> Plan:
        return make_plan(backend, self._schedule, self._options)

    def _divides(self, problem: Problem) -> bool:
        """Whether two kernels can compute the pair; an override may ask for one."""
        try:
            plan = self._plan(_joining(self._backend, {problem: False}.get))
        except NoKernel:
            return False
        return all(step.problem != problem for step in plan.steps)

    def network(self, joined: Mapping[Problem, bool]) -> Network:
        """The network with each pair in one kernel or in two, ready to be measured."""
        view = _joining(self._backend, joined.get)
        plan = self._plan(view)
        self._backend.prepare((step.kernel, step.problem) for step in plan.steps)
        found = Network(view, plan)
        found.settle()
        return found

    def turned(
        self, network: Network, progress: Callable[[str], None]
    ) -> tuple[Network, dict[Problem, bool]]:
        """Plan each pair the other way where the network, as planned by the backend, gains."""
        joined = self.planned
        for problem in joined:
            tried = joined | {problem: not joined[problem]}
            other = self.network(tried)
            now, then = network.timer({}), other.timer({})
            if then() <= SLOW * now():
                before, after = _in_turns(now, then, CONFIRM)
                if before - after > GAIN * before:
                    network, joined = other, tried
            del other, now, then  # frees its memory before the next one is built
            progress(f"{problem}: {'one kernel' if joined[problem] else 'two kernels'}")
        return network, joined


def _is_pair(problem: Problem) -> bool:
    return bool(problem.op.parts) and isinstance(problem.op, TUNED_OPS)


def _joining(backend: Backend, joins: Callable[[Problem], bool | None]) -> Backend:
    """A copy of the backend that decides by `joins` whether one kernel computes a pair (True), or
    two do (False). None leaves it to the backend.
    """

    def fastest(problem: Problem, name: str) -> Fastest:
        found = backend.fastest(problem, name)
        joined = joins(problem)
        if joined is False:
            return Apart()
        return None if joined and isinstance(found, Apart) else found

    return choosing(backend, fastest)


def _better(
    network: Network, chosen: Mapping[Problem, Kernel], problem: Problem, planned: Kernel
) -> tuple[Kernel, float] | None:
    """The kernel that is best in the problem's place, if it beats the present one, and its gain."""
    present = network.run(chosen)
    current = chosen.get(problem, planned)
    limit = SLOW * network.microseconds(present)
    looks: list[tuple[float, Kernel]] = []
    for one in network.candidates(problem, planned):
        if one.id == current.id:
            continue
        other = network.run({**chosen, problem: one})
        if network.microseconds(other, 1) > limit and network.microseconds(other, 1) > limit:
            continue
        before, after = network.compared(present, other, LOOK)
        looks.append((before - after, one))
    looks.sort(key=lambda look: -look[0])
    found = None
    for look, one in looks[:CONFIRMED]:
        if look <= 0:
            break
        before, after = network.compared(present, network.run({**chosen, problem: one}), CONFIRM)
        if before - after > max(GAIN * before, 0.0 if found is None else found[1]):
            found = one, before - after
    return found


def _table(
    backend: Backend,
    kernels: Mapping[Problem, Kernel],
    divided: Mapping[Problem, Kernel],
    name: str,
) -> Table:
    """The kernels of the problems, with their times alone, as `r18 tune` measures them.

    divided: pairs that two kernels compute, and the kernel that would compute both. A pair whose
    two kernels cannot be timed alone is left out, and the backend decides.
    """
    timings = {}
    for problem, kernel in kernels.items():
        place = Range(backend, problem, precision(name))
        timings[problem] = Timing(kernel.id, place.measure(place.launches(kernel), 20, 7))
    for problem, kernel in divided.items():
        timed = timed_apart(backend, problem, name, input_layout(kernel, problem))
        if timed is not None:
            timings[problem] = timed
    choices: dict[str, dict[int, Timing]] = {}
    for problem, timing in timings.items():
        choices.setdefault(at_batch_1(problem), {})[problem.batch] = timing
    return Table(str(backend.probe()), {name: choices})


__all__ = ["Exchange", "InNetwork", "Network", "tune_in_network"]
