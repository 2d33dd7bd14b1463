"""Threads that take turns at every line of a kernel's Python, and other numbers of threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

from r18.machine import set_blas_threads

MOST_TURNS = 600
"""After that many lines, or when one waits in vain `MOST_WAITS` times (a kernel may hold a
lock), the threads run freely."""
MOST_WAITS = 5
WAIT_SECONDS = 0.2  # on a busy machine a thread may get its turn late
NOT_TRACED = frozenset(
    {"r18", "r18_oracle", "torch", "numpy", "numba", "hypothesis", *sys.stdlib_module_names}
)
"""Packages in which the threads do not take turns; a kernel's own state is not there."""


class Turns:
    """Whose turn it is, of threads numbered from 0."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._done = [False] * count
        self._left = MOST_TURNS
        self._waits = MOST_WAITS

    def give(self, mine: int) -> None:
        """Let the next thread go on, and wait until each of the others has made a step or ended."""
        with self._changed:
            self._left -= 1
            if self._left < 0 or self._waits < 0:
                return
            if self._turn == mine:
                self._turn = self._after(mine)
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._turn == mine, WAIT_SECONDS):
                self._waits -= 1
                self._turn = mine

    def end(self, mine: int) -> None:
        with self._changed:
            self._done[mine] = True
            if self._turn == mine:
                self._turn = self._after(mine)
            self._changed.notify_all()

    def _after(self, mine: int) -> int:
        """The next thread that has not ended; this one if there is no other."""
        count = len(self._done)
        others = ((mine + step) % count for step in range(1, count))
        return next((other for other in others if not self._done[other]), mine)


def alternating(*works: Callable[[], object]) -> list[BaseException | None]:
    """Run functions in threads of their own that take turns; what each raised.

    Nothing is collected meanwhile: the lines of a finalizer or of a callback of the collector would
    be turns of the thread that it interrupts, and the others would get ahead.
    """
    turns = Turns(len(works))

    def traced(mine: int, work: Callable[[], object]) -> Callable[[], object]:
        def at_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                turns.give(mine)
            return at_line

        def at_call(frame: FrameType, event: str, argument: Any) -> Any:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            return None if package in NOT_TRACED else at_line

        def run() -> None:
            sys.settrace(at_call)
            try:
                work()
            finally:
                sys.settrace(None)
                turns.end(mine)

        return run

    collecting = gc.isenabled()
    gc.disable()
    try:
        return together(*(traced(index, work) for index, work in enumerate(works)))
    finally:
        if collecting:
            gc.enable()


def together(*works: Callable[[], object]) -> list[BaseException | None]:
    """Run functions in threads of their own, all at once; what each raised."""
    raised: list[BaseException | None] = [None] * len(works)
    ready = threading.Barrier(len(works))

    def run(index: int, work: Callable[[], object]) -> None:
        ready.wait()
        try:
            work()
        except BaseException as error:  # any exception of a kernel is a finding
            raised[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return raised


def blas_threads() -> int:
    """The largest number of threads of a BLAS library; 1 without one."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return max((library.get_num_threads() for library in found), default=1)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """BLAS, PyTorch and Numba (if loaded) on this many threads; Numba has a maximum."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    blas = [library.get_num_threads() for library in libraries]
    torch_threads = torch.get_num_threads()
    numba = sys.modules.get("numba")
    numba_threads = numba.get_num_threads() if numba else 0
    try:
        for library in libraries:
            set_blas_threads(library, count)
        torch.set_num_threads(count)
        if numba:
            numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        yield
    finally:
        for library, before in zip(libraries, blas, strict=True):
            set_blas_threads(library, before)
        torch.set_num_threads(torch_threads)
        if numba:
            numba.set_num_threads(numba_threads)
