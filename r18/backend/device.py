"""The hardware that kernels run on: the device, its memory, and its streams."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from r18.errors import UsageError
from r18.graph.ops import Shape

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DeviceInfo:
    """The device of a backend: `kind` is "cpu" or "cuda", `name` describes it.

    simulated: the device is simulated in software. Kernels can be verified there, on small
               problems, but it is too slow for anything else, and `auto` never chooses it.
    """

    kind: str
    name: str
    details: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def slug(self) -> str:
        """The device in a file's name: `nvidia-h200` of "NVIDIA H200 (sm_90)"; CPUs are `cpu`."""
        if self.kind == "cpu":
            return "cpu"
        name = re.split(r"[(,]", self.name)[0]
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or self.kind


class Buffer(Protocol):
    """A span of device bytes. A view shares memory with the buffer it was taken from."""

    @property
    def nbytes(self) -> int: ...

    def view(self, offset: int, nbytes: int) -> Buffer: ...


class Event(Protocol):
    """A point in a stream's work."""

    def milliseconds_since(self, earlier: Any) -> float:
        """Time between two recorded events; waits for both."""
        ...


class Memory(ABC):
    """An allocator of bytes; knows no op. A buffer is freed when nothing refers to it.

    `upload`, `download` and `fill` are complete when they return.

    alignment: buffers begin at addresses that are multiples of this many bytes.
    adopts:    `adopt` and `adopt_stream` work: kernels can run over another library's memory, in
               its streams. `r18.torch` needs this.
    by_size_nbytes: where a plan needs no more bytes for it, only buffers of the same size share
               bytes, so that each thread of a kernel finds its part of one in its core's cache. In
               larger plans, buffers of all sizes share.
    """

    alignment: int = 64
    adopts: ClassVar[bool] = False
    by_size_nbytes: ClassVar[int] = 0

    @abstractmethod
    def empty(self, nbytes: int) -> Buffer:
        """A new buffer; its contents are undefined."""

    @abstractmethod
    def upload(self, array: Array, buffer: Buffer) -> None:
        """Copy a host array into the leading bytes of a buffer, in C order."""

    @abstractmethod
    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """A copy of a buffer's leading bytes as a host array."""

    @abstractmethod
    def fill(self, buffer: Buffer, byte: int) -> None:
        """Set every byte of a buffer."""

    def adopt(self, address: int, nbytes: int, owner: object) -> Buffer:
        """The bytes at an address of this device as a buffer, without a copy.

        The buffer keeps `owner`, the object that the bytes belong to, alive. The caller ensures
        that the bytes exist and that the address is a multiple of `alignment`. Raises `UsageError`
        unless `adopts`.
        """
        raise self._adopts_nothing()

    def adopt_stream(self, handle: int) -> Stream:
        """The device's stream of that handle, 0 for the default one, to enqueue in.

        A host has one stream, whatever the handle. Raises `UsageError` unless `adopts`.
        """
        raise self._adopts_nothing()

    def allocating(
        self, allocate: Callable[[int], tuple[int, object]]
    ) -> AbstractContextManager[None]:
        """Within the context, this thread's buffers come from `allocate`: bytes → (address, owner).

        So that one device has one pool. The default changes nothing: the memory has no pool.
        """
        return nullcontext()

    def _adopts_nothing(self) -> UsageError:
        return UsageError(
            f"{type(self).__name__} cannot adopt another library's memory or streams\n"
            "  set `adopts = True`, and implement `adopt` and `adopt_stream`"
        )


class Stream(ABC):
    """An order of device work.

    overlapping: the device may begin a launch before the previous one has ended. Kernels then wait
                 by themselves for the memory they read and write; a check verifies that with
                 `copy_late`.
    """

    overlapping: ClassVar[bool] = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work in the stream."""

    @abstractmethod
    def record(self) -> Event:
        """An event after the work that is in the stream now."""

    @contextmanager
    def trace(self) -> Iterator[list[tuple[str, Event]]]:
        """Within the context, kernels that work in several phases leave an event after each.

        Yields the list that receives them, as (phase, event); a phase's name may be empty. The
        list stays empty by default: every call is one phase.
        """
        yield []

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """Record the launches of `work` as a graph and return the graph's launch.

        None, the default: this device has no graphs.
        """
        return None

    def branch(self) -> AbstractContextManager[Stream]:
        """A stream for work that may run at the same time as this stream's.

        It begins after the work that is in this stream now; work enqueued in this stream after the
        block waits for it. By default it is this stream, and nothing runs at the same time.
        """
        return nullcontext(self)

    def copy_late(self, source: Buffer, target: Buffer) -> None:
        """Enqueue a slow copy that lets the next launch begin before it has ended.

        Raises `UsageError` unless `overlapping`.
        """
        raise UsageError(f"launches in a {type(self).__name__} do not overlap")


__all__ = ["Array", "Buffer", "DeviceInfo", "Event", "Memory", "Stream"]
