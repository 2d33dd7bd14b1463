"""Files that a user names: only regular ones, of bounded size, opened once and read once.

A name may lead to a FIFO, a device or a folder, where reading blocks or never ends, and a file may
be larger than the memory. `open_file` refuses these without blocking, and everything that reads a
file of somebody else's goes through it: weights, manifests, dumps, findings, records, tables,
labels, images. Check and use see the same bytes, since a file is opened once.

All raise `OSError`; `Refused`, which is one, is for what is there but is not read.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from r18.errors import R18Error, plain, show

JSON_LIMIT = 64 << 20
"""The most bytes of a JSON file of ours: a record, a finding, a table."""
TEXT_LIMIT = 1 << 29
"""The most bytes of a table or a list of photographs; a million of them have 60 MB."""
MOST_ROWS = 5_000_000
"""The most rows of such a file."""
IMAGE_LIMIT = 1 << 30
"""The most bytes of a photograph: more than any raw image of as many pixels as are decoded."""
WEIGHTS_LIMIT = 1 << 30
"""The most bytes of a file of weights; ResNet-34's have 87 MB, with an optimizer's state 260 MB."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Refused(OSError):
    """A file is there, but it is not read: not a regular one, too large, or it changed."""


def open_file(path: str | os.PathLike[str], limit: int) -> BufferedReader:
    """Open a regular file of at most `limit` bytes for reading; never blocks.

    Raises `Refused` for anything else that is there, and `OSError` as `open` does.
    """
    try:
        _check_kind(os.stat(path).st_mode)  # not even opened: that alone may rewind a tape
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(str(error)) from None
    try:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode)
        if status.st_size > limit:
            raise Refused(f"{status.st_size:,} bytes are too many (at most {limit:,})")
        return BufferedReader(io.FileIO(descriptor))
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """All of a file; raises as `open_file`, and `Refused` where it changes while it is read."""
    with open_file(path, limit) as stream:
        return read_all(stream)


def read_all(stream: BufferedReader) -> bytes:
    """All bytes of a file that `open_file` opened. Raises `Refused` if the file changed since."""
    size = os.fstat(stream.fileno()).st_size
    data = stream.read(size + 1)
    if len(data) != size:
        raise Refused("it changed while it was read")
    return data


def read_text(path: str | os.PathLike[str], limit: int, encoding: str = "utf-8") -> str:
    """A file as text, with its line breaks; raises as `read_bytes`, and `UnicodeDecodeError`."""
    return read_bytes(path, limit).decode(encoding)


def read_object(path: str | Path, limit: int, error: type[R18Error]) -> dict[str, object]:
    """The JSON object in a file of at most `limit` bytes; no field twice, no NaN, no infinity.

    Raises `error`, and `OSError` where the file cannot be read.
    """

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        check_distinct("field", [name for name, _ in pairs], error)
        return dict(pairs)

    def no_constant(text: str) -> float:
        raise error(f"{text} is not a JSON number")

    try:
        text = read_text(path, limit)
        data = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError) as problem:
        raise error(f"not JSON: {plain(problem)}") from None
    if not isinstance(data, dict):
        raise error(f"expected a JSON object, got {show(data)}")
    return data


def check_distinct(what: str, names: Iterable[str], error: type[R18Error]) -> None:
    """Raise `error` for a name that appears more than once."""
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise error(f"the {what} {show(name)} appears {count} times")


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise Refused(f"not a regular file, but {kind}")


__all__ = [
    "IMAGE_LIMIT",
    "JSON_LIMIT",
    "MOST_ROWS",
    "TEXT_LIMIT",
    "WEIGHTS_LIMIT",
    "Refused",
    "check_distinct",
    "open_file",
    "read_all",
    "read_bytes",
    "read_object",
    "read_text",
]
