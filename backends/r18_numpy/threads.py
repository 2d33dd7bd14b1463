"""Items of work on several threads, each with a BLAS of one thread.

Copying windows, the product and the epilogue of a block then run on one core, side by side with
those of other blocks. Products threaded inside BLAS would leave the rest to one core, and would
wait at every barrier for whichever thread the system has put aside.
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
    """As many threads as the user lets BLAS have (`OPENBLAS_NUM_THREADS` and the like)."""
    return max((pool["num_threads"] for pool in _controller().info()), default=1)


def run_all(task: Callable[[T, int], None], items: Sequence[T], workers: int) -> None:
    """Call `task(item, worker)` on every item, on this thread and `workers` − 1 others.

    Each worker takes the next item when it is done with one. `worker` counts from 0: two calls at
    once never have the same, so it can name a scratch. Raises what a task raises, when no task is
    running any more.
    """
    queue: SimpleQueue[T] = SimpleQueue()
    for item in items:
        queue.put(item)

    def work(worker: int) -> None:
        with np.errstate(all="ignore"):  # the caller's setting is not that of the other threads
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
    """Only asked for by one of several workers, so that there are two threads at least."""
    return ThreadPoolExecutor(thread_count() - 1, "r18-numpy")


_lock = threading.Lock()
_users = 0


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """One thread a product while anybody is inside; the setting is the whole process's.

    Also around products too small to share out: a thread that BLAS has woken goes on spinning for
    tens of milliseconds, on a core that the next step's workers want.
    """
    global _users
    count = thread_count()  # asked before it is changed
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
