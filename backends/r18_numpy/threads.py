"""Blocks of a convolution on several threads, each with a BLAS of one thread.

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
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

T = TypeVar("T")


@cache
def thread_count() -> int:
    """As many threads as the user lets BLAS have (`OPENBLAS_NUM_THREADS` and the like)."""
    return max((pool["num_threads"] for pool in _controller().info()), default=1)


def run_all(task: Callable[[T], None], items: Sequence[T], workers: int) -> None:
    """Call `task` on every item: here if there is one worker, else on `thread_count()` threads.

    Raises what a task raises.
    """
    if workers == 1 or len(items) == 1:
        for item in items:
            task(item)
        return
    with _single_threaded_blas():
        for _ in _pool().map(lambda item: _quiet(task, item), items):
            pass


def _quiet(task: Callable[[T], None], item: T) -> None:
    with np.errstate(all="ignore"):  # the caller's setting is not that of these threads
        task(item)


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count(), "r18-numpy")


_lock = threading.Lock()
_users = 0


@contextmanager
def _single_threaded_blas() -> Iterator[None]:
    """One thread a product while anybody is inside; the setting is the whole process's."""
    global _users
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
                _set_blas_threads(thread_count())


def _set_blas_threads(count: int) -> None:
    for library in _controller().lib_controllers:
        library.set_num_threads(count)
