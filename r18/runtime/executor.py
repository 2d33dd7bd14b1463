"""The program that any backend with kernels and an allocator gets for free.

`make_plan` is a pure function: it picks a kernel for each step, puts a `Relayout` step where
layouts meet, and gives every value, input and workspace its place in one arena. `ExecutorProgram`
uploads weights, allocates the arena, and enqueues the plan's launches. `run_kernel` calls a kernel
alone; it goes down the same `Launch.enqueue` path, so that what is proved about kernels holds for
the network.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, cast

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Branching,
    Buffer,
    CompileOptions,
    Concurrent,
    Event,
    Kernel,
    Memory,
    StepTime,
    Stream,
    Tuned,
    input_dtype,
    input_layout,
    output_layout,
)
from r18.errors import NoKernel, ProgramClosed, ShapeError, UsageError, WeightsError, unknown
from r18.graph.ops import Layout, Normalize, Problem, Relayout, Shape
from r18.graph.passes import fold_weights
from r18.graph.precision import precision
from r18.graph.schedule import Schedule
from r18.runtime.arena import Lifetime, plan_arena
from r18.runtime.fusing import schedule_for

# -- choosing kernels --------------------------------------------------------------------------


def choose_kernel(
    kernels: Sequence[Kernel],
    problem: Problem,
    precision_name: str,
    *,
    pattern: str | None = None,
    asked_by: str = "",
) -> Kernel:
    """The first kernel that takes the problem in that precision, among those matching `pattern`.

    Raises `NoKernel` with every refusal, or `UnknownName` when no kernel's id matches the pattern.
    """
    if pattern is not None:
        kernels = [k for k in kernels if fnmatchcase(k.id, pattern)] or _no_such(kernels, pattern)
    refusals: list[str] = []
    for kernel in kernels:
        if kernel.op is not type(problem.op):
            if pattern is not None:
                refusals.append(f"{kernel.id}: computes {kernel.op.name}")
        elif kernel.precision.name != precision_name:
            if pattern is not None:
                refusals.append(f"{kernel.id}: its precision is {kernel.precision}")
        elif (reason := kernel.refusal(problem)) is not None:
            refusals.append(f"{kernel.id}: {reason}")
        else:
            return kernel
    head = f"no kernel takes {problem} in {precision_name}" + (asked_by and f" ({asked_by})")
    known = sorted({k.precision.name for k in kernels if k.op is type(problem.op)})
    if not refusals:
        refusals = [f"precisions with kernels for {problem.op.name}: {', '.join(known) or 'none'}"]
    if isinstance(problem.op, Normalize):
        refusals.append("preprocess on the host instead, and compile without `pixels`")
    raise NoKernel("\n  ".join([head, *refusals]))


def in_layout_of_input(
    kernels: Sequence[Kernel], kernel: Kernel, problem: Problem, layout: Layout
) -> Kernel:
    """The chosen kernel, or its twin that reads the first input as it lies, in `layout`.

    A twin has the same op, algorithm and precision, and takes the problem. What a backend prefers
    is an algorithm; to follow its input's layout spares that algorithm a relayout.
    """
    if len(problem.inputs[0]) != 4 or input_layout(kernel, problem) is layout:
        return kernel
    return next(
        (
            twin
            for twin in kernels
            if (twin.op, twin.algorithm, twin.precision)
            == (kernel.op, kernel.algorithm, kernel.precision)
            and input_layout(twin, problem) is layout
            and twin.refusal(problem) is None
        ),
        kernel,
    )


def _no_such(kernels: Iterable[Kernel], pattern: str) -> list[Kernel]:
    raise unknown("kernel", pattern, (k.id for k in kernels), hint="A glob over ids works too.")


# -- the plan ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A value in memory: where it lies in the arena, and how."""

    value: str
    shape: Shape  # logical
    layout: Layout
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.dtype)


