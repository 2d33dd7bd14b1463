"""Measure which kernel is fastest for a problem on a device, and keep the result as data.

A table is a JSON file that a command wrote: `r18 tune` measures every kernel that takes a problem
and keeps the fastest. Plans read it; a problem that it does not hold follows the backend's own
order. The choice changes only speed: every kernel is verified by itself.

For a problem that fuses two ops the table may say `apart`: separate kernels of the two ops took
that time, and no fused kernel took less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Buffer,
    Fastest,
    Kernel,
    Launch,
    Stream,
    Table,
    Timing,
    input_layout,
    output_layout,
    prepare_weights,
)
from r18.backend.launch import refusal_of, workspace_of
from r18.backend.registry import installed, load_backend
from r18.backend.tuned import APART, at_batch_1, read_table
from r18.errors import UsageError, unknown
from r18.graph.ops import (
    AvgPoolLinear,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    Layout,
    Linear,
    Op,
    Problem,
    Relayout,
    Shape,
    WeightSpec,
    parts_of,
)
from r18.graph.passes import FUSION_LEVELS, fuse, fuse_ops
from r18.graph.precision import FP8, INT8, Precision, dtype_of, is_floating, precision
from r18.graph.quantized import QuantizedAvgPoolLinear, QuantizedConv2d, QuantizedLinear
from r18.graph.scaled import ScaledAvgPoolLinear, ScaledConv2d, ScaledLinear
from r18.graph.scaling import calibrated
from r18.graph.schedule import Schedule

TUNED_OPS: tuple[type[Op], ...] = (
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    Linear,
    AvgPoolLinear,
    QuantizedConv2d,
    QuantizedLinear,
    QuantizedAvgPoolLinear,
    ScaledConv2d,
    ScaledLinear,
    ScaledAvgPoolLinear,
)
"""Ops worth measuring: the others have one kernel per layout."""
PLACES = 3
VALUES = 1 << 20


def shipped_table(backend: str, device: str) -> Path:
    """Where the backend of an entry point's name ships the table of a device, by its slug.

    Raises `UnknownName`, `UsageError` for an entry point whose module is not there.
    """
    points = installed()
    if backend not in points:
        raise unknown("backend", backend, points)
    module = points[backend].module
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise UsageError(f"backend '{backend}' should be in {module}, which has no file")
    return Path(spec.origin).parent / "tuned" / f"{device}.json"


def as_on(device: str, backend: Backend) -> Backend:
    """The backend as planned on a device, given by slug, whose table it ships.

    Problems that the table lacks follow the backend's own preference, as without a device.

    Raises `UnknownName` for a backend that is no entry point, and for a device without a table.
    """
    path = shipped_table(backend.name, device)
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.json"))
        raise unknown(f"device with a table of '{backend.name}'", device, known)
    table = read_table(path)
    unprobed = load_backend(backend.name)  # `backend` may have found the table of this machine

    def fastest(problem: Problem, precision_name: str) -> Fastest:
        found = table.best(problem, precision_name)
        return unprobed.fastest(problem, precision_name) if found is None else found

    return choosing(backend, fastest)


def choosing(backend: Backend, fastest: Callable[[Problem, str], Fastest]) -> Backend:
    """A copy of the backend in whose plans another function takes the place of its `fastest`."""
    there = copy(backend)
    vars(there)["fastest"] = fastest
    return there


@dataclass(frozen=True)
class Chain:
    """Launches that are enqueued one after the other."""

    launches: tuple[Launch, ...]

    def enqueue(self, stream: Stream) -> None:
        for launch in self.launches:
            launch.enqueue(stream)


Link = tuple[Kernel, Problem]
"""A kernel and its problem in a chain."""


class Range:
    """A problem to measure kernels on: random inputs, three copies of them for each layout.

    The launches of one measurement rotate among the copies, so that no input is in a cache because
    the previous launch has just read it. Outputs rotate with them.
    """

    def __init__(self, backend: Backend, problem: Problem, precision: Precision) -> None:
        self.backend = backend
        self.problem = problem
        self.precision = precision
        self._inputs: dict[Layout, list[tuple[Buffer, ...]]] = {}
        rng = np.random.default_rng(0)
        self._weights = [_weight(spec, rng) for spec in problem.op.weights()]
        # A million values again and again: drawing every value would take longer than measuring.
        self._values = {
            dtype: _values(dtype, rng)
            for dtype in dict.fromkeys(precision.input_dtypes(problem.op))
        }
        self._outputs = [self._output(problem) for _ in range(PLACES)]

    def launches(self, kernel: Kernel) -> list[Launch]:
        """The kernel on each of the places; its weights are prepared once."""
        roles = [spec.role for spec in self.problem.op.weights()]
        prepared = prepare_weights(kernel, self.problem, roles, self._weights)
        workspace = self.backend.memory.empty(workspace_of(kernel, self.problem))
        inputs = self._inputs_in(input_layout(kernel, self.problem))
        return [
            Launch(kernel, self.problem, inputs[place], prepared, output, workspace)
            for place, output in enumerate(self._outputs)
        ]

    def _inputs_in(self, layout: Layout) -> list[tuple[Buffer, ...]]:
        if layout not in self._inputs:
            dtypes = self.precision.input_dtypes(self.problem.op)
            self._inputs[layout] = [
                tuple(map(self._filled, self.problem.inputs, dtypes)) for _ in range(PLACES)
            ]
        return self._inputs[layout]

    def _filled(self, shape: Shape, dtype: np.dtype[np.generic]) -> Buffer:
        """A buffer of the values, again and again; random in any layout."""
        memory, nbytes = self.backend.memory, math.prod(shape) * dtype.itemsize
        values, buffer = self._values[dtype], memory.empty(nbytes)
        for offset in range(0, nbytes, values.nbytes):
            part = values[: (nbytes - offset) // dtype.itemsize]
            memory.upload(part, buffer.view(offset, part.nbytes))
        return buffer

    def _output(self, problem: Problem) -> Buffer:
        dtype = self.precision.output_dtype(problem.op)
        return self.backend.memory.empty(math.prod(problem.output) * dtype.itemsize)

    def chains(self, links: Sequence[Link]) -> list[Chain]:
        """Kernels that each read the previous one's output, on each of the copies.

        It is their last input, as the problem's last input is the first kernel's; any other is the
        problem's own. Their weights are random.
        """
        memory, rng = self.backend.memory, np.random.default_rng(0)
        kernel, part = links[0]
        held = [inputs[-1] for inputs in self._inputs_in(input_layout(kernel, part))]
        launches: list[list[Launch]] = [[] for _ in held]
        for kernel, part in links:
            prepared = prepared_at_random(kernel, part, rng)
            workspace = memory.empty(workspace_of(kernel, part))
            own = self._inputs_in(input_layout(kernel, part)) if len(part.inputs) > 1 else None
            for place, made in enumerate(held):
                inputs = (*own[place][: len(part.inputs) - 1], made) if own else (made,)
                held[place] = self._output(part)
                launch = Launch(kernel, part, inputs, prepared, held[place], workspace)
                launches[place].append(launch)
        return [Chain(tuple(found)) for found in launches]

    def measure(self, launches: Sequence[Launch | Chain], count: int, repeat: int) -> float:
        """Median microseconds of one of `count` launches back to back, of `repeat` such runs.

        They are a graph where the backend's streams have graphs.
        """
        stream = self.backend.stream()

        def work() -> None:
            for index in range(count):
                launches[index % len(launches)].enqueue(stream)

        run = stream.capture(work) or work
        return statistics.median(_timed(stream, run, repeat)) * 1e3 / count


def _weight(spec: WeightSpec, rng: np.random.Generator) -> Array:
    """A random weight as its op stores it: numbers that keep sums small, or integers."""
    if spec.storage and np.issubdtype(stored := dtype_of(spec.storage), np.integer):
        most = spec.limit or np.iinfo(np.int8).max
        return rng.integers(-most, most + 1, spec.shape).astype(stored)
    return rng.uniform(0.5, 1, spec.shape).astype(np.float32) / math.prod(spec.shape[1:])


def prepared_at_random(
    kernel: Kernel, problem: Problem, rng: np.random.Generator
) -> tuple[Buffer, ...]:
    """Random weights of the problem's op, in the form that the kernel reads."""
    specs = problem.op.weights()
    weights = [_weight(spec, rng) for spec in specs]
    return prepare_weights(kernel, problem, [spec.role for spec in specs], weights)


