"""Access to the compiled kernels: imports Numba on first use, and runs one kernel at a time.

A program's calls are captured: finding a kernel's arguments takes three times as long as calling it
with them, and both take longer than some layers of one image.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from r18.backend import Array, HostMemory, HostStream
from r18.errors import BackendUnavailable
from r18_numba_cpu.kernels.arguments import LINE

NAME = "numba-cpu"

_RUNNING = threading.Lock()
"""Held while a kernel runs. Each kernel uses all threads, so two at a time would gain nothing. And
Numba's `workqueue` threading layer, its fallback, aborts the process when two threads enter it."""


Call = tuple[Any, tuple[Any, ...]]
"""A compiled kernel and its arguments."""

_RECORDED: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


@cache
def module(name: str) -> Any:
    """A module of `r18_numba_cpu.kernels`. Raises `BackendUnavailable` if Numba is missing."""
    try:
        return import_module(f"r18_numba_cpu.kernels.{name}")
    except ImportError as error:
        raise BackendUnavailable(
            NAME, f"Numba does not import: {error}", "pip install 'r18[numba]'"
        ) from error


def run(function: Any, *arguments: Any) -> None:
    """Run a compiled kernel. Kernels index memory themselves, so arrays are passed flat.

    All that a kernel of this backend does to its output goes through here: see `CallStream`.
    """
    flat = tuple(a.reshape(-1) if isinstance(a, np.ndarray) else a for a in arguments)
    if (calls := _RECORDED.get()) is not None:
        calls.append((function, flat))
        return
    with _RUNNING:
        function(*flat)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls that this thread makes, in place of running them."""
    calls: list[Call] = []
    token = _RECORDED.set(calls)
    try:
        yield calls
    finally:
        _RECORDED.reset(token)


class WorkerMemory(HostMemory):
    """Host memory for plans whose buffers stay, part by part, in the caches of workers' cores.

    Kernels are cut so that a worker reads what it wrote. A line that another core has written is
    slow to read, and to write. In bytes of a buffer of another size, a worker's part would lie
    where the part of another worker was.
    """

    by_size_nbytes = 16 << 20  # larger plans run faster if buffers of all sizes share bytes


class CallStream(HostStream):
    """Captures the calls of kernels, whose arguments are the same in every run.

    Arguments that depend on the number of threads are captured again when it changes.
    """

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        def calls_now() -> tuple[int, list[Call]]:
            with recorded() as calls:
                work()
            return workers(), calls

        threads, calls = calls_now()

        def launch() -> None:
            nonlocal threads, calls
            if threads != workers():
                threads, calls = calls_now()
            with _RUNNING:
                for function, arguments in calls:
                    function(*arguments)

        return launch


def vector() -> Any:
    return module("vector")


def most_threads() -> int:
    """Numba's threads: NUMBA_NUM_THREADS, or all CPUs. A caller may use fewer."""
    vector()  # raises if Numba is missing
    return int(_numba().config.NUMBA_NUM_THREADS)


def workers() -> int:
    """The threads that kernels run on now, as set by `numba.set_num_threads`."""
    return int(_numba().get_num_threads())


def counters() -> Array:
    """What `kernels.blocks.begin_count` takes, for the threads that kernels run on now.

    Kernels share them, because only one runs at a time.
    """
    return _counters(workers())


@cache
def _counters(count: int) -> Array:
    return np.zeros(count * LINE, np.int64)


@cache
def _numba() -> Any:
    return import_module("numba")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
