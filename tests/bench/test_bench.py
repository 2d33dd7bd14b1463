"""Benchmarks: which contender is timed when and on what, and the arithmetic of times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import commands
from r18.backend import Array, CompileOptions, DeviceInfo, StepTime
from r18.backend.registry import load_backend
from r18.bench.baselines import PEER, FedTorchvision, Way
from r18.bench.baselines.torchvision import Torchvision
from r18.bench.contenders import contenders, peer_contender
from r18.bench.inputs.from_host import STRETCHES
from r18.bench.rows import PACES, Contender, Row, with_ratios
from r18.bench.run import Result
from r18.bench.tables import from_host_table, judged, pytest_benchmark, step_table, table
from r18.bench.timing import bench, random_images, rotated
from r18.errors import BackendUnavailable, NoKernel, UsageError
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.machine import machine, peak_nbytes, reset_peak, resident_nbytes
from r18.runtime.pipeline import pipeline
from support import bytes_of, output_of, random_weights

CPU = DeviceInfo("cpu", "a CPU")
CUDA = DeviceInfo("cuda", "a GPU")
SETTLE = PACES["cpu"].settle


class Stage:
    """Fake runners on a fake clock: a run takes as long as its contender's script says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, str, Any]] = []  # (event, contender, detail)
        self.closed: list[str] = []

    def clock(self) -> float:
        self.log.append(("clock", "", self.now))
        return self.now

    def contender(
        self,
        name: str,
        seconds: float = 0.03,
        *,
        device: DeviceInfo = CPU,
        precision: str = "fp32",
        batch: int = 1,
        error: Exception | None = None,
        required: bool = True,
    ) -> Contender:
        def make() -> FakeRunner:
            if error is not None:
                raise error
            self.log.append(("make", name, None))
            return FakeRunner(self, name, seconds)

        return Contender(name, device, precision, "all", (batch, 3, 4, 4), make, required)


class FakeRunner:
    arena_nbytes = 1000
    weight_nbytes = 2000
    kernels: ClassVar = {"k/a": 1, "k/b": 1}

    def __init__(self, stage: Stage, name: str, seconds: float) -> None:
        self.stage, self.name, self.seconds = stage, name, seconds
        self.profiles = 0

    def load(self, images: Array) -> None:
        self.stage.log.append(("load", self.name, images.copy()))

    def run(self) -> None:
        self.stage.log.append(("run", self.name, None))
        self.stage.now += self.seconds

    def fetch(self) -> Array:
        return np.zeros((1, 10), np.float32)

    def time(self, clock: Callable[[], float]) -> float:
        self.stage.log.append(("time", self.name, None))
        begin = clock()
        self.run()
        return (clock() - begin) * 1e3

    def steps(self) -> list[StepTime]:
        self.profiles += 1
        return [StepTime("a", "k/a", float(self.profiles)), StepTime("b", "k/b", 10.0)]

    def close(self) -> None:
        self.stage.closed.append(self.name)


def turns(stage: Stage) -> list[str]:
    """The contenders in the order in which they were timed."""
    return [name for event, name, _ in stage.log if event == "time"]


# -- rounds ------------------------------------------------------------------------------------


def test_a_round_is_everyone_once_and_each_round_begins_one_further() -> None:
    assert [rotated(3, round_) for round_ in range(4)] == [
        [0, 1, 2],
        [1, 2, 0],
        [2, 0, 1],
        [0, 1, 2],
    ]


@given(st.integers(1, 9), st.integers(0, 50))
def test_rotated_is_a_permutation(count: int, round_: int) -> None:
    assert sorted(rotated(count, round_)) == list(range(count))


def test_contenders_take_turns() -> None:
    stage = Stage()
    field = [stage.contender(name, seconds=1.0) for name in "abc"]
    bench(field, warmup=2, repeat=4, clock=stage.clock)
    assert turns(stage) == list("abcbcacababc")
    ran = [name for event, name, _ in stage.log if event == "run"]
    made_and_warm = list("abc" + "aabbcc")  # once to measure memory, then the warm-up
    assert ran == made_and_warm + [name for name in "abcbcacababc" for _ in range(2)]


def test_a_series_is_everything_again() -> None:
    stage = Stage()
    field = [stage.contender(name, seconds=1.0) for name in "ab"]
    rows = bench(field, warmup=1, repeat=2, series=3, clock=stage.clock)
    assert turns(stage) == list("abba" * 3)
    ran = [name for event, name, _ in stage.log if event == "run"]
    again = list("ab") + [name for name in "abba" for _ in range(2)]  # warmed up again
    assert ran == list("ab") + 3 * again
    assert [(row.repeat, row.series, len(row.samples_ms)) for row in rows] == [(2, 3, 6)] * 2


