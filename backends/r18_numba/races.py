"""Races in shared memory, found in the simulator: accesses that no barrier puts in order.

The simulator runs one thread at a time, so two threads that add to one element give the right sum
there and a wrong one on a GPU. So each access of a watched array is compared with the others since
the last barrier: of two threads that use one element, neither may write to it.
"""

from __future__ import annotations

from typing import Any, Protocol

from r18.backend import Array

SEVERAL = -1
"""Stands for the threads that have read an element."""


class Race(Exception):
    """Two threads used an element of shared memory, one of them wrote, and no barrier was between
    them."""


class Block(Protocol):
    """The state of a block: which of its threads runs, and how many barriers it has passed."""

    running: int
    passed: int


class Watched:
    """A shared array whose elements are read and written one at a time, by index.

    `written` and `read` have, for an index, the barriers passed at the last access and the thread.
    """

    def __init__(self, array: Array, block: Block) -> None:
        self._array = array
        self._block = block
        self._written: dict[Any, tuple[int, int]] = {}
        self._read: dict[Any, tuple[int, int]] = {}

    def __getitem__(self, index: Any) -> Any:
        thread, passed = self._block.running, self._block.passed
        self._check(self._written, index, thread, passed)
        before = self._read.get(index)
        together = before is not None and before[0] == passed and before[1] != thread
        self._read[index] = passed, SEVERAL if together else thread
        return self._array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        thread, passed = self._block.running, self._block.passed
        self._check(self._written, index, thread, passed)
        self._check(self._read, index, thread, passed)
        self._written[index] = passed, thread
        self._array[index] = value

    def _check(
        self, used: dict[Any, tuple[int, int]], index: Any, thread: int, passed: int
    ) -> None:
        before = used.get(index)
        if before is not None and before[0] == passed and before[1] != thread:
            other = "other threads" if before[1] == SEVERAL else f"thread {before[1]}"
            did = "wrote to" if used is self._written else "read"
            raise Race(
                f"thread {thread} used element {_plain(index)} of a shared array that {other} "
                f"{did}, with no barrier in between"
            )


def _plain(index: Any) -> int | tuple[int, ...]:
    """The index without NumPy's types, for a message."""
    return tuple(map(int, index)) if isinstance(index, tuple) else int(index)


__all__ = ["Race", "Watched"]
