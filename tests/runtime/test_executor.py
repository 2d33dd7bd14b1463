"""The executor: what every backend with kernels and memory gets, and how it can fail."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import r18_numba_cpu
import r18_numpy
import r18_torch
from r18.backend import (
    Backend,
    CompileOptions,
    DeviceInfo,
    Event,
    Kernel,
    Memory,
    Plan,
    Program,
    RoundingContract,
    Stream,
    input_layout,
    output_layout,
)
from r18.backend import (
    Backend as BackendBase,
)
from r18.errors import (
    NoKernel,
    ProgramClosed,
    R18Error,
    ShapeError,
    UnknownName,
    UsageError,
    WeightsError,
)
from r18.graph.ops import (
    OPS,
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Layout,
    Linear,
    MatMul,
    MaxPool2d,
    Op,
    Problem,
    Relayout,
    ReLU,
)
from r18.graph.passes import FUSION_LEVELS, fold_weights, fuse
from r18.graph.precision import FP32, Precision
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.resnet import tiny
from r18.graph.scaled import SCALED_OPS
from r18.graph.schedule import CANONICAL, Schedule
from r18.runtime.fusing import PARTS
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel, make_plan
from support import (
    Array,
    PoisonedMemory,
    check_plan,
    compute,
    images,
    physical,
    random_weights,
)

BATCH = 3

# -- a backend from nothing: its own buffers, an allocator, a stream that works later -----------


class ToyBuffer:
    """A span of a bytearray."""

    def __init__(self, data: bytearray, start: int, nbytes: int) -> None:
        assert 0 <= start <= start + nbytes <= len(data)
        self.data, self.start, self.nbytes = data, start, nbytes

    def view(self, offset: int, nbytes: int) -> ToyBuffer:
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return ToyBuffer(self.data, self.start + offset, nbytes)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        count = int(np.prod(shape))
        return np.frombuffer(self.data, dtype, count, self.start).reshape(shape)

    def overlaps(self, other: ToyBuffer) -> bool:
        return self.data is other.data and (
            self.start < other.start + other.nbytes and other.start < self.start + self.nbytes
        )


class ToyMemory(Memory):
    """Memory filled with 0xFF, so that an unwritten float is NaN, with an unusual alignment."""

    alignment = 48

    def __init__(self) -> None:
        self.allocations: list[int] = []

    def empty(self, nbytes: int) -> ToyBuffer:
        self.allocations.append(nbytes)
        return ToyBuffer(bytearray(b"\xff" * nbytes), 0, nbytes)

    def upload(self, array: Array, buffer: Any) -> None:
        buffer.array(array.shape, array.dtype)[...] = array

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.array(buffer.array(shape, dtype))

    def fill(self, buffer: Any, byte: int) -> None:
        buffer.array((buffer.nbytes,), np.uint8).fill(byte)


class ToyStream(Stream):
    """Work waits in a queue until a caller synchronises, as on a busy device.

    Its clock ticks once for each piece of work. A capture takes what was queued out of the queue.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.clock = 0
        self.captures = 0
        self.replays = 0
        self.phased = False
        self.marks: list[tuple[str, Event]] | None = None

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def run(self, work: Callable[[], None]) -> None:
        def ticking() -> None:
            work()
            self.clock += 1

        self.queue.append(ticking)
        if self.marks is not None:
            self.marks.append((f"phase {len(self.marks)}", self.record()))

    def record(self) -> ToyEvent:
        event = ToyEvent(self)
        self.queue.append(event.stamp)
        return event

    @contextmanager
    def trace(self) -> Iterator[list[tuple[str, Event]]]:
        """With `phased`, each piece of work a kernel enqueues is a phase of its own."""
        marks: list[tuple[str, Event]] = []
        self.marks = marks if self.phased else None
        yield marks
        self.marks = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        waiting, self.queue = self.queue, []
        work()
        recorded, self.queue = self.queue, waiting
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            self.queue.extend(recorded)

        return replay


class ToyEvent:
    """The stream's clock at one point of its work."""

    def __init__(self, stream: ToyStream) -> None:
        self.stream = stream
        self.time: int | None = None

    def stamp(self) -> None:
        self.time = self.stream.clock

    def milliseconds_since(self, earlier: ToyEvent) -> float:
        assert self.time is not None, "the event was not waited for"
        assert earlier.time is not None
        return float(self.time - earlier.time)


SUM = RoundingContract("sum", "float32", "float32")


@dataclass(frozen=True)
class ToyKernel(Kernel):
    """A kernel in the plainest NumPy, which checks its arguments against the contract."""

    op: type[Op]
    algorithm: str
    layout: Layout = Layout.NCHW
    reads: Layout | None = None
    in_place: bool = False
    scratch: int = 0
    refuses: Callable[[Problem], str | None] = lambda problem: None
    precision: Precision = FP32
    contract: RoundingContract = SUM
    deterministic: bool = True
    batch_invariant: bool = True
    edges: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return f"toy/{self.op.name}/{self.algorithm}/fp32"

    def refusal(self, problem: Problem) -> str | None:
        return self.refuses(problem)

    def workspace(self, problem: Problem) -> int:
        return self.scratch

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[ToyBuffer, ...]:
        memory, buffers = ToyMemory(), []
        for array in weights:
            stored = np.ascontiguousarray(array, np.float32)
            buffers.append(memory.empty(stored.nbytes))
            memory.upload(stored, buffers[-1])
        return tuple(buffers)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Any, ...],
        weights: tuple[Any, ...],
        output: Any,
        workspace: Any,
        stream: Any,
    ) -> None:
        read, write = input_layout(self, problem), output_layout(self, problem)
        for buffer in (*inputs, output, workspace):
            assert buffer.start % ToyMemory.alignment == 0
        assert workspace.nbytes == self.scratch
        for buffer in inputs:
            same = buffer is inputs[0] and buffer.start == output.start
            assert not buffer.overlaps(output) or (self.in_place and same)
            assert not buffer.overlaps(workspace)
        assert not output.overlaps(workspace)

        def work() -> None:
            workspace.array((self.scratch,), np.uint8).fill(0xAA)
            result = compute(
                problem.op,
                [
                    _logical(b.array(read.physical(s), np.float32), read)
                    for b, s in zip(inputs, problem.inputs, strict=True)
                ],
                [
                    b.array(spec.shape, np.float32)
                    for b, spec in zip(weights, problem.op.weights(), strict=True)
                ],
            )
            target = output.array(write.physical(problem.output), np.float32)
            target[...] = physical(result, write)

        stream.run(work)


