"""The way to the compiled kernels: Numba is imported on first use; one kernel runs at a time."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

from r18.errors import BackendUnavailable

NAME = "numba-cpu"

RUNNING = threading.Lock()
"""Held while a kernel runs. A kernel uses every thread there is, so two at once would gain nothing;
and Numba's own pool of threads, where it finds no better, ends the process if two call it."""


@cache
def module(name: str) -> Any:
    """A module of `r18_numba.cpu.kernels`. Raises `BackendUnavailable` where Numba is missing."""
    try:
        return import_module(f"r18_numba.cpu.kernels.{name}")
    except ImportError as error:
        raise BackendUnavailable(
            NAME, f"Numba does not import: {error}", "pip install 'r18[numba]'"
        ) from error


def vector() -> Any:
    return module("vector")


def most_threads() -> int:
    """Numba's threads, of which a caller may use fewer: NUMBA_NUM_THREADS, or all CPUs."""
    vector()  # Numba is there
    config: Any = import_module("numba.core.config")
    return int(config.NUMBA_NUM_THREADS)


def workers() -> int:
    """The threads that the caller's kernels run on: as `numba.set_num_threads` says."""
    return int(import_module("numba").get_num_threads())


def panels(outputs: int) -> int:
    """How many panels of `product.COLUMNS` columns hold so many."""
    return ceil_div(outputs, module("product").COLUMNS)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
