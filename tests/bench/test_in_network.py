"""Exchanging kernels in the whole network: which are tried, which are kept, what plans run."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest

import r18_numpy
from commands import r18
from r18.backend import CompileOptions, Fastest, Kernel, Launch, Preferred, Table, Timing
from r18.backend.registry import load_backend
from r18.backend.tuned import APART, at_batch_1, read_table
from r18.bench.in_network import Network, tune_in_network
from r18.bench.tuning import as_on
from r18.cli.app import REFUSED
from r18.graph.ops import Conv2d, ConvProjection, GlobalAvgPool, Linear, Problem
from r18.graph.passes import fuse
from r18.graph.quantize import LEVEL, quantized
from r18.graph.quantized import QuantizedConv2d
from r18.graph.resnet import resnet18, tiny
from r18.runtime.plan import make_plan

SCHEDULE = tiny()


class WithTiles(r18_numpy.Backend):
    """A backend whose im2col convolution has two tiles that no table of kernels lists."""

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        return _tiles(kernel) if kernel.id.startswith("numpy/conv2d/im2col/") else ()


TILED = "m1", "m2"
TILES: dict[str, tuple[Kernel, ...]] = {}


def _tiles(kernel: Kernel) -> tuple[Kernel, ...]:
    """A kernel's tiles, the same objects in every call, as the protocol demands."""
    if kernel.id not in TILES:
        TILES[kernel.id] = tuple(changed(kernel, id=f"{kernel.id}/{tile}") for tile in TILED)
    return TILES[kernel.id]


def changed(kernel: Kernel, **members: object) -> Kernel:
    """A copy of a kernel whose class has these members."""
    one = copy(kernel)
    object.__setattr__(one, "__class__", type("Changed", (type(kernel),), members))
    return one


def costing(monkeypatch: pytest.MonkeyPatch, cost: Callable[[list[Launch]], float]) -> list[str]:
    """Have networks cost what `cost` says of their launches; returns the ids of tried kernels."""
    tried: list[str] = []
    launched: dict[int, list[Launch]] = {}
    real = Network.run

    def run(self: Network, exchanged: dict[Problem, Kernel]) -> Callable[[], None]:
        work = real(self, exchanged)
        launched[id(work)] = [self._exchanged(one, exchanged) for one in self._launches]
        tried.extend(kernel.id for kernel in exchanged.values())
        kept.append(work)  # or another one would have its id
        return work

    kept: list[Callable[[], None]] = []
    monkeypatch.setattr(Network, "run", run)
    monkeypatch.setattr(
        Network, "microseconds", lambda self, work, runs=None: cost(launched[id(work)])
    )
    return tried


def convolutions(launches: list[Launch]) -> list[str]:
    return [one.kernel.id for one in launches if isinstance(one.problem.op, Conv2d)]


def pairs(launches: list[Launch]) -> int:
    """How many launches compute two ops each."""
    return sum(bool(one.problem.op.parts) for one in launches)


def test_an_exchange_that_helps_is_kept_for_all_steps_of_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = costing(
        monkeypatch,
        lambda launches: (
            9 * pairs(launches) + sum(2 - ("/m2" in one) for one in convolutions(launches))
        ),
    )
    found = tune_in_network(WithTiles(), SCHEDULE, CompileOptions())
    assert found.pairs == ()
    plan = make_plan(WithTiles(), SCHEDULE, CompileOptions())
    problems = {step.problem for step in plan.steps if isinstance(step.problem.op, Conv2d)}
    assert {one.problem for one in found.exchanges} == problems
    assert {one.kernel for one in found.exchanges} == {"numpy/conv2d/im2col/fp32/m2"}
    assert {one.before for one in found.exchanges} == {"numpy/conv2d/im2col/fp32"}
    steps = sum(isinstance(step.problem.op, Conv2d) for step in plan.steps)
    assert (found.before, found.after) == (2 * steps, steps)
    assert sum(one.gain for one in found.exchanges) == steps
    assert "numpy/conv2d/direct/fp32" in tried  # other algorithms as well as tiles


