"""Runs blocks on several threads, each with single-threaded BLAS.

One thread copies the windows of a block, multiplies and runs the epilogue, in parallel with other
blocks. Threads inside BLAS would parallelize only the product, and would wait at each of its
barriers for the slowest thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from r18.machine import set_blas_threads

T = TypeVar("T")


@cache
def thread_count() -> int:
    """The number of threads that BLAS is set to, by `OPENBLAS_NUM_THREADS` and the like."""
    return max((pool["num_threads"] for pool in _controller().info()), default=1)


def run_all(task: Callable[[T, int], None], items: Sequence[T], workers: int) -> None:
    """Call `task(item, worker)` on every item, on this thread and `workers` − 1 others.

    Each worker takes the next item when it has finished one. `worker` counts from 0 and differs
    between concurrent calls, so it can select a scratch. Raises what a task raises, after all
    tasks have ended.
    """
    queue: SimpleQueue[T] = SimpleQueue()
    for item in items:
        queue.put(item)

    def work(worker: int) -> None:
        with np.errstate(all="ignore"):  # it applies to one thread only
            while True:
                try:
                    item = queue.get_nowait()
                except Empty:
                    return
                task(item, worker)

    with single_threaded_blas():
        others = [_pool().submit(work, worker) for worker in range(1, min(workers, len(items)))]
        try:
            work(0)
        finally:
            errors = [other.exception() for other in others]  # waits for each
    for error in errors:
        if error is not None:
            raise error


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@cache
def _pool() -> ThreadPoolExecutor:
    """Used only with several workers, so `thread_count()` is at least 2."""
    return ThreadPoolExecutor(thread_count() - 1, "r18-numpy")


_lock = threading.Lock()
_users = 0


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Single-threaded BLAS while any thread is inside. The setting applies to the whole process.

    Also used around small products: a BLAS thread, once woken, spins for tens of milliseconds on a
    core that the next step's workers need.
    """
    global _users
    count = thread_count()  # read before it is changed
    with _lock:
        if _users == 0:
            _set_blas_threads(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _set_blas_threads(count)


def _set_blas_threads(count: int) -> None:
    for library in _controller().lib_controllers:
        set_blas_threads(library, count)
