"""What a worker is at, in memory that it shares with its parent.

A worker says before each call of a kernel what it is about to do. If the call ends the process, the
parent reads the last that was said. A message through a pipe would wake the parent each time, some
hundred thousand times in a `verify`. Here the parent looks when it likes.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

MOST_NBYTES = 1 << 15
"""The longest content; an announcement has some hundred bytes."""

_NUMBER = struct.Struct("=Q")
_SLOT_NBYTES = _NUMBER.size + MOST_NBYTES
_NBYTES = _NUMBER.size + 2 * _SLOT_NBYTES
_TRIES = 1000


class Slate:
    """A file that two processes map: how often it was written to, and two slots in turn.

    A slot is a length and the content. The newest content is whole even if the process dies while
    it writes the next one, which goes to the other slot.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises `OSError` if the file cannot be made or mapped."""
        flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | (os.O_CREAT | os.O_EXCL) * create
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, _NBYTES)
            self._memory = mmap.mmap(descriptor, _NBYTES)
        finally:
            os.close(descriptor)

    def write(self, content: bytes) -> bool:
        """Replace the content; False, with nothing written, if it is too long."""
        if len(content) > MOST_NBYTES:
            return False
        count = self.count + 1
        start = _start(count)
        _NUMBER.pack_into(self._memory, start, len(content))
        self._memory[start + _NUMBER.size : start + _NUMBER.size + len(content)] = content
        _NUMBER.pack_into(self._memory, 0, count)
        return True

    @property
    def count(self) -> int:
        """How often the slate was written to."""
        return int(_NUMBER.unpack_from(self._memory, 0)[0])

    def read(self) -> tuple[int, bytes]:
        """The count and the content; empty if nothing was written, or if a process that wrote
        anywhere has spoiled it."""
        for _ in range(_TRIES):
            count = self.count
            start = _start(count)
            length = min(_NUMBER.unpack_from(self._memory, start)[0], MOST_NBYTES)
            content = self._memory[start + _NUMBER.size : start + _NUMBER.size + length]
            if self.count == count:  # else the slot may have been written to meanwhile
                return count, content if count else b""
        return count, b""

    def close(self) -> None:
        self._memory.close()


def _start(count: int) -> int:
    return _NUMBER.size + (count % 2) * _SLOT_NBYTES


__all__ = ["MOST_NBYTES", "Slate"]