def test_the_medians_of_series() -> None:
    stage = Stage()
    (row,) = bench([stage.contender("a")], warmup=0, repeat=1, clock=stage.clock)
    many = replace(row, samples_ms=(1.0, 2.0, 9.0, 5.0, 7.0, 6.0), series=2)
    assert many.series_ms == (2.0, 6.0)
    assert many.median_ms == 5.5
    assert many.to_json()["series_ms"] == (2.0, 6.0)


def test_rows_that_took_turns_are_given_before_the_next_begin() -> None:
    stage = Stage()
    first = stage.contender(PEER, 0.02)
    field = [
        first,
        stage.contender("a", 0.01),
        stage.contender("a", 0.04, batch=8),
        replace(first, precision="fp16x3", twin=first),
    ]
    given: list[tuple[list[tuple[str, str, int, float | None]], bool]] = []

    def note(rows: list[Row]) -> None:
        made_next = sum(event == "make" for event, *_ in stage.log) > 2
        given.append(([(r.backend, r.precision, r.batch, r.ratio) for r in rows], made_next))

    rows = bench(field, warmup=0, repeat=1, clock=stage.clock, on_group=note)
    assert given == [
        (
            [
                (PEER, "fp32", 1, pytest.approx(1)),
                ("a", "fp32", 1, pytest.approx(0.5)),
                (PEER, "fp16x3", 1, pytest.approx(1)),
            ],
            False,
        ),
        ([("a", "fp32", 8, None)], True),
    ]
    assert len(rows) == 4


def test_a_twin_is_timed_once_and_has_a_row_of_its_own() -> None:
    stage = Stage()
    first = stage.contender("a", precision="fp32")
    field = [first, replace(first, precision="fp16x3", twin=first)]
    losses = {"fp32": 0.5, "fp16x3": 0.25}
    rows = bench(
        field, warmup=0, repeat=3, clock=stage.clock, judge=lambda c, _: losses[c.precision]
    )
    assert turns(stage) == list("aaa")
    assert [(row.precision, row.loss) for row in rows] == list(losses.items())
    assert rows[0].samples_ms == rows[1].samples_ms
    assert stage.closed == ["a"]


def test_a_turn_settles_before_it_is_timed_and_then_takes_other_input() -> None:
    stage = Stage()
    rows = bench([stage.contender("a", seconds=SETTLE / 4)], warmup=0, repeat=1, clock=stage.clock)
    begin = max(i for i, (event, *_) in enumerate(stage.log) if event == "load")
    settling = [i for i, (event, *_) in enumerate(stage.log[:begin]) if event == "load"][-1]
    runs = [event for event, *_ in stage.log[settling:begin]].count("run")
    assert runs == 4
    timed = ["load", "time", "clock", "run", "clock"]
    assert [event for event, *_ in stage.log[begin:]] == timed
    settled_on, timed_on = stage.log[settling][2], stage.log[begin][2]
    assert not np.array_equal(settled_on, timed_on)
    assert rows[0].samples_ms == pytest.approx([SETTLE / 4 * 1e3])


def test_on_a_gpu_a_turn_is_a_few_runs_over_a_batch_that_has_arrived() -> None:
    """The first run after a load is not timed, since it would wait for the batch to arrive."""
    stage = Stage()
    field = [stage.contender(name, 1.0, device=CUDA) for name in "ab"]
    rows = bench(field, warmup=0, repeat=25, clock=stage.clock)
    assert PACES["cuda"].runs == 10
    assert turns(stage) == list("a" * 10 + "b" * 20 + "a" * 10 + "a" * 5 + "b" * 5)
    assert [len(row.samples_ms) for row in rows] == [25, 25]
    events = [event for event, *_ in stage.log if event in ("load", "run", "time")]
    after_load = [after for event, after in pairwise(events) if event == "load"]
    assert set(after_load) == {"run"}
    inputs = {x.tobytes() for event, name, x in stage.log if event == "load" and name == "a"}
    assert len(inputs) == 3