def tensor_nbytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes of a dense tensor, exactly."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class PlannedStep:
    """One launch: a kernel on a problem, between named tensors of the plan.

    beside: it may run while the step before it does.
    """

    name: str
    problem: Problem
    kernel: Kernel
    inputs: tuple[str, ...]  # keys of Plan.tensors
    output: str
    weights: tuple[str, ...]
    workspace_nbytes: int
    workspace_offset: int
    beside: bool = False


@dataclass(frozen=True)
class Plan:
    """What a program will do, before any device is touched."""

    backend: str
    schedule: Schedule
    options: CompileOptions
    steps: tuple[PlannedStep, ...]
    tensors: Mapping[str, Tensor]  # by value name, or `value@layout` for a relaid-out copy
    arena_nbytes: int

    def kernel_ids(self) -> dict[str, str]:
        """Kernel id by step name."""
        return {step.name: step.kernel.id for step in self.steps}


@dataclass
class _Draft:
    """A planned step before the arena gives it offsets."""

    name: str
    problem: Problem
    kernel: Kernel
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...]


def make_plan(backend: Backend, schedule: Schedule, options: CompileOptions) -> Plan:
    """Plan a schedule (at level `none`, or already at `options.fusion`) on a backend.

    Steps are those of `r18.runtime.fusing.schedule_for`: at level `all` the backend has a say.

    A step gets the kernel that its override names. Without one it gets the first that the backend
    lists and that takes its problem, but where its first input lies in another layout than that
    kernel reads, the same algorithm in the input's layout if there is one (see
    `in_layout_of_input`): so pooling between NHWC convolutions stays in NHWC. Layouts that still
    differ meet in a `Relayout` step.

    Two steps in a row of which neither needs the other are planned side by side where the backend
    says that it pays (`r18.backend.Concurrent`): nothing of either lies where the other's does.

    Pure: needs no device. Raises `NoKernel` for a step that no kernel takes, `UnknownName` for a
    tap, precision or kernel that does not exist, `UsageError` for an override that names no step
    and no op of the schedule.
    """
    storage = precision(options.precision).dtype
    schedule = schedule_for(backend, schedule, options)
    kernels = backend.kernels()
    _check_overrides(schedule, options)
    shapes = schedule.shapes(options.batch)
    problems = schedule.problems(options.batch)
    dtypes = dict.fromkeys(shapes, storage)
    layouts: dict[str, Layout] = {schedule.input: Layout.NCHW}
    if schedule.of_pixels:
        dtypes[schedule.input], layouts[schedule.input] = np.dtype(np.uint8), Layout.NHWC
    values: dict[str, str] = {schedule.input: schedule.input}  # tensor key → value
    drafts: list[_Draft] = []

    def in_layout(value: str, wanted: Layout) -> str:
        """The key of the value's tensor in the wanted layout, planning a relayout if need be."""
        if len(shapes[value]) != 4 or layouts[value] is wanted:
            return value
        key = f"{value}@{wanted.value}"
        if key not in values:
            problem = Problem(Relayout(layouts[value], wanted), (shapes[value],))
            kernel = choose_kernel(kernels, problem, options.precision)
            drafts.append(_Draft(f"relayout {key}", problem, kernel, (value,), key, ()))
            layouts[key], values[key] = wanted, value
        return key

    for step in schedule.steps:
        pattern = options.kernels.get(step.name, options.kernels.get(step.op.name))
        kernel = choose_kernel(
            fastest_first(backend, kernels, problems[step.name], options.precision),
            problems[step.name],
            options.precision,
            pattern=pattern,
            asked_by=f"step '{step.name}' of '{schedule.name}' on backend '{backend.name}'",
        )
        if pattern is None:
            kernel = in_layout_of_input(
                kernels, kernel, problems[step.name], layouts[step.inputs[0]]
            )
        reads = input_layout(kernel, problems[step.name])
        inputs = tuple(in_layout(value, reads) for value in step.inputs)
        drafts.append(
            _Draft(step.name, problems[step.name], kernel, inputs, step.output, step.weights)
        )
        layouts[step.output], values[step.output] = kernel.layout, step.output

    kept = {schedule.input, schedule.output, *(schedule.value_of(tap) for tap in options.taps)}
    nbytes = {key: tensor_nbytes(shapes[value], dtypes[value]) for key, value in values.items()}
    beside = _beside(backend, drafts, options.precision)
    # What runs side by side runs at the same time, for all that shares memory.
    times = list(accumulate(int(not pair) for pair in beside))
    owner, lifetimes = _lifetimes(drafts, times, schedule.input, kept, nbytes, options.arena)
    scratch = [draft.kernel.workspace(draft.problem) for draft in drafts]
    lifetimes += [
        Lifetime(f"workspace of {draft.name}", size, time, time)
        for draft, size, time in zip(drafts, scratch, times, strict=True)
    ]
    arena = plan_arena(lifetimes, backend.memory.alignment, share=options.arena)
    return Plan(
        backend=backend.name,
        schedule=schedule,
        options=options,
        steps=tuple(
            PlannedStep(
                draft.name,
                draft.problem,
                draft.kernel,
                draft.inputs,
                draft.output,
                draft.weights,
                size,
                arena.offsets[f"workspace of {draft.name}"],
                pair,
            )
            for draft, size, pair in zip(drafts, scratch, beside, strict=True)
        ),
        tensors={
            key: Tensor(
                value, shapes[value], layouts[key], dtypes[value], arena.offsets[owner[key]]
            )
            for key, value in values.items()
        },
        arena_nbytes=arena.nbytes,
    )


