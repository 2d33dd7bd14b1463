"""A slate: a file in which a worker says what it is doing, for its parent to read.

A worker says before each call of a kernel what it is about to do. If the call ends the process, the
parent reads the last entry. A message through a pipe would wake the parent each time, some hundred
thousand times in a `verify`. Here the parent looks when it likes.

The file is written and read, not mapped: a process that has mapped a file dies of SIGBUS when
anyone truncates it, or when the disk is full.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

MOST_NBYTES = 1 << 12
"""The longest content; an announcement has some hundred bytes."""

_HEADER = struct.Struct("=QI")  # the number of the entry, and the content's length
_CHECKSUM = struct.Struct("=I")  # the CRC-32 of the header and the content, which come after it
_CONTENT = _CHECKSUM.size + _HEADER.size
_SLOT_NBYTES = _CONTENT + MOST_NBYTES


class Slate:
    """One process's descriptor of the file: two slots, which entries take in turn.

    The last entry is whole even if the process dies while it writes the next one. Whatever the file
    holds, `read` returns an entry that was written, or none. The numbers of two entries say which
    is the later one, also where one of them arrives through a pipe.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises `OSError` if the file cannot be made (`create`) or opened."""
        self._file = path.open("x+b" if create else "r+b", buffering=0)
        self._slot = 0

    def write(self, number: int, content: bytes) -> bool:
        """Write an entry; False if it is too long or the file cannot be written.

        Only one process writes. number: larger than that of the entry before.
        """
        if len(content) > MOST_NBYTES:
            return False
        checked = _HEADER.pack(number, len(content)) + content
        entry = _CHECKSUM.pack(zlib.crc32(checked)) + checked
        try:
            self._file.seek(self._slot * _SLOT_NBYTES)
            if self._file.write(entry) != len(entry):
                return False
        except OSError:  # such as a full disk
            return False
        self._slot = 1 - self._slot
        return True

    def read(self) -> tuple[int, bytes]:
        """The number of the last entry and its content; 0 and nothing without one."""
        try:
            self._file.seek(0)
            data = self._file.read(2 * _SLOT_NBYTES) or b""
        except OSError:
            return 0, b""
        return max(map(_entry, (data[:_SLOT_NBYTES], data[_SLOT_NBYTES:])))

    def close(self) -> None:
        self._file.close()


def _entry(slot: bytes) -> tuple[int, bytes]:
    if len(slot) < _CONTENT:
        return 0, b""
    (checksum,) = _CHECKSUM.unpack_from(slot)
    number, length = _HEADER.unpack_from(slot, _CHECKSUM.size)
    content = slot[_CONTENT : _CONTENT + length]
    if zlib.crc32(slot[_CHECKSUM.size : _CONTENT + length]) != checksum:
        return 0, b""
    return number, content


__all__ = ["MOST_NBYTES", "Slate"]
