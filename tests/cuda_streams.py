"""CUDA's streams and events without a device, whose work is done at the worst moment.

Nothing of a stream is done before something waits for it, but for a few operations now and then,
of any stream that may go on: a seed decides. What is ordered by neither streams, events nor
waiting comes out in every order, sooner or later.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from r18.backend import Array, Launch
from r18.backend.host import HostBuffer, HostMemory
from r18_numpy import Backend


def _program_module() -> Any:
    """The module of cupy's program, also without CuPy, with a stand-in for all that it uses."""
    if find_spec("cupy") is not None:
        return import_module("r18_cupy.cuda.program")
    sys.modules["cupy"] = ModuleType("cupy")
    try:
        return import_module("r18_cupy.cuda.program")
    finally:
        del sys.modules["cupy"]


PROGRAM = _program_module()

Operation = tuple[Callable[[], bool], Callable[[], None]]
"""Whether the operation may be done now, and the function that does it."""


def always() -> bool:
    return True


class Device:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pace = self.rng.choice([0.0, 0.3, 1.3])  # operations done while one is enqueued
        self.streams: list[Stream] = []

    def step(self) -> bool:
        """Do one operation of some stream; returns False if no stream may go on."""
        ready = [s for s in self.streams if s.work and s.work[0][0]()]
        if not ready:
            return False
        ready[self.rng.integers(len(ready))].work.popleft()[1]()
        return True

    def meanwhile(self) -> None:
        for _ in range(self.rng.poisson(self.pace)):
            self.step()

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.step(), "nothing can go on: a deadlock"


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: deque[Operation] = deque()
        device.streams.append(self)

    def push(self, do: Callable[[], None], may: Callable[[], bool] = always) -> None:
        self.work.append((may, do))
        self.device.meanwhile()

    def wait_event(self, event: Event) -> None:
        recorded = event.recorded
        self.push(lambda: None, lambda: event.reached >= recorded)

    def synchronize(self) -> None:
        self.device.until(lambda: not self.work)


class Event:
    """An event: how often it was recorded, and the last recording that a stream has reached."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached = number

        stream.push(reach)

    @property
    def done(self) -> bool:
        return self.reached == self.recorded

    def synchronize(self) -> None:
        recorded = self.recorded
        self.device.until(lambda: self.reached >= recorded)


class DeviceBytes(HostBuffer):
    """Host bytes that stand in for device memory."""

    def view(self, offset: int, nbytes: int) -> DeviceBytes:
        return DeviceBytes(super().view(offset, nbytes).array)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def memory(self) -> DeviceBytes:
        return self

    def copy_from_host_async(self, source: int, nbytes: int, stream: Stream) -> None:
        stream.push(lambda: _move(self.address, source, nbytes))

    def copy_to_host_async(self, target: int, nbytes: int, stream: Stream) -> None:
        stream.push(lambda: _move(target, self.address, nbytes))


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


class DeviceMemory(HostMemory):
    def empty(self, nbytes: int) -> DeviceBytes:
        return DeviceBytes(super().empty(nbytes).array)


class Queue:
    """A stand-in for the backend's stream."""

    def __init__(self, device: Device) -> None:
        self.cuda = Stream(device)
        self.captured: list[Callable[[], None]] | None = None

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def do(self, work: Callable[[], None]) -> None:
        if self.captured is None:
            self.cuda.push(work)
        else:
            self.captured.append(work)

    def capture(self, work: Callable[[], None], *, warm: bool = True) -> Callable[[], None]:
        graph: list[Callable[[], None]] = []
        self.captured = graph
        work()
        self.captured = None

        def launch() -> None:
            for one in graph:
                self.cuda.push(one)

        return launch


class Program(PROGRAM.CupyProgram):
    """CuPy's program with NumPy kernels, which its stream runs later."""

    def _enqueue(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._stream.do(lambda launch=launch: launch.enqueue(self._stream))  # type: ignore[attr-defined]


class Deferred(Backend):
    """A backend that runs such programs on a stand-in device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.memory = DeviceMemory()
        self.device = device

    def stream(self) -> Any:
        return Queue(self.device)


def cupy_on(device: Device) -> Any:
    """A stand-in for what the program module uses of CuPy."""

    def pinned(nbytes: int) -> Array:
        return np.full(nbytes, 0xEE, np.uint8)

    return SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(compute_capability="90"),
            Event=lambda disable_timing=True: Event(device),
            Stream=lambda non_blocking=True: Stream(device),
            alloc_pinned_memory=pinned,
        )
    )
