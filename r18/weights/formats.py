"""Weights in files of other tools: `.pth`, `.safetensors`, `.npz`.

Each reader takes the bytes of a file, which are read once, and gives its tensors by name, described
but not read (`r18.weights.tensors.Tensor`), so that they can be checked first. Nothing in a file
is ever executed. `path` is for messages. All raise `WeightsError`.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import WeightsError, plain
from r18.weights.archives import open_archive, read_exactly
from r18.weights.pickles import checked
from r18.weights.state_dicts import read_plain
from r18.weights.tensors import Float32, Tensor

MOST_HEADER = 10_000
"""The most bytes of an array's header in an `.npz`, as NumPy limits it; a plain one has 128."""

MOST_SAFETENSORS_HEADER = 100_000_000
"""The most bytes of a `.safetensors` file's header, as its library limits it."""

_REMEDY = (
    "  only tensors are loaded, and nothing in a file is executed; make the file with "
    "torch.save(model.state_dict(), …)"
)


def read_torch(path: Path, data: bytes) -> dict[str, Tensor]:
    """A PyTorch checkpoint with a `state_dict`, by itself or under the key `state_dict`.

    A pickle that would call anything, or fill the memory, is refused by `r18.weights.pickles`. What
    holds plain tensors is read here; the rest needs PyTorch, and is loaded with `weights_only`.
    """
    if (simple := read_plain(path, data)) is not None:
        return read_state_dict(simple, f"weights '{path}'")
    try:
        file = checked(data)
    except Exception as error:  # zipfile and pickle on hostile bytes raise nearly anything
        # The text of an instruction that no pickle has is its number.
        why = "it is no pickle" if isinstance(error, KeyError) else _first_line(error)
        raise WeightsError(
            f"weights '{path}': no checkpoint of PyTorch's, or damaged: {why}\n{_REMEDY}"
        ) from None
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"weights '{path}': it is no plain state_dict, and reading it needs PyTorch, which is "
            "not installed\n  pip install 'r18[torch]'"
        ) from None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # and so does its unpickler
        raise WeightsError(
            f"weights '{path}': PyTorch refuses to load it: {_first_line(error)}\n{_REMEDY}"
        ) from None
    return read_state_dict(loaded, f"weights '{path}'")


def read_state_dict(state_dict: object, where: str) -> dict[str, Tensor]:
    """The tensors (of PyTorch or NumPy) of a `state_dict`, or of a checkpoint around one.

    A `module.` before every name (DataParallel) is taken off; `num_batches_tracked` is dropped,
    since inference does not read it.
    """
    if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state_dict"), Mapping):
        state_dict = state_dict["state_dict"]
    if not isinstance(state_dict, Mapping) or not all(isinstance(n, str) for n in state_dict):
        raise WeightsError(
            f"{where}: holds a {type(state_dict).__name__}, expected a state_dict (names and "
            "tensors)\n  make it with torch.save(model.state_dict(), …)"
        )
    tensors = {n: _described(n, v, where) for n, v in state_dict.items() if not _is_counter(n)}
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _is_counter(name: str) -> bool:
    return name.endswith(".num_batches_tracked")


def _described(name: str, value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return Tensor.of(value)
    if not (hasattr(value, "detach") and hasattr(value, "layout")):
        raise WeightsError(
            f"{where}: '{plain(name)}' is a {type(value).__name__}, expected a tensor\n"
            "  in a checkpoint of several parts, the weights stand under 'state_dict'"
        )
    if value.is_meta or str(value.layout) != "torch.strided":
        raise WeightsError(
            f"{where}: tensor '{plain(name)}' is "
            f"{'on the meta device' if value.is_meta else value.layout}, expected plain dense "
            "values"
        )
    return Tensor(
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        lambda: value.detach().cpu().numpy(),
    )


def read_safetensors(path: Path, data: bytes) -> dict[str, Tensor]:
    """A `.safetensors` file. Needs the library safetensors."""
    try:
        from safetensors import deserialize
    except ImportError:
        raise _no_safetensors(f"weights '{path}': reading it") from None
    try:
        return {
            name: Tensor(
                _SAFETENSORS_DTYPES.get(part["dtype"], part["dtype"]),
                tuple(part["shape"]),
                partial(_safetensor, part),
            )
            for name, part in deserialize(data)  # type: ignore[no-untyped-call]
            if not _is_counter(name)
        }
    except Exception as error:
        raise WeightsError(
            f"weights '{path}': not a safetensors file, or damaged: {_first_line(error)}"
        ) from None


_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
}


