"""Planning a schedule: a kernel for each step, and a place in one arena for every tensor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import numpy as np

from r18.backend import (
    Backend,
    CompileOptions,
    Fastest,
    Kernel,
    Plan,
    PlannedStep,
    Preferred,
    Tensor,
    input_layout,
    tensor_nbytes,
)
from r18.backend.launch import refusal_of, workspace_of
from r18.errors import NoKernel, UsageError, show, unknown, unknown_kernel
from r18.graph.ops import Layout, Problem, Relayout
from r18.graph.precision import Precision, precision
from r18.graph.quantized import QuantizedRelayout
from r18.graph.schedule import Schedule, Step
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
        elif (reason := refusal_of(kernel, problem)) is not None:
            refusals.append(f"{kernel.id}: {reason}")
        else:
            return kernel
    head = f"no kernel takes {problem} in {precision_name}" + (asked_by and f" ({asked_by})")
    known = sorted({k.precision.name for k in kernels if k.op is type(problem.op)})
    if not refusals:
        refusals = [f"precisions with kernels for {problem.op.name}: {', '.join(known) or 'none'}"]
        if not known and not (problem.op.optional or isinstance(problem.op, Relayout)):
            ops = ", ".join(dict.fromkeys(k.op.name for k in kernels)) or "none"
            refusals[0] += f"; ops with kernels: {ops}; add one to kernels(), or borrow numpy's"
            refusals[0] += " (docs/tutorial.md, step 5)"
    if problem.op.of_pixels:
        refusals.append("preprocess on the host instead, and compile without `pixels`")
    raise NoKernel("\n  ".join([head, *refusals]))


def in_layout_of_input(
    kernels: Sequence[Kernel], kernel: Kernel, problem: Problem, layout: Layout
) -> Kernel:
    """The chosen kernel, or its twin that reads the first input in its present `layout`.

    A backend prefers an algorithm; the twin in the input's layout saves that algorithm a relayout.
    """
    if len(problem.inputs[0]) != 4 or input_layout(kernel, problem) is layout:
        return kernel
    twins = twins_of(kernels, kernel, problem)
    return next((twin for twin in twins if input_layout(twin, problem) is layout), kernel)


def twins_of(kernels: Iterable[Kernel], kernel: Kernel, problem: Problem) -> Iterator[Kernel]:
    """Kernels of the same op, algorithm and precision that take the problem, itself among them."""
    for twin in kernels:
        same = (twin.op, twin.algorithm, twin.precision)
        alike = same == (kernel.op, kernel.algorithm, kernel.precision)
        if alike and not refusal_of(twin, problem):
            yield twin


def _no_such(kernels: Iterable[Kernel], pattern: str) -> list[Kernel]:
    raise unknown_kernel(pattern, (k.id for k in kernels))


def fastest_first(
    backend: Backend, kernels: Sequence[Kernel], problem: Problem, precision_name: str
) -> Sequence[Kernel]:
    """The kernels, with the one that measured fastest first where that is known.

    That may be a variant of one of them (`Backend.variants`), if it was measured at this batch.
    """
    fastest = backend.fastest(problem, precision_name)
    if not isinstance(fastest, Fastest):
        raise UsageError(
            f"fastest() of backend '{backend.name}' must return a Preferred, an Apart or None, "
            f"not {show(fastest)}"
            + (f": write Preferred({show(fastest)})" if isinstance(fastest, str) else "")
        )
    if not isinstance(fastest, Preferred):
        return kernels
    for kernel in kernels:
        if kernel.id == fastest.kernel:
            return [kernel, *(other for other in kernels if other is not kernel)]
    for kernel in kernels:
        if fastest.kernel.startswith(f"{kernel.id}/"):
            first = next((v for v in backend.variants(kernel) if v.id == fastest.kernel), None)
            if first is not None:
                first = first if fastest.measured else kernel
                return [first, *(other for other in kernels if other is not first)]
    return kernels


# -- the plan ----------------------------------------------------------------------------------


def make_plan(backend: Backend, schedule: Schedule, options: CompileOptions) -> Plan:
    """Plan a schedule (at level `none`, or already at `options.fusion`) on a backend.

    The steps are those of `r18.runtime.fusing.schedule_for`: at level `all` the backend has a say.

    A step gets the kernel that its override names. Without an override it gets the first kernel
    that the backend lists for its problem, unless its first input has another layout than that
    kernel reads: then the same algorithm in the input's layout if there is one (see
    `in_layout_of_input`), so that pooling between NHWC convolutions stays in NHWC. A `Relayout`
    step converts layouts that still differ; a `QuantizedRelayout`, where the precision does not say
    how the value is stored.

    Two consecutive independent steps are planned to run at the same time where the backend says
    that it pays (`Backend.beside`); their tensors then share no memory.

    Pure: needs no device. Raises `NoKernel` for a step that no kernel takes, `UnknownName` for a
    tap, precision or kernel that does not exist, `UsageError` for an override that names no step
    and no op of the schedule.
    """
    how = precision(options.precision)
    schedule = schedule_for(backend, schedule, options)
    _check_overrides(schedule, options)
    draft = _Draft.of(backend, schedule, options)
    for step in schedule.steps:
        draft.add(step)
    return _placed(draft, how)


@dataclass(frozen=True)
class _DraftStep:
    """A planned step before the arena gives it offsets."""

    name: str
    problem: Problem
    kernel: Kernel
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...]


@dataclass
class _Draft:
    """A plan in the making: each step with its kernel, each tensor with its layout.

    values, layouts: by tensor key, which is the value's name or `value@layout` for a relaid-out
    copy.
    """

    backend: Backend
    schedule: Schedule
    options: CompileOptions
    kernels: tuple[Kernel, ...]
    problems: Mapping[str, Problem]
    shapes: Mapping[str, tuple[int, ...]]
    layouts: dict[str, Layout]
    values: dict[str, str]
    steps: list[_DraftStep] = field(default_factory=list)

    @classmethod
    def of(cls, backend: Backend, schedule: Schedule, options: CompileOptions) -> _Draft:
        """Without steps: the input only."""
        given = Layout.NHWC if schedule.of_pixels else Layout.NCHW
        return cls(
            backend,
            schedule,
            options,
            backend.kernels(),
            schedule.problems(options.batch),
            schedule.shapes(options.batch),
            {schedule.input: given},
            {schedule.input: schedule.input},
        )

    def add(self, step: Step) -> None:
        """Plan a step of the schedule, after the relayouts of its inputs."""
        problem = self.problems[step.name]
        kernel = self._chosen(step, problem)
        reads = input_layout(kernel, problem)
        inputs = tuple(self._in_layout(value, reads) for value in step.inputs)
        self.steps.append(_DraftStep(step.name, problem, kernel, inputs, step.output, step.weights))
        self.layouts[step.output], self.values[step.output] = kernel.layout, step.output

    def _chosen(self, step: Step, problem: Problem) -> Kernel:
        kernel = self._preferred(step)
        if self._pattern(step) is not None:
            return kernel
        layout = self.layouts[step.inputs[0]]
        return self._in_layout_of_reader(
            step, in_layout_of_input(self.kernels, kernel, problem, layout)
        )

    def _pattern(self, step: Step) -> str | None:
        overrides = self.options.kernels
        return overrides.get(step.name, overrides.get(step.op.name))

    def _preferred(self, step: Step) -> Kernel:
        """The kernel of a step, whatever the layouts of its inputs."""
        problem, name = self.problems[step.name], self.options.precision
        return choose_kernel(
            fastest_first(self.backend, self.kernels, problem, name),
            problem,
            name,
            pattern=self._pattern(step),
            asked_by=f"step '{step.name}' of '{self.schedule.name}' on backend "
            f"'{self.backend.name}'",
        )

    def _in_layout_of_reader(self, step: Step, kernel: Kernel) -> Kernel:
        """The kernel, or its twin that reads the same layout and writes the one that is read next.

        Kernels that make integers of images have such twins: which of their layouts saves a
        relayout depends on the first convolution.
        """
        problem = self.problems[step.name]
        reader = next((s for s in self.schedule.steps if step.output in s.inputs), None)
        twins = [
            twin
            for twin in twins_of(self.kernels, kernel, problem)
            if twin.layout is not kernel.layout
            and input_layout(twin, problem) is input_layout(kernel, problem)
        ]
        if reader is None or not twins:
            return kernel
        read = input_layout(self._preferred(reader), self.problems[reader.name])
        return kernel if read is kernel.layout else twins[0]

    def _in_layout(self, value: str, wanted: Layout) -> str:
        """The key of the value's tensor in the wanted layout, planning a relayout if need be."""
        shape, layout = self.shapes[value], self.layouts[value]
        if len(shape) != 4 or layout is wanted:
            return value
        key = f"{value}@{wanted.value}"
        if key not in self.values:
            stored = self.schedule.storage[value]
            op = QuantizedRelayout(layout, wanted, stored) if stored else Relayout(layout, wanted)
            problem = Problem(op, (shape,))
            kernel = choose_kernel(self.kernels, problem, self.options.precision)
            self.steps.append(_DraftStep(f"relayout {key}", problem, kernel, (value,), key, ()))
            self.layouts[key], self.values[key] = wanted, value
        return key


