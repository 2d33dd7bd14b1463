"""A deterministic scheduler for Numba's simulator: a block's threads take turns between barriers.

Numba starts all threads of a block and polls them. That is many times slower, and the order is
random, so a missing barrier shows in only a few runs. Here one thread runs at a time, in the same
order in every launch: first to last up to the first barrier, last to first up to the next, and so
on. Odd blocks start in reverse. A read that comes before another thread's write, because a barrier
is missing, therefore fails in every run. Two threads that add to one element between two barriers
give the right sum in any order; in the first block of each launch `races` finds them.

The threads are greenlets of the thread that launches: at a barrier, a switch between threads of the
system takes longer than what simulated ones compute.

At the start of each block, shared and local arrays hold NaN (integers −1).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from r18.backend import Array
from r18.errors import BackendUnavailable
from r18.graph.ops import Shape
from r18_numba.races import Watched
from r18_numba.target import INSTALL, NAME, numba_cuda

numba_cuda()  # chooses the simulator before its modules are imported
kernel: Any = import_module("numba.cuda.simulator.kernel")
kernelapi: Any = import_module("numba.cuda.simulator.kernelapi")
try:
    greenlet: Any = import_module("greenlet")
except ImportError as error:
    raise BackendUnavailable(NAME, f"its simulator needs greenlet: {error}", INSTALL) from error


class Ended(BaseException):
    """Ends a thread at a barrier after another thread failed."""


class Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block. It runs from one barrier to the next each time that it gets the turn."""

    def __init__(self, block: Block, at: Shape, number: int, thread: Shape, work: Any) -> None:
        super().__init__(work, block, at, thread, debug=False)
        self.number = number
        self._greenlet = greenlet.greenlet(self.run)

    def go(self) -> bool:
        """Run to the next barrier; False once the thread has ended."""
        self._greenlet.switch()
        return not self._greenlet.dead

    def run(self) -> None:
        try:
            self._continue()
            super().run()  # stores an `Exception`
        except Ended:
            pass

    def syncthreads(self) -> None:
        self._greenlet.parent.switch()
        self._continue()

    def _continue(self) -> None:
        if self.abort:
            raise Ended


class Block(kernel.BlockManager):  # type: ignore[misc]
    """A block's threads. One runs at a time.

    running: its number. passed: the barriers that the block has passed.
    """

    running = 0
    passed = 0

    def run(self, at: Shape, *arguments: Any) -> None:
        """Run one block of the grid to its end. Raises what a thread raises."""

        def work() -> None:
            self._f(*arguments)

        fresh_memory(None if any(at) else self)
        arguments = tuple(plain(argument) for argument in arguments)
        places = enumerate(np.ndindex(*self._block_dim))
        threads = [Thread(self, at, number, index, work) for number, index in places]
        with _traced_like_threads():
            ahead = threads[::-1] if sum(at) % 2 else threads
            while ahead := self._to_the_barrier(ahead):
                self.passed += 1
        for thread in threads:
            if thread.exception:
                error, traceback = thread.exception
                raise error.with_traceback(traceback)

    def _to_the_barrier(self, ahead: list[Thread]) -> list[Thread]:
        """Let the threads go on one after another, and return those that reached a barrier, the
        last one first. A thread that has ended keeps none waiting. If one fails, all others end.
        """
        behind: list[Thread] = []
        for thread in ahead:
            self.running = thread.number
            _Current.thread = thread
            if thread.go():
                behind.append(thread)
            elif thread.exception:
                for other in (*ahead, *behind):
                    other.abort = True
        return behind[::-1]


class _Current:
    """A substitute for the simulator's `threading`, whose current thread is the CUDA thread that
    runs."""

    thread: Thread

    @classmethod
    def current_thread(cls) -> Thread:
        return cls.thread


@contextmanager
def _traced_like_threads() -> Iterator[None]:
    """Kernels are traced as new threads of Python are: only if `threading.settrace` says so.

    The oracle traces its own threads line by line. In a kernel they would wait for each other,
    while one has the simulator for itself.
    """
    if (before := sys.gettrace()) is None or threading.gettrace() is not None:
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


class Shared(kernelapi.FakeCUDAShared):  # type: ignore[misc]
    """A block's arrays, each identified by the line that allocates it.

    watched: the block whose races to look for, or None.
    """

    def __init__(self, dynamic_nbytes: int) -> None:
        super().__init__(dynamic_nbytes)
        self.arrays: dict[tuple[object, int], Array | Watched] = {}
        self.watched: Block | None = None

    def array(self, shape: int | Shape, dtype: Any, alignment: None = None) -> Array | Watched:
        frame = sys._getframe(1)
        line = (frame.f_code, frame.f_lineno)
        if line not in self.arrays:
            array = unwritten(shape, dtype)
            self.arrays[line] = Watched(array, self.watched) if self.watched else array
        return self.arrays[line]


class Local(kernelapi.FakeCUDALocal):  # type: ignore[misc]
    def array(self, shape: int | Shape, dtype: Any, alignment: None = None) -> Array:
        return unwritten(shape, dtype)


def fresh_memory(watched: Block | None) -> None:
    """Drop the shared arrays of the previous block. watched: the next one, to look for races."""
    shared = kernel._get_kernel_context().shared
    shared.arrays.clear()
    shared.watched = watched


def unwritten(shape: int | Shape, dtype: Any) -> Array:
    """An array of bytes 0xFF."""
    array: Array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def plain(argument: Any) -> Any:
    """The array without Numba's wrapper, whose reads are several times slower."""
    wrapped = isinstance(argument, kernel.FakeWithinKernelCUDAArray)
    return argument._item._ary if wrapped else argument


def install() -> None:
    """Replace the simulator's scheduler and memory in this process."""
    kernel.BlockManager = Block
    kernelapi.FakeCUDAShared = Shared
    kernelapi.FakeCUDALocal = Local
    kernelapi.threading = _Current