def test_inputs_are_random_differ_and_are_the_same_for_everyone() -> None:
    sets = random_images((2, 3, 4, 4), 3)
    assert all(s.dtype == np.float32 and s.shape == (2, 3, 4, 4) for s in sets)
    assert all(np.count_nonzero(s) == s.size for s in sets)
    assert len({s.tobytes() for s in sets}) == 3
    assert [s.tobytes() for s in sets] == [s.tobytes() for s in random_images((2, 3, 4, 4), 3)]

    stage = Stage()
    bench([stage.contender(name) for name in "ab"], warmup=0, repeat=6, clock=stage.clock)
    seen = {
        name: {
            np.asarray(x).tobytes() for event, n, x in stage.log if event == "load" and n == name
        }
        for name in "ab"
    }
    assert len(seen["a"]) == 3
    assert seen["a"] == seen["b"]


def test_devices_and_batches_do_not_take_turns_with_each_other() -> None:
    stage = Stage()
    field = [
        stage.contender("small", seconds=1.0),
        stage.contender("large", seconds=1.0, batch=8),
        stage.contender("gpu", seconds=1.0, device=CUDA),
        stage.contender("narrow", seconds=1.0, precision="fp16"),
    ]
    rows = bench(field, warmup=0, repeat=2, clock=stage.clock)
    assert turns(stage) == ["small", "narrow", "narrow", "small", "large", "large", "gpu", "gpu"]
    assert [row.repeat for row in rows] == [2] * 4
    assert [row.backend for row in rows] == ["small", "large", "gpu", "narrow"]  # as they came
    # One group is closed before the next is made: two batches never share the memory.
    assert stage.closed[:2] in (["narrow", "small"], ["small", "narrow"])


# -- from host memory --------------------------------------------------------------------------


class FakeFeeding:
    """A fake program on a fake clock, whose copies of `copy` seconds overlap its runs."""

    def __init__(self, stage: Stage, name: str, run: float, copy: float) -> None:
        self.stage, self.name, self.seconds, self.copy = stage, name, run, copy
        self.arrays = np.zeros((2, 3, 4, 4), np.uint8), np.zeros((2, 3, 4, 4), np.uint8)
        self.arrived = self.computed = 0.0

    def input_arrays(self) -> tuple[Array, Array]:
        return self.arrays

    def load(self, images: Array) -> None:
        assert any(images is array for array in self.arrays)
        self.stage.log.append(("feed", self.name, images.copy()))
        self.stage.now = max(self.stage.now, self.arrived)  # the other array is free
        self.arrived = self.stage.now + self.copy

    def launch(self) -> None:
        self.computed = max(self.computed, self.arrived) + self.seconds

    def fetch(self) -> Array:
        return self.fetch_later()()

    def fetch_later(self) -> Callable[[], Array]:
        ready = self.computed

        def fetch() -> Array:
            self.stage.now = max(self.stage.now, ready)
            return np.zeros((2, 10), np.float32)

        return fetch

    def close(self) -> None:
        self.stage.closed.append(f"{self.name} fed")


def fed_row(run: float, copy: float, device: float = 0.01) -> Row:
    stage = Stage()
    field = [
        replace(
            stage.contender("a", device, batch=2),
            feed=lambda: FakeFeeding(stage, "a", run, copy),
        )
    ]
    (found,) = bench(field, warmup=0, repeat=1, from_host=True, clock=stage.clock)
    assert stage.closed == ["a fed", "a"]
    pixels = [images for event, _, images in stage.log if event == "feed"]
    assert len({images.tobytes() for images in pixels}) == 2  # random, and two of them
    return found


def test_what_takes_longer_decides_how_fast_batches_come() -> None:
    computing = fed_row(run=0.010, copy=0.004).from_host
    copying = fed_row(run=0.010, copy=0.025).from_host
    assert computing is not None
    assert copying is not None
    assert computing.nbytes == 2 * 3 * 4 * 4
    assert computing.batches == 25  # a quarter of a second
    assert len(computing.runs_ms) == len(computing.copies_ms) == STRETCHES
    assert computing.median_ms == pytest.approx(10)
    assert computing.copy_ms == pytest.approx(4)
    assert copying.median_ms == pytest.approx(copying.copy_ms) == pytest.approx(25)


def test_json_and_table_of_what_was_fed() -> None:
    found = fed_row(run=0.0125, copy=0.004)
    data = json.loads(json.dumps(found.to_json()))["from_host"]
    assert data["share"] == pytest.approx(0.8)
    assert data["images_per_second"] == pytest.approx(160)
    assert data["copy_bytes_per_second"] == pytest.approx(96 / 0.004)
    assert len(data["runs_ms"]) == STRETCHES
    assert row().to_json()["from_host"] is None
    line = from_host_table([row(), found]).splitlines()[2:]
    assert [" ".join(text.split()) for text in line] == [
        "a cpu fp32 2 12.50 12.50..12.50 160.0 80.0% 4.000 0.0"
    ]