def fastest_first(
    backend: Backend, kernels: Sequence[Kernel], problem: Problem, precision_name: str
) -> Sequence[Kernel]:
    """The kernels with the one that measured fastest before the others, where that is known."""
    if not isinstance(backend, Tuned):
        return kernels
    fastest = backend.fastest(problem, precision_name)
    return sorted(kernels, key=lambda kernel: kernel.id != fastest)


def _check_overrides(schedule: Schedule, options: CompileOptions) -> None:
    known = {s.name for s in schedule.steps} | {s.op.name for s in schedule.steps}
    for name in options.kernels:
        if name not in known:
            raise unknown("step or op in a kernel override", name, known, error=UsageError)


def _beside(backend: Backend, drafts: Sequence[_Draft], precision_name: str) -> list[bool]:
    """Of each draft, whether it runs beside the one before; no more than two run at once."""
    found = [False] * len(drafts)
    if not isinstance(backend, Concurrent):
        return found
    for index in range(1, len(drafts)):
        first, second = drafts[index - 1], drafts[index]
        found[index] = (
            not found[index - 1]
            and first.output not in second.inputs
            and not (first.kernel.in_place or second.kernel.in_place)
            and backend.beside(first.problem, second.problem, precision_name)
        )
    return found


def _lifetimes(
    drafts: Sequence[_Draft],
    times: Sequence[int],
    source: str,
    kept: set[str],
    nbytes: Mapping[str, int],
    share: bool,
) -> tuple[dict[str, str], list[Lifetime]]:
    """Each tensor's lifetime, and which tensor's memory it lies in (its own, but for in-place).

    times: when each draft runs; ascending.

    The input lives throughout, so that a program may be launched again without a load; the output
    and the tapped values live to the end. A kernel that works in place takes over its first
    input's memory where that value dies there.
    """
    end = times[-1] + 1
    first = {source: times[0] - 1}
    last = {source: end}
    for time, draft in zip(times, drafts, strict=True):
        first[draft.output] = time
        last[draft.output] = end if draft.output in kept else time
        for key in draft.inputs:
            last[key] = max(last[key], time)
    owner = {key: key for key in first}
    if share:
        for time, draft in zip(times, drafts, strict=True):
            key = draft.inputs[0]
            if (
                draft.kernel.in_place
                and last[key] == time
                and draft.inputs.count(key) == 1
                and nbytes[key] == nbytes[draft.output]
            ):
                root = owner[key]
                owner[draft.output] = root
                last[root] = max(last[root], last[draft.output])
    return owner, [
        Lifetime(key, nbytes[key], first[key], last[key]) for key in first if owner[key] == key
    ]