class Tabled(r18_numpy.Backend):
    """A backend that follows a table, and prefers nothing else."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return self.table.best(problem, precision)


def test_pairs_of_ops_become_one_step_where_the_network_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cost(launches: list[Launch]) -> float:
        """Launches; one of a projection and its convolution costs three below 64 channels."""
        few = [one for one in launches if isinstance(one.problem.op, ConvProjection)]
        return len(launches) + 2 * sum(one.problem.output[1] < 64 for one in few)

    costing(monkeypatch, cost)
    apart = make_plan(r18_numpy.Backend(), SCHEDULE, CompileOptions(2))
    assert not any(step.problem.op.parts for step in apart.steps)
    said: list[str] = []
    found = tune_in_network(r18_numpy.Backend(), SCHEDULE, CompileOptions(2), said.append)
    assert sorted(problem.op.name for problem in found.pairs) == ["conv2d_projection", "gap_linear"]
    assert (found.before, found.after) == (len(apart.steps), len(apart.steps) - 2)
    plan = make_plan(Tabled(found.table), SCHEDULE, CompileOptions(2))
    assert {s.problem for s in plan.steps if s.problem.op.parts} == set(found.pairs)
    assert sum(line.endswith(": one kernel") for line in said) == 2
    divided = [line for line in said if line.endswith(": two kernels")]
    timings = [row[2] for row in found.table.choices["fp32"].values()]
    assert [one.kernel for one in timings].count(APART) == len(divided) == 2
    assert all(one.microseconds > 0 for one in timings)


def test_pairs_that_a_table_joins_come_apart_where_the_network_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = r18_numpy.Backend()
    monkeypatch.setattr(joined, "fastest", lambda problem, precision: None, raising=False)
    costing(monkeypatch, lambda launches: 100 + 3 * pairs(launches) - len(launches))
    found = tune_in_network(joined, SCHEDULE, CompileOptions())
    assert {problem.op.name for problem in found.pairs} == {"conv2d_projection", "gap_linear"}
    plan = make_plan(Tabled(found.table), SCHEDULE, CompileOptions())
    assert not any(step.problem.op.parts for step in plan.steps)


class WithoutPooling(r18_numpy.Backend):
    """A backend that can only pool where it also computes the classifier."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(one for one in super().kernels() if one.op is not GlobalAvgPool)

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return None


def test_pairs_that_only_one_kernel_computes_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costing(monkeypatch, lambda launches: 100 + 3 * pairs(launches) - len(launches))
    backend = WithoutPooling()
    found = tune_in_network(backend, SCHEDULE, CompileOptions())
    assert {problem.op.name for problem in found.pairs} == {"conv2d_projection"}
    asked = CompileOptions(kernels={"conv2d_projection": "*"})
    assert tune_in_network(backend, SCHEDULE, asked).pairs == ()


def test_pairs_are_not_turned_where_that_takes_far_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []

    def cost(launches: list[Launch]) -> float:
        runs.append(bool(pairs(launches)))
        return 1000.0 if pairs(launches) else 100.0

    costing(monkeypatch, cost)
    found = tune_in_network(r18_numpy.Backend(), SCHEDULE, CompileOptions())
    assert found.pairs == ()
    assert sum(runs) == 4 * (5 + 1)  # to settle, and one look


def test_a_pair_whose_kernels_cannot_be_timed_is_left_to_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costing(monkeypatch, lambda launches: 100 + 3 * pairs(launches))
    monkeypatch.setattr("r18.bench.in_network.timed_apart", lambda *about: None)
    found = tune_in_network(r18_numpy.Backend(), SCHEDULE, CompileOptions())
    timings = [row[1] for row in found.table.choices["fp32"].values()]
    assert timings
    assert not any(one.kernel == APART for one in timings)


def test_what_does_not_help_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    costing(
        monkeypatch, lambda launches: 1000 - 0.9 * any("/m2" in one.kernel.id for one in launches)
    )
    found = tune_in_network(WithTiles(), SCHEDULE, CompileOptions())
    assert found.exchanges == ()  # less than a thousandth
    plan = make_plan(WithTiles(), SCHEDULE, CompileOptions())
    of = [step.problem for step in plan.steps if isinstance(step.problem.op, Conv2d)]
    table = found.table.choices["fp32"]
    assert {table[problem][1].kernel for problem in map(at_batch_1, of)} == {
        "numpy/conv2d/im2col/fp32"
    }
    assert found.before == found.after == 1000


