"""Memory, streams, events and graphs by Numba, on a GPU or in the simulator."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from r18.backend import Array, Buffer, Event, Memory, Stream
from r18.backend.host import HostEvent
from r18.graph.ops import Shape
from r18_numba.target import numba_cuda, simulated

cuda = numba_cuda()
if simulated():
    import_module("r18_numba.simulator").install()

_SIMULATOR = threading.RLock()
"""The simulator runs one kernel at a time."""

Dim3 = tuple[int, int, int]


class NumbaBuffer:
    """A span of device bytes, with typed arrays over it, made on demand."""

    __slots__ = ("_raw", "_typed", "nbytes")

    def __init__(self, raw: Any, nbytes: int) -> None:
        self._raw = raw  # 1-d uint8 of `nbytes`; never empty, as an empty array has no address
        self.nbytes = nbytes
        self._typed: dict[Any, Any] = {}

    def view(self, offset: int, nbytes: int) -> NumbaBuffer:
        """The bytes [offset, offset + nbytes), shared with this buffer."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view [{offset}, {offset + nbytes}) of a buffer of {self.nbytes}")
        return NumbaBuffer(self._raw[offset : offset + nbytes] if nbytes else self._raw, nbytes)

    def as_array(self, dtype: Any) -> Any:
        """A 1-d device array over the whole buffer, cached per dtype. The buffer is not empty."""
        if dtype not in self._typed:
            self._typed[dtype] = self._raw.view(dtype)
        return self._typed[dtype]


class NumbaMemory(Memory):
    """Bytes from the CUDA driver, which aligns them to 256; from NumPy in the simulator.

    Copies and fills run in the default stream and are complete on return.
    """

    alignment = 256

    def empty(self, nbytes: int) -> NumbaBuffer:
        return NumbaBuffer(cuda.device_array(max(1, nbytes), np.uint8), nbytes)

    def upload(self, array: Array, buffer: Buffer) -> None:
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if source.nbytes:
            numba_buffer(buffer).as_array(np.uint8)[: source.nbytes].copy_to_device(source)
            cuda.synchronize()  # a copy from pageable memory returns once it is staged

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        raw: Array = np.empty(int(np.prod(shape, dtype=object)) * dtype.itemsize, np.uint8)
        if raw.nbytes:
            numba_buffer(buffer).as_array(np.uint8)[: raw.nbytes].copy_to_host(raw)
        return raw.view(dtype).reshape(shape)

    def fill(self, buffer: Buffer, byte: int) -> None:
        if buffer.nbytes:
            self.upload(np.full(buffer.nbytes, byte, np.uint8), buffer)


def numba_buffer(buffer: Buffer) -> NumbaBuffer:
    """The buffer, checked to be of this backend. Raises `TypeError` for another's."""
    if not isinstance(buffer, NumbaBuffer):
        raise TypeError(f"a Numba kernel was given a {type(buffer).__name__}")
    return buffer


class NumbaEvent:
    """A recorded CUDA event."""

    def __init__(self, stream: Any) -> None:
        self.event = cuda.event(timing=True)
        self.event.record(stream)

    def milliseconds_since(self, earlier: NumbaEvent) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


class NumbaStream(Stream):
    """A CUDA stream. In the simulator, work runs when it is enqueued."""

    def __init__(self) -> None:
        self.cuda = cuda.stream()
        self._marks: list[tuple[str, Event]] | None = None

    def launch(
        self, function: Any, grid: Dim3, block: Dim3, *arguments: Any, phase: str = ""
    ) -> None:
        """Enqueue a launch. Arguments are device arrays and 32-bit integers."""
        if simulated():
            with _simulation():
                function[grid, block](*arguments)
        else:
            scalars = (np.int32(a) if isinstance(a, int) else a for a in arguments)
            function[grid, block, self.cuda](*scalars)
        if self._marks is not None:
            self._marks.append((phase, self.record()))

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def record(self) -> NumbaEvent | HostEvent:
        """An event. In the simulator, whose events have no time, a reading of the host's clock."""
        return HostEvent(time.perf_counter()) if simulated() else NumbaEvent(self.cuda)

    @contextmanager
    def trace(self) -> Iterator[list[tuple[str, Event]]]:
        """Collect an event after each launch, with its phase; see `r18.backend`."""
        self._marks = []
        try:
            yield self._marks
        finally:
            self._marks = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """The work as a CUDA graph. None in the simulator, or if the driver cannot capture it.

        The work runs once first, which compiles and loads its functions.
        """
        if simulated():
            return None
        work()
        self.synchronize()
        from r18_numba.graph import Graph, GraphError

        try:
            graph = Graph(int(self.cuda), work)
        except GraphError:
            return None

        def launch() -> None:
            cuda.current_context()  # attaches the context to a new thread
            graph.launch()

        return launch


@contextmanager
def _simulation() -> Iterator[None]:
    """Run one kernel in the simulator, without warnings of overflow.

    `np.errstate` would not do: it applies to one context, and each greenlet has its own.
    """
    with _SIMULATOR, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