def test_only_those_that_can_be_are_fed_and_only_if_asked() -> None:
    def refuses() -> FakeFeeding:
        raise NoKernel("no kernel takes normalize\n  more")

    stage = Stage()
    field = [
        stage.contender("a"),
        replace(stage.contender("b"), feed=refuses),
        replace(stage.contender("c"), feed=lambda: FakeFeeding(stage, "c", 0.1, 0.1)),
    ]
    skipped: list[tuple[str, str]] = []
    reports: list[tuple[int, int]] = []
    rows = bench(
        field,
        warmup=0,
        repeat=1,
        from_host=True,
        clock=stage.clock,
        on_skip=lambda contender, error: skipped.append((contender.name, str(error))),
        progress=lambda what, done, total: reports.append((done, total)),
    )
    assert [found.from_host is not None for found in rows] == [False, False, True]
    assert skipped == [("b from host", "no kernel takes normalize\n  more")]
    assert reports[-1][0] == reports[-1][1]
    plain = bench(field, warmup=0, repeat=1, clock=stage.clock)
    assert not any(found.from_host for found in plain)


def test_a_backend_is_fed_through_its_own_program() -> None:
    schedule = tiny()
    field = contenders(
        {"numpy": load_backend("numpy")},
        schedule,
        random_weights(schedule),
        batches=(2,),
        algorithms=[("conv2d", "direct")],
    )
    own, direct, peer = field
    assert direct.feed is None
    assert peer.feed is not None
    assert peer_contender("cuda", schedule, {}, 1, "fp16", Way("graph")).feed is None
    with pytest.raises(BackendUnavailable, match="torchvision has no 'tiny'"):
        peer.feed()
    assert own.feed is not None
    program = own.feed()
    (first, _) = program.input_arrays()
    assert (first.shape, first.dtype) == ((2, 3, 32, 32), np.dtype(np.uint8))
    first[...] = 128
    assert np.isfinite(list(pipeline(program, [first, first]))).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_peer_is_fed_with_the_same_pixels(channels_last: bool) -> None:
    schedule = resnet18(image_size=32, classes=10)
    weights = random_weights(schedule)
    way = Way(channels_last=channels_last)
    given = [bytes_of(schedule, 2, seed) for seed in range(5)]
    scale, shift = (np.array(v)[:, None, None] for v in Preprocess().normalize.scale_shift)
    plain = Torchvision("cpu", schedule, weights, "fp32", way)
    expected = []
    for pixels in given:
        plain.load((pixels * scale + shift).astype(np.float32))
        plain.run()
        expected.append(plain.fetch())
    program = FedTorchvision("cpu", schedule, weights, 2, "fp32", way)
    arrays = program.input_arrays()

    def filled() -> Iterator[Array]:
        for turn, pixels in enumerate(given):
            arrays[turn % 2][...] = pixels
            yield arrays[turn % 2]

    for got, wanted in zip(pipeline(program, filled()), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    program.close()
    plain.close()


# -- numbers -----------------------------------------------------------------------------------


def row(ms: float = 10.0, **changes: object) -> Row:
    base = Row("x", "a CPU", "cpu", "fp32", "all", 4, 1, 3, (ms, ms / 2, ms * 2))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_times_by_a_fake_clock() -> None:
    stage = Stage()
    field = [stage.contender("a", 0.25, batch=4), stage.contender(PEER, 0.5, batch=4)]
    ours, peer = bench(field, warmup=1, repeat=3, clock=stage.clock)
    assert ours.samples_ms == (250.0, 250.0, 250.0)
    assert (ours.median_ms, ours.ms_per_image, ours.images_per_second) == (250.0, 62.5, 16.0)
    assert (ours.p10_ms, ours.p90_ms) == (250.0, 250.0)
    assert (ours.ratio, peer.ratio) == (0.5, 1.0)  # time / peer's time: below 1 is faster
    assert (ours.warmup, ours.repeat, ours.batch, ours.fusion) == (1, 3, 4, "all")
    assert (ours.arena_nbytes, ours.weight_nbytes) == (1000, 2000)


def test_medians_and_percentiles() -> None:
    found = row(samples_ms=tuple(float(n) for n in range(1, 12)))
    assert (found.median_ms, found.p10_ms, found.p90_ms) == (6.0, 2.0, 10.0)


def test_rows_that_spread_widely_and_busy_machines_are_told() -> None:
    host = {"cpus": 2, "threads": 2, "load_average": (0.5, 9.0, 9.0)}
    calm, shaken = row(samples_ms=(10.0, 10.0, 14.0)), row(samples_ms=(10.0, 11.0, 40.0))

    def warned(*rows: Row, **changes: object) -> list[str]:
        return Result(list(rows), [], {"machine": host | changes}, ()).warnings

    assert warned(calm) == []
    (spread,) = warned(calm, shaken)
    assert spread.startswith("x, fp32, batch 4: a tenth of its runs took over 34.2 ms")
    (busy,) = warned(calm, load_average=(1.7, 0.0, 0.0))
    assert "the machine is busy, its load average of the last minute is 1.7 on 2 CPUs" in busy
    (crowded,) = warned(calm, threads=8)
    assert "8 threads on 2 CPUs wait for each other: give --threads 2" in crowded
    assert warned(calm, load_average=None) == []  # not every system knows it


def test_threads_that_share_cores_or_memory_are_told() -> None:
    host = {"cpus": 4, "threads": 4, "load_average": None, "cpu": {"cores": 4, "nodes": 1}}
    times = (10.0, 10.0)

    def warned(kind: str = "cpu", **changes: object) -> list[str]:
        rows = [row(samples_ms=times, device_kind=kind)]
        return Result(rows, [], {"machine": host | changes}, ()).warnings

    assert warned() == []
    (shared,) = warned(cpu={"cores": 2, "nodes": 1})
    assert shared == (
        "4 threads on 2 cores: two threads of a core share its vector units and caches, so compare "
        "with --threads 2"
    )
    assert warned(cpu={"cores": 2, "nodes": 1}, threads=2) == []
    assert warned("cuda", cpu={"cores": 2, "nodes": 2}) == []
    (far,) = warned(cpu={"cores": 4, "nodes": 2})
    assert far.startswith("threads run on 2 NUMA nodes, each with memory of its own")
    (more,) = warned(cpu={"cores": 2, "nodes": 1}, threads=8)
    assert "8 threads on 4 CPUs wait for each other: give --threads 4" in more
    assert warned(cpu={"cores": 0, "nodes": 0}) == warned(cpu=None) == []  # not every system tells


def test_ratios_are_to_the_peer_of_the_same_kind_precision_and_batch() -> None:
    rows = [
        row(30.0),
        row(10.0, precision="fp64"),
        row(10.0, batch=8),
        row(10.0, device_kind="cuda"),
        row(20.0, backend=PEER),
        row(40.0, backend=PEER, precision="fp64"),
    ]
    assert [found.ratio for found in with_ratios(rows)] == [1.5, 0.25, None, None, 1.0, 1.0]


def test_the_best_peer_is_the_fastest_in_any_way() -> None:
    graph, compiled = Way("graph").name, Way("compile", channels_last=True).name
    rows = [
        row(30.0),
        row(20.0, backend=PEER),
        row(15.0, backend=graph),
        row(10.0, backend=compiled),
        row(30.0, batch=8),
        row(10.0, batch=8, backend=graph),
    ]
    found = with_ratios(rows)
    assert [r.best_ratio for r in found] == [3.0, 2.0, 1.5, 1.0, 3.0, 1.0]
    assert [r.best_peer for r in found] == [compiled] * 4 + [graph] * 2
    assert [r.ratio for r in found] == [1.5, 1.0, 0.75, 0.5, None, None]


def test_judged_rows_are_counted_in_the_singular_and_the_plural() -> None:
    worst = row(loss=0.25)
    said = " judged against float64: at most 0.25 of the bound (x, fp32, batch 4)"
    assert judged([worst]) == f"outputs of 1 row{said}"
    assert judged([row(loss=0.125), worst]) == f"outputs of 2 rows{said}"


def test_the_rule_that_judged_rows_of_integers_is_printed() -> None:
    ours = row(loss=0.0, precision="int8")
    peers = [replace(ours, backend=name) for name in ("onnxruntime", "openvino")]
    equal = "compared with the reference's integers: equal, bit for bit"
    assert judged([ours]) == f"outputs of 1 int8 row {equal}"
    inside = (
        "values inside 2 int8 rows of baselines judged (onnxruntime, openvino): each follows from "
        "a known arithmetic, no sum saturates; no bound on their errors"
    )
    assert judged([ours, *peers]) == f"outputs of 1 int8 row {equal}\n{inside}"
    floats = "outputs of 1 row judged against float64: at most 0.25 of the bound (x, fp32, batch 4)"
    mixed = judged([row(loss=0.25), ours, replace(ours, batch=8), *peers])
    assert mixed == f"{floats}\noutputs of 2 int8 rows {equal}\n{inside}"


def test_pytorch_s_rows_next_to_integers_are_judged_against_float64() -> None:
    """On a GPU it computes in float16 there."""
    theirs = row(backend=PEER, precision="int8", device_kind="cuda", loss=0.5)
    said = " judged against float64: at most 0.5 of the bound (torchvision eager, int8, batch 4)"
    assert judged([theirs]) == f"outputs of 1 row{said}"
    assert judged([]) == "no output was judged"


def test_steps_are_medians_over_the_repeats() -> None:
    stage = Stage()
    (found,) = bench([stage.contender("a")], warmup=0, repeat=5, per_step=True, clock=stage.clock)
    assert found.steps == (StepTime("a", "k/a", 3.0), StepTime("b", "k/b", 10.0))
    assert "23.1%" in step_table(found)
    phases = (StepTime("a", "k", 1.0, "im2col"), StepTime("a", "k", 3.0, "gemm"))
    lines = step_table(replace(found, steps=phases)).splitlines()
    assert "a im2col k 1.000 25.0%" in [" ".join(line.split()) for line in lines]
    (plain,) = bench([stage.contender("a")], warmup=0, repeat=1, clock=stage.clock)
    assert plain.steps == ()


def test_json_has_every_field_and_what_is_derived() -> None:
    data = json.loads(json.dumps(row(steps=(StepTime("a", "k", 1.0),), ratio=2.0).to_json()))
    assert data["samples_ms"] == [10.0, 5.0, 20.0]
    assert data["steps"] == [{"step": "a", "kernel": "k", "milliseconds": 1.0, "phase": ""}]
    assert data["ms_per_image"] == 2.5
    assert {"median_ms", "p10_ms", "p90_ms", "images_per_second"} <= data.keys()
    assert {"backend", "device", "device_kind", "precision", "fusion", "batch"} <= data.keys()
    assert {"warmup", "repeat", "ratio", "arena_nbytes", "peak_rss_nbytes"} <= data.keys()


def test_times_as_pytest_benchmark_writes_them() -> None:
    """Times in pytest-benchmark's format have the statistics of its `Stats`, in seconds."""
    data = pytest_benchmark(
        [row(0, samples_ms=(1.0, 2.0, 3.0, 4.0, 90.0))], "tiny", {"cpus": 2}, ""
    )
    (found,) = data["benchmarks"]
    assert (found["group"], found["fullname"]) == ("tiny, fp32, batch 4", "tiny::x[fp32-4-cpu]")
    stats = found["stats"]
    assert stats["data"] == [0.001, 0.002, 0.003, 0.004, 0.09]
    assert (stats["min"], stats["median"], stats["max"]) == (0.001, 0.003, 0.09)
    assert stats["mean"] == pytest.approx(0.02)
    assert stats["ops"] == pytest.approx(50)
    assert stats["stddev"] == pytest.approx(0.0391472, rel=1e-5)
    assert (stats["q1"], stats["q3"], stats["iqr"]) == pytest.approx((0.002, 0.004, 0.002))
    assert stats["outliers"] == "1;1"
    assert (stats["ld15iqr"], stats["hd15iqr"], stats["rounds"]) == (0.001, 0.004, 5)
    (alone,) = pytest_benchmark([row(0, samples_ms=(5.0,))], "tiny", {}, "")["benchmarks"]
    assert (alone["stats"]["stddev"], alone["stats"]["iqr"]) == (0, 0)
    json.dumps(data, allow_nan=False)


def test_the_command_writes_a_file_for_pytest_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = commands.r18(
        *("bench", "--backends", "numpy", "--network", "tiny", "--batch", "1", "--repeat", "3"),
        *("--warmup", "0", "--benchmark-json", file),
    )
    assert done.code == 0, done.err
    data = json.loads(file.read_text("utf-8"))
    assert [one["name"] for one in data["benchmarks"]] == ["numpy[fp32-1-cpu]"]
    assert data["benchmarks"][0]["stats"]["rounds"] == 3
    assert data["benchmarks"][0]["extra_info"]["error"]["relative"] > 0


def test_a_file_for_pytest_benchmark_may_be_replaced(tmp_path: Path) -> None:
    from r18.cli.bench import _check_benchmark

    file = tmp_path / "bench.json"
    file.write_text(json.dumps(pytest_benchmark([row()], "tiny", {}, "")))
    _check_benchmark(file, "--benchmark-json")


def test_the_table_leaves_out_what_is_not_known() -> None:
    text = table([row(ratio=1.234, arena_nbytes=2_500_000), row(batch=1)])
    first, second = text.splitlines()[2:]
    assert "time / torchvision eager" in text.splitlines()[0]
    assert " ".join(first.split()) == "x cpu fp32 4 2.500 1.500..4.500 400.0 1.23 2.5"
    assert " ".join(second.split()) == "x cpu fp32 1 10.00 6.000..18.00 100.0"
    assert "backend" in table([])


def test_the_table_shows_the_best_peer_where_there_are_several() -> None:
    plain = row(ratio=1.5, best_ratio=1.5, best_peer=PEER)
    assert "best peer" not in table([plain])
    better = row(ratio=1.5, best_ratio=3.0, best_peer=Way("graph").name)
    head, _, line = table([better]).splitlines()
    assert "time / torchvision eager    time / best peer" in head
    assert line.split()[-2:] == ["1.50", "3.00"]


def test_outputs_are_judged_once_each_when_everything_is_timed() -> None:
    stage = Stage()

    def judge(contender: Contender, runner: Any) -> float:
        stage.log.append(("judge", contender.name, runner.name))
        return {"a": 0.5, "b": 2.0}[contender.name]

    field = [stage.contender(name) for name in "ab"]
    rows = bench(field, warmup=0, repeat=2, judge=judge, clock=stage.clock)
    assert [found.loss for found in rows] == [0.5, 2.0]
    judged = [index for index, (event, *_) in enumerate(stage.log) if event == "judge"]
    assert [stage.log[index][1:] for index in judged] == [("a", "a"), ("b", "b")]
    assert judged[0] > max(i for i, (event, *_) in enumerate(stage.log) if event == "time")
    (plain,) = bench([stage.contender("a")], warmup=0, repeat=1, clock=stage.clock)
    assert plain.loss is None


# -- what cannot be made -----------------------------------------------------------------------


def test_a_required_contender_that_cannot_be_made_is_an_error_and_closes_the_others() -> None:
    stage = Stage()
    field = [stage.contender("a"), stage.contender("b", error=NoKernel("no such kernel"))]
    with pytest.raises(NoKernel, match="no such kernel"):
        bench(field, clock=stage.clock)
    assert stage.closed == ["a"]


@pytest.mark.parametrize("error", [NoKernel("no kernel"), MemoryError("full")])
def test_others_are_left_out_and_reported(error: Exception) -> None:
    stage = Stage()
    skipped: list[tuple[str, Exception]] = []
    seen: list[tuple[int, int]] = []
    rows = bench(
        [stage.contender("a", required=False, error=error), stage.contender("b")],
        warmup=1,
        repeat=2,
        clock=stage.clock,
        on_skip=lambda contender, why: skipped.append((contender.name, why)),
        progress=lambda what, done, total: seen.append((done, total)),
    )
    assert [found.backend for found in rows] == ["b"]
    assert skipped == [("a", error)]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (8, 8)  # everything is accounted for, what was left out too


@pytest.mark.parametrize("counts", [{"repeat": 0}, {"warmup": -1}, {"input_sets": 0}])
def test_counts_are_checked(counts: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least"):
        bench([], **counts)  # type: ignore[arg-type]


def test_contenders_are_every_combination_with_a_peer_behind_each() -> None:
    backends = {"numpy": load_backend("numpy"), "again": load_backend("numpy")}
    field = contenders(backends, tiny(), {}, precisions=("fp32", "fp64"), batches=(1, 3))
    assert [(c.name, c.precision, c.shape[0]) for c in field] == [
        (name, precision, batch)
        for batch in (1, 3)
        for precision in ("fp32", "fp64")
        for name in ("numpy", "again", PEER)
    ]
    assert [c.required for c in field] == [True, True, False] * 4
    for bad in ({"batches": ()}, {"batches": (2, 2)}, {"precisions": ("fp32", "fp32")}):
        with pytest.raises(UsageError):
            contenders(backends, tiny(), {}, **bad)
    with pytest.raises(UsageError, match="at least one backend"):
        contenders({}, tiny(), {})


# -- real contenders ---------------------------------------------------------------------------


def test_backends_on_a_tiny_network() -> None:
    network = tiny()
    weights = random_weights(network)
    backends = {name: load_backend(name) for name in ("numpy", "numba-cpu", "r18_torch:cpu")}
    skipped: list[str] = []
    rows = bench(
        contenders(backends, network, weights, batches=(2,)),
        warmup=1,
        repeat=2,
        per_step=True,
        on_skip=lambda contender, why: skipped.append(f"{contender.name}: {why}"),
    )
    assert [found.backend for found in rows] == list(backends)
    assert skipped == [f"{PEER}: backend '{PEER}' is not available: torchvision has no 'tiny'"]
    for found in rows:
        assert len(found.samples_ms) == 2
        assert min(found.samples_ms) > 0
        assert found.ratio is None
        assert found.weight_nbytes
        assert [step.step for step in found.steps][-1] == "fc"
        plan = backends[found.backend].compile(network, weights, CompileOptions(batch=2)).plan
        assert found.arena_nbytes == plan.arena_nbytes


def test_a_precision_without_kernels_is_an_error_for_a_backend_that_was_named() -> None:
    field = contenders({"numpy": load_backend("numpy")}, tiny(), {}, precisions=("bf16",))
    with pytest.raises(NoKernel, match="bf16"):
        bench(field)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_peer_computes_the_same_network(precision: str) -> None:
    network = resnet18(image_size=64, classes=12)
    weights = random_weights(network)
    images = random_images((2, 3, 64, 64), 1)[0]
    peer = Torchvision("cpu", network, weights, precision)
    peer.load(images)
    peer.run()
    output = peer.fetch()
    options = CompileOptions(batch=2, precision=precision)
    expected = load_backend("numpy").compile(network, weights, options)(images)
    scale = np.abs(expected).max()
    assert np.abs(output - expected).max() / scale < (1e-5 if precision == "fp32" else 1e-12)
    assert output.dtype == expected.dtype
    assert not peer._module.training
    assert peer.weight_nbytes > sum(w.nbytes for w in weights.values())
    assert peer.steps() == []


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: peer_contender("cpu", tiny(), {}, 1, "fp32"), "has no 'tiny'"),
        (lambda: peer_contender("cpu", resnet18(), {}, 1, "tf32"), "no tf32 on cpu"),
        (lambda: peer_contender("cpu", resnet18(), {}, 1, "int8"), "no int8 on cpu"),
        (
            lambda: peer_contender("npu", resnet18(), {}, 1, "fp32"),
            "no device of kind",
        ),
        (
            lambda: peer_contender("cpu", resnet18(), {}, 1, "fp32", Way("graph")),
            "'graph' is for CUDA graphs, not for cpu",
        ),
    ],
)
def test_a_peer_that_does_not_exist_says_why(make: Callable[[], Contender], cause: str) -> None:
    contender = make()
    assert not contender.required
    with pytest.raises(BackendUnavailable, match=cause):
        contender.make()


