"""AMX's instructions as loops (`kernels/emulated.py`), next to kernels as the CPU has them: for a
whole process, `R18_NUMBA_CPU_EMULATE` would do.

What a CPU would refuse is in `test_amx.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba import types

from r18_numba_cpu import compiled
from r18_numba_cpu.kernels import emulated
from r18_numba_cpu.kernels.cache import KernelCache

MULTIPLYING = tuple(
    f"{form}.{name}"
    for form in ("integers", "bfloat16")
    for name in ("implicit_gemm", "conv_maxpool")
)
"""The modules of kernels with tiles. Each kernel is named after its module."""
DIGEST = hashlib.sha256(Path(emulated.__file__).read_bytes()).hexdigest()[:16]


@contextmanager
def used() -> Iterator[None]:
    """Have the kernels emulate what the CPU lacks, and the backend list them."""
    amx = compiled.module("amx")
    if amx.AVAILABLE:
        yield
        return
    kernels = [getattr(compiled.module(name), name.split(".")[-1]) for name in MULTIPLYING]
    before = amx.INSTRUCTIONS, amx.HAS_BFLOAT16, [kernel._cache for kernel in kernels]
    amx.INSTRUCTIONS = emulated.EmulatedTiles
    for kernel in kernels:
        kernel._cache = Apart(kernel._cache)
    amx.AVAILABLE = amx.HAS_BFLOAT16 = True
    yield
    amx.INSTRUCTIONS, amx.HAS_BFLOAT16, caches = before
    for kernel, own in zip(kernels, caches, strict=True):
        kernel._cache = own
    amx.AVAILABLE = False


class Apart(KernelCache):
    """A cache with separate files for emulated tiles, which a CPU with AMX must not find."""

    def __init__(self, own: KernelCache) -> None:
        super().__init__(own._kernel, own._folder)

    def _path(self, sig: Any, codegen: Any) -> Path:
        path = super()._path(sig, codegen)
        is_of_amx = sig[1].dtype in (types.int32, types.uint32)  # its weights
        return path.with_name(f"emulated-{DIGEST}-{path.name}") if is_of_amx else path


def kept(kernel: Any) -> bool:
    """Whether all code of a kernel with emulated tiles is on the disk for other processes."""
    codegen = kernel.targetctx.codegen()
    paths = [kernel._cache._path(signature, codegen) for signature in kernel.overloads]
    emulated = [path for path in paths if path.name.startswith("emulated-")]
    return bool(emulated) and all(path.is_file() for path in emulated)
