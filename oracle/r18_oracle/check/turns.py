"""Threads that take turns at every line of a kernel's Python, and other numbers of threads."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from threadpoolctl import ThreadpoolController

from r18.machine import set_blas_threads
from r18_oracle.threads import torch_threads

MOST_TURNS = 600
"""After that many lines, or when one waits in vain `MOST_WAITS` times, the threads run freely."""
MOST_WAITS = 5
WAIT_SECONDS = 0.2  # on a busy machine a thread may get its turn late
LOOK_SECONDS = 0.002
"""A thread that sleeps this long, while nothing that it may wait for runs, waits for a lock that
another one holds. While Python runs anything else, a thread that wants to run wakes up for a moment
every few microseconds (`together`)."""
NOT_TRACED = frozenset(
    {"r18", "r18_oracle", "torch", "numpy", "numba", "hypothesis", *sys.stdlib_module_names}
)
"""Packages in which the threads do not take turns; a kernel's own state is not there."""


class Turns:
    """Whose turn it is, of threads numbered from 0.

    A thread that waits for another one's lock gets no turn until it wakes up. Where the system does
    not say which threads sleep, the others wait `WAIT_SECONDS` for it at each line.
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._ids = [0] * count  # of the system's threads
        self._done = [False] * count
        self._waiting = [False] * count  # for its turn, in `give`
        self._slept: list[int | None] = [None] * count  # `_sleep` of those that were passed over
        self._left = MOST_TURNS
        self._waits = MOST_WAITS

    def begin(self, mine: int) -> None:
        self._ids[mine] = threading.get_native_id()

    def give(self, mine: int) -> None:
        """Let the next thread go on, and wait until each of the others has made a step or ended."""
        with self._changed:
            self._left -= 1
            if self._left < 0 or self._waits < 0:
                return
            self._slept[mine] = None
            if self._turn == mine or self._done[self._turn]:
                self._pass_on(mine)
            self._waiting[mine] = True
            if not self._wait(mine):
                self._waits -= 1
                self._turn = mine
            self._waiting[mine] = False

    def end(self, mine: int) -> None:
        with self._changed:
            self._done[mine] = True
            if self._turn == mine:
                self._pass_on(mine)

    def _wait(self, mine: int) -> bool:
        """Wait for this thread's turn, and pass over those that sleep; False if it is in vain."""
        deadline = time.monotonic() + WAIT_SECONDS
        before = None
        while not self._changed.wait_for(lambda: self._turn == mine, LOOK_SECONDS):
            turn = self._turn
            now = self._quiet(turn)
            if now is not None and (turn, now) == before:
                self._slept[turn] = now[self._ids[turn]]
                self._pass_on(turn)
            elif time.monotonic() > deadline:
                return False
            before = None if now is None else (turn, now)
        return True

    def _pass_on(self, last: int) -> None:
        """Pass the turn to the next thread that has not ended and does not sleep; else to the last
        one again."""
        count = len(self._done)
        others = ((last + step) % count for step in range(1, count))
        self._turn = next((o for o in others if not self._done[o] and not self._asleep(o)), last)
        self._changed.notify_all()

    def _asleep(self, one: int) -> bool:
        """Whether a thread still sleeps since it was passed over."""
        return self._slept[one] is not None and _sleep(self._ids[one]) == self._slept[one]

    def _quiet(self, turn: int) -> dict[int, int] | None:
        """`_sleep` of the thread whose turn it is, and of all in the process that do not wait for
        theirs; None unless all of them sleep."""
        waiting = {id for id, waits in zip(self._ids, self._waiting, strict=True) if waits}
        asleep: dict[int, int] = {}
        for id in {self._ids[turn], *_threads()} - waiting - {threading.get_native_id()}:
            slept = _sleep(id)
            if slept is None:
                return None
            asleep[id] = slept
        return asleep if self._ids[turn] in asleep else None


_TASKS = Path("/proc/self/task")


def _threads() -> list[int]:
    """The system's ids of all threads of this process; empty where it does not list them."""
    try:
        return [int(id) for id in os.listdir(_TASKS)]
    except OSError:
        return []


def _sleep(id: int) -> int | None:
    """How often a thread has gone to sleep, if it sleeps now; None if it does not, or if the system
    does not say. While the number stays the same, the thread does not wake up."""
    try:
        status = (_TASKS / str(id) / "status").read_bytes()
    except OSError:
        return None
    found = re.search(rb"\nState:\tS.*\nvoluntary_ctxt_switches:\t(\d+)\n", status, re.DOTALL)
    return None if found is None else int(found[1])


def alternating(*works: Callable[[], object]) -> list[BaseException | None]:
    """Run functions in threads of their own that take turns; returns the exception of each.

    The garbage collector is off: the lines of a finalizer or of a callback of the collector would
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
            turns.begin(mine)
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
    """Run functions in threads of their own, all at once; returns the exception of each."""
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
    numba = sys.modules.get("numba")
    numba_threads = numba.get_num_threads() if numba else 0
    with torch_threads(count):
        try:
            for library in libraries:
                set_blas_threads(library, count)
            if numba:
                numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
            yield
        finally:
            for library, before in zip(libraries, blas, strict=True):
                set_blas_threads(library, before)
            if numba:
                numba.set_num_threads(numba_threads)
