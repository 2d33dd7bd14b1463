"""Compiler options and the cache on disk. Kernels are compiled for this machine and run nogil."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, extending, njit, typeof

from r18.machine import cache_folder
from r18_numba_cpu.kernels.cache import KernelCache


def _folder() -> Path:
    """The cache folder for the current sources.

    A kernel's code also depends on the functions that are compiled into it. So the name of this
    folder is a hash over all of these modules.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return cache_folder() / "numba-cpu" / digest.hexdigest()[:16]


FOLDER = _folder()

LAYERS = ["omp", "tbb", "workqueue"]
"""Numba's threading layers, the preferred one first. Numba prefers TBB where it is installed, which
prints a warning whenever another thread than the first forks, as for every subprocess."""
SETTINGS: Any = config
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    SETTINGS.THREADING_LAYER_PRIORITY = LAYERS


def kernel(function: Callable[..., None]) -> Any:
    """Compile a kernel, which allocates nothing. Its `prange` loops run on Numba's threads."""
    compiled = _compiled(function)
    compiled._cache = KernelCache(function, FOLDER)  # where `cache=True` would put Numba's own
    return compiled


UNCOUNTED: Any = {"_nrt": False}
"""Compile without reference counts, for code that allocates nothing: a kernel's caller holds its
arrays. Numba counts a reference wherever code slices an array or takes one out of a tuple, by an
atomic instruction on memory that all threads share: in an epilogue twice for each vector of
outputs, and for all arguments whenever a worker begins."""


INLINED: Any = UNCOUNTED | {"forceinline": True}
"""Have LLVM inline a function, where it would not. A call of one with a tile's arguments, about a
hundred words, takes as long as a short tile's products."""
CALLED: Any = UNCOUNTED | {"forceinline": False}
"""Let LLVM decide. NOTE: without it a function inherits the option from the first that calls it in
the process, and its code depends on what was compiled before."""


def function(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call. Its code becomes part of each kernel's."""
    return njit(nogil=True, error_model="numpy", inline="never", **CALLED)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that is called in one place, and there for each tile."""
    return njit(nogil=True, error_model="numpy", **INLINED)(function)


def overload(function: Callable[..., Any], inline: bool = False) -> Any:
    """Choose a function's code by the types of its arguments; see `numba.extending.overload`.

    inline: see `inlined`.
    """
    return extending.overload(function, jit_options=INLINED if inline else CALLED)


def assembly(kernel: Any, arguments: tuple[Any, ...]) -> str:
    """The machine code of a kernel for arguments like these, with LLVM's comments.

    Code that was cached has no text. So it is compiled again, once: the text is cached, too.
    """
    signature = tuple(map(typeof, arguments))
    compiled, kept = _compiled(kernel.py_func), kernel._cache
    codegen = compiled.targetctx.codegen()
    if (text := kept.load_text(signature, codegen)) is None:
        text = _text(compiled, signature)
        kept.save_text(signature, codegen, text)
    return str(text)


def _text(compiled: Any, signature: tuple[Any, ...]) -> str:
    compiled.compile(signature)
    (found,) = compiled.overloads.values()
    machine = found.library.codegen._tm
    machine.set_asm_verbosity(True)
    try:
        return str(found.library.get_asm_str())
    finally:
        machine.set_asm_verbosity(False)


def _compiled(function: Callable[..., Any]) -> Any:
    return njit(nogil=True, error_model="numpy", parallel=True, **UNCOUNTED)(function)
