"""How Numba's simulator runs a block here: its threads take turns, each from barrier to barrier.

Numba starts a block's threads at once and polls them. That takes many times longer, and leaves it
to chance which thread is ahead: a missing barrier then shows in one run of many. Here one thread
runs at a time, in an order that every launch repeats: first to last up to the first barrier, last
to first up to the next, and so on; odd blocks begin the other way around. What one thread reads
before another has written it is read too early in every run. What goes wrong only between two
barriers, as when two threads add to one element at once, does not show here at all.

Shared and local arrays hold NaN (integers −1) until something is written: in every block anew.
"""

from __future__ import annotations

import sys
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from r18.backend import Array
from r18.graph.ops import Shape
from r18_numba.target import numba_cuda

numba_cuda()  # the simulator must have been chosen
kernel: Any = import_module("numba.cuda.simulator.kernel")
kernelapi: Any = import_module("numba.cuda.simulator.kernelapi")


class Ended(BaseException):
    """Ends a thread at a barrier, because another has failed."""


class Lane(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block: it goes on when it is given the turn, and gives it on at a barrier."""

    def __init__(self, block: Block, at: Shape, thread: Shape, work: Any) -> None:
        super().__init__(work, block, at, thread, debug=False)
        self._block = block
        self._turn = Lock()
        self._turn.acquire()

    def go(self) -> None:
        self._turn.release()

    def run(self) -> None:
        try:
            self._wait()
            super().run()  # keeps an `Exception` that is raised
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
    """A block's threads, of which one runs at a time.

    Only the thread whose turn it is touches any of this, so nothing needs a lock.
    """

    def run(self, at: Shape, *arguments: Any) -> None:
        """Run the block at this place of the grid to its end. Raises what a thread raises."""

        def work() -> None:
            self._f(*arguments)

        fresh_memory()
        arguments = tuple(plain(argument) for argument in arguments)
        lanes = [Lane(self, at, thread, work) for thread in np.ndindex(*self._block_dim)]
        # Ahead of a barrier, in the order of their turns; and those that have reached it.
        self._ahead = lanes[::-1] if sum(at) % 2 else list(lanes)
        self._behind: list[Lane] = []
        self._over = Lock()
        self._over.acquire()
        for lane in lanes:
            lane.start()
        self._next()
        self._over.acquire()
        for lane in lanes:
            lane.join()
        for lane in lanes:
            if lane.exception:
                error, traceback = lane.exception
                raise error.with_traceback(traceback)

    def waits(self, lane: Lane) -> None:
        """The lane has reached a barrier."""
        self._behind.append(lane)
        self._next()

    def ended(self, lane: Lane) -> None:
        """The lane has run to its end: no barrier waits for it. If it failed, all others end."""
        if lane.exception:
            for other in (*self._ahead, *self._behind):
                other.abort = True
        self._next()

    def _next(self) -> None:
        if not self._ahead:  # all have reached the barrier: the last one there goes on first
            self._ahead, self._behind = self._behind[::-1], []
        if self._ahead:
            self._ahead.pop(0).go()
        else:
            self._over.release()


class Shared(kernelapi.FakeCUDAShared):  # type: ignore[misc]
    """A block's arrays, each known by the line that asks for it."""

    def __init__(self, dynamic_nbytes: int) -> None:
        super().__init__(dynamic_nbytes)
        self.arrays: dict[tuple[object, int], Array] = {}

    def array(self, shape: int | Shape, dtype: Any, alignment: None = None) -> Array:
        frame = sys._getframe(1)
        line = (frame.f_code, frame.f_lineno)
        if line not in self.arrays:
            self.arrays[line] = unwritten(shape, dtype)
        return self.arrays[line]


class Local(kernelapi.FakeCUDALocal):  # type: ignore[misc]
    def array(self, shape: int | Shape, dtype: Any, alignment: None = None) -> Array:
        return unwritten(shape, dtype)


def fresh_memory() -> None:
    """Forget the shared arrays of the block before."""
    kernel._get_kernel_context().shared.arrays.clear()


def unwritten(shape: int | Shape, dtype: Any) -> Array:
    """An array whose every byte is 0xFF."""
    array: Array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def plain(argument: Any) -> Any:
    """An array itself, which is read several times faster than Numba's wrapping of it."""
    wrapped = isinstance(argument, kernel.FakeWithinKernelCUDAArray)
    return argument._item._ary if wrapped else argument


def install() -> None:
    """Use all this in every launch of this process from now on."""
    kernel.BlockManager = Block
    kernelapi.FakeCUDAShared = Shared
    kernelapi.FakeCUDALocal = Local
