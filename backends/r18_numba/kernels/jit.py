"""How device code is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r18_numba.target import numba_cuda, simulated

cuda = numba_cuda()
SIMULATED = simulated()

ALIGNMENT = None if SIMULATED else 16
"""Of shared arrays, so that four floats are read at once; the simulator knows no alignment."""


def kernel(registers: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """A decorator for a `__global__` function: IEEE arithmetic, and at most so many registers."""
    limit = {} if SIMULATED or registers is None else {"max_registers": registers}
    compiled: Callable[[Callable[..., None]], Any] = cuda.jit(fastmath=False, opt=True, **limit)
    return compiled


def function() -> Callable[[Callable[..., Any]], Any]:
    """A decorator for a `__device__` function."""
    compiled: Callable[[Callable[..., Any]], Any] = cuda.jit(device=True, fastmath=False)
    return compiled