def _placed(draft: _Draft, how: Precision) -> Plan:
    """The draft with a place in the arena for every tensor and workspace."""
    schedule, options, steps = draft.schedule, draft.options, draft.steps
    dtypes = _dtypes(schedule, how)
    kept = {schedule.input, schedule.output, *(schedule.value_of(tap) for tap in options.taps)}
    nbytes = {
        key: tensor_nbytes(draft.shapes[value], dtypes[value])
        for key, value in draft.values.items()
    }
    beside = _beside(draft.backend, steps, options.precision)
    # For sharing memory, steps that run at the same time have the same time.
    times = list(accumulate(int(not pair) for pair in beside))
    owner, lifetimes = _lifetimes(steps, times, schedule.input, kept, nbytes, options.arena)
    scratch = [workspace_of(step.kernel, step.problem) for step in steps]
    lifetimes += [
        Lifetime(f"workspace of {step.name}", size, time, time)
        for step, size, time in zip(steps, scratch, times, strict=True)
    ]
    memory = draft.backend.memory
    arena = plan_arena(
        lifetimes, memory.alignment, share=options.arena, by_size_nbytes=memory.by_size_nbytes
    )
    return Plan(
        backend=draft.backend.name,
        schedule=schedule,
        options=options,
        steps=tuple(
            PlannedStep(
                step.name,
                step.problem,
                step.kernel,
                step.inputs,
                step.output,
                step.weights,
                size,
                arena.offsets[f"workspace of {step.name}"],
                pair,
            )
            for step, size, pair in zip(steps, scratch, beside, strict=True)
        ),
        tensors={
            key: Tensor(
                value,
                draft.shapes[value],
                draft.layouts[key],
                dtypes[value],
                arena.offsets[owner[key]],
            )
            for key, value in draft.values.items()
        },
        arena_nbytes=arena.nbytes,
    )


