"""A program on a GPU: copies overlap with compute, and device arrays are accepted.

Two input buffers alternate, each with pinned host memory: while one batch is computed, the next is
copied on a separate stream. Arrays that are already on the device are read in place.

Two events per buffer order the streams without the host. A copy into the buffer waits for the last
run that read it (`free`); a run that reads it waits for its batch (`ready`). Outputs are copied
back on the compute stream, between their run and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import cupy
import numpy as np

from r18.backend import (
    Array,
    Backend,
    Buffer,
    Launch,
    Plan,
    Program,
    Tensor,
    logical,
    widened,
)
from r18.backend.program import without_mask
from r18.errors import UsageError
from r18.graph.ops import Layout
from r18_cupy.cuda.device import CupyBuffer, CupyStream, delay

_DLPACK_CUDA = 2  # kDLCUDA


class Slot:
    """An input buffer.

    ready: its batch has arrived. free: the last run that read it has ended.
    staging: pinned memory for batches in pageable memory, allocated on first use.
    """

    def __init__(self, buffer: CupyBuffer) -> None:
        self.buffer = buffer
        self.staging: Array | None = None
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.free = cupy.cuda.Event(disable_timing=True)


class CupyProgram(Program):
    """See `r18.backend.Program`. `run` takes and gives arrays on the device."""

    def __init__(self, backend: Backend, plan: Plan, weights: Mapping[str, Array]) -> None:
        self._loaded: Slot | None = None
        super().__init__(backend, plan, weights)
        tensor = plan.tensors[plan.schedule.input]
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._slots = [
            Slot(cast(CupyBuffer, buffer))
            for buffer in (self._buffer(tensor.value), self._memory.empty(tensor.nbytes))
        ]
        self._next = 0
        self._arriving: list[tuple[cupy.cuda.Event, Array]] = []
        self._runs: dict[int, Callable[[], None]] = {}
        reads = [tensor.value in step.inputs for step in plan.steps]
        self._head = len(reads) - reads[::-1].index(True)  # steps up to the last reader
        self._tail: Callable[[], None] | None = None
        self._held: Any = None

    @property
    def _cuda(self) -> cupy.cuda.Stream:
        return cast(CupyStream, self._stream).cuda

    # -- from and to the host ------------------------------------------------------------------

    def load(self, images: Array) -> None:
        """Start copying a batch to the device; `images` may be changed once this returns.

        An array of `input_arrays` is copied directly. It may be changed once the other one has been
        loaded, or its run has ended. A launch in flight continues with its own batch.
        """
        images = without_mask(images)
        tensor = self._check_input(images.shape, images.dtype)
        with self._lock:
            given = [array is images for array in self._input_arrays or ()]
            index = given.index(True) if any(given) else self._next
            slot, other = self._slots[index], self._slots[1 - index]
            source = images if any(given) else self._staged(images, tensor, slot)
            self._copies.wait_event(slot.free)
            delay(self._copies)
            slot.buffer.memory.copy_from_host_async(source.ctypes.data, source.nbytes, self._copies)
            slot.ready.record(self._copies)
            self._loaded, self._next = slot, 1 - index
            if any(given):
                other.ready.synchronize()  # the other array may now be changed, as documented

    def _staged(self, images: Array, tensor: Tensor, slot: Slot) -> Array:
        """Copy the batch to the slot's pinned memory, after its previous copy has completed."""
        if slot.staging is None:
            slot.staging = self._host_array(tensor)
        slot.ready.synchronize()
        with np.errstate(over="ignore"):  # overflow to infinity is intended
            slot.staging[...] = images
        return slot.staging

    def _host_array(self, tensor: Tensor) -> Array:
        return logical(_pinned(tensor.layout.physical(tensor.shape), tensor.dtype), tensor.layout)

    def fetch_later(self) -> Callable[[], Array]:
        """The copy goes into the stream of the run, before the next one."""
        self._check_open()
        tensor = self._plan.tensors[self._plan.schedule.output]
        buffer = cast(CupyBuffer, self._buffer(tensor.value))
        with self._lock:
            host = _pinned(tensor.layout.physical(tensor.shape), tensor.dtype)
            arrived = cupy.cuda.Event(disable_timing=True)
            delay(self._cuda)
            buffer.memory.copy_to_host_async(host.ctypes.data, host.nbytes, self._cuda)
            arrived.record(self._cuda)
            # Keep it alive: the pool would reuse the memory while the copy is in flight.
            self._arriving = [(e, held) for e, held in self._arriving if not e.done]
            self._arriving.append((arrived, host))

        def fetch() -> Array:
            arrived.synchronize()
            return np.ascontiguousarray(widened(logical(host, tensor.layout)))

        return fetch

    def launch(self) -> None:
        """Enqueue one run over the loaded batch; returns immediately."""
        self._check_open()
        slot = self._slots[0] if self._loaded is None else self._loaded
        self._cuda.wait_event(slot.ready)
        delay(self._cuda)
        self._run_of(slot)()
        slot.free.record(self._cuda)

    def _launches_now(self) -> tuple[Launch, ...]:
        if self._loaded is None:
            return self._launches
        self._loaded.ready.synchronize()
        return self._reading(self._loaded.buffer, self._launches)

    def _run_of(self, slot: Slot) -> Callable[[], None]:
        """The launches that read a slot's buffer, as a graph if the options say so."""
        if slot is self._slots[0] and self._graph is not None:
            return self._graph
        key = slot.buffer.address
        if key not in self._runs:
            self._runs[key] = self._ready(self._reading(slot.buffer, self._launches))
        return self._runs[key]

    def _ready(self, launches: tuple[Launch, ...]) -> Callable[[], None]:
        """Launches as one callable, as a graph if the options say so."""

        def work() -> None:
            self._enqueue(launches)

        if not (launches and self._plan.options.graph):
            return work
        return cast(CupyStream, self._stream).capture(work, warm=False)

    def _reading(self, source: Buffer, launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        """The launches with another buffer as the network's input."""
        value = self._plan.schedule.input
        return tuple(
            replace(
                launch,
                inputs=tuple(
                    source if key == value else buffer
                    for key, buffer in zip(step.inputs, launch.inputs, strict=True)
                ),
            )
            for step, launch in zip(self._plan.steps, launches, strict=False)
        )

    def _buffer(self, key: str) -> Buffer:
        if key == self._plan.schedule.input and self._loaded is not None:
            self._loaded.ready.synchronize()
            return self._loaded.buffer
        return super()._buffer(key)

    # -- on the device -------------------------------------------------------------------------

    def run(self, images: Any, stream: Any = None) -> cupy.ndarray:
        """Run over a device array, ordered within the caller's stream.

        images: (N, C, H, W), with DLPack or `__cuda_array_interface__`. If it is dense, in the
        program's storage format and aligned to 256 bytes, it is read in place, otherwise copied.
        stream: an integer handle, or a PyTorch (`cuda_stream`) or CuPy (`ptr`) stream; default
        CuPy's current stream. The run starts after the work enqueued on it so far, and work
        enqueued later sees the result.

        Returns the output as a CuPy array, logical shape, in the storage format, without a copy: it
        shares the program's memory and is valid until the next run. Does not synchronise. Raises
        `ShapeError`, and `UsageError` for integers.
        """
        caller = _stream(stream)
        with self._lock, caller:
            source = _device_array(images)
            tensor = self._check_input(source.shape, source.dtype)
            physical = source if tensor.layout is Layout.NCHW else source.transpose(0, 2, 3, 1)
            dense = cupy.ascontiguousarray(physical, tensor.dtype)  # no copy if it already fits
            if dense.data.ptr % self._memory.alignment:
                dense = dense.copy()  # kernels use vector loads
            begun = cupy.cuda.Event(disable_timing=True)
            begun.record(caller)
            self._cuda.wait_event(begun)
            delay(self._cuda)
            buffer = CupyBuffer(dense.data, dense.nbytes)
            self._enqueue(self._reading(buffer, self._launches[: self._head]))
            self._finish()
            done = cupy.cuda.Event(disable_timing=True)
            done.record(self._cuda)
            caller.wait_event(done)
            self._held = (images, dense)  # kept alive until the next run replaces it
            return self._output()

    def _finish(self) -> None:
        """Enqueue the launches after those that read the input, the same for every input."""
        if self._tail is None:
            self._tail = self._ready(self._launches[self._head :])
        self._tail()

    def _output(self) -> cupy.ndarray:
        tensor = self._plan.tensors[self._plan.schedule.output]
        buffer = cast(CupyBuffer, self._buffer(tensor.value))
        array = buffer.as_array(tensor.layout.physical(tensor.shape), tensor.dtype)
        return logical(array, tensor.layout)

    def close(self) -> None:
        """Release the memory; idempotent."""
        if not self._closed:
            self._copies.synchronize()
        super().close()
        self._slots, self._runs, self._tail, self._held = [], {}, None, None
        self._arriving = []


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A host array in pinned memory."""
    size = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(size * dtype.itemsize)
    return cast(Array, np.frombuffer(memory, dtype, size).reshape(shape))


def _device_array(images: Any) -> cupy.ndarray:
    """A CuPy array that shares the memory."""
    if isinstance(images, cupy.ndarray):
        return images
    described = getattr(images, "__cuda_array_interface__", None)
    # Types without a name there, such as PyTorch's bfloat16, appear as raw bytes; DLPack can name
    # them.
    if described is not None and np.dtype(described["typestr"]).kind != "V":
        return cupy.asarray(images)
    if hasattr(images, "__dlpack_device__") and images.__dlpack_device__()[0] == _DLPACK_CUDA:
        return cupy.from_dlpack(images)
    raise UsageError(
        f"run() takes an array on the GPU (DLPack or __cuda_array_interface__), got a "
        f"{type(images).__name__} on the host; call the program with it, or load, launch, fetch"
    )


def _stream(stream: Any) -> cupy.cuda.Stream:
    if stream is None:
        return cupy.cuda.get_current_stream()
    if isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        return stream
    return cupy.cuda.ExternalStream(int(getattr(stream, "cuda_stream", stream)))
