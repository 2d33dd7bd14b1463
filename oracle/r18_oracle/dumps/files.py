"""The folders of dumps and fixtures: tensors in files, and the JSON that describes them.

`r18.weights.tensors` reads and checks them. Paths of dumps and fixtures are plain file names.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from r18 import atomic
from r18.atomic import new_folder
from r18.backend import Array
from r18.errors import DumpError, show
from r18.files import read_object
from r18.weights.tensors import (
    DTYPES,
    TensorFile,
    check_file,
    check_sha256,
    read_file,
)

VERSION = 1
MAX_NBYTES = 16 << 20
"""The largest JSON file that is read; a dump of all of ResNet-34's checkpoints has 60 KB."""

T = TypeVar("T")


def tensor_file(data: Mapping[str, object]) -> TensorFile:
    """A `TensorFile` from JSON, every field checked. Raises `DumpError` without the file's name."""
    name, path = field(data, "name", str), field(data, "path", str)
    shape, dtype = field(data, "shape", list), field(data, "dtype", str)
    sha256 = check_sha256(field(data, "sha256", str), f"sha256 of {show(name)}", DumpError)
    if path in ("", ".", "..") or re.search(r"[/\\:\0]", path):
        raise DumpError(f"{show(name)}: the path {show(path)} is not a plain file name")
    if not all(type(extent) is int and 1 <= extent < 1 << 31 for extent in shape):
        raise DumpError(f"{show(name)}: {show(shape)} is not a shape")
    if dtype not in DTYPES:
        raise DumpError(f"{show(name)}: the dtype {show(dtype)} is not one of {', '.join(DTYPES)}")
    return TensorFile(name, path, tuple(shape), dtype, sha256, _scale(data, name, dtype))


def _scale(data: Mapping[str, object], name: str, dtype: str) -> float | None:
    """The scale of integers, which other tensors must not have."""
    if not is_integer(dtype):
        if "scale" in data:
            raise DumpError(f"{show(name)} has a scale, and is {dtype}: only integers have one")
        return None
    scale = field(data, "scale", float)
    if not (math.isfinite(scale) and scale > 0):
        raise DumpError(f"the scale of {show(name)} must be positive and finite, got {scale}")
    return scale


def is_integer(dtype: str) -> bool:
    """Whether a dtype of `DTYPES` is one of integers."""
    return np.dtype(DTYPES[dtype]).kind in "iu"


@dataclass(frozen=True)
class Origin:
    """Where something came from, in words, and the digest that identifies it."""

    source: str
    sha256: str

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Origin:
        source = field(data, "source", str)
        sha256 = field(data, "sha256", str)
        return cls(source, check_sha256(sha256, f"sha256 of {show(source)}", DumpError))


def sha256_of(array: Array, dtype: str = "float32") -> str:
    """The digest of the array as it would be stored."""
    return hashlib.sha256(np.ascontiguousarray(array, DTYPES[dtype])).hexdigest()


def write_tensor(
    folder: Path, name: str, array: Array, dtype: str | None = None, scale: float | None = None
) -> TensorFile:
    """Store an array as `NAME.bin`: float64 as it is, any other as float32, or rounded to `dtype`.

    scale: of integers. Raises `OSError`, also when the file is there already.
    """
    stored = dtype or ("float64" if array.dtype == np.float64 else "float32")
    with np.errstate(over="ignore"):  # what is beyond the largest finite value becomes infinite
        values = np.ascontiguousarray(array, DTYPES[stored])
    with (folder / f"{name}.bin").open("xb") as stream:
        stream.write(memoryview(values).cast("B"))
    digest = sha256_of(values, stored)
    return TensorFile(name, f"{name}.bin", array.shape, stored, digest, scale)


def check_tensor(folder: Path, file: TensorFile) -> None:
    """Raise `DumpError` unless the file is a regular one in the folder, and of the right size."""
    with reading(folder):
        check_file(folder, file, DumpError)


def read_tensor(folder: Path, file: TensorFile) -> Array:
    """The array, after every check; read-only. Raises `DumpError`."""
    with reading(folder):
        array = read_file(folder, file, DumpError)
    array.flags.writeable = False
    return array


# -- folders -----------------------------------------------------------------------------------


def check_free(target: Path, kind: str, description: str, overwrite: bool) -> None:
    """Raise `DumpError` unless a folder may be written; see `r18.atomic.check_free`."""

    def check(path: Path) -> None:
        if _parse(path).get("kind") != kind:
            raise DumpError(f"'{path.name}' describes something else")

    atomic.check_free(target, kind, description, overwrite, check, DumpError)


@contextmanager
def whole_folder(target: Path, kind: str, description: str, overwrite: bool) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends, or leaves no trace.

    Raises `DumpError`, as `check_free` does.
    """
    check_free(target, kind, description, overwrite)
    try:
        with new_folder(target, overwrite=overwrite) as draft:
            yield draft
    except OSError as error:
        raise DumpError(f"cannot write a {kind} to '{target}': {error}") from error


# -- JSON --------------------------------------------------------------------------------------


def write_json(path: Path, kind: str, data: Mapping[str, Any]) -> None:
    """Write an object, a line for each field, and for each element of a list of objects."""
    lines = []
    for key, value in {"kind": kind, "version": VERSION, "byte_order": "little", **data}.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n".join(f"    {json.dumps(element)}" for element in value)
            lines.append(f"  {json.dumps(key)}: [\n{inner}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_json(path: Path, kind: str) -> dict[str, object]:
    """The object in a file, of that kind and of our version. Raises `DumpError`."""
    data = _parse(path)
    if "kind" not in data and "tensors" in data:
        raise DumpError(f"'{path}': it belongs to an export of weights, not to a {kind}")
    known = {"kind": kind, "version": VERSION, "byte_order": "little"}
    for key, wanted in known.items():
        found = data.get(key)
        if type(found) is not type(wanted) or found != wanted:
            raise DumpError(f"'{path}': {key} is {show(found)}, this r18 reads {wanted!r}")
    return data


def _parse(path: Path) -> dict[str, object]:
    with reading(path):
        return read_object(path, MAX_NBYTES, DumpError)


def field(data: Mapping[str, object], name: str, kind: type[T]) -> T:
    """A field of that type; raises `DumpError`, which does not name the file."""
    if name not in data:
        raise DumpError(f"the field '{name}' is missing")
    value = data[name]
    if type(value) is not kind:
        raise DumpError(f"the field '{name}' must be of type {kind.__name__}, got {show(value)}")
    return value


def objects(data: Mapping[str, object], name: str) -> list[dict[str, object]]:
    """A field that is a list of objects; raises `DumpError`."""
    values = field(data, name, list)
    for value in values:
        if not isinstance(value, dict):
            raise DumpError(f"'{name}' must be a list of objects, got {show(value)}")
    return values


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Put the name of the file or folder before the message of whatever goes wrong."""
    try:
        yield
    except DumpError as error:
        raise DumpError(f"'{path}': {error}") from None
    except OSError as error:
        raise DumpError(f"cannot read '{path}': {error}") from None


__all__ = [
    "Origin",
    "TensorFile",
    "check_free",
    "check_tensor",
    "field",
    "is_integer",
    "objects",
    "read_json",
    "read_tensor",
    "reading",
    "sha256_of",
    "tensor_file",
    "whole_folder",
    "write_json",
    "write_tensor",
]
