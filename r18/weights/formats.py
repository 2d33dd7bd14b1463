"""Weights in files of other tools: `.pth`, `.safetensors`, `.npz`.

Each reader gives the tensors of a file by name, described but not read
(`r18.weights.tensors.Tensor`), so that they can be checked first. Nothing in a file is ever
executed. All raise `WeightsError`.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import WeightsError, show
from r18.weights.tensors import Float32, Tensor


def read_torch(path: Path) -> dict[str, Tensor]:
    """A PyTorch checkpoint with a `state_dict`, by itself or under the key `state_dict`.

    Loaded with `weights_only`: a pickle that would call anything is refused. Needs PyTorch.
    """
    try:
        import torch
    except ImportError:
        raise WeightsError(
            f"weights '{path}': reading it needs PyTorch, which is not installed\n"
            "  pip install 'r18[torch]'"
        ) from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on hostile bytes the unpickler raises nearly anything
        raise WeightsError(
            f"weights '{path}': PyTorch refuses to load it: {_first_line(error)}\n"
            "  only tensors are loaded, and nothing in a file is executed; make the file with "
            "torch.save(model.state_dict(), …)"
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
    if isinstance(value, np.ndarray):
        return Tensor.of(value)
    if not (hasattr(value, "detach") and hasattr(value, "layout")):
        raise WeightsError(
            f"{where}: '{name}' is a {type(value).__name__}, expected a tensor\n"
            "  in a checkpoint of several parts, the weights stand under 'state_dict'"
        )
    if value.is_meta or str(value.layout) != "torch.strided":
        raise WeightsError(
            f"{where}: tensor '{name}' is {'on the meta device' if value.is_meta else value.layout}"
            ", expected plain dense values"
        )
    return Tensor(
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        lambda: value.detach().cpu().numpy(),
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """A `.safetensors` file. Needs the library safetensors."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise _no_safetensors(f"weights '{path}': reading it") from None
    try:
        with safe_open(path, framework="numpy") as file:
            described = {n: file.get_slice(n) for n in file.keys() if not _is_counter(n)}  # noqa: SIM118
            return {
                name: Tensor(
                    _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype()),
                    tuple(part.get_shape()),
                    partial(_safetensor, path, name),
                )
                for name, part in described.items()
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


def _safetensor(path: Path, name: str) -> NDArray[Any]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        array: NDArray[Any] = file.get_tensor(name)
    return array


def _no_safetensors(what: str) -> WeightsError:
    return WeightsError(
        f"{what} needs the library safetensors, which is not installed\n"
        "  pip install 'r18[safetensors]'"
    )


def read_npz(path: Path) -> dict[str, Tensor]:
    """An `.npz` archive; arrays of Python objects are described by their dtype, never unpickled."""
    tensors: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                if name in tensors:
                    raise ValueError(f"'{name}' is in it twice")
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(stream)
                if not _is_counter(name):
                    tensors[name] = Tensor(dtype.name, shape, partial(_npy, path, member))
    except Exception as error:  # as in read_torch: zipfile and the header parser on hostile bytes
        raise WeightsError(
            f"weights '{path}': not an .npz archive, or damaged: {_first_line(error)}"
        ) from None
    return tensors


def _npy(path: Path, member: str) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return array
    except Exception as error:
        raise WeightsError(
            f"weights '{path}': '{member}' is damaged: {_first_line(error)}"
        ) from None


def save_npz(path: Path, tensors: Mapping[str, Float32]) -> None:
    """Write an uncompressed archive, `NAME.npy` for each tensor."""
    with path.open("wb") as stream:
        np.savez(stream, **tensors)  # type: ignore[arg-type]


def save_safetensors(path: Path, tensors: Mapping[str, Float32]) -> None:
    """Write with the library safetensors; raises `WeightsError` where it is not installed."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise _no_safetensors("writing .safetensors") from None
    save_file(dict(tensors), os.fspath(path))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return show(text.splitlines()[0]).strip("'\"")


__all__ = [
    "read_npz",
    "read_safetensors",
    "read_state_dict",
    "read_torch",
    "save_npz",
    "save_safetensors",
]
