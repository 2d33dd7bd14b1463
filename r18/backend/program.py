"""A compiled schedule, ready to run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from r18.backend.device import Array, Buffer, Event, Stream
from r18.backend.launch import (
    Launch,
    bind,
    download,
    enqueue_all,
    logical,
    prepare_plan,
    upload,
    widened,
)
from r18.backend.plan import Plan, PlannedStep, Tensor
from r18.errors import ProgramClosed, ShapeError, UsageError
from r18.graph.ops import Shape

if TYPE_CHECKING:
    from r18.backend.protocol import Backend


@dataclass(frozen=True)
class StepTime:
    """One step's share of a run, in milliseconds; one phase's, if its kernel works in phases."""

    step: str
    kernel: str
    milliseconds: float
    phase: str = ""


class Program:
    """A compiled schedule: weights uploaded, buffers planned, launches captured; run many times.

    `load`, `launch`, `synchronize` and `fetch` are the parts of a call, in this order: a launch
    before the first load, or a fetch before the first launch, raises `UsageError`. A program holds
    one batch in flight; calling it is safe from several threads. A backend with more to offer
    (copies during compute, arrays on the device) inherits this and returns its own from
    `Backend.program`. Its `load` checks a batch with `_check_input`, and its `launch` goes through
    `_enqueue` or `_graph`: they keep the order.

    weights: those that the plan's schedule reads at level `none`, by torchvision's names. Raises
             `WeightsError` for one that is missing or misshapen.
    weight_nbytes: device bytes of the prepared weights.
    """

    def __init__(self, backend: Backend, plan: Plan, weights: Mapping[str, Array]) -> None:
        self._plan = plan
        self._memory = backend.memory
        self._stream = backend.stream()
        self._lock = threading.RLock()
        self._closed = False
        self._given = True  # a capture runs the launches; `load` and `launch` come after it
        prepared = prepare_plan(plan, weights)
        try:
            self._arena = self._memory.empty(plan.arena_nbytes)
        except MemoryError as error:
            raise UsageError(
                f"the plan needs {plan.arena_nbytes:,} bytes for batch {plan.options.batch}, more "
                "than the device has left\n  take a smaller batch"
            ) from error
        self._launches = bind(plan, prepared, self._arena)
        self.weight_nbytes = sum(b.nbytes for launch in self._launches for b in launch.weights)
        self._input_arrays: tuple[Array, Array] | None = None
        self._graph: Callable[[], None] | None = None
        if plan.options.graph:
            graph = self._stream.capture(lambda: self._enqueue(self._launches))
            self._graph = None if graph is None else lambda: self._begin(graph)
        self._given = self._ran = False

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a program holds buffers and launches of its device: it can be neither pickled nor "
            "copied\n  compile again where another is needed"
        )

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def stream(self) -> Stream:
        """The stream of every launch: events recorded in it before and after a launch time it."""
        return self._stream

    def __call__(self, images: Array) -> Array:
        """Logits (or the schedule's output) of one batch; (N, C, H, W) in, float32 out."""
        with self._lock:
            self.load(images)
            self.launch()
            return self.fetch()

    def load(self, images: Array) -> None:
        """Bring a batch of the program's input shape to the device: floating point, or pixels."""
        images = without_mask(images)
        tensor = self._check_input(images.shape, images.dtype)
        with self._lock:
            self._stream.synchronize()  # a launch in flight may still be reading the last batch
            upload(self._memory, images, tensor.layout, tensor.dtype, self._buffer(tensor.value))

    def launch(self) -> None:
        """Enqueue one run over the loaded batch; returns at once on an asynchronous device."""
        self._check_open()
        if self._graph is not None:
            self._graph()
        else:
            self._begin(lambda: self._enqueue(self._launches))

    def synchronize(self) -> None:
        """Wait until every launch is complete."""
        self._check_open()
        self._stream.synchronize()

    def fetch(self, name: str | None = None) -> Array:
        """A copy of the output or of a tapped checkpoint, in logical shape; waits for launches.

        float32, or float64 from an fp64 program: narrower formats are widened exactly. Raises
        `UnknownName` for a name that is no checkpoint and `UsageError` for one not tapped.
        """
        self._check_open()
        schedule = self._plan.schedule
        value = schedule.output if name is None else schedule.value_of(name)
        kept = {schedule.input, schedule.output}
        kept |= {schedule.value_of(tap) for tap in self._plan.options.taps}
        if value not in kept:
            raise UsageError(f"checkpoint '{name}' was not kept: compile with taps=('{name}', ...)")
        own = type(self).launch is not Program.launch  # it may run in a way that nothing here sees
        if not (self._ran or (self._given and (own or value == schedule.input))):
            raise UsageError(f"'{value}' was not computed yet: load a batch and launch first")
        tensor = self._plan.tensors[value]
        with self._lock:
            self._stream.synchronize()
            array = download(
                self._memory, self._buffer(value), tensor.shape, tensor.layout, tensor.dtype
            )
        return widened(array)

    def input_arrays(self) -> tuple[Array, Array]:
        """Two host arrays of the input's shape and format, to be filled and loaded in turn.

        The same two each time. `load` recognises them and copies without staging. One may be
        refilled when the other has been loaded since, or when its run has ended. Pixels have shape
        (N, C, H, W) over NHWC memory. See `r18.runtime.pipeline`.
        """
        self._check_open()
        if self._input_arrays is None:
            tensor = self._plan.tensors[self._plan.schedule.input]
            self._input_arrays = self._host_array(tensor), self._host_array(tensor)
        return self._input_arrays

    def fetch_later(self) -> Callable[[], Array]:
        """`fetch` of the run enqueued last, in two parts: the returned function waits for it.

        Batches loaded and launched in between do not change it. By default it is fetched here.
        """
        output = self.fetch()
        return lambda: output

    def profile(self) -> list[StepTime]:
        """Time of each step of one run, by the stream's events, outside any graph.

        A step whose kernel works in phases has an entry for each, in order. Raises `UsageError`
        before the first load.
        """
        self._check_open()
        self._check_given()
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
            self._ran = True
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
        """A host array of the tensor's memory layout, viewed in its logical shape."""
        return logical(np.zeros(tensor.layout.physical(tensor.shape), tensor.dtype), tensor.layout)

    def _launches_now(self) -> tuple[Launch, ...]:
        """The launches over the batch loaded last."""
        return self._launches

    def _enqueue(self, launches: Sequence[Launch]) -> None:
        self._begin(lambda: enqueue_all(launches, self._stream))

    def _begin(self, run: Callable[[], None]) -> None:
        """Run launches over a batch; raises `UsageError` where none was ever loaded."""
        self._check_given()
        run()
        self._ran = True

    def _check_given(self) -> None:
        if not self._given:
            raise UsageError("there is no batch to compute on: load one first")

    def _check_input(self, shape: Shape, dtype: np.dtype[Any]) -> Tensor:
        """The input's tensor, if a batch of this shape and dtype fits it.

        From then on the program counts as loaded.
        """
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
        self._given = True
        return tensor

    def _check_open(self) -> None:
        if self._closed:
            raise ProgramClosed("this program was closed; compile the schedule again")


def without_mask(images: Array) -> Array:
    """A batch in host memory as an array. Raises `UsageError` for a mask, which would be lost."""
    if isinstance(images, np.ma.MaskedArray):
        raise UsageError("the program knows no mask: fill the masked array first")
    return np.asarray(images)


__all__ = ["Program", "StepTime", "without_mask"]
