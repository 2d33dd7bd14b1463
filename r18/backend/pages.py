"""Host memory in huge pages, where the system has them.

Two megabytes lie in one page, so they lie in the caches as they lie in the addresses: of pages of
4 KiB, wherever the system happens to have them, some compete for the same sets of a cache, and more
translations are needed than a core remembers. In a virtual machine, whose translations take longer,
convolutions in bfloat16 took up to twice as long.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from r18.backend.device import Array

HUGE = 2 << 20
"""The bytes of a huge page of x86-64, and of the usual one of arm64."""

SHARED = 64 << 10
"""Smaller buffers are not worth a place in a huge page."""


class Pages:
    """Takes places for buffers one after another from mappings of whole huge pages.

    A mapping is given back when no array of it is left. Safe in several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest: Array = np.empty(0, np.uint8)

    def empty(self, nbytes: int, alignment: int) -> Array:
        """uint8 of this size, at a multiple of the alignment. Raises `MemoryError`."""
        if nbytes < SHARED or not hasattr(mmap, "MADV_HUGEPAGE"):
            return aligned(np.empty(nbytes + alignment, np.uint8), alignment)[:nbytes]
        with self._lock:
            rest = aligned(self._rest, alignment)
            if rest.nbytes < nbytes:
                rest = mapped(nbytes)
            self._rest = rest[nbytes:]
        return rest[:nbytes]


def aligned(raw: Array, alignment: int) -> Array:
    """The view of an array of bytes from the first multiple of the alignment on."""
    return raw[-raw.ctypes.data % alignment :]


def mapped(nbytes: int) -> Array:
    """Whole huge pages of at least this size, zeroed by the system."""
    size = -(-nbytes // HUGE) * HUGE
    try:
        memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {size + HUGE:,} bytes left: {error}") from error
    with contextlib.suppress(OSError):  # of a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return aligned(np.frombuffer(memory, np.uint8), HUGE)[:size]


__all__ = ["HUGE", "SHARED", "Pages"]
