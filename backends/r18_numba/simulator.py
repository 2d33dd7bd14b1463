"""A deterministic scheduler for Numba's simulator: a block's threads take turns between barriers.

Numba starts all threads of a block and polls them. That is many times slower, and the order is
random, so a missing barrier shows in only a few runs. Here one thread runs at a time, in the same
order in every launch: first to last up to the first barrier, last to first up to the next, and so
on. Odd blocks start in reverse. A read that comes before another thread's write, because a barrier
is missing, therefore fails in every run. Two threads that add to one element between two barriers
give the right sum in any order; in the first block of each launch `races` finds them.

At the start of each block, shared and local arrays hold NaN (integers −1).
"""

from __future__ import annotations

import sys
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from r18.backend import Array
from r18.graph.ops import Shape
from r18_numba.races import Watched
from r18_numba.target import numba_cuda

numba_cuda()  # chooses the simulator before its modules are imported
kernel: Any = import_module("numba.cuda.simulator.kernel")
kernelapi: Any = import_module("numba.cuda.simulator.kernelapi")


class Ended(BaseException):
    """Ends a thread at a barrier after another thread failed."""


class Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block. It runs when it gets the turn and passes it on at a barrier."""

    def __init__(self, block: Block, at: Shape, number: int, thread: Shape, work: Any) -> None:
        super().__init__(work, block, at, thread, debug=False)
        self.number = number
        self._block = block
        self._turn = Lock()
        self._turn.acquire()

    def go(self) -> None:
        self._turn.release()

    def run(self) -> None:
        try:
            self._wait()
            super().run()  # stores an `Exception`
        except Ended:
            pass
        finally:
            self._block.ended(self)

    def syncthreads(self) -> None:
        self._block.waits(self)
        self._wait()

    def _wait(self) -> None:
        self._turn.acquire()
        if self.abort:
            raise Ended


class Block(kernel.BlockManager):  # type: ignore[misc]
    """A block's threads. One runs at a time.

    running: its number. passed: the barriers that the block has passed. Only the running thread
    accesses this state, so it needs no lock.
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
        # Threads before the barrier, in the order of their turns, and threads at the barrier.
        self._ahead = threads[::-1] if sum(at) % 2 else list(threads)
        self._behind: list[Thread] = []
        self._over = Lock()
        self._over.acquire()
        for thread in threads:
            thread.start()
        self._next()
        self._over.acquire()
        for thread in threads:
            thread.join()
        for thread in threads:
            if thread.exception:
                error, traceback = thread.exception
                raise error.with_traceback(traceback)

    def waits(self, thread: Thread) -> None:
        """The thread has reached a barrier."""
        self._behind.append(thread)
        self._next()

    def ended(self, thread: Thread) -> None:
        """The thread has finished; no barrier waits for it. If it failed, all others end."""
        if thread.exception:
            for other in (*self._ahead, *self._behind):
                other.abort = True
        self._next()

    def _next(self) -> None:
        if not self._ahead:  # all threads reached the barrier: the last one goes first
            self._ahead, self._behind = self._behind[::-1], []
            self.passed += 1
        if self._ahead:
            thread = self._ahead.pop(0)
            self.running = thread.number
            thread.go()
        else:
            self._over.release()


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