def test_exchanges_that_only_help_alone_are_not_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(launches: list[Launch]) -> float:
        problems = {one.problem for one in launches if "/m2" in one.kernel.id}
        return 100 + (len(problems) - 1) ** 2  # one is best, two as good as none

    costing(monkeypatch, cost)
    found = tune_in_network(WithTiles(), SCHEDULE, CompileOptions())
    assert len(found.exchanges) == 1
    assert (found.before, found.after) == (101, 100)


def test_a_second_sweep_finds_what_suits_later_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(WithTiles(), SCHEDULE, CompileOptions())
    first, *_, last = dict.fromkeys(
        step.problem for step in plan.steps if isinstance(step.problem.op, Conv2d)
    )

    def cost(launches: list[Launch]) -> float:
        exchanged = {one.problem for one in launches if "/m2" in one.kernel.id}
        return 100 - 10 * (last in exchanged) - 10 * ({first, last} <= exchanged)

    costing(monkeypatch, cost)
    found = tune_in_network(WithTiles(), SCHEDULE, CompileOptions())
    assert [one.problem for one in found.exchanges] == [last, first]
    assert found.after == 80


def test_a_candidate_that_takes_far_longer_is_measured_twice_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[bool] = []

    def cost(launches: list[Launch]) -> float:
        slow = "numpy/conv2d/direct/fp32" in convolutions(launches)
        runs.append(slow)
        return 1000.0 if slow else 100.0

    costing(monkeypatch, cost)
    found = tune_in_network(r18_numpy.Backend(), SCHEDULE, CompileOptions())
    plan = make_plan(r18_numpy.Backend(), SCHEDULE, CompileOptions())
    problems = {step.problem for step in plan.steps if isinstance(step.problem.op, Conv2d)}
    assert found.exchanges == ()
    assert sum(runs) == 2 * len(problems)


def test_networks_run_as_they_are() -> None:
    """Networks of floats and of integers run with the real clock, and an exchanged kernel runs."""
    options = CompileOptions(2, "int8")
    schedule = quantized(fuse(SCHEDULE, LEVEL))
    for backend, taken, how in (
        (WithTiles(), SCHEDULE, CompileOptions(2)),
        (r18_numpy.Backend(), schedule, options),
    ):
        network = Network(backend, make_plan(backend, taken, how))
        problems = network.problems
        kinds = {type(problem.op) for problem in problems}
        assert kinds & {Conv2d, QuantizedConv2d}
        others = {
            problem: [k for k in network.candidates(problem, kernel) if k.id != kernel.id]
            for problem, kernel in problems.items()
        }
        exchanged = {problem: found[-1] for problem, found in others.items() if found}
        assert bool(exchanged) == (how.precision == "fp32")  # integers have one kernel per op
        assert min(network.compared(network.run({}), network.run(exchanged), 1)) > 0


class Named(WithTiles):
    """A backend that prefers a variant by its id."""

    preferred = "numpy/conv2d/im2col/fp32/m2"

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        if isinstance(problem.op, Conv2d):
            return Preferred(self.preferred)
        return super().fastest(problem, precision)


def test_plans_run_a_variant_that_a_table_names() -> None:
    ids = make_plan(Named(), SCHEDULE, CompileOptions()).kernel_ids()
    convolutions = {step.name for step in SCHEDULE.steps if isinstance(step.op, Conv2d)}
    assert {ids[name] for name in convolutions} == {Named.preferred}
    assert Named.preferred not in {ids[name] for name in ids.keys() - convolutions}


def test_a_name_of_nothing_leaves_the_backends_own_order() -> None:
    class Unknown(Named):
        preferred = "numpy/conv2d/im2col/fp32/m3"

    class Silent(WithTiles):
        def fastest(self, problem: Problem, precision: str) -> Fastest:
            is_conv = isinstance(problem.op, Conv2d)
            return None if is_conv else super().fastest(problem, precision)

    ids = make_plan(Unknown(), SCHEDULE, CompileOptions()).kernel_ids()
    assert ids == make_plan(Silent(), SCHEDULE, CompileOptions()).kernel_ids()


