"""A backend's program and the reference's, compiled once and run side by side, batch by batch."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import Array, Backend, CompileOptions, DeviceInfo, Program
from r18.backend.registry import get_backend
from r18.bench.contenders import Compiled
from r18.bench.timing import random_images, rotated
from r18.errors import ImageError, NoKernel
from r18.evaluate.decode import Batch, Decoded
from r18.evaluate.margins import Allowance, calls, multiple, unit_roundoff
from r18.evaluate.request import Request
from r18.evaluate.rows import NOT_FINITE, OK, TOP, UNREADABLE, BatchRows, Row, Times
from r18.graph.precision import precision as precision_of
from r18.weights import Weights
from r18.weights.precisions import in_precision

FACTOR_ROUNDOFFS = {"tf32": 2.0**-11, "fp16x2": 2.0**-23}
"""The unit roundoffs of formats that only factors have."""
SAMPLE = 8
"""Images on which losses against float64 are measured before a run."""


@dataclass(frozen=True)
class Running:
    """A running backend, as the journal keeps it: `kernels` is a digest over the plan's kernels."""

    name: str
    device: str
    kind: str
    kernels: str


class Pair:
    """Both programs, for batches of the request's size; safe from several threads.

    Raises what `get_backend` and compiling raise.
    """

    def __init__(
        self,
        request: Request,
        weights: Weights,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request = request
        self.weights = weights
        self._clock = clock
        self._lock = threading.Lock()
        self._batches = 0
        self._backends: list[Backend] = []
        self._runners: list[Compiled] = []
        self._devices: list[DeviceInfo] = []
        self._open = ExitStack()
        try:
            self._enter(request.backend, request.precision)
            if request.against is not None:
                self._enter(request.against, request.against_precision)
        except BaseException:
            self._open.close()
            raise

    def _enter(self, name: str, precision: str) -> None:
        request = self.request
        backend = get_backend(name)
        device = backend.probe()
        options = request.options(precision)
        program = backend.compile(*in_precision(request.schedule, self.weights, options), options)
        runner = Compiled(program, device.kind)
        self._open.callback(runner.close)
        runner.load(random_images((request.batch, *request.schedule.input_shape), 1)[0])
        runner.run()  # what is made on a first run is charged to no batch
        self._backends.append(backend)
        self._devices.append(device)
        self._runners.append(runner)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._open.close()

    def running(self) -> tuple[Running, ...]:
        """The backend and, where there is one, the reference."""
        return tuple(
            Running(backend.name, device.name, device.kind, _kernels_sha256(runner.program))
            for backend, device, runner in zip(
                self._backends, self._devices, self._runners, strict=True
            )
        )

    # -- batches -------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, images: Sequence[Decoded]) -> BatchRows:
        """The rows of a batch, in its order, and the times; at most as many as a run takes.

        A run is always a whole batch: places without an image hold zeros, and their outputs are
        dropped. A sample's result does not depend on its neighbours.
        """
        pixels_of = [image.pixels for image in images]
        readable = [image for image in pixels_of if not isinstance(image, ImageError)]
        outputs: list[Array] = []
        times = None
        if readable:
            shape = (self.request.batch, *self.request.schedule.input_shape)
            pixels = np.zeros(shape, np.float32)
            pixels[: len(readable)] = readable
            outputs, times = self._run(pixels)
        found = iter(range(len(readable)))
        rows = []
        for item, image in zip(batch, images, strict=True):
            if isinstance(image.pixels, ImageError):
                made = Row(item.file, item.label, UNREADABLE, error=str(image.pixels))
            else:
                index = next(found)
                made = row(item.file, item.label, *(output[index] for output in outputs))
            rows.append(replace(made, seen=image.seen))
        return BatchRows(tuple(rows), times)

    def _run(self, pixels: Array) -> tuple[list[Array], Times]:
        """Outputs and times of both; they take turns at being first."""
        milliseconds = [0.0] * len(self._runners)
        with self._lock:
            for runner in self._runners:
                runner.load(pixels)
            for turn in rotated(len(self._runners), self._batches):
                milliseconds[turn] = self._runners[turn].time(self._clock) / len(pixels)
            outputs = [runner.program.fetch() for runner in self._runners]
            self._batches += 1
        return outputs, Times(*milliseconds)

    # -- what rounding may do ------------------------------------------------------------------

    def bound(self, pixels: Array) -> float:
        """How far rounding may move a logit of one program from that of the other.

        The sum of both allowed errors against float64. As in the oracle, the allowed error is a
        multiple of the error of correct arithmetic in the same precision: here the reference's,
        measured on these images (N, 3, H, W). For a precision that the reference lacks, the error
        in its own precision is scaled by the roundoffs. Quantisation is not rounding of these
        logits, so a quantised program is allowed no error.
        """
        exact = self._exact(pixels)
        losses: dict[str, float] = {}
        return sum(self._allowed(runner.program, exact, pixels, losses) for runner in self._runners)

    def _allowed(
        self, program: Program, exact: Array, pixels: Array, losses: dict[str, float]
    ) -> float:
        precision = precision_of(program.plan.options.precision)
        if precision.dtype.kind in "iu":
            return 0.0
        algorithms = (step.kernel.contract.algorithm for step in program.plan.steps)
        allowance = Allowance.of(precision, multiple(algorithms, precision))
        # float64's own loss cannot be seen in float64: the allowance scales the loss in float32.
        yardstick = "fp32" if precision.accumulate == "float64" else precision.name
        if yardstick not in losses:
            losses[yardstick] = self._loss(yardstick, exact, pixels)
        return allowance.most(losses[yardstick], float(np.abs(exact).max()))

    def _loss(self, precision: str, exact: Array, pixels: Array) -> float:
        """The largest error of the reference's logits in a precision."""
        try:
            found = self._logits(self._backends[-1], precision, pixels)
        except NoKernel:
            own = self.request.against_precision
            found = self._logits(self._backends[-1], own, pixels)
            scale = max(1.0, _roundoff(precision) / _roundoff(own))
        else:
            scale = 1.0
        return scale * float(np.abs(found.astype(np.float64) - exact).max())

    def _exact(self, pixels: Array) -> Array:
        """The logits in float64: the reference's own, else the core's reference on the CPU."""
        try:
            return self._logits(self._backends[-1], "fp64", pixels)
        except NoKernel:
            return self._logits(get_backend("numpy"), "fp64", pixels)

    def _logits(self, backend: Backend, precision: str, pixels: Array) -> Array:
        options = CompileOptions(len(pixels), precision, self.request.fusion)
        found = in_precision(self.request.schedule, self.weights, options)
        program = backend.compile(*found, options)
        try:
            return program(pixels)
        finally:
            program.close()


def row(file: str, label: int | None, logits: Array, expected: Array | None = None) -> Row:
    """One image's row, from its logits and the reference's, (classes,) each."""
    for name, values in (("backend", logits), ("reference", expected)):
        if values is not None and (count := int((~np.isfinite(values)).sum())):
            error = f"{count} of {values.size} logits of the {name} are not finite"
            return Row(file, label, NOT_FINITE, error=error)
    if expected is None:
        return Row(file, label, OK, top_classes(logits))
    (call,) = calls(logits[None], expected[None])
    return Row(file, label, OK, top_classes(logits), top_classes(expected), call.margin)


def top_classes(logits: Array) -> tuple[int, ...]:
    """The `TOP` classes, the most probable first; equal ones in their own order."""
    return tuple(int(index) for index in np.argsort(-logits, kind="stable")[:TOP])


def _roundoff(name: str) -> float:
    """The unit roundoff of the narrowest format that a precision's values go through."""
    precision = precision_of(name)
    factors = FACTOR_ROUNDOFFS.get(precision.multiply) or unit_roundoff(precision.multiply)
    return max(unit_roundoff(precision.storage), factors)


def _kernels_sha256(program: Program) -> str:
    """A digest over the steps of the plan, their kernels, and the sources of those that are
    compiled."""
    digest = hashlib.sha256()
    for step in program.plan.steps:
        source = step.kernel.digest or ""
        digest.update(f"{step.name} {step.kernel.id} {source}\n".encode())
    return digest.hexdigest()


__all__ = ["SAMPLE", "Pair", "Running", "row", "top_classes"]