def _logical(array: Array, layout: Layout) -> Array:
    return array.transpose(0, 3, 1, 2) if layout is Layout.NHWC and array.ndim == 4 else array


class Toy(BackendBase):
    """The least that a backend must have for the executor to run networks on it."""

    name = "toy"

    def __init__(self, kernels: tuple[ToyKernel, ...]) -> None:
        self.memory = ToyMemory()
        self.streams: list[ToyStream] = []
        self._kernels = kernels

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "a toy")

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels

    def stream(self) -> ToyStream:
        self.streams.append(ToyStream())
        return self.streams[-1]


PLAIN = (
    *(
        ToyKernel(op, "plain", scratch=100 if op is Conv2d else 0, in_place=op in (ReLU, Add))
        for op in OPS.values()
        if not op.optional
    ),
    ToyKernel(Conv2d, "nhwc", Layout.NHWC),
    ToyKernel(Conv2d, "picky", refuses=lambda p: "takes 1×1 only" if p.op.depth > 64 else None),
)


def toy(*kernels: ToyKernel) -> Toy:
    return Toy(kernels or PLAIN)


# -- what runs ---------------------------------------------------------------------------------

MAKE: dict[str, Callable[[], Backend]] = {
    "toy": toy,
    "numpy": r18_numpy.Backend,
    "torch": r18_torch.cpu,
    "numba-cpu": r18_numba_cpu.Backend,
}
BACKENDS = pytest.mark.parametrize("name", MAKE)
SCHEDULE = tiny(softmax=True)


@cache
def weights() -> dict[str, Array]:
    return random_weights(SCHEDULE)


def compiled(backend: Backend, schedule: Schedule = SCHEDULE, **options: Any) -> Program:
    program = backend.compile(schedule, weights(), CompileOptions(batch=BATCH, **options))
    assert isinstance(program, Program)
    return program


@cache
def expected(level: str = "none") -> dict[str, Array]:
    """Every value of the network in float64, from float32 weights and images."""
    fused = fuse(SCHEDULE, level)
    given = {n: np.asarray(a, np.float64) for n, a in weights().items()}
    folded = fold_weights(fused, given)
    values = {SCHEDULE.input: images(SCHEDULE, BATCH).astype(np.float64)}
    for step in fused.steps:
        values[step.output] = compute(
            step.op, [values[v] for v in step.inputs], [folded[w] for w in step.weights]
        )
    return values


