"""Memory, streams, events and graphs through CuPy.

Planning needs only the memory's alignment, so CuPy is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from r18.backend import Array, Buffer, Event, Memory, Stream
from r18.graph.ops import Shape
from r18_cupy.cuda import launch
from r18_cupy.cuda.copy_late import late_copy

if TYPE_CHECKING:
    import cupy


@cache
def _cupy() -> Any:
    """CuPy, with its memory pool on or off as `R18_CUPY_POOL` says."""
    import cupy

    if os.environ.get("R18_CUPY_POOL") == "0":
        # Each buffer is then its own allocation, whose bounds compute-sanitizer checks.
        cupy.cuda.set_allocator(None)
    return cupy


class CupyBuffer:
    """A range of device bytes from CuPy's pool. Kernels need only its address."""

    __slots__ = ("_memory", "address", "nbytes")

    def __init__(self, memory: cupy.cuda.MemoryPointer, nbytes: int) -> None:
        self._memory = memory
        self.address = int(memory.ptr)
        self.nbytes = nbytes

    @property
    def memory(self) -> cupy.cuda.MemoryPointer:
        return self._memory

    def view(self, offset: int, nbytes: int) -> CupyBuffer:
        """The bytes [offset, offset + nbytes), shared with this buffer."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view [{offset}, {offset + nbytes}) of a buffer of {self.nbytes}")
        return CupyBuffer(self.memory + offset, nbytes)

    def as_array(self, shape: Shape, dtype: np.dtype[Any]) -> cupy.ndarray:
        """The leading bytes as a CuPy array; shares memory."""
        return _cupy().ndarray(shape, dtype, self.memory)


class AdoptedBuffer(CupyBuffer):
    """Bytes with another owner. Adopting happens on every call, so CuPy's object for them is
    created only on demand.
    """

    __slots__ = ("_owner",)

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    @property
    def memory(self) -> cupy.cuda.MemoryPointer:
        return _foreign(self.address, self.nbytes, self._owner)


class CupyMemory(Memory):
    """Memory from CuPy's allocator, which aligns to 512 bytes."""

    alignment = 256
    adopts = True

    def empty(self, nbytes: int) -> CupyBuffer:
        return CupyBuffer(_cupy().cuda.alloc(max(1, nbytes)), nbytes)

    def upload(self, array: Array, buffer: Buffer) -> None:
        source = np.ascontiguousarray(array)
        if source.nbytes:
            _device(buffer).memory.copy_from_host(source.ctypes.data, source.nbytes)
            # NOTE: a copy from pageable memory returns when it is staged, not when it has arrived.
            _cupy().cuda.Stream.null.synchronize()

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        array: Array = np.empty(shape, dtype)
        if array.nbytes:
            _device(buffer).memory.copy_to_host(array.ctypes.data, array.nbytes)
        return array

    def fill(self, buffer: Buffer, byte: int) -> None:
        if buffer.nbytes:
            _device(buffer).memory.memset(byte, buffer.nbytes)
            _cupy().cuda.Stream.null.synchronize()

    def adopt(self, address: int, nbytes: int, owner: object) -> CupyBuffer:
        return AdoptedBuffer(address, nbytes, owner)

    def adopt_stream(self, handle: int) -> CupyStream:
        return _adopted(handle)

    @contextmanager
    def allocating(self, allocate: Callable[[int], tuple[int, object]]) -> Iterator[None]:
        def allocator(nbytes: int) -> cupy.cuda.MemoryPointer:
            address, owner = allocate(nbytes)
            return _foreign(address, nbytes, owner)

        with _cupy().cuda.using_allocator(allocator):
            yield


def _foreign(address: int, nbytes: int, owner: object) -> cupy.cuda.MemoryPointer:
    """Device bytes owned by `owner`, which is kept alive by the pointer."""
    cuda = _cupy().cuda
    device = cuda.device.get_device_id()  # saves CuPy a driver query for the address
    return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, device), 0)


@dataclass(frozen=True)
class _Handle:
    """A stream handle with the CUDA stream protocol."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _external(handle: int) -> cupy.cuda.Stream:
    """CuPy's object for an external stream."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14 and later; it deprecates ExternalStream
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle)


@lru_cache(maxsize=256)
def _adopted(handle: int) -> CupyStream:
    """A stream that only wraps a handle, independent of any device, so it may outlive the
    stream."""
    return CupyStream(_external(handle))


def _device(buffer: Buffer) -> CupyBuffer:
    if not isinstance(buffer, CupyBuffer):
        raise TypeError(f"a CuPy kernel was given a {type(buffer).__name__}")
    return buffer


def delay(stream: cupy.cuda.Stream) -> None:
    """With a perturbed schedule, delay the stream's next work if the seed says so."""
    if launch.LAUNCHER.delays_host():
        launch.LAUNCHER.launch(late_copy(0), (0, 0, 0), stream)


def _untimed() -> cupy.cuda.Event:
    """An event without timing, which is cheaper."""
    return _cupy().cuda.Event(disable_timing=True)


class CupyEvent:
    """A timed point in a stream's work."""

    def __init__(self, stream: cupy.cuda.Stream) -> None:
        self.event = _cupy().cuda.Event()
        self.event.record(stream)

    def milliseconds_since(self, earlier: CupyEvent) -> float:
        self.event.synchronize()
        return float(_cupy().cuda.get_elapsed_time(earlier.event, self.event))


class CupyStream(Stream):
    """A CUDA stream: a new non-blocking one, or the given one."""

    def __init__(self, cuda: cupy.cuda.Stream | None = None) -> None:
        self.cuda = _cupy().cuda.Stream(non_blocking=True) if cuda is None else cuda
        self._marks: list[tuple[str, Event]] | None = None
        self._branch: CupyStream | None = None

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def record(self) -> CupyEvent:
        return CupyEvent(self.cuda)

    @contextmanager
    def trace(self) -> Iterator[list[tuple[str, Event]]]:
        """Collect (phase, event) after each launch inside the block; see `r18.backend`."""
        self._marks = []
        try:
            yield self._marks
        finally:
            self._marks = None

    def mark(self, phase: str) -> None:
        """Record that a launch of this phase has been enqueued."""
        if self._marks is not None:
            self._marks.append((phase, self.record()))

    @contextmanager
    def branch(self) -> Iterator[CupyStream]:
        """A branch of this stream, one at a time."""
        other = self._branch_stream()
        other.cuda.wait_event(self.cuda.record(_untimed()))
        delay(other.cuda)
        yield other
        self.cuda.wait_event(other.cuda.record(_untimed()))

    def _branch_stream(self) -> CupyStream:
        """The stream of all branches; one suffices, since there is one branch at a time."""
        if self._branch is None:
            self._branch = CupyStream()
        return self._branch

    def capture(self, work: Callable[[], None], *, warm: bool = True) -> Callable[[], None]:
        """Capture the work as a CUDA graph. `warm`: run it once first, because loading functions is
        not allowed during capture.
        """
        if warm:
            work()
            self.cuda.synchronize()
        self._branch_stream()  # streams cannot be created during capture
        self.cuda.begin_capture()
        try:
            work()
        finally:
            graph = self.cuda.end_capture()
        graph.upload(self.cuda)
        return lambda: graph.launch(self.cuda)


class OverlappingStream(CupyStream):
    """A stream on a device with programmatic dependent launch."""

    overlapping = True

    def copy_late(self, source: Buffer, target: Buffer) -> None:
        addresses = launch.Buffers((source,), (), target, target).addresses
        launch.LAUNCHER.launch(late_copy(target.nbytes), addresses, self.cuda)