# -- running -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A kernel with its problem and buffers: the one way in which kernels are called.

    beside: it may run while the launch before it does.
    """

    kernel: Kernel
    problem: Problem
    inputs: tuple[Buffer, ...]
    weights: tuple[Buffer, ...]
    output: Buffer
    workspace: Buffer
    beside: bool = False

    def enqueue(self, stream: Stream) -> None:
        self.kernel.enqueue(
            self.problem, self.inputs, self.weights, self.output, self.workspace, stream
        )


def upload(
    memory: Memory, array: Array, kernel_layout: Layout, dtype: np.dtype[Any], buffer: Buffer
) -> None:
    """Round a logical array to a storage dtype and bring it into a buffer in a layout."""
    if array.ndim == 4 and kernel_layout is Layout.NHWC:
        array = array.transpose(0, 2, 3, 1)
    with np.errstate(over="ignore"):  # beyond the largest finite value lies infinity
        memory.upload(np.ascontiguousarray(array, dtype), buffer)


def download(
    memory: Memory, buffer: Buffer, shape: Shape, layout: Layout, dtype: np.dtype[Any]
) -> Array:
    """A buffer's tensor as a logical array in its storage dtype."""
    return np.ascontiguousarray(
        logical(memory.download(buffer, layout.physical(shape), dtype), layout)
    )


def logical(array: Array, layout: Layout) -> Array:
    """An array of a layout's physical shape, as one of the logical shape over the same memory."""
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 and layout is Layout.NHWC else array


def widened(array: Array) -> Array:
    """A copy in float32, or float64 of float64: as a program gives what it has computed."""
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32)


def prepare_weights(
    kernel: Kernel, problem: Problem, names: Sequence[str], weights: Sequence[Array]
) -> tuple[Buffer, ...]:
    """Check shapes, then let the kernel bring its weights into device form."""
    specs = problem.op.weights()
    if len(specs) != len(weights):
        raise WeightsError(f"{problem.op.label} reads {len(specs)} weights, got {len(weights)}")
    for name, spec, array in zip(names, specs, weights, strict=True):
        if tuple(array.shape) != spec.shape:
            raise WeightsError(
                f"weight '{name}' has shape {tuple(array.shape)}, {problem.op.label} needs "
                f"{spec.shape}"
            )
    return kernel.prepare(problem, tuple(weights))


def prepare_plan(plan: Plan, weights: Mapping[str, Array]) -> tuple[tuple[Buffer, ...], ...]:
    """Each step's weights in device form, from those of level `none`; see `prepare_weights`."""
    read = fold_weights(plan.schedule, weights)
    return tuple(
        prepare_weights(step.kernel, step.problem, step.weights, [read[n] for n in step.weights])
        for step in plan.steps
    )


def bind(
    plan: Plan,
    prepared: Sequence[tuple[Buffer, ...]],
    arena: Buffer,
    given: Mapping[str, Buffer] | None = None,
) -> tuple[Launch, ...]:
    """The plan's steps over an arena, ready to enqueue; the first part of `prepared` is the first
    step's weights. `given` buffers take the place of the tensors of those keys."""
    given = given or {}

    def place(key: str) -> Buffer:
        tensor = plan.tensors[key]
        return given[key] if key in given else arena.view(tensor.offset, tensor.nbytes)

    return tuple(
        Launch(
            step.kernel,
            step.problem,
            tuple(place(key) for key in step.inputs),
            weights,
            place(step.output),
            arena.view(step.workspace_offset, step.workspace_nbytes),
            step.beside,
        )
        for step, weights in zip(plan.steps, prepared, strict=True)
    )


def enqueue_all(launches: Sequence[Launch], stream: Stream) -> None:
    """Enqueue launches in their order, side by side what may be where the stream branches."""
    pending = list(reversed(launches))
    while pending:
        launch = pending.pop()
        if pending and pending[-1].beside and isinstance(stream, Branching):
            with stream.branch() as branch:
                launch.enqueue(stream)
                pending.pop().enqueue(branch)
        else:
            launch.enqueue(stream)