@BACKENDS
@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_a_backend_with_kernels_and_an_allocator_runs_the_network(name: str, level: str) -> None:
    """Every tapped value of the level is near its float64 value."""
    taps = tuple(fuse(SCHEDULE, level).taps)
    program = compiled(MAKE[name](), fusion=level, taps=taps)
    output = program(images(SCHEDULE, BATCH))
    assert output.dtype == np.float32
    for tap in taps:
        exact = expected(level)[program.plan.schedule.value_of(tap)]
        got = program.fetch(tap)
        assert got.shape == exact.shape
        assert np.abs(got - exact).max() <= 1e-5 * np.abs(exact).max()
    np.testing.assert_array_equal(program.fetch(), output)
    np.testing.assert_array_equal(program.fetch("image"), images(SCHEDULE, BATCH))
    np.testing.assert_allclose(output.sum(axis=1), 1, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize("level", ["none", "all"])
def test_taps_arena_and_graph_do_not_change_a_bit(name: str, level: str) -> None:
    everything = tuple(fuse(SCHEDULE, level).taps)
    x = images(SCHEDULE, BATCH)
    outputs = {}
    for taps, arena, graph in product(((), CANONICAL, everything), (True, False), (True, False)):
        program = compiled(MAKE[name](), fusion=level, taps=taps, arena=arena, graph=graph)
        program(x)
        outputs[len(taps), arena, graph] = program.fetch()
    assert len({array.tobytes() for array in outputs.values()}) == 1, outputs.keys()


@BACKENDS
@pytest.mark.parametrize("arena", [True, False])
def test_launching_again_without_a_load_gives_the_same_bits(name: str, arena: bool) -> None:
    """Launching again without a load gives the same bits: the input survives every run."""
    program = compiled(MAKE[name](), fusion="none", arena=arena, taps=CANONICAL)
    program.load(images(SCHEDULE, BATCH))
    runs = []
    for _ in range(3):
        program.launch()
        runs.append([program.fetch().tobytes(), *(program.fetch(c).tobytes() for c in CANONICAL)])
    assert runs[0] == runs[1] == runs[2]
    np.testing.assert_array_equal(program.fetch("image"), images(SCHEDULE, BATCH))


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
def test_nothing_reads_memory_that_nothing_wrote(level: str, byte: int) -> None:
    """Before a run every byte of the program is spoilt, except for the input's and the weights'.

    0xFF is NaN and 0x7F a huge number: a read of stale memory would be seen in the logits.
    """
    memory = PoisonedMemory()
    backend = r18_numpy.Backend()
    backend.memory = memory
    program = compiled(backend, fusion=level)
    clean = program(images(SCHEDULE, BATCH))
    assert np.isfinite(clean).all()
    assert memory.buffers
    for buffer in memory.buffers:
        buffer.array.fill(byte)
    np.testing.assert_array_equal(program(images(SCHEDULE, BATCH)), clean)
    # And in between, with the input kept, as `launch` finds it the second time.
    (arena,) = (b for b in memory.buffers if b.nbytes == program.plan.arena_nbytes)
    image = program.plan.tensors["image"]
    program.load(images(SCHEDULE, BATCH))
    arena.array[: image.offset] = byte
    arena.array[image.offset + image.nbytes :] = byte
    program.launch()
    np.testing.assert_array_equal(program.fetch(), clean)


@pytest.mark.parametrize("level", FUSION_LEVELS)
@pytest.mark.parametrize("taps", [(), CANONICAL])
@BACKENDS
def test_plans_overwrite_nothing_that_is_needed(
    name: str, level: str, taps: tuple[str, ...]
) -> None:
    backend = MAKE[name]()
    plan = make_plan(backend, SCHEDULE, CompileOptions(batch=BATCH, fusion=level, taps=taps))
    check_plan(plan, backend.memory.alignment)


def test_a_fetched_array_is_a_copy() -> None:
    program = compiled(r18_numpy.Backend())
    first = program(images(SCHEDULE, BATCH))
    before = first.copy()
    program(images(SCHEDULE, BATCH, seed=1))
    np.testing.assert_array_equal(first, before)
    program.fetch()[...] = 0
    assert program.fetch().any()


def test_weights_are_copied_when_a_program_is_compiled() -> None:
    given = {name: array.copy() for name, array in weights().items()}
    program = r18_numpy.Backend().compile(SCHEDULE, given, CompileOptions(batch=BATCH))
    before = program(images(SCHEDULE, BATCH))
    for array in given.values():
        array[...] = 0
    np.testing.assert_array_equal(program(images(SCHEDULE, BATCH)), before)


def test_a_schedule_that_is_fused_already_runs_at_its_own_level_only() -> None:
    fused = fuse(SCHEDULE, "conv_bn_relu")
    same = compiled(r18_numpy.Backend(), fused, fusion="conv_bn_relu")
    other = compiled(r18_numpy.Backend(), fusion="conv_bn_relu")
    x = images(SCHEDULE, BATCH)
    np.testing.assert_array_equal(same(x), other(x))
    with pytest.raises(UsageError) as caught:
        compiled(r18_numpy.Backend(), fused, fusion="all")
    assert str(caught.value) == (
        "schedule 'tiny' is at level 'conv_bn_relu', the options ask for 'all'"
    )


@BACKENDS
def test_a_slice_runs_like_the_whole(name: str) -> None:
    """Slices give the whole network's values: `stem_pool` to `layer2`, and the 2-d head."""
    whole = compiled(MAKE[name](), taps=CANONICAL)
    whole(images(SCHEDULE, BATCH))
    for first, last in (("stem_pool", "layer2"), ("gap", "softmax")):
        part = compiled(MAKE[name](), SCHEDULE.between(first, last))
        value = whole.fetch() if last == "softmax" else whole.fetch(last)
        np.testing.assert_array_equal(part(whole.fetch(first)), value)


# -- the stream --------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [True, False])
def test_launch_only_enqueues_and_fetch_waits(graph: bool) -> None:
    backend = toy()
    program = compiled(backend, graph=graph)
    (stream,) = backend.streams
    assert (stream.captures, stream.queue) == (int(graph), [])
    allocated = len(backend.memory.allocations)
    program.load(images(SCHEDULE, BATCH))
    program.launch()
    assert len(stream.queue) == len(program.plan.steps)
    assert stream.clock == 0  # nothing has run
    program.fetch()
    assert stream.clock == len(program.plan.steps)
    program.launch()
    program.synchronize()
    assert stream.queue == []
    assert stream.replays == (2 if graph else 0)
    assert len(backend.memory.allocations) == allocated  # all of it at compilation


def test_loading_the_next_batch_does_not_disturb_the_one_in_flight() -> None:
    """A load right after `launch`, which returns at once, does not disturb the batch in flight."""
    backend = toy()
    program = compiled(backend)
    first, second = images(SCHEDULE, BATCH), images(SCHEDULE, BATCH, seed=1)
    alone = program(first)
    program.load(first)
    program.launch()
    try:
        program.load(second)
    except R18Error:
        return  # refusing is as safe as waiting
    np.testing.assert_array_equal(program.fetch(), alone)


def test_profile_lists_every_step_with_its_kernel_and_time() -> None:
    backend = toy()
    program = compiled(backend, kernels={"layer2.0.conv1": "toy/conv2d/nhwc/fp32"})
    program.load(images(SCHEDULE, BATCH))
    times = program.profile()
    assert [(t.step, t.kernel) for t in times] == list(program.plan.kernel_ids().items())
    assert [t.milliseconds for t in times] == [1.0] * len(program.plan.steps)  # the toy's clock
    assert any(t.step.startswith("relayout ") for t in times)
    after = program.fetch()
    np.testing.assert_array_equal(program(images(SCHEDULE, BATCH)), after)


def test_profile_shows_the_phases_of_a_kernel() -> None:
    backend = toy()
    program = compiled(backend)
    program.load(images(SCHEDULE, BATCH))
    program._stream.phased = True
    times = program.profile()
    names = list(program.plan.kernel_ids())
    assert [(t.step, t.phase) for t in times] == [(name, "phase 0") for name in names]
    assert [t.milliseconds for t in times] == [1.0] * len(names)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_profile_measures_time(name: str) -> None:
    program = compiled(MAKE[name](), fusion="none")
    program.load(images(SCHEDULE, BATCH))
    times = program.profile()
    assert [t.step for t in times] == [s.name for s in SCHEDULE.steps]
    assert all(t.milliseconds >= 0 for t in times)
    assert sum(t.milliseconds for t in times) > 0


@BACKENDS
def test_threads_may_call_one_program(name: str) -> None:
    """Threads may call one program, and each gets the logits of its own images."""
    program = compiled(MAKE[name]())
    inputs = [images(SCHEDULE, BATCH, seed) for seed in range(6)]
    alone = [program(x) for x in inputs]
    same: list[bool] = []
    start = threading.Barrier(len(inputs))

    def call(index: int) -> None:
        start.wait()
        same.extend(np.array_equal(program(inputs[index]), alone[index]) for _ in range(8))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 8 * len(inputs)


def test_programs_of_one_backend_do_not_share_memory() -> None:
    backend = r18_numpy.Backend()
    one, other = compiled(backend), compiled(backend)
    before = one(images(SCHEDULE, BATCH))
    other(images(SCHEDULE, BATCH, seed=1))
    np.testing.assert_array_equal(one.fetch(), before)


# -- in place ----------------------------------------------------------------------------------


def test_kernels_in_place_take_over_their_inputs_memory() -> None:
    backend = toy()
    plan = make_plan(backend, SCHEDULE, CompileOptions(batch=BATCH, fusion="none"))
    in_place = check_plan(plan, backend.memory.alignment)
    expected_pairs = {s.output: s.inputs[0] for s in plan.steps if s.kernel.in_place}
    assert in_place == expected_pairs
    assert "layer1.0.relu_1" in in_place  # the chain bn2 → add → relu_1 is in one place
    assert plan.tensors["layer1.0.bn2"].offset == plan.tensors["layer1.0.relu_1"].offset


def test_what_is_needed_again_is_not_overwritten_in_place() -> None:
    """An in-place ReLU does not overwrite its input if that is tapped."""
    backend = toy()
    options = CompileOptions(batch=BATCH, fusion="none", taps=("bn1", "layer1.0.add"))
    in_place = check_plan(make_plan(backend, SCHEDULE, options), backend.memory.alignment)
    assert "relu" not in in_place
    assert "layer1.0.relu_1" not in in_place
    assert in_place["layer1.0.relu"] == "layer1.0.bn1"


def test_a_shortcut_that_is_the_first_input_of_a_sum_is_not_overwritten_while_needed() -> None:
    """A sum does not overwrite its shortcut while conv1 of the stage's first block needs it."""
    backend = toy()
    swapped = replace(
        SCHEDULE,
        steps=tuple(
            replace(s, inputs=s.inputs[::-1]) if isinstance(s.op, Add) else s
            for s in SCHEDULE.steps
        ),
    )
    plan = make_plan(backend, swapped, CompileOptions(batch=BATCH, fusion="none"))
    in_place = check_plan(plan, backend.memory.alignment)
    assert in_place["layer1.0.add"] == "maxpool"  # it dies there, not before
    x = images(SCHEDULE, BATCH)
    output = compiled(backend, swapped, fusion="none")(x)
    np.testing.assert_array_equal(output, compiled(backend, fusion="none")(x))


# -- choosing kernels --------------------------------------------------------------------------


def ids(plan: Plan, op: type[Op]) -> dict[str, str]:
    return {s.name: s.kernel.id for s in plan.steps if type(s.problem.op) is op}


def plan_with(backend: Backend, **kernels: str) -> Plan:
    options = CompileOptions(batch=BATCH, fusion="none", kernels=kernels)
    return make_plan(backend, SCHEDULE, options)


def test_the_first_kernel_that_takes_a_problem_is_chosen() -> None:
    picky = PLAIN[-1]
    plan = plan_with(toy(picky, *PLAIN[:-1]))
    found = ids(plan, Conv2d)
    assert found["layer4.0.downsample.0"] == "toy/conv2d/picky/fp32"
    assert found["layer4.0.conv1"] == "toy/conv2d/plain/fp32"
    assert set(ids(plan_with(toy()), Conv2d).values()) == {"toy/conv2d/plain/fp32"}


def test_kernels_can_be_chosen_by_op() -> None:
    plan = plan_with(r18_numpy.Backend(), conv2d="numpy/conv2d/direct/fp32")
    assert set(ids(plan, Conv2d).values()) == {"numpy/conv2d/direct/fp32"}


def test_kernels_can_be_chosen_by_step_which_wins_over_the_op() -> None:
    choice = {"conv2d": "numpy/conv2d/direct/fp32", "layer1.0.conv1": "numpy/conv2d/im2col/fp32"}
    plan = plan_with(r18_numpy.Backend(), **choice)
    found = ids(plan, Conv2d)
    assert found.pop("layer1.0.conv1") == "numpy/conv2d/im2col/fp32"
    assert set(found.values()) == {"numpy/conv2d/direct/fp32"}


def test_kernels_can_be_chosen_by_a_glob() -> None:
    plan = plan_with(r18_numpy.Backend(), conv2d="*/direct/*")
    assert set(ids(plan, Conv2d).values()) == {"numpy/conv2d/direct/fp32"}
    plan = plan_with(toy(), conv2d="toy/conv2d/p*")  # the first of those that match
    assert set(ids(plan, Conv2d).values()) == {"toy/conv2d/plain/fp32"}


def test_a_choice_changes_the_kernel_and_not_the_result() -> None:
    backend = r18_numpy.Backend()
    direct = compiled(backend, kernels={"conv2d": "*direct*"})(images(SCHEDULE, BATCH))
    exact = expected("all")[SCHEDULE.output]
    np.testing.assert_allclose(direct, exact, rtol=0, atol=1e-5)


def test_a_kernel_that_does_not_exist_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        plan_with(r18_numpy.Backend(), conv2d="numpy/conv2d/dirct/fp32")
    first, known, hint = str(caught.value).splitlines()
    assert first == (
        "unknown kernel 'numpy/conv2d/dirct/fp32', did you mean 'numpy/conv2d/direct/fp32'?"
    )
    assert "numpy/conv2d/im2col/fp64" in known
    assert hint == "  A glob over ids works too."


def test_a_choice_for_a_step_or_op_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        plan_with(toy(), **{"layer1.0.conv3": "*"})
    first = str(caught.value).splitlines()[0]
    assert first == (
        "unknown step or op in a kernel override 'layer1.0.conv3', did you mean 'layer1.0.conv2'?"
    )
    options = CompileOptions(batch=BATCH, fusion="all", kernels={"bn1": "*"})
    with pytest.raises(UsageError, match="kernel override 'fc1'"):  # after one that is known
        compiled(toy(), kernels={"conv1": "toy/*", "conv2d": "toy/*", "fc1": "toy/*"})
    with pytest.raises(UsageError, match="kernel override 'bn1'"):  # folded away at this level
        make_plan(toy(), SCHEDULE, options)


def test_a_refused_choice_lists_every_reason() -> None:
    with pytest.raises(NoKernel) as caught:
        plan_with(toy(), conv2d="toy/conv2d/picky/fp32")
    assert str(caught.value).splitlines() == [
        "no kernel takes conv2d(in_channels=3, out_channels=8, kernel_size=7×7, stride=2×2, "
        "padding=3×3) 3×3×32×32 → 3×8×16×16 in fp32 (step 'conv1' of 'tiny' on backend 'toy')",
        "  toy/conv2d/picky/fp32: takes 1×1 only",
    ]
    with pytest.raises(NoKernel) as caught:
        plan_with(r18_numpy.Backend(), conv2d="numpy/relu/*")
    assert str(caught.value).splitlines()[1:] == [
        "  numpy/relu/maximum/fp32: computes relu",
        "  numpy/relu/maximum/fp64: computes relu",
    ]
    with pytest.raises(NoKernel) as caught:
        plan_with(r18_numpy.Backend(), **{"layer1.0.conv1": "numpy/conv2d/*/fp64"})
    assert str(caught.value).splitlines()[1:] == [
        "  numpy/conv2d/im2col/fp64: its precision is fp64",
        "  numpy/conv2d/direct/fp64: its precision is fp64",
    ]


def test_a_precision_without_kernels_says_which_there_are() -> None:
    with pytest.raises(NoKernel) as caught:
        compiled(r18_numpy.Backend(), precision="fp16")
    head, known = str(caught.value).splitlines()
    assert head.endswith("in fp16 (step 'conv1' of 'tiny' on backend 'numpy')")
    assert known == "  precisions with kernels for conv2d: fp32, fp64"
    with pytest.raises(UnknownName, match="unknown precision 'fp23', did you mean 'fp32'"):
        compiled(r18_numpy.Backend(), precision="fp23")


def test_an_op_without_kernels_says_so() -> None:
    without = tuple(k for k in PLAIN if k.op is not Linear)
    with pytest.raises(NoKernel, match="precisions with kernels for linear: none"):
        compiled(toy(*without))


def test_choose_kernel_refuses_by_every_kernel_when_none_takes() -> None:
    problem = Problem(ReLU(), ((1, 2),))
    kernels = [
        ToyKernel(ReLU, "a", refuses=lambda p: "reason one"),
        ToyKernel(ReLU, "b", refuses=lambda p: "reason two"),
        ToyKernel(Add, "c"),
    ]
    with pytest.raises(NoKernel) as caught:
        choose_kernel(kernels, problem, "fp32")
    assert str(caught.value).splitlines() == [
        "no kernel takes relu() 1×2 → 1×2 in fp32",
        "  toy/relu/a/fp32: reason one",
        "  toy/relu/b/fp32: reason two",
    ]


# -- layouts -----------------------------------------------------------------------------------

NHWC = {
    "toy": "toy/conv2d/nhwc/fp32",
    "torch": "torch/conv2d/aten_nhwc/fp32",
}


@pytest.mark.parametrize("name", NHWC)
def test_relayout_steps_stand_where_layouts_meet(name: str) -> None:
    backend = MAKE[name]()
    taps = tuple(SCHEDULE.taps)
    chosen = {"layer2.0.conv1": NHWC[name], "layer2.0.downsample.0": NHWC[name]}
    options = CompileOptions(batch=BATCH, fusion="none", taps=taps, kernels=chosen)
    plan = make_plan(backend, SCHEDULE, options)
    check_plan(plan, backend.memory.alignment)
    added = [s for s in plan.steps if isinstance(s.problem.op, Relayout)]
    assert [(s.name, s.inputs, s.output, s.problem.op.label) for s in added] == [
        # The block's input once, for both of its readers; then each convolution's result.
        (
            "relayout layer1.0.relu_1@nhwc",
            ("layer1.0.relu_1",),
            "layer1.0.relu_1@nhwc",
            "relayout nchw→nhwc",
        ),
        (
            "relayout layer2.0.conv1@nchw",
            ("layer2.0.conv1",),
            "layer2.0.conv1@nchw",
            "relayout nhwc→nchw",
        ),
        (
            "relayout layer2.0.downsample.0@nchw",
            ("layer2.0.downsample.0",),
            "layer2.0.downsample.0@nchw",
            "relayout nhwc→nchw",
        ),
    ]
    assert plan.tensors["layer2.0.conv1"].layout is Layout.NHWC
    assert [s.name for s in plan.steps if s not in added] == [s.name for s in SCHEDULE.steps]
    for before, step in pairwise(plan.steps):
        if before in added:  # a relayout comes right before the step that wants it
            assert before.output in step.inputs


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize(
    "chosen", [{"conv2d"}, {"layer2.0.conv1"}, {"conv1", "layer4.0.conv2", "layer3.0.downsample.0"}]
)
@pytest.mark.parametrize("name", NHWC)
def test_layouts_change_no_result(name: str, chosen: set[str], level: str) -> None:
    """Layouts change no result: taps are logical arrays, whatever their layout in memory."""
    taps = tuple(fuse(SCHEDULE, level).taps)
    kernels = dict.fromkeys(chosen, NHWC[name])
    program = compiled(MAKE[name](), fusion=level, taps=taps, kernels=kernels)
    assert any(isinstance(s.problem.op, Relayout) for s in program.plan.steps)
    program(images(SCHEDULE, BATCH))
    for tap in taps:
        exact = expected(level)[program.plan.schedule.value_of(tap)]
        assert np.abs(program.fetch(tap) - exact).max() <= 1e-5 * np.abs(exact).max()


def test_convolutions_of_one_layout_that_follow_each_other_need_no_relayout() -> None:
    backend = toy()
    options = CompileOptions(batch=BATCH, fusion="all", kernels={"conv2d": NHWC["toy"]})
    plan = make_plan(backend, SCHEDULE, options)
    added = [s.output for s in plan.steps if isinstance(s.problem.op, Relayout)]
    # Into the stem, around the pool, and in front of the average: nothing inside the stages.
    assert added == ["image@nhwc", "relu@nchw", "maxpool@nhwc", "layer4.0.relu_1@nchw"]


def relayouts(*twins: ToyKernel, **overrides: str) -> list[str]:
    """Values that are relaid out if convolutions are NHWC and `twins` follow the NCHW kernels."""
    kernels = {"conv2d": NHWC["toy"], **overrides}
    program = compiled(toy(*PLAIN, *twins), fusion="all", kernels=kernels)
    exact = expected()[SCHEDULE.output]
    assert np.abs(program(images(SCHEDULE, BATCH)) - exact).max() <= 1e-5 * np.abs(exact).max()
    return [s.output for s in program.plan.steps if isinstance(s.problem.op, Relayout)]


def test_a_kernel_follows_its_first_input_into_its_layout() -> None:
    pool = ToyKernel(MaxPool2d, "plain", Layout.NHWC)
    gap = ToyKernel(GlobalAvgPool, "plain", Layout.NHWC)
    assert relayouts(pool, gap) == ["image@nhwc"]
    assert relayouts(gap) == ["image@nhwc", "relu@nchw", "maxpool@nhwc"]


def test_a_kernel_follows_no_input_into_what_is_not_its_own_algorithm_or_refuses() -> None:
    around = ["image@nhwc", "relu@nchw", "maxpool@nhwc", "layer4.0.relu_1@nchw"]
    other = ToyKernel(MaxPool2d, "other", Layout.NHWC)
    picky = ToyKernel(MaxPool2d, "plain", Layout.NHWC, refuses=lambda problem: "no")
    assert relayouts(other, picky) == around
    # Its twin is there, but an override is obeyed as it stands.
    pool = ToyKernel(MaxPool2d, "other", Layout.NHWC)
    assert relayouts(ToyKernel(MaxPool2d, "other"), pool, maxpool2d="toy/*/other/*") == around


def test_a_kernel_that_reads_another_layout_than_it_writes_needs_no_relayout() -> None:
    stem = ToyKernel(Conv2d, "stem", Layout.NHWC, reads=Layout.NCHW)
    twin = ToyKernel(Conv2d, "nhwc", Layout.NHWC, reads=Layout.NCHW)
    pools = [ToyKernel(op, "plain", Layout.NHWC) for op in (MaxPool2d, GlobalAvgPool)]
    assert relayouts(stem, *pools, conv1=stem.id) == []
    # Not asked for, it is found by the layout that it reads.
    backend = toy(PLAIN[-2], twin, *pools, *PLAIN[:-2])
    plan = make_plan(backend, SCHEDULE, CompileOptions(batch=BATCH, fusion="all"))
    assert plan.steps[0].kernel is twin
    assert not any(isinstance(step.problem.op, Relayout) for step in plan.steps)


def test_layouts_that_meet_without_a_relayout_kernel_are_an_error() -> None:
    without = tuple(k for k in PLAIN if k.op is not Relayout)
    with pytest.raises(NoKernel, match="precisions with kernels for relayout: none"):
        compiled(toy(*without), kernels={"layer2.0.conv1": NHWC["toy"]})


# -- one kernel alone --------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("level", ["none", "all"])
def test_a_kernel_alone_gives_the_bits_that_it_gives_in_the_program(name: str, level: str) -> None:
    """A kernel alone gives its bits in the program, or tests of kernels would not count there."""
    backend = MAKE[name]()
    schedule = fuse(SCHEDULE, level)
    chosen = {"layer2.0.conv1": NHWC[name]} if name in NHWC else {}
    program = compiled(backend, fusion=level, taps=tuple(schedule.taps), kernels=chosen)
    program(images(SCHEDULE, BATCH))
    folded = fold_weights(schedule, weights())
    for step in program.plan.steps:
        values = [program.plan.tensors[key].value for key in (*step.inputs, step.output)]
        *inputs, inside = (program.fetch(value) for value in values)
        given = [folded[weight] for weight in step.weights]
        alone = run_kernel(backend, step.kernel, step.problem, *inputs, *given)
        np.testing.assert_array_equal(alone, inside, err_msg=step.name)


def test_run_kernel_refuses_what_is_not_the_problem() -> None:
    backend = toy()
    conv = next(k for k in PLAIN if k.algorithm == "picky")
    op = Conv2d(2, 4, (1, 1), bias=True)
    problem = Problem(op, ((1, 2, 3, 3),))
    x, w, b = np.ones((1, 2, 3, 3)), np.ones((4, 2, 1, 1)), np.ones(4)
    assert run_kernel(backend, conv, problem, x, w, b).tolist() == np.full((1, 4, 3, 3), 3).tolist()
    with pytest.raises(ShapeError, match=r"was given inputs of shape \(1, 2, 3, 4\)"):
        run_kernel(backend, conv, problem, np.ones((1, 2, 3, 4)), w, b)
    with pytest.raises(WeightsError, match=r"conv2d\+bias reads 2 weights, got 1"):
        run_kernel(backend, conv, problem, x, w)
    with pytest.raises(WeightsError, match=r"weight 'bias' has shape \(5,\)"):
        run_kernel(backend, conv, problem, x, w, np.ones(5))
    with pytest.raises(WeightsError, match="reads 2 weights, got 3"):
        run_kernel(backend, conv, problem, x, w, b, b)
    big = Problem(Conv2d(65, 1, (1, 1)), ((1, 65, 1, 1),))
    with pytest.raises(NoKernel) as caught:
        run_kernel(backend, conv, big, np.ones((1, 65, 1, 1)), np.ones((1, 65, 1, 1)))
    assert str(caught.value) == (
        "toy/conv2d/picky/fp32 refuses conv2d(in_channels=65, out_channels=1, kernel_size=1×1, "
        "stride=1×1, padding=0×0) 1×65×1×1 → 1×1×1×1: takes 1×1 only"
    )


def test_kernels_read_their_inputs_and_weights_only() -> None:
    """Kernels do not change their inputs and weights, which belong to `run_kernel`'s caller."""
    backend = r18_numpy.Backend()
    rng = np.random.default_rng(0)
    problem = Problem(BatchNorm(3), ((2, 3, 4, 4),))
    arrays = [rng.normal(size=(2, 3, 4, 4)).astype(np.float32)]
    arrays += [rng.uniform(1, 2, 3).astype(np.float32) for _ in range(4)]
    before = [a.copy() for a in arrays]
    run_kernel(backend, choose_kernel(backend.kernels(), problem, "fp32"), problem, *arrays)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


# -- errors ------------------------------------------------------------------------------------


def test_what_was_not_tapped_cannot_be_fetched() -> None:
    program = compiled(r18_numpy.Backend(), taps=("layer1",))
    program(images(SCHEDULE, BATCH))
    assert program.fetch("layer1.0").shape == program.fetch("layer1").shape  # the same value
    with pytest.raises(UsageError) as caught:
        program.fetch("layer2")
    assert str(caught.value) == (
        "checkpoint 'layer2' was not kept: compile with taps=('layer2', ...)"
    )
    with pytest.raises(UnknownName, match="unknown checkpoint 'layer22', did you mean 'layer2'"):
        program.fetch("layer22")


def test_an_unknown_tap_is_an_error_at_compilation() -> None:
    with pytest.raises(UnknownName, match="unknown checkpoint 'layer9'"):
        compiled(r18_numpy.Backend(), taps=("layer9",))
    with pytest.raises(UnknownName, match="level 'none' has every one"):
        compiled(r18_numpy.Backend(), taps=("layer1.0.conv1",))
    compiled(r18_numpy.Backend(), taps=("layer1.0.conv1",), fusion="none")


@pytest.mark.parametrize(
    "shape", [(BATCH + 1, 3, 32, 32), (3, 32, 32), (BATCH, 32, 32, 3), (BATCH, 3, 32, 31)]
)
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    program = compiled(r18_numpy.Backend())
    with pytest.raises(ShapeError) as caught:
        program(np.zeros(shape, np.float32))
    assert str(caught.value) == (
        f"the program takes (3, 3, 32, 32), got {shape}; its batch is fixed, "
        "compile another for another size"
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.complex64])
def test_images_that_are_not_floating_point_are_refused(dtype: Any) -> None:
    """Images of integers are refused, as unprocessed bytes would pass for tiny variations."""
    program = compiled(r18_numpy.Backend())
    with pytest.raises(UsageError, match=f"floating-point input, got {np.dtype(dtype)}"):
        program(np.zeros((BATCH, 3, 32, 32), dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_floating_point_images_are_rounded_to_storage(dtype: Any) -> None:
    program = compiled(r18_numpy.Backend())
    x = images(SCHEDULE, BATCH).astype(dtype)
    np.testing.assert_array_equal(program(x), program(x.astype(np.float32)))


def test_images_of_any_strides_and_byte_order_are_taken() -> None:
    program = compiled(r18_numpy.Backend())
    x = images(SCHEDULE, BATCH)
    for same in (
        np.asfortranarray(x),
        x[::-1][::-1],
        np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        x.astype(">f4"),
        np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),  # read-only
    ):
        np.testing.assert_array_equal(program(same), program(x))


@BACKENDS
def test_a_closed_program_says_so(name: str) -> None:
    program = compiled(MAKE[name]())
    x = images(SCHEDULE, BATCH)
    program(x)
    program.close()
    program.close()  # idempotent
    for use in (
        lambda: program(x),
        lambda: program.load(x),
        program.launch,
        program.synchronize,
        program.fetch,
        program.profile,
    ):
        with pytest.raises(ProgramClosed, match="this program was closed; compile"):
            use()
    assert program.plan.steps  # what it did can still be read


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_program_is_neither_copied_nor_pickled(duplicate: Callable[[Program], Any]) -> None:
    with pytest.raises(UsageError, match="neither pickled nor copied\n  compile again"):
        duplicate(compiled(r18_numpy.Backend()))


def test_closing_waits_for_the_work_in_flight() -> None:
    backend = toy()
    program = compiled(backend)
    program.load(images(SCHEDULE, BATCH))
    program.launch()
    program.close()
    assert backend.streams[0].queue == []


def test_a_profile_begins_on_an_idle_stream() -> None:
    """A profile starts on an idle stream, or the first step would include the run before it."""
    program = compiled(toy())
    program.load(images(SCHEDULE, BATCH))
    program.launch()
    stream = program.stream
    assert isinstance(stream, ToyStream)
    assert stream.queue
    record, idle = stream.record, list[bool]()

    def recorded() -> ToyEvent:
        idle.append(not stream.queue)
        return record()

    stream.record = recorded  # type: ignore[method-assign]
    program.profile()
    assert idle[0]


def test_missing_and_misshapen_weights_are_named() -> None:
    backend = r18_numpy.Backend()
    options = CompileOptions(batch=BATCH)
    missing = {n: a for n, a in weights().items() if n != "layer1.0.conv1.weight"}
    with pytest.raises(WeightsError, match=r"needs the weight 'layer1\.0\.conv1\.weight'"):
        backend.compile(SCHEDULE, missing, options)
    for name, shape in (("fc.weight", (10, 63)), ("layer1.0.conv1.weight", (8, 8, 3, 1))):
        for level in ("none", "all"):
            wrong = {**weights(), name: np.zeros(shape, np.float32)}
            with pytest.raises(WeightsError, match=r"has shape .* needs"):
                backend.compile(SCHEDULE, wrong, replace(options, fusion=level))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layer1.0.bn1.weight", (1,)),
        ("layer1.0.bn1.bias", ()),
        ("layer1.0.bn1.running_mean", (1,)),
        ("layer1.0.bn1.running_var", (9,)),
        ("layer1.0.conv1.weight", (8, 3, 3)),
        ("layer1.0.conv1.weight", (1, 8, 3, 3)),
    ],
)
def test_weights_that_are_folded_are_checked_like_the_others(
    name: str, shape: tuple[int, ...]
) -> None:
    """Folded weights are checked too: NumPy would broadcast a wrong shape without an error."""
    wrong = {**weights(), name: np.ones(shape, np.float32)}
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        r18_numpy.Backend().compile(SCHEDULE, wrong, CompileOptions(batch=BATCH))


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch must be from 1 to .*, got 0"):
        CompileOptions(batch=0)