def _safetensor(part: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(_SAFETENSORS_DTYPES[part["dtype"]]).newbyteorder("<")
    return np.frombuffer(part["data"], dtype).reshape(part["shape"])


def _no_safetensors(what: str) -> WeightsError:
    return WeightsError(
        f"{what} needs the library safetensors, which is not installed\n"
        "  pip install 'r18[safetensors]'"
    )


def read_npz(path: Path, data: bytes) -> dict[str, Tensor]:
    """An `.npz` archive; arrays of Python objects are described by their dtype, never unpickled."""
    tensors: dict[str, Tensor] = {}
    try:
        archive = open_archive(data)
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise ValueError(f"'{plain(name)}' is in it twice")
            with archive.open(member) as stream:
                shape, _, dtype = _header(stream)
            if not _is_counter(name):
                tensors[name] = Tensor(dtype.name, shape, partial(_npy, path, archive, member))
    except Exception as error:  # as in read_torch: zipfile and the header parser on hostile bytes
        raise WeightsError(
            f"weights '{path}': not an .npz archive, or damaged: {_first_line(error)}"
        ) from None
    return tensors


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether it is in Fortran's order, dtype) of the array that begins in a stream.

    The length of a header is checked before it is read: NumPy would read gigabytes first.
    """
    version = np.lib.format.read_magic(stream)
    size = stream.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(size, "little")
    if length > MOST_HEADER:
        raise ValueError(f"a header of {length:,} bytes; at most {MOST_HEADER:,} are read")
    text = BytesIO(size + stream.read(length))
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(text)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(text)
    if min(shape, default=0) < 0:
        raise ValueError(f"{shape} is no shape")
    return shape, fortran, dtype


def _npy(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """The member as an array; everything after its header is the array's."""
    try:
        with archive.open(member) as stream:
            shape, fortran, dtype = _header(stream)
            if dtype.hasobject:
                raise ValueError("it holds Python objects, which are never unpickled")
            data = read_exactly(stream, math.prod(shape) * dtype.itemsize)
            array = np.frombuffer(data, dtype)
        return array.reshape(shape, order="F" if fortran else "C")
    except Exception as error:
        raise WeightsError(
            f"weights '{path}': '{plain(member.filename)}' is damaged: {_first_line(error)}"
        ) from None


def save_npz(path: Path, tensors: Mapping[str, Float32]) -> None:
    """Write an uncompressed archive, `NAME.npy` for each tensor."""
    with path.open("wb") as stream:
        np.savez(stream, **tensors)  # type: ignore[arg-type]


def save_safetensors(path: Path, tensors: Mapping[str, Float32]) -> None:
    """Write with the library safetensors; raises `WeightsError` where it is not installed."""
    try:
        from safetensors.numpy import save
    except ImportError:
        raise _no_safetensors("writing .safetensors") from None
    path.write_bytes(save(dict(tensors)))  # `save_file` makes files that only their owner may read


def is_npz(file: BufferedReader) -> bool:
    """Whether a file is an archive of arrays, by its members' names; none is read."""
    try:
        names = zipfile.ZipFile(file).namelist()
    except Exception:  # as in `read_npz`
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def is_safetensors(file: BufferedReader) -> bool:
    """Whether a file begins as safetensors do: a header in JSON, after its length."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_SAFETENSORS_HEADER:
        return False
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        return False
    if not isinstance(header, dict):
        return False
    parts = [part for name, part in header.items() if name != "__metadata__"]
    return all(isinstance(part, dict) and "data_offsets" in part for part in parts)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return plain(text.splitlines()[0], 120)


__all__ = [
    "is_npz",
    "is_safetensors",
    "read_npz",
    "read_safetensors",
    "read_state_dict",
    "read_torch",
    "save_npz",
    "save_safetensors",
]
