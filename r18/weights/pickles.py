"""Check what a `.pth` file would have PyTorch do, before PyTorch reads it.

PyTorch's `weights_only` loader calls nothing that is not on its list, but what is on it may be
asked for gigabytes: a few bytes of a pickle copy a long text a million times. Here the pickle runs
first with stand-ins that build nothing, and what they are asked for is counted. An archive is
packed again from its members, so that PyTorch reads the bytes that were checked.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from io import BytesIO
from typing import Any

from r18.errors import plain
from r18.weights.archives import open_archive, read_exactly

MOST_PICKLED = 2 << 20
"""The most bytes of a pickle; a ResNet's has 20 KB. In memory it takes up to 100 times as much."""
MOST_COPIED = 64 << 20
"""The most elements that a pickle may have copied."""

_MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle of a file that PyTorch wrote before version 1.6."""
PICKLES = 5
"""The pickles of such a file: magic number, protocol, system, object, names of storages. Values
follow."""

_COPYING = {
    "_codecs.encode",
    "collections.Counter",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
    "builtins.bytearray",
    "__builtin__.bytearray",
}
_DESCRIBING = ("torch._utils", "torch._tensor", "torch.nn.parameter", "torch.serialization")


def checked(data: bytes) -> BytesIO:
    """The file as `torch.load` takes it. Raises nearly anything for hostile bytes."""
    if not zipfile.is_zipfile(BytesIO(data)):
        _check_old(data)
        return BytesIO(data)
    packed = BytesIO()
    with open_archive(data) as archive, zipfile.ZipFile(packed, "w") as again:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"'{plain(member.filename)}' is compressed, as PyTorch never does")
            pickled = member.filename.rpartition("/")[2] == "data.pkl"
            if pickled and member.file_size > MOST_PICKLED:
                raise ValueError(_too_long())
            with archive.open(member) as stream:
                content = read_exactly(stream, member.file_size)
            if pickled:
                Check(BytesIO(content)).load()
            again.writestr(member.filename, content)
    packed.seek(0)
    return packed


def _check_old(data: bytes) -> None:
    """The pickles of a file without an archive."""
    stream = BytesIO(data)
    for index in range(PICKLES):
        found = Check(stream, values=len(data)).load()
        if index == 0 and found != _MAGIC:
            raise ValueError("it does not begin as PyTorch's files do")


class _Inert:
    """Stands for what PyTorch would make."""

    def __setstate__(self, state: object) -> None:
        pass


# The class in Python: that in C allocates as many places as a pickle's largest memo index says.
class Check(pickle._Unpickler):
    """Runs a pickle with stand-ins.

    values: the bytes of the file, where all storages are allocated before they are read.
    """

    def __init__(self, stream: BytesIO, values: int | None = None) -> None:
        self._values = values
        self._copied = 0
        super().__init__(_Beginning(stream), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module}.{name}"
        if known == "collections.OrderedDict":
            return self._ordered
        plain_torch = module == "torch" and not name.endswith("Tensor")
        if known in _COPYING or module in _DESCRIBING or plain_torch:
            return self._inert
        raise ValueError(f"its pickle names {plain(known)}, which is no part of a state_dict")

    def persistent_load(self, pid: Any) -> _Inert:
        if self._values is not None:
            self._values -= max((part for part in pid if isinstance(part, int)), default=0)
            if self._values < 0:
                raise ValueError("it declares more values than it holds")
        return _Inert()

    def _ordered(self, *given: Any) -> OrderedDict[Any, Any]:
        self._inert(*given)
        return OrderedDict(*given)

    def _inert(self, *given: Any) -> _Inert:
        self._copied += sum(len(value) for value in given if hasattr(value, "__len__"))
        if self._copied > MOST_COPIED:
            raise ValueError("its pickle copies more than any state_dict holds")
        return _Inert()


class _Beginning:
    """The next `MOST_PICKLED` bytes of a stream, and an error after them."""

    def __init__(self, stream: BytesIO) -> None:
        self._stream = stream
        self._end = stream.tell() + MOST_PICKLED

    def read(self, count: int) -> bytes:
        return self._whole(self._stream.read(count))

    def readline(self) -> bytes:
        return self._whole(self._stream.readline())

    def readinto(self, buffer: bytearray) -> int:
        count = self._stream.readinto(buffer)
        self._whole(b"")
        return count

    def _whole(self, data: bytes) -> bytes:
        if self._stream.tell() > self._end:
            raise ValueError(_too_long())
        return data


def _too_long() -> str:
    return f"its pickle has more than {MOST_PICKLED:,} bytes"


__all__ = ["PICKLES", "Check", "checked"]
