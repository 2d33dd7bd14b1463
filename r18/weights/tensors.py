"""What a set of tensors must be to serve a schedule, whatever it came from.

Names, dtypes and shapes are checked before any tensor is read (`check_described`), values after
(`check_values`). `where` begins each message, as in `weights 'resnet18.pth'`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import WeightsError
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


def check_described(
    tensors: Mapping[str, Tensor],
    schedule: Schedule,
    where: str = "",
    error: type[WeightsError] = WeightsError,
) -> None:
    """Raise `error` unless the tensors are the schedule's: same names, float32, same shapes."""
    specs = schedule.weight_specs
    check_names(tensors, schedule, where, error)
    for name, spec in specs.items():
        if tensors[name].dtype != "float32":
            raise error(
                f"{_at(where)}tensor '{name}' is {tensors[name].dtype}, expected float32\n"
                "  convert it first (in PyTorch: model.float()); weights are never cast silently"
            )
        if tensors[name].shape != spec.shape:
            raise error(
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


def show(value: object) -> str:
    """The `repr` of something not trusted, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…" + text[-2:]


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _first(array: NDArray[Any], bad: NDArray[np.bool_]) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{array[index]} at {list(index)}{_more(int(bad.sum()) - 1)}"


__all__ = [
    "Float32",
    "Tensor",
    "check_described",
    "check_names",
    "check_values",
    "read_tensors",
    "show",
    "tensor_bytes",
    "tensor_sha256",
]