class ExecutorProgram:
    """A plan with its memory and launches. See `r18.backend.Program`."""

    def __init__(self, backend: Backend, plan: Plan, weights: Mapping[str, Array]) -> None:
        self._plan = plan
        self._memory = backend.memory
        self._stream = backend.stream()
        self._lock = threading.RLock()
        self._closed = False
        prepared = prepare_plan(plan, weights)
        self._arena = self._memory.empty(plan.arena_nbytes)
        self._launches = bind(plan, prepared, self._arena)
        self.weight_nbytes = sum(b.nbytes for launch in self._launches for b in launch.weights)
        self._input_arrays: tuple[Array, Array] | None = None
        self._graph: Callable[[], None] | None = None
        if plan.options.graph:
            self._graph = self._stream.capture(lambda: self._enqueue(self._launches))

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def stream(self) -> Stream:
        """Where every launch goes; see `r18.backend.OnStream`."""
        return self._stream

    def __call__(self, images: Array) -> Array:
        """Logits (or the schedule's output) of one batch; (N, C, H, W) in, float32 out."""
        with self._lock:
            self.load(images)
            self.launch()
            return self.fetch()

    def load(self, images: Array) -> None:
        """Bring a batch of the program's input shape to the device: floating point, or pixels."""
        images = np.asarray(images)
        tensor = self._check_input(images.shape, images.dtype)
        with self._lock:
            self._stream.synchronize()  # a launch in flight may still be reading the last batch
            upload(self._memory, images, tensor.layout, tensor.dtype, self._buffer(tensor.value))

    def launch(self) -> None:
        """Enqueue one run over what was loaded; returns at once on an asynchronous device."""
        self._check_open()
        if self._graph is not None:
            self._graph()
        else:
            self._enqueue(self._launches)

    def synchronize(self) -> None:
        """Wait until every launch is complete."""
        self._check_open()
        self._stream.synchronize()

    def fetch(self, name: str | None = None) -> Array:
        """A copy of the output, or of a tapped checkpoint, by logical shape; waits for launches.

        Raises `UnknownName` for a name that is no checkpoint and `UsageError` for one that was
        not tapped.
        """
        self._check_open()
        schedule = self._plan.schedule
        value = schedule.output if name is None else schedule.value_of(name)
        kept = {schedule.input, schedule.output}
        kept |= {schedule.value_of(tap) for tap in self._plan.options.taps}
        if value not in kept:
            raise UsageError(f"checkpoint '{name}' was not kept: compile with taps=('{name}', ...)")
        tensor = self._plan.tensors[value]
        with self._lock:
            self._stream.synchronize()
            array = download(
                self._memory, self._buffer(value), tensor.shape, tensor.layout, tensor.dtype
            )
        return widened(array)

    def input_arrays(self) -> tuple[Array, Array]:
        """See `r18.backend.Pipelined`. Where runs end at once, both may be filled at any time."""
        self._check_open()
        if self._input_arrays is None:
            tensor = self._plan.tensors[self._plan.schedule.input]
            self._input_arrays = self._host_array(tensor), self._host_array(tensor)
        return self._input_arrays

    def fetch_later(self) -> Callable[[], Array]:
        """See `r18.backend.Pipelined`. It is fetched here and now."""
        output = self.fetch()
        return lambda: output

    def profile(self) -> list[StepTime]:
        """Time of each step of one run, by the stream's events, outside any graph.

        A step whose kernel works in phases has an entry for each, in order.
        """
        self._check_open()
        marks: list[tuple[PlannedStep, str, Event]] = []
        with self._lock:
            self._stream.synchronize()
            start = self._stream.record()
            for step, launch in zip(self._plan.steps, self._launches_now(), strict=True):
                with self._stream.trace() as phases:
                    launch.enqueue(self._stream)
                if not phases:
                    phases.append(("", self._stream.record()))
                marks += [(step, phase, event) for phase, event in phases]
            self._stream.synchronize()
        times, earlier = [], start
        for step, phase, event in marks:
            elapsed = event.milliseconds_since(earlier)
            times.append(StepTime(step.name, step.kernel.id, elapsed, phase))
            earlier = event
        return times

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._closed:
            self._stream.synchronize()
        self._closed = True
        self._launches = ()
        self._graph = None
        self._input_arrays = None
        self._arena = cast(Buffer, None)

    def _buffer(self, key: str) -> Buffer:
        tensor = self._plan.tensors[key]
        return self._arena.view(tensor.offset, tensor.nbytes)

    def _host_array(self, tensor: Tensor) -> Array:
        """A host array that lies in memory as the tensor does, logical to look at."""
        return logical(np.zeros(tensor.layout.physical(tensor.shape), tensor.dtype), tensor.layout)

    def _launches_now(self) -> tuple[Launch, ...]:
        """The launches over the batch loaded last."""
        return self._launches

    def _enqueue(self, launches: Sequence[Launch]) -> None:
        enqueue_all(launches, self._stream)

    def _check_input(self, shape: Shape, dtype: np.dtype[Any]) -> Tensor:
        """The input's tensor, if a batch of this shape and dtype fits it."""
        self._check_open()
        tensor = self._plan.tensors[self._plan.schedule.input]
        if shape != tensor.shape:
            raise ShapeError(
                f"the program takes {tensor.shape}, got {shape}; its batch is fixed, "
                "compile another for another size"
            )
        if self._plan.schedule.of_pixels:
            if dtype != tensor.dtype:
                raise UsageError(
                    f"the program takes {tensor.dtype} pixels and normalises them itself, got "
                    f"{dtype}; for preprocessed input compile without `pixels`"
                )
        elif dtype.kind != "f" and dtype != tensor.dtype:
            raise UsageError(
                f"the program takes preprocessed floating-point input, got {dtype}; "
                "for pixels compile with `pixels`"
            )
        return tensor

    def _check_open(self) -> None:
        if self._closed:
            raise ProgramClosed("this program was closed; compile the schedule again")


