"""Compiler options of device code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r18_numba.target import numba_cuda, simulated

cuda = numba_cuda()
SIMULATED = simulated()

ALIGNMENT = None if SIMULATED else 16
"""Alignment of shared arrays in bytes, so that four floats are read at a time. The simulator has no
alignment."""

REDUCTION_THREADS = 256
"""The most threads of a block that reduces. Such blocks have a power of two of threads."""


def kernel(registers: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """A decorator for a `__global__` function: IEEE arithmetic, at most `registers` per thread."""
    limit = {} if SIMULATED or registers is None else {"max_registers": registers}
    compiled: Callable[[Callable[..., None]], Any] = cuda.jit(fastmath=False, opt=True, **limit)
    return compiled


def function() -> Callable[[Callable[..., Any]], Any]:
    """A decorator for a `__device__` function."""
    compiled: Callable[[Callable[..., Any]], Any] = cuda.jit(device=True, fastmath=False)
    return compiled
