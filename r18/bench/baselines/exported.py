"""The base class of peers that run the exported network on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from r18.backend import Array, StepTime
from r18.backend.host import HostMemory
from r18.bench.baselines.onnx_export import onnx_model
from r18.errors import BackendUnavailable, ProgramClosed
from r18.graph.ops import Shape
from r18.graph.precision import FP32, INT8
from r18.graph.schedule import Schedule
from r18.qdq import qdq_model
from r18.weights.precisions import quantization_of


class Exported(ABC):
    """The network as an ONNX model, built by a library in `_built`. See `r18.bench.rows.Runner`.

    Images are read from and logits written to memory that the library is bound to, so that a run
    copies nothing. Raises `BackendUnavailable` where the library or `onnx` is missing, and for
    what it is no peer in: all but its `precisions` on a CPU. In int8 it raises `WeightsError` for
    weights without a quantisation. Images and logits are float32 in each.
    """

    mode: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = (FP32.name, INT8.name)
    arena_nbytes = None
    weight_nbytes = None  # each keeps them in layouts of its own, and does not say
    kernels: ClassVar[Mapping[str, int]] = {}

    def __init__(
        self,
        kind: str,
        schedule: Schedule,
        weights: Mapping[str, Array],
        batch: int,
        precision: str,
    ) -> None:
        if kind != "cpu":
            raise BackendUnavailable(self.mode, f"it is a peer on the CPU, not on {kind}")
        if precision not in self.precisions:
            raise BackendUnavailable(self.mode, f"it has no {precision} on {kind}")
        shapes = schedule.shapes(batch)
        self._images = _aligned(shapes[schedule.input])
        self._output = _aligned(shapes[schedule.output])
        if precision == INT8.name:
            model = qdq_model(schedule, quantization_of(weights), batch=batch)
        else:
            model = onnx_model(schedule, weights, batch=batch)
        content = model.SerializeToString()
        self._infer = self._built(content, schedule.input, schedule.output, precision)

    @abstractmethod
    def _built(
        self, model: bytes, images: str, output: str, precision: str
    ) -> Callable[[], object]:
        """A function that runs the model once, from `_images` to `_output`; the names are the
        model's."""

    def load(self, images: Array) -> None:
        np.copyto(self._images, images)

    def run(self) -> None:
        self._infer()

    def time(self, clock: Callable[[], float]) -> float:
        begin = clock()
        self._infer()
        return (clock() - begin) * 1e3

    def fetch(self) -> Array:
        return self._output.copy()

    def steps(self) -> list[StepTime]:
        return []

    def close(self) -> None:
        self._infer = self._closed  # the library's session goes with what ran it

    def _closed(self) -> None:
        raise ProgramClosed(f"'{self.mode}' was used after it was closed")


def not_importable(mode: str, error: ImportError) -> BackendUnavailable:
    """The error where a library is missing."""
    return BackendUnavailable(mode, f"it does not import: {error}", "pip install 'r18[peers]'")


def _aligned(shape: Shape) -> Array:
    """Float32 on a cache line: a library may copy what begins elsewhere."""
    dtype = np.dtype(np.float32)
    nbytes = dtype.itemsize * int(np.prod(shape))
    return HostMemory().empty(nbytes).as_array(shape, dtype)


__all__ = ["Exported", "not_importable"]
