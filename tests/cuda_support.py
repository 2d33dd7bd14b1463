"""Shared helpers for tests of CUDA kernels: architectures, parameters of a `.cu` function, and the
backend as on a device."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from r18.backend.digest import cuda_files
from r18_cupy import Backend
from r18_cupy.catalogue import all_kernels
from r18_cupy.cuda.compiler import ARCHITECTURES as ARCHITECTURES
from r18_cupy.cuda.compiler import KERNELS, Entry

_SCALARS = {
    "int": np.int32,
    "unsigned": np.uint32,
    "float": np.float32,
    "long long": np.int64,
    "size_t": np.uint64,
}


class On(Backend):
    """The backend as it is after it has probed a device of this compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = capability


@cache
def entries() -> tuple[Entry, ...]:
    """Every function of the listed kernels, once."""
    return tuple(dict.fromkeys(entry for kernel in all_kernels() for entry in kernel.entries()))


@cache
def waits(entry: Entry) -> bool:
    """Whether a function waits for the launch before it: by itself, or through what it includes."""
    return any(
        "wait_for_previous_launch();" in path.read_text()
        for path in cuda_files(entry.path, KERNELS)
        if path.name != "dependent_launch.cuh"
    )


@cache
def parameters(entry: Entry) -> list[type[np.generic] | str]:
    """The parameters of a function as written: "pointer", a struct's name, or a scalar type."""
    text = "\n".join(path.read_text() for path in cuda_files(entry.path, KERNELS))
    found = re.search(rf"\b{entry.symbol}\s*\(([^)]*)\)\s*{{", text)
    assert found, f"{entry.symbol} is not defined in {entry.path.name}"
    kinds: list[type[np.generic] | str] = []
    for parameter in found[1].split(","):
        if "*" in parameter:
            kinds.append("pointer")
            continue
        words = re.sub(r"\bconst\b|__grid_constant__", "", parameter).split()
        kind = " ".join(words[:-1])
        kinds.append(_SCALARS.get(kind, kind))
    return kinds
