"""PyTorch's files of plain tensors, read without PyTorch, whose import takes seconds.

A `state_dict` is a pickle that names storages, and their raw values: members of an archive, or what
follows the pickles in files of before version 1.6. Only contiguous tensors in plain memory are read
here. Anything else gives None, and is left to PyTorch and its messages.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import WeightsError, plain
from r18.weights.archives import open_archive, read_exactly
from r18.weights.pickles import MOST_PICKLED, PICKLES, Check
from r18.weights.tensors import Tensor

DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
}
"""The elements of storages, by PyTorch's classes."""
NBYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
ORDER_NBYTES = 16
"""The most bytes of `NAME/byteorder`."""
COUNT_NBYTES = 8
"""Bytes of the number of elements before each storage of an old file."""


def read_plain(path: Path, data: bytes) -> dict[Any, Any] | None:
    """The contents of the file, with tensors as `Tensor`; None for one that PyTorch has to read.

    path is for messages. A tensor whose values are damaged raises `WeightsError` when it is read.
    """
    try:
        found = _archived(path, data) if zipfile.is_zipfile(BytesIO(data)) else _old(data)
    except Exception:  # pickle and zipfile raise nearly anything, and PyTorch will say what
        return None
    return dict(found) if isinstance(found, dict) and _is_plain(found) else None


def _is_plain(value: object) -> bool:
    """Whether it is made only of dictionaries, tensors, numbers and strings."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return isinstance(value, Tensor | str | int | float)


@dataclass(frozen=True)
class _Storage:
    """Values that a pickle names. read: gives their bytes."""

    dtype: str
    count: int
    read: Callable[[], bytes]

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("a storage of less than nothing")

    @property
    def nbytes(self) -> int:
        return self.count * NBYTES[self.dtype]


class _Reading(Check):
    """A pickle's objects: storages by `storage`, which takes their dtype, key and count."""

    def __init__(self, stream: BytesIO, storage: Callable[[str, str, int], _Storage]) -> None:
        super().__init__(stream)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        known = {
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        }
        return known.get(f"{module}.{name}") or super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, place, count, *view = (_text(part) for part in pid)
        known = place == "cpu" or place.startswith("cuda")  # where it was, which does not matter
        if kind != "storage" or not known or any(part is not None for part in view):
            raise ValueError("a storage that is not plain memory")
        return self._storage(dtype, key, count)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _tensor(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Tensor:
    """A tensor that is contiguous in a storage."""
    if not isinstance(shape, tuple):  # a list would be copied, as often as it is named
        raise ValueError("a shape that is no tuple")
    size = math.prod(shape)
    whole = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    moved = [(a, b) for a, b, extent in zip(strides, whole, shape, strict=True) if extent > 1]
    if min(shape, default=0) < 0 or any(a != b for a, b in moved):
        raise ValueError("a tensor that is not contiguous")
    if not 0 <= offset <= storage.count - size:
        raise ValueError("a tensor beyond its storage")
    return Tensor(storage.dtype, shape, partial(_values, storage, offset, shape))


def _values(storage: _Storage, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    dtype = np.dtype(storage.dtype).newbyteorder("<")
    return np.frombuffer(storage.read(), dtype, math.prod(shape), offset * dtype.itemsize).reshape(
        shape
    )


def _archived(path: Path, data: bytes) -> Any:
    """Read an archive: `NAME/data.pkl`, `NAME/data/KEY`, and `NAME/byteorder` in newer ones."""
    archive = open_archive(data)
    members = {member.filename: member for member in archive.infolist()}
    (pickled,) = (name for name in members if name.rpartition("/")[2] == "data.pkl")
    folder = pickled.removesuffix("data.pkl")

    def content(name: str, limit: int) -> bytes:
        if members[name].file_size > limit:
            raise ValueError("a member of more bytes than it has to have")
        with archive.open(members[name]) as stream:
            return read_exactly(stream, members[name].file_size)

    def values(name: str, nbytes: int) -> bytes:
        try:
            return content(name, nbytes)
        except Exception as error:
            why = plain(error)
            raise WeightsError(f"weights '{path}': '{plain(name)}' is damaged: {why}") from None

    def storage(dtype: str, key: str, count: int) -> _Storage:
        name, nbytes = f"{folder}data/{key}", count * NBYTES[dtype]
        found = _Storage(dtype, count, partial(values, name, nbytes))
        if members[name].file_size != nbytes or members[name].compress_type != zipfile.ZIP_STORED:
            raise ValueError("a storage of another size than it declares")
        return found

    order = f"{folder}byteorder"
    if order in members and content(order, ORDER_NBYTES) != b"little":
        raise ValueError("values in another order of bytes")
    return _Reading(BytesIO(content(pickled, MOST_PICKLED)), storage).load()


def _old(data: bytes) -> Any:
    """Read a file without an archive: five pickles, and then each storage with its count."""
    stream = BytesIO(data)
    named: dict[str, _Storage] = {}

    def storage(dtype: str, key: str, count: int) -> _Storage:
        if key in named and (named[key].dtype, named[key].count) != (dtype, count):
            raise ValueError("a storage that is declared in two ways")
        return named.setdefault(key, _Storage(dtype, count, lambda: held[key]))

    found = [_Reading(stream, storage).load() for _ in range(PICKLES)]
    _, _, system, content, keys = found
    if system.get("little_endian", system.get(b"little_endian")) is not True:
        raise ValueError("values in another order of bytes")
    held: dict[str, bytes] = {}
    for key in map(_text, keys):
        if int.from_bytes(stream.read(COUNT_NBYTES), "little") != named[key].count:
            raise ValueError("a storage of another size than it declares")
        held[key] = _exactly(stream, named[key].nbytes)
    if held.keys() != named.keys():
        raise ValueError("a storage without values")
    return content


def _exactly(stream: BytesIO, nbytes: int) -> bytes:
    """That many bytes of the stream."""
    found = stream.read(nbytes)
    if len(found) != nbytes:
        raise ValueError("it ends in a storage")
    return found


__all__ = ["read_plain"]
