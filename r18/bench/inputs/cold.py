"""How fast with empty caches: before each run they are overwritten, which is not timed.

The other times of a benchmark are warm: a run finds in the caches what the previous one left there.
Here images, weights and activations come from memory. On a GPU a buffer several times the size of
its L2 is filled, as Triton's `do_bench` does; the run then also waits while the L2 writes that
buffer's lines back, as it does behind any other program. On a CPU one thread reads and writes a
buffer twice as large as the largest cache. It evicts that cache and its own core's; what other
cores keep in private caches stays. Instruction caches are not emptied.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend import Memory
from r18.errors import UsageError

RUNS = 30
"""Timed runs of each contender, or as many as the other times have in a series, if fewer."""
GPU_NBYTES = 512 << 20
"""Four times the largest L2 of a GPU so far, 126 MB."""
CPU_FACTOR = 2
"""The buffer's size in multiples of the largest cache. It is read and written in order, so it
replaces everything."""
BYTE = 0x5A
"""The byte that a GPU's buffer is filled with. Not zero: a device may store zeros without their
bytes."""

Flush = Callable[[], None]
"""A function that overwrites the caches; complete when it returns."""


@dataclass(frozen=True)
class Cold:
    """Times with overwritten caches, in milliseconds of a batch. nbytes: overwritten before each
    run."""

    nbytes: int
    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def to_json(self) -> dict[str, Any]:
        """The number of runs, their median and percentiles; the samples are left out."""
        p10, p90 = (float(np.percentile(self.samples_ms, percent)) for percent in (10, 90))
        return {
            "nbytes": self.nbytes,
            "runs": len(self.samples_ms),
            "median_ms": self.median_ms,
            "p10_ms": p10,
            "p90_ms": p90,
        }


def flushed_nbytes(kind: str, caches: Mapping[str, int]) -> int:
    """The size of the buffer that overwrites the caches of a kind of device.

    caches: the CPU's, as `r18.cpu.Cpu.caches`. Raises `UsageError` for a CPU whose caches the
    system does not tell.
    """
    if kind != "cpu":
        return GPU_NBYTES
    if not caches:
        raise UsageError(
            "the system does not tell the sizes of the CPU's caches, so they cannot be overwritten"
        )
    return CPU_FACTOR * max(caches.values())


def flush_of(memory: Memory, nbytes: int) -> Flush:
    """A function that fills one buffer of a device's memory each time it is called."""
    buffer = memory.empty(nbytes)
    return lambda: memory.fill(buffer, BYTE)


def host_flush(nbytes: int) -> Flush:
    """A function that reads and writes one array each time it is called.

    NOTE: not a fill. For arrays of this size libraries fill with stores that bypass the caches.
    """
    array = np.zeros(nbytes // 8, np.int64)

    def flush() -> None:
        np.add(array, 1, out=array)

    return flush


__all__ = ["BYTE", "RUNS", "Cold", "Flush", "flush_of", "flushed_nbytes", "host_flush"]
