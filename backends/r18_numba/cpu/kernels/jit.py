"""How the CPU kernels are compiled: for this machine, without Python's lock, kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba.core.config
from numba import njit

from r18.machine import cache_folder


def _folder() -> Path:
    """Where compiled code is kept: one folder for each state of these sources.

    Numba looks at the file of a function alone, and not at those whose code it contains.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return cache_folder() / "numba-cpu" / digest.hexdigest()[:16]


FOLDER = _folder()


config: Any = numba.core.config


def kernel(function: Callable[..., None]) -> Any:
    """Compile a kernel, whose loops over `prange` run on Numba's threads."""
    return _compiled(function, parallel=True)


def part(function: Callable[..., Any]) -> Any:
    """Compile a part of a kernel; it is taken into the kernel's own code."""
    return njit(nogil=True, error_model="numpy", inline="never")(function)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    before = config.CACHE_DIR  # NOTE: read when the function is decorated, not when it is compiled
    config.CACHE_DIR = str(FOLDER)
    try:
        return njit(nogil=True, error_model="numpy", cache=True, **options)(function)
    finally:
        config.CACHE_DIR = before
