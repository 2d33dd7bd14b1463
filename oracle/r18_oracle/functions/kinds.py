"""The kinds of arrays by name."""

from __future__ import annotations

from r18.errors import UsageError, unknown
from r18_oracle.functions.arrays import Arrays, NumPyArrays, TorchArrays
from r18_oracle.functions.device_arrays import CuPyArrays, TorchCudaArrays

KINDS: dict[str, type[Arrays]] = {
    kind.name: kind for kind in (TorchCudaArrays, TorchArrays, CuPyArrays, NumPyArrays)
}
"""The kinds in the order in which a function is tried with them: a GPU first, where there is
one."""


def arrays_of(name: str) -> Arrays:
    """The arrays of a name. Contacts no device. Raises `UsageError` for an unknown one."""
    if name not in KINDS:
        raise unknown("kind of arrays", name, KINDS, error=UsageError)
    return KINDS[name]()


__all__ = ["KINDS", "arrays_of"]