def test_an_unknown_level_is_refused_at_compilation() -> None:
    with pytest.raises(UsageError, match="unknown fusion level 'full'"):
        compiled(r18_numpy.Backend(), fusion="full")


def test_planning_needs_no_device() -> None:
    """Planning for CUDA works on a machine without a GPU."""
    plan = make_plan(r18_torch.cuda(), SCHEDULE, CompileOptions(batch=BATCH, precision="tf32"))
    assert {k.split("/")[-1] for k in plan.kernel_ids().values()} == {"tf32"}


def test_kernel_ids_are_unique_and_say_what_they_name() -> None:
    for backend in (r18_numpy.Backend(), r18_torch.cpu()):
        kernels = backend.kernels()
        assert len({k.id for k in kernels}) == len(kernels)
        for kernel in kernels:
            assert isinstance(kernel, Kernel)
            parts = kernel.id.split("/")
            assert parts[:4] == [
                backend.name,
                kernel.op.name,
                kernel.algorithm,
                kernel.precision.name,
            ]
        for precision in {k.precision.name for k in kernels}:
            found = {k.op for k in kernels if k.precision.name == precision}
            calibrated = {
                "int8": QUANTIZED_OPS,
                "fp8": (*SCALED_OPS, MaxPool2d, Relayout),
            }
            needed = set(calibrated.get(precision, OPS.values()))
            fused = {*PARTS, MatMul}  # which no backend needs
            assert found - fused == needed - fused
