"""The lines of a backend's sources that belong to each of its kernels.

A kernel reaches the functions that it holds, the methods of its class, and, transitively, the
backend's own definitions that these name. A mutant is shown to the kernels that reach its line. If
none reaches it, as with the list of kernels, the mutant is shown to all kernels with code in its
file, or else to all kernels.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from r18.backend import Backend, Kernel
from r18_oracle.mutation.mutants import Mutant
from r18_oracle.mutation.names import Names, Span


def reach(kernel: Kernel, root: Path, names: Names | None = None) -> tuple[Span, ...]:
    """The functions and definitions under `root` that the kernel reaches, sorted.

    names: of the sources under `root`; pass it to read them only once for many kernels.
    """
    return tuple(sorted((names or Names(root)).followed(_held(kernel, root))))


def _held(kernel: Kernel, root: Path) -> set[Span]:
    """The functions under `root` that the kernel holds, and those that they refer to."""
    waiting: list[Any] = [*getattr(kernel, "__dict__", {}).values(), type(kernel)]
    seen: set[int] = set()
    spans: set[Span] = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            waiting += [value for base in thing.__mro__ for value in vars(base).values()]
        function = _function(thing)
        if function is None:
            continue
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        path = Path(function.__code__.co_filename)
        if path.is_relative_to(root):
            lines = list(_lines(function.__code__))
            name = path.relative_to(root).as_posix() if path != root else path.name
            spans.add((name, min(lines), max(lines)))
            waiting += _named(function, root)
    return spans


ASIDE = ("ceilings", "host_code")
"""Methods of a backend that run no kernel: rates of the machine, and machine code."""


def aside(kind: type[Backend], root: Path, names: Names) -> set[str]:
    """The files under `root` that only the methods of `ASIDE` of a backend's class refer to."""
    inside: set[Span] = set()
    others: set[Span] = set()
    for name, value in vars(kind).items():
        function = _function(value)
        if function is not None and (path := Path(function.__code__.co_filename)).is_relative_to(
            root
        ):
            file = path.relative_to(root).as_posix() if path != root else path.name
            lines = list(_lines(function.__code__))
            (inside if name in ASIDE else others).add((file, min(lines), max(lines)))
    files = [{span[0] for span in names.followed(spans)} for spans in (inside, others)]
    return files[0] - files[1]


def device_code(kernel: Kernel, root: Path) -> tuple[Span, ...]:
    """The whole files under `root` that the kernel is compiled from; none if it is not compiled."""
    files = [path for path in kernel.source_files if path.is_relative_to(root)]
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    return tuple((path.relative_to(root).as_posix(), 1, lines[path]) for path in files)


def _function(thing: Any) -> FunctionType | None:
    """The plain function in a method, a property, a partial or a decorated function."""
    for wrapper in ("fget", "__func__", "func"):
        thing = getattr(thing, wrapper, thing)
    try:
        thing = inspect.unwrap(thing)
    except ValueError:  # wrapped in itself
        return None
    return thing if isinstance(thing, FunctionType) else None


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _lines(code: CodeType) -> Iterator[int]:
    for part in _codes(code):
        yield part.co_firstlineno
        yield from (line for _, _, line in part.co_lines() if line)


def _named(function: FunctionType, root: Path) -> Iterator[Any]:
    """The globals that a function refers to, and attributes of the backend's own modules."""
    codes = list(_codes(function.__code__))
    names = {name for code in codes for name in code.co_names}
    found = [
        function.__globals__[name]
        for code in codes
        for name in _loaded(code)
        if name in function.__globals__
    ]
    for thing in found:
        if isinstance(thing, ModuleType):
            if Path(getattr(thing, "__file__", None) or "/").is_relative_to(root):
                yield from (getattr(thing, name) for name in names if hasattr(thing, name))
        elif not isinstance(thing, type) or _is_ours(thing, root):
            yield thing


@cache
def _loaded(code: CodeType) -> tuple[str, ...]:
    """The globals that code loads, in order; cached, since hundreds of kernels share functions."""
    steps = dis.get_instructions(code)
    return tuple(s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _is_ours(kind: type, root: Path) -> bool:
    try:
        return Path(inspect.getfile(kind)).is_relative_to(root)
    except (OSError, TypeError):
        return False


def reaching(
    file: str, line: int, reaches: Mapping[str, Sequence[Span]], wanted: Iterable[str]
) -> list[str]:
    """The ids in `wanted` of the kernels that a mutant of this line is shown to."""
    exact = [k for k, spans in reaches.items() if any(_holds(s, file, line) for s in spans)]
    near = [k for k, spans in reaches.items() if any(span[0] == file for span in spans)]
    chosen = set(exact or near or reaches)
    return [kernel for kernel in wanted if kernel in chosen]


def _holds(span: Span, file: str, line: int) -> bool:
    return span[0] == file and span[1] <= line <= span[2]


def shown(
    mutants: Iterable[Mutant], reaches: Mapping[str, Sequence[Span]], wanted: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The kernels that each mutant is shown to, by the mutant's id; see `reaching`."""
    by_file: dict[str, dict[str, list[Span]]] = {}
    lines: dict[tuple[str, int], tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for mutant in mutants:
        file, line = place = mutant.file, mutant.line
        if file not in by_file:
            by_file[file] = {k: [s for s in spans if s[0] == file] for k, spans in reaches.items()}
        if place not in lines:
            lines[place] = tuple(reaching(file, line, by_file[file], wanted))
        found[mutant.id] = lines[place]
    return found