def _dtypes(schedule: Schedule, how: Precision) -> dict[str, np.dtype[Any]]:
    """The dtype of every value: that of the step that makes it, or of the one that reads it."""
    made = {step.output: how.output_dtype(step.op) for step in schedule.steps}
    read = {
        value: dtype
        for step in schedule.steps
        for value, dtype in zip(step.inputs, how.input_dtypes(step.op), strict=True)
    }
    return read | made


def _check_overrides(schedule: Schedule, options: CompileOptions) -> None:
    known = {s.name for s in schedule.steps} | {s.op.name for s in schedule.steps}
    for name in options.kernels:
        if name not in known:
            raise unknown("step or op in a kernel override", name, known, error=UsageError)


def _beside(backend: Backend, steps: Sequence[_DraftStep], precision_name: str) -> list[bool]:
    """Whether each draft runs at the same time as the one before it; at most two do."""
    found = [False] * len(steps)
    for index in range(1, len(steps)):
        first, second = steps[index - 1], steps[index]
        found[index] = (
            not found[index - 1]
            and first.output not in second.inputs
            and not (first.kernel.in_place or second.kernel.in_place)
            and backend.beside(first.problem, second.problem, precision_name)
        )
    return found


def _lifetimes(
    steps: Sequence[_DraftStep],
    times: Sequence[int],
    source: str,
    kept: set[str],
    nbytes: Mapping[str, int],
    share: bool,
) -> tuple[dict[str, str], list[Lifetime]]:
    """Each tensor's owner (the tensor whose memory it uses), and the owners' lifetimes.

    times: when each step runs; ascending.

    A tensor owns its memory unless it is written in place. The input lives throughout, so that a
    program may be launched again without a load; the output and the tapped values live to the end.
    A kernel that works in place takes over its first input's memory if nothing reads it later.
    """
    end = times[-1] + 1
    first = {source: times[0] - 1}
    last = {source: end}
    for time, step in zip(times, steps, strict=True):
        first[step.output] = time
        last[step.output] = end if step.output in kept else time
        for key in step.inputs:
            last[key] = max(last[key], time)
    owner = {key: key for key in first}
    if share:
        for time, step in zip(times, steps, strict=True):
            key = step.inputs[0]
            if (
                step.kernel.in_place
                and last[key] == time
                and step.inputs.count(key) == 1
                and nbytes[key] == nbytes[step.output]
            ):
                root = owner[key]
                owner[step.output] = root
                last[root] = max(last[root], last[step.output])
    return owner, [
        Lifetime(key, nbytes[key], first[key], last[key]) for key in first if owner[key] == key
    ]


__all__ = ["choose_kernel", "fastest_first", "in_layout_of_input", "make_plan"]
