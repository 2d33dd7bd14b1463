"""Compiled kernels on the disk, in place of Numba's own cache.

Numba's cache trusts what it finds: a damaged file ends the process or is run, an index that is cut
ends every later run, and where its folder cannot be written it writes next to the sources.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import sigutils
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from r18 import cache
from r18_numba_cpu import emulation

BASE: Any = _Cache
TEXT = ".s"


class KernelCache(BASE):
    """One file for each signature of a kernel, in a folder that is named after the sources."""

    def __init__(self, kernel: Callable[..., None], folder: Path) -> None:
        self._kernel = kernel
        self._folder = folder
        self._enabled = True

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        for suffix in (".numba", TEXT):
            for path in self._folder.glob(f"{self._kernel.__name__}-*{suffix}"):
                path.unlink(missing_ok=True)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel, or None if it has to be compiled."""
        if not self._enabled:
            return None
        path = self._path(sig, target_context.codegen())
        content = cache.load(path)
        if content is None:
            return None
        # NOTE: Numba's cache calls `target_context.refresh()`, which loads all that compiling needs
        # and takes half the time of a start. Compiled code needs the symbols of the runtime.
        rtsys.initialize(target_context)
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception as error:  # a library that it was linked with has changed
            warnings.warn(
                f"the compiled code in '{path}' cannot be loaded, and is compiled again: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._enabled and not data.lifted and not data.library.has_dynamic_globals:
            cache.store(self._path(sig, data.codegen), dumps(data._reduce()))

    def load_text(self, sig: Any, codegen: Any) -> str | None:
        """The machine code that `save_text` kept, or None."""
        content = cache.load(self._path(sig, codegen).with_suffix(TEXT)) if self._enabled else None
        return None if content is None else content.decode()

    def save_text(self, sig: Any, codegen: Any, text: str) -> None:
        if self._enabled:
            cache.store(self._path(sig, codegen).with_suffix(TEXT), text.encode())

    def _path(self, sig: Any, codegen: Any) -> Path:
        """The file of a signature: its name is a hash over all else that decides the code."""
        arguments, _ = sigutils.normalize_signature(sig)
        versions = (numba.__version__, llvmlite.__version__, sys.version, *emulation.requested())
        code = self._kernel.__code__.co_code.hex()
        key = repr((arguments, codegen.magic_tuple(), versions, code))
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self._folder / f"{self._kernel.__name__}-{name}.numba"