def test_a_variant_that_refuses_leaves_the_others() -> None:
    one = _tiles(next(k for k in r18_numpy.Backend().kernels() if k.op is Conv2d))[1]
    refusing = changed(one, refusal=lambda self, problem: "not this time")

    class Refusing(Named):
        def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
            return (refusing,) if kernel.id == "numpy/conv2d/im2col/fp32" else ()

    ids = make_plan(Refusing(), SCHEDULE, CompileOptions()).kernel_ids()
    assert Named.preferred not in ids.values()


def test_the_command_writes_what_it_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costing(
        monkeypatch,
        lambda launches: sum(2 - (one.endswith("direct/fp32")) for one in convolutions(launches)),
    )
    path = tmp_path / "t.json"
    kept = Problem(Linear(3, 4), ((1, 3),))
    timing = Timing("numpy/linear/gemm/fp32", 7.0)
    Table("CPU", {"fp32": {at_batch_1(kept): {1: timing}}}).write(path)
    asked = ("tune", "--backend", "numpy", "--network", "tiny", "--in-network", "--batch", "2")
    result = r18(*asked, "--out", str(path))
    assert result.code == 0, result.err
    assert "kernels exchanged" in result.out
    assert "plans of 'numpy' read no table: " in result.err
    table = read_table(path)
    assert table.choices["fp32"][at_batch_1(kept)] == {1: timing}
    found = {one.kernel for row in table.choices["fp32"].values() for one in row.values()}
    assert "numpy/conv2d/direct/fp32" in found


def test_every_tile_of_cupy_is_a_candidate_in_the_plan_of_an_h200() -> None:
    """A convolution's candidates are all of cupy's tiles with the plan's layouts there."""
    backend = load_backend("cupy")
    schedule = quantized(fuse(resnet18(), LEVEL))
    there = as_on("nvidia-h200", backend)
    plan = make_plan(there, schedule, CompileOptions(8, "int8"))
    place = object.__new__(Network)
    place._backend, place._plan = there, plan
    step = next(s for s in plan.steps if s.name == "layer2.1.conv1")
    ids = [kernel.id for kernel in place.candidates(step.problem, step.kernel)]
    assert len(ids) == len(set(ids))
    assert any("/implicit_gemm_wgmma_halo/int8/nhwc/m" in one for one in ids)
    assert any("/implicit_gemm_mma/int8/nhwc/m" in one for one in ids)
    assert not any("/nchw" in one for one in ids)


def test_a_problem_with_two_kernels_in_a_plan_is_left_alone() -> None:
    plan = make_plan(WithTiles(), resnet18(), CompileOptions())
    of = [step for step in plan.steps if isinstance(step.problem.op, Conv2d)]
    problems = [step.problem for step in of]
    twice = next(step for step in of if problems.count(step.problem) > 1)
    other = replace(twice, kernel=_tiles(twice.kernel)[0])
    network = object.__new__(Network)
    network._plan = plan
    assert twice.problem in network.problems
    steps = (other if step is twice else step for step in plan.steps)
    network._plan = replace(plan, steps=tuple(steps))
    assert twice.problem not in network.problems


def test_other_steps_cannot_be_asked_for() -> None:
    for more in (("--steps", "fc"), ("--fusion", "none")):
        result = r18("tune", "--backend", "numpy", "--network", "tiny", "--in-network", *more)
        assert result.code == REFUSED
        assert "leave out --steps and --fusion" in result.err


def test_a_variant_of_another_batch_is_not_taken_over() -> None:
    """A variant that was preferred for another batch is not used; its kernel chooses instead."""

    class Nearby(Named):
        def fastest(self, problem: Problem, precision: str) -> Fastest:
            is_conv = isinstance(problem.op, Conv2d)
            return Preferred(self.preferred, measured=False) if is_conv else None

    ids = make_plan(Nearby(), SCHEDULE, CompileOptions()).kernel_ids()
    assert "numpy/conv2d/im2col/fp32" in ids.values()
    assert Named.preferred not in ids.values()