def test_the_core_times_without_pytorch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from r18.bench.timing import bench
from r18.bench.contenders import contenders
from r18.backend.registry import load_backend
from r18.graph.resnet import tiny
from r18.weights.synthetic import synthetic_weights
import r18.cli.app
network = tiny()
field = contenders({"numpy": load_backend("numpy")}, network, synthetic_weights(network))
skipped = []
rows = bench(field, warmup=0, repeat=1, on_skip=lambda c, error: skipped.append(error.cause))
print([row.backend for row in rows], skipped[0].split(":")[0])
"""
    assert output_of(code) == "['numpy'] it does not import"


# -- memory and machine ------------------------------------------------------------------------


def test_peak_memory_is_of_what_was_touched_since_it_was_reset() -> None:
    before = resident_nbytes()
    if before is None or not reset_peak():
        pytest.skip("this system does not tell or reset a process's peak memory")
    size = 64 << 20
    np.ones(size, np.uint8)
    grown = (peak_nbytes() or 0) - before
    assert 0.9 * size < grown < 2 * size
    assert reset_peak()
    assert (peak_nbytes() or 0) - before < size / 2


def test_the_machine_is_plain_json() -> None:
    found = json.loads(json.dumps(machine()))
    assert found["cpus"] >= 1
    assert found["processor"]
    assert math.isfinite(sum(found["load_average"] or [0.0]))
