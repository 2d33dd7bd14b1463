"""Tensors in files, as dumps and fixtures keep them, and the JSON beside them.

A tensor is one file in its folder: raw values, little-endian, row-major, no header. What a folder
says may come from any program and is not trusted: paths are plain names, and sizes and hashes are
checked before anything is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from r18.atomic import new_folder
from r18.backend import Array
from r18.errors import DumpError
from r18.graph.ops import Shape
from r18.weights.tensors import show

DTYPES = {"float32": "<f4", "float64": "<f8"}
VERSION = 1
MAX_NBYTES = 16 << 20
"""The largest JSON file that is read; a dump of all of ResNet-34's checkpoints has 60 KB."""

T = TypeVar("T")


@dataclass(frozen=True)
class TensorFile:
    """A tensor in a file of its folder; `sha256` is None where nobody has said it."""

    name: str
    path: str
    shape: Shape
    dtype: str = "float32"
    sha256: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> TensorFile:
        """Check every field. Raises `DumpError`, which does not name the file."""
        name, path = field(data, "name", str), field(data, "path", str)
        shape, dtype = field(data, "shape", list), field(data, "dtype", str)
        sha256 = field(data, "sha256", str)
        if path in ("", ".", "..") or re.search(r"[/\\:\0]", path):
            raise DumpError(f"{show(name)}: the path {show(path)} is not a plain file name")
        if not all(type(extent) is int and 1 <= extent < 1 << 31 for extent in shape):
            raise DumpError(f"{show(name)}: {show(shape)} is not a shape")
        if dtype not in DTYPES:
            raise DumpError(
                f"{show(name)}: the dtype {show(dtype)} is not one of {', '.join(DTYPES)}"
            )
        return cls(name, path, tuple(shape), dtype, _hex(sha256, f"sha256 of {show(name)}"))


@dataclass(frozen=True)
class Origin:
    """Where something came from, in words, and the digest that identifies it."""

    source: str
    sha256: str

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Origin:
        source = field(data, "source", str)
        return cls(source, _hex(field(data, "sha256", str), f"sha256 of {show(source)}"))


def sha256_of(array: Array, dtype: str = "float32") -> str:
    """The digest of the array as it would be stored."""
    return hashlib.sha256(np.ascontiguousarray(array, DTYPES[dtype])).hexdigest()


def write_tensor(folder: Path, name: str, array: Array, dtype: str | None = None) -> TensorFile:
    """Store an array as `NAME.bin`: float64 as it is, any other as float32, or rounded to `dtype`.

    Raises `OSError`, also when the file is there already.
    """
    stored = dtype or ("float64" if array.dtype == np.float64 else "float32")
    with np.errstate(over="ignore"):  # beyond the largest finite value lies infinity
        values = np.ascontiguousarray(array, DTYPES[stored])
    with (folder / f"{name}.bin").open("xb") as stream:
        stream.write(memoryview(values).cast("B"))
    return TensorFile(name, f"{name}.bin", array.shape, stored, sha256_of(values, stored))


def check_tensor(folder: Path, file: TensorFile) -> Path:
    """The tensor's file, a regular one inside the folder, and of the right size.

    Raises `DumpError`.
    """
    path = folder / file.path
    try:
        status = path.stat()
        inside = path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except FileNotFoundError:
        raise DumpError(
            f"'{folder}' lacks '{file.path}', the tensor '{file.name}' of shape "
            f"{_shape(file)}\n  write it again, whole"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise DumpError(f"cannot read '{path}': {error}") from None
    if not inside:
        raise DumpError(f"'{path}' is a link out of its folder, which is not followed")
    if not stat.S_ISREG(status.st_mode):
        raise DumpError(f"'{path}' is not a regular file")
    if status.st_size != file.nbytes:
        raise DumpError(
            f"'{path}' has {status.st_size} bytes, expected {file.nbytes}: shape {_shape(file)} "
            f"in {file.dtype}\n  truncated, or of another shape or dtype"
        )
    return path


def read_tensor(folder: Path, file: TensorFile) -> Array:
    """The array, after every check; read-only. Raises `DumpError`."""
    path = check_tensor(folder, file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DumpError(f"cannot read '{path}': {error.strerror}") from None
    found = hashlib.sha256(data).hexdigest()
    if len(data) != file.nbytes or file.sha256 not in (None, found):
        raise DumpError(
            f"'{path}' is not what was written: its sha256 is {found[:16]}…, expected "
            f"{str(file.sha256)[:16]}…\n  it was changed or damaged; write it again"
        )
    return np.frombuffer(data, DTYPES[file.dtype]).reshape(file.shape)


# -- folders -----------------------------------------------------------------------------------


def check_free(target: Path, kind: str, description: str, overwrite: bool) -> None:
    """Raise `DumpError` unless a folder may be written at `target`.

    It may where there is none, or an empty one; with `overwrite` also where there is one that holds
    a `kind` (told by its JSON file, named `description`) and nothing else.
    """
    held = _held(target)
    is_ours = description in held and all(n == description or n.endswith(".bin") for n in held)
    if held and not (is_ours and _kind(target / description) == kind):
        other = next((name for name in held if name != description), description)
        raise DumpError(
            f"cannot write a {kind} to '{target}': it is no {kind}, and it holds '{other}'\n"
            "  choose another folder, or empty this one"
        )
    if held and not overwrite:
        raise DumpError(
            f"cannot write a {kind} to '{target}': one is there already\n"
            "  replace it with --force (overwrite=True), or choose another folder"
        )


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


def _held(target: Path) -> list[str]:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise DumpError(f"cannot write to '{target}': it is a file or a link; name a folder")
    return sorted(path.name for path in target.iterdir()) if target.is_dir() else []


def _kind(path: Path) -> object:
    try:
        return _parse(path).get("kind")
    except DumpError:
        return None


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
    known = {"kind": kind, "version": VERSION, "byte_order": "little"}
    for key, wanted in known.items():
        found = data.get(key)
        if type(found) is not type(wanted) or found != wanted:
            raise DumpError(f"'{path}': {key} is {show(found)}, this r18 reads {wanted!r}")
    return data


def _parse(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise DumpError(f"'{path}' is larger than {MAX_NBYTES:,} bytes")
        data = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"'{path}' is not JSON: {error}") from None
    except OSError as error:
        raise DumpError(f"cannot read '{path}': {error.strerror}") from None
    if not isinstance(data, dict):
        raise DumpError(f"'{path}': expected a JSON object, got {show(data)}")
    return data


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
    """Put the file's name before the `DumpError` of a field."""
    try:
        yield
    except DumpError as error:
        raise DumpError(f"'{path}': {error}") from None


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the field {show(name)} appears twice in one object")
    return data


def _hex(text: str, what: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise DumpError(f"{what} must be 64 lowercase hex digits, got {show(text)}")
    return text


def _shape(file: TensorFile) -> str:
    return "×".join(map(str, file.shape))


__all__ = [
    "Origin",
    "TensorFile",
    "check_free",
    "check_tensor",
    "field",
    "objects",
    "read_json",
    "read_tensor",
    "reading",
    "sha256_of",
    "whole_folder",
    "write_json",
    "write_tensor",
]
