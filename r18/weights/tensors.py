"""Tensors from outside: what a schedule needs of them, and how they are read from a folder.

For a schedule, names, dtypes and shapes are checked before any tensor is read (`check_described`),
values after (`check_values`). `where` begins each message, as in `weights 'resnet18.pth'`.

Exports, dumps and fixtures are folders with a JSON file and one file for each tensor: raw values,
little-endian, row-major, no header. Such a folder may come from any program and is not trusted.
`check_path`, `check_file` and `read_file` check what it says and holds, as `r18.files.read_object`
does its JSON file. They raise the `error` of their caller, which puts the folder's name before the
message.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import R18Error, WeightsError, plain, show
from r18.files import open_file
from r18.graph.ops import Shape
from r18.graph.schedule import Schedule

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Tensor:
    """A tensor that is not read yet: its dtype's NumPy name, its shape, and how to read it."""

    dtype: str
    shape: Shape
    read: Callable[[], NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Tensor:
        """An array that is there already."""
        return cls(array.dtype.name, array.shape, lambda: array)


def check_described(tensors: Mapping[str, Tensor], schedule: Schedule, where: str = "") -> None:
    """Raise `WeightsError` unless the tensors are the schedule's: same names, float32, same
    shapes."""
    specs = schedule.weight_specs
    check_names(tensors, schedule, where)
    for name, spec in specs.items():
        if tensors[name].dtype != "float32":
            raise WeightsError(
                f"{_at(where)}tensor '{name}' is {tensors[name].dtype}, expected float32\n"
                "  convert it first (in PyTorch: model.float()); weights are never cast silently"
            )
        if tensors[name].shape != spec.shape:
            raise WeightsError(
                f"{_at(where)}tensor '{name}' has shape {show(list(tensors[name].shape))}, "
                f"{schedule.name} needs {list(spec.shape)}\n"
                "  another network, or another number of classes?"
            )


def check_names(
    names: Iterable[str],
    schedule: Schedule,
    where: str = "",
    error: type[WeightsError] = WeightsError,
) -> None:
    """Raise `error` for the first tensor that the schedule does not know, or that is missing."""
    given, specs = set(names), schedule.weight_specs
    unknown = sorted(given - set(specs))
    if unknown:
        near = difflib.get_close_matches(unknown[0][:200], list(specs), n=1, cutoff=0.5)
        raise error(
            f"{_at(where)}tensor {show(unknown[0])}{_more(len(unknown) - 1)} is not one of "
            f"{schedule.name}'s" + (f", did you mean '{near[0]}'?" if near else "") + "\n"
            f"  known are its {len(specs)} tensors, by torchvision's names; another network?"
        )
    missing = [name for name in specs if name not in given]
    if missing:
        raise error(
            f"{_at(where)}tensor '{missing[0]}'{_more(len(missing) - 1)} is missing\n"
            f"  {schedule.name} needs {len(specs)} tensors, {len(given)} of them are here; "
            "another network, or a part of a checkpoint?"
        )


def check_values(
    tensors: Mapping[str, NDArray[Any]],
    schedule: Schedule,
    where: str = "",
    error: type[WeightsError] = WeightsError,
) -> None:
    """Raise `error` for a value that is not finite, or a running_var below zero."""
    for name, spec in schedule.weight_specs.items():
        bad = ~np.isfinite(tensors[name])
        if bad.any():
            raise error(
                f"{_at(where)}tensor '{name}' is not finite: {_first(tensors[name], bad)}\n"
                "  a training run that diverged, or a damaged file?"
            )
        negative = tensors[name] < 0
        if spec.role == "running_var" and negative.any():
            raise error(
                f"{_at(where)}tensor '{name}' is a variance and below zero: "
                f"{_first(tensors[name], negative)}\n"
                "  it is damaged, or another tensor under this name"
            )


def read_tensors(
    tensors: Mapping[str, Tensor], schedule: Schedule, where: str
) -> dict[str, Float32]:
    """Check names, dtypes and shapes; read; check values. In the order of `weight_specs`.

    Raises `WeightsError`.
    """
    check_described(tensors, schedule, where)
    arrays = {name: tensors[name].read() for name in schedule.weight_specs}
    check_values(arrays, schedule, where)
    return arrays


def tensor_bytes(array: NDArray[Any]) -> NDArray[np.float32]:
    """The array as it is stored and hashed: row-major little-endian float32."""
    return np.ascontiguousarray(array, dtype="<f4")


def tensor_sha256(array: NDArray[Any]) -> str:
    """The hex digest of `tensor_bytes`."""
    return hashlib.sha256(tensor_bytes(array)).hexdigest()


# -- folders of tensors ------------------------------------------------------------------------

DTYPES = {
    "float32": "<f4",
    "float64": "<f8",
    "int8": "|i1",
    "uint8": "|u1",
    "int32": "<i4",
}
"""NumPy's names of the dtypes that are stored, by the names in the JSON file."""


@dataclass(frozen=True)
class TensorFile:
    """A tensor in a file of its folder; `sha256` is None where it is not known.

    scale: of integers that stand for numbers, q · scale; None for all others.
    """

    name: str
    path: str
    shape: Shape
    dtype: str = "float32"
    sha256: str | None = None
    scale: float | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def described(self) -> str:
        """Shape and dtype, for messages."""
        return f"shape {show(list(self.shape))} in {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"shape": list(self.shape)}
        return found if self.scale is not None else {k: v for k, v in found.items() if k != "scale"}


def check_sha256(text: str, what: str, error: type[R18Error]) -> str:
    """The digest as it is; raises `error` for anything but 64 lowercase hex digits."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise error(f"{what} must be 64 lowercase hex digits, got {show(text)}")
    return text


def check_path(path: str, tensor: str, error: type[R18Error]) -> None:
    """Raise `error` for a path that could lead out of its folder, on any system."""
    if (
        not path.isprintable()
        or "\\" in path
        or re.match(r"[A-Za-z]:", path)
        or PurePosixPath(path).is_absolute()
        or ".." in PurePosixPath(path).parts
        or PurePosixPath(path).as_posix() != path
    ):
        raise error(
            f"tensor {show(tensor)}: the path {show(path)} is not a plain relative one (with '/', "
            "no '..', no drive), and nothing outside of the folder is read"
        )


def inside(folder: Path, path: str, error: type[R18Error]) -> Path:
    """The regular file at a path in a folder, links resolved.

    Raises `error` where there is none, or it is outside; `OSError` where it cannot be examined.
    """
    root = folder.resolve()
    try:
        file = (root / path).resolve(strict=True)
    except FileNotFoundError:
        raise error(f"there is no '{plain(path)}' in the folder") from None
    except (OSError, RuntimeError, ValueError) as problem:
        raise error(f"'{plain(path)}' leads nowhere: {plain(problem)}") from None
    if not file.is_relative_to(root):
        raise error(f"'{plain(path)}' is a link out of the folder, to '{plain(file)}'")
    if not stat.S_ISREG(file.stat().st_mode):
        raise error(f"'{plain(path)}' is not a regular file")
    return file


def check_file(folder: Path, file: TensorFile, error: type[R18Error]) -> Path:
    """The tensor's file: regular, inside the folder, and of the right size; raises as `inside`."""
    check_path(file.path, file.name, error)
    path = inside(folder, file.path, error)
    size = path.stat().st_size
    if size != file.nbytes:
        raise error(
            f"tensor {show(file.name)}: '{plain(file.path)}' has {size} bytes, expected "
            f"{file.nbytes}: {file.described}\n"
            "  truncated, or of another shape or dtype; write it again"
        )
    return path


def check_hash(file: TensorFile, found: str, error: type[R18Error]) -> None:
    """Raise `error` for another digest than the file's own."""
    if file.sha256 not in (None, found):
        raise error(
            f"tensor {show(file.name)}: '{plain(file.path)}' has sha256 {found[:16]}…, expected "
            f"{str(file.sha256)[:16]}…\n  it was changed or damaged; write it again"
        )


def read_file(folder: Path, file: TensorFile, error: type[R18Error]) -> NDArray[Any]:
    """The tensor, after every check; a file that changes while it is read is refused.

    Raises as `inside`.
    """
    path = check_file(folder, file, error)
    with open_file(path, file.nbytes) as stream:
        array = np.empty(file.shape, DTYPES[file.dtype])
        count = stream.readinto(memoryview(array).cast("B"))
        if count != file.nbytes or stream.read(1):
            raise error(f"tensor {show(file.name)}: '{plain(file.path)}' changed while it was read")
    check_hash(file, hashlib.sha256(array).hexdigest(), error)
    return array.astype(file.dtype, copy=False)


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _first(array: NDArray[Any], bad: NDArray[np.bool_]) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{array[index]} at {list(index)}{_more(int(bad.sum()) - 1)}"


__all__ = [
    "DTYPES",
    "Float32",
    "Tensor",
    "TensorFile",
    "check_described",
    "check_file",
    "check_hash",
    "check_names",
    "check_path",
    "check_sha256",
    "check_values",
    "inside",
    "read_file",
    "read_tensors",
    "tensor_bytes",
    "tensor_sha256",
]