def _values(dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    if is_floating(dtype):
        return rng.standard_normal(VALUES, np.float32).astype(dtype)
    ends = np.iinfo(dtype)
    return rng.integers(ends.min, ends.max + 1, VALUES).astype(dtype)


def _timed(stream: Stream, run: Callable[[], None], repeat: int) -> list[float]:
    """Milliseconds of each of `repeat` runs, after two that warm up."""
    times = []
    for turn in range(repeat + 2):
        before = stream.record()
        run()
        after = stream.record()
        stream.synchronize()
        if turn >= 2:
            times.append(after.milliseconds_since(before))
    return times


def tuned_schedules(
    backend: Backend, schedule: Schedule, levels: Sequence[str], names: Sequence[str], bits: int = 8
) -> list[Schedule]:
    """The schedules whose problems plans of a schedule (at level `none`) may have.

    levels: of the precisions in `names` that store floats. In int8 there is one, in integers, with
    weights of these bits, and in fp8 one of scaled ops. Where the backend has kernels of
    `TUNED_OPS` that compute two steps in one, there is a further schedule with these steps fused.
    Raises what `fuse`, `quantized` and `scaled` raise.
    """
    found = []
    own = (INT8.name, FP8.name)
    if any(name not in own for name in names):
        found += [fuse(schedule, level) for level in levels]
    found += [calibrated(schedule, name, bits) for name in own if name in names]
    ops = {kernel.op.name for kernel in backend.kernels() if kernel.op in TUNED_OPS}
    highest = [plain for plain in found if plain.level == FUSION_LEVELS[-1]]
    further = ((plain, fuse_ops(plain, ops)) for plain in highest)
    return found + [fused for plain, fused in further if fused != plain]


def tune(
    backend: Backend,
    problems: Iterable[Problem],
    precisions: Sequence[str],
    progress: Callable[[str], None] = lambda text: None,
) -> Table:
    """Measure every kernel that takes each problem, and keep the fastest.

    A short first measurement leaves out kernels that take over twice as long as the best.
    `progress` is called with a description of each finished problem.
    """
    choices: dict[str, dict[str, dict[int, Timing]]] = {name: {} for name in precisions}
    asked = list(dict.fromkeys(problems))
    backend.prepare(
        (kernel, problem)
        for problem in asked
        for name in precisions
        for kernel in _takers(backend, problem, name)
    )
    for problem in asked:
        for name in precisions:
            timings = _timings(backend, problem, name)
            if not timings:
                continue
            best = _fastest(timings)
            if problem.op.parts:
                fused = _kernel_of(backend, best)
                both = _apart(backend, problem, name, input_layout(fused, problem))
                best = _fastest([best, *both])
            choices[name].setdefault(at_batch_1(problem), {})[problem.batch] = best
            progress(f"{name} {problem}: {best.kernel} {best.microseconds:.1f} µs")
    return Table(str(backend.probe()), choices)


def _fastest(timings: Sequence[Timing]) -> Timing:
    return min(timings, key=lambda timing: timing.microseconds)


def _kernel_of(backend: Backend, timing: Timing) -> Kernel:
    return next(kernel for kernel in backend.kernels() if kernel.id == timing.kernel)


def _takers(backend: Backend, problem: Problem, name: str) -> list[Kernel]:
    return [
        kernel
        for kernel in backend.kernels()
        if kernel.op is type(problem.op)
        and kernel.precision.name == name
        and refusal_of(kernel, problem) is None
    ]


def _timings(backend: Backend, problem: Problem, name: str) -> list[Timing]:
    """Every kernel that takes the problem in a precision and is not left out."""
    place = Range(backend, problem, precision(name))
    looks = [
        (kernel, launches, place.measure(launches, 3, 3))
        for kernel in _takers(backend, problem, name)
        for launches in [place.launches(kernel)]
    ]
    limit = 2 * min((time for *_, time in looks), default=0.0)
    return [
        Timing(kernel.id, place.measure(launches, 20, 7))
        for kernel, launches, time in looks
        if time <= limit
    ]


def timed_apart(backend: Backend, problem: Problem, name: str, reads: Layout) -> Timing | None:
    """The time of the fastest two kernels that compute a problem's ops one after the other.

    reads: the layout of the inputs. None: no two kernels compute them, relayouts included.
    """
    found = _apart(backend, problem, name, reads)
    return _fastest(found) if found else None


def _apart(backend: Backend, problem: Problem, name: str, reads: Layout) -> list[Timing]:
    """The two ops of a problem by their own kernels, as a plan has them; nothing where it cannot.

    Two that a plan may run at the same time run one after the other here.

    The convolution that is fastest by itself, or each kernel of a first op that is not tuned, each
    kernel of the second op behind it, and relayouts where layouts meet; of inputs that lie in the
    layout `reads`, as for the kernel that they are compared with.
    """
    one, other = parts_of(problem)
    firsts = _takers(backend, one, name)
    if isinstance(one.op, TUNED_OPS):
        alone = _timings(backend, one, name)
        firsts = [_kernel_of(backend, _fastest(alone))] if alone else []
    place = Range(backend, problem, precision(name))
    found = (
        _linked(backend, name, reads, [(first, one), (second, other)])
        for first in firsts
        for second in _takers(backend, other, name)
    )
    return [Timing(APART, place.measure(place.chains(links), 20, 7)) for links in found if links]


def _linked(
    backend: Backend, name: str, layout: Layout, links: Sequence[Link]
) -> list[Link] | None:
    """The links with relayouts where one reads another layout than it is given; None: no kernel.

    What is given is the last input: see `Range.chains`.
    """
    found: list[Link] = []
    for kernel, problem in links:
        wanted = input_layout(kernel, problem)
        if wanted is not layout and len(problem.inputs[0]) == 4:  # 2-d ones are row-major
            moved = Problem(Relayout(layout, wanted), problem.inputs[-1:])
            takers = _takers(backend, moved, name)
            if not takers:
                return None
            found.append((takers[0], moved))
        found.append((kernel, problem))
        layout = output_layout(kernel, problem)
    return found


__all__ = [
    "TUNED_OPS",
    "Range",
    "as_on",
    "choosing",
    "prepared_at_random",
    "shipped_table",
    "timed_apart",
    "tune",
    "tuned_schedules",
]