def compile_schedule(
    backend: Backend, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
) -> ExecutorProgram:
    """Plan, upload, capture. `weights` are those of level `none`, by torchvision's names.

    Raises what `make_plan` raises, and `WeightsError` for a missing or misshapen weight.
    """
    return ExecutorProgram(backend, make_plan(backend, schedule, options), weights)


def launch_on(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Launch:
    """A launch in buffers of its own, of host arrays: the problem's inputs, then the op's weights.

    Arrays are logical (NCHW, OIHW), brought to what the kernel reads on the way in. Raises
    `NoKernel` with the refusal, `ShapeError` or `WeightsError` for arrays that are not the
    problem's.
    """
    if (reason := kernel.refusal(problem)) is not None:
        raise NoKernel(f"{kernel.id} refuses {problem}: {reason}")
    inputs, weights = arrays[: problem.op.arity], arrays[problem.op.arity :]
    if tuple(a.shape for a in inputs) != problem.inputs:
        raise ShapeError(
            f"{problem} was given inputs of shape {', '.join(str(a.shape) for a in inputs)}"
        )
    memory, dtype = backend.memory, kernel.precision.dtype
    buffers, given = [], input_dtype(problem, kernel.precision)
    for array in inputs:
        buffers.append(memory.empty(tensor_nbytes(array.shape, given)))
        upload(memory, array, input_layout(kernel, problem), given, buffers[-1])
    names = [spec.role for spec in problem.op.weights()]
    return Launch(
        kernel,
        problem,
        tuple(buffers),
        prepare_weights(kernel, problem, names, weights),
        memory.empty(tensor_nbytes(problem.output, dtype)),
        memory.empty(kernel.workspace(problem)),
    )


def run_kernel(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Array:
    """Call one kernel on host arrays, as `launch_on` takes them.

    The result is logical, in the kernel's storage format.
    """
    launch = launch_on(backend, kernel, problem, *arrays)
    stream = backend.stream()
    launch.enqueue(stream)
    stream.synchronize()
    layout, dtype = output_layout(kernel, problem), kernel.precision.dtype
    return download(backend.memory, launch.output, problem.output, layout, dtype)
