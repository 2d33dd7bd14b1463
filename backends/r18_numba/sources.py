"""What a kernel's results follow from: the modules that it is made of, found by their imports.

A kernel class imports its device code where it launches it; what that imports, and the host module
that the class lies in with what it imports, follow. All are told by their text, without Numba.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
DEVICE = PACKAGE / "kernels"

SERVING = {PACKAGE / name for name in ("target.py", "device.py", "sources.py")}
"""Modules that decide the result of no kernel."""


def digest(kind: type, name: str) -> str:
    """sha256 over a kernel's id and the modules of its class, by name and text.

    Versions of Numba are not in it: a record names those that it was made with.
    """
    found = hashlib.sha256(name.encode())
    for path in (*host_files(kind), *device_files(kind)):
        found.update(f"\0{path.relative_to(PACKAGE).as_posix()}\0".encode())
        found.update(_text(path).encode())
    return found.hexdigest()


@cache
def device_files(kind: type) -> tuple[Path, ...]:
    """The modules of device code that a kernel class launches, and those that they import."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(f"{PACKAGE.name}.")]
    named = {
        path
        for base in ours
        for path in _imported(ast.walk(ast.parse(inspect.getsource(base))))
        if path.parent == DEVICE
    }
    return tuple(path for path in _followed(named) if path.parent == DEVICE)


@cache
def host_files(kind: type) -> tuple[Path, ...]:
    """The module of a kernel class, and those that it imports at its top."""
    return tuple(_followed([Path(inspect.getfile(kind))]))


def _followed(paths: Iterable[Path]) -> list[Path]:
    """The modules, and what they import at their tops, and so on; sorted."""
    found: set[Path] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path not in found and path not in SERVING:
            found.add(path)
            waiting += _imported(ast.parse(_text(path)).body)
    return sorted(found)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[Path]:
    """The modules of this package that import statements among the nodes name."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            _, *parts = (node.module or "").split(".")
            folder = PACKAGE.joinpath(*parts)
            modules = [folder.with_suffix(".py"), *(folder / f"{a.name}.py" for a in node.names)]
            yield from (module for module in modules if module.is_file())


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8")
