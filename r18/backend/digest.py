"""A digest over the sources that a kernel's results follow from.

Records of a device name a kernel together with this digest. When it changes, the record no longer
covers the kernel, and `r18 verify --stale` runs the kernel again.

Code counts:

- Python by its syntax tree, without comments, docstrings and formatting, in a form that is the
  same in every version of Python.
- CUDA C++ by its tokens, without comments and formatting.
- A file by what it says, not by its name or folder: a file that moves, with the imports of it,
  keeps its digest.

Python imports are followed through all modules of the given packages, wherever in a module they
stand, except under `if TYPE_CHECKING:`. `#include "…"` is followed likewise. A module, a name or a
header that is not there raises `DigestError`: nothing is skipped silently.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from r18.errors import R18Error


class DigestError(R18Error):
    """A source that a kernel names cannot be found, so that no digest covers it."""


def combined(parts: Collection[str]) -> str:
    """sha256 over several texts, in their order."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# -- Python ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonSources:
    """The modules of one package that the results of its kernels follow from.

    package:        the package's folder.
    infrastructure: modules that serve every kernel and decide the result of none, by their path
                    in the package (`cuda/launch.py`). Neither counted nor followed.
    """

    package: Path
    infrastructure: frozenset[str] = frozenset()

    def files(self, kind: type) -> tuple[Path, ...]:
        """The modules of a kernel class and its bases, and all that they import; sorted.

        In the class's own modules the bodies of other classes are not followed, so that two
        kernels of one module need not share their device code. Raises `DigestError`.
        """
        return _files(self, kind)

    def digest(self, kind: type) -> str:
        """sha256 over the code of `files`. Raises `DigestError`."""
        files = self.files(kind)
        return combined(sorted(_code(self, path, files) for path in files))

    def _imported(self, path: Path, files: Collection[Path]) -> list[str]:
        """A module's imports, one name a line, sorted: their order and grouping do not count.

        The code of an imported module takes the place of its name if it is one of `files`. For
        the core only the imported name counts, since the core may move its modules.
        """
        found = set()
        for node in _statements(_tree(path)):
            for alias, target, _ in self._targets(path, node):
                module, _, name = alias.name.rpartition(".")
                if isinstance(node, ast.ImportFrom):
                    module = node.module or ""
                if target is not None:
                    module = _own_code(target) if target in files else ""
                elif module.split(".")[0] == "r18":
                    module = ""
                found.add(f"{module} {name} as {alias.asname}")
        return sorted(found)

    @property
    def _serving(self) -> frozenset[Path]:
        return _existing(self)

    def _imports(self, path: Path, kept: Collection[str] | None) -> Iterator[Path]:
        """The modules that a module imports; of its classes only those in `kept` count."""
        for node in _statements(_tree(path), kept):
            for _, target, name in self._targets(path, node):
                if target is None or target in self._serving:
                    continue
                if name is not None and name not in _bound(target):
                    raise DigestError(
                        f"{path}:{node.lineno} imports '{name}' from {target}, which has no such "
                        "name: no digest covers what it means"
                    )
                yield target

    def _targets(
        self, path: Path, node: ast.stmt
    ) -> Iterator[tuple[ast.alias, Path | None, str | None]]:
        """The target of each name that an import binds; nothing for another statement.

        (alias, module of this package or None for another package's, name in that module or None
        for the module itself).
        """
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *parts = alias.name.split(".")
                ours = first == self.package.name
                yield alias, self._module(parts, path, node) if ours else None, None
        elif isinstance(node, ast.ImportFrom):
            folder = self._folder(path, node)
            for alias in node.names:
                if folder is None:
                    yield alias, None, None
                elif (inner := _module_file(folder / alias.name)) is not None:
                    yield alias, inner, None
                else:
                    parts = list(folder.relative_to(self.package).parts)
                    yield alias, self._module(parts, path, node), alias.name

    def _folder(self, path: Path, node: ast.ImportFrom) -> Path | None:
        """The path without suffix that `from … import` names; None outside of the package."""
        parts = (node.module or "").split(".")
        if node.level:
            folder = path.parents[node.level - 1].joinpath(*filter(None, parts))
            return folder if folder.is_relative_to(self.package) else None
        return self.package.joinpath(*parts[1:]) if parts[0] == self.package.name else None

    def _module(self, parts: list[str], path: Path, node: ast.stmt) -> Path:
        found = _module_file(self.package.joinpath(*parts))
        if found is None:
            name = ".".join([self.package.name, *parts])
            raise DigestError(
                f"{path}:{node.lineno} imports '{name}', which is no module of {self.package}: "
                "no digest covers it"
            )
        return found


@cache
def _files(sources: PythonSources, kind: type) -> tuple[Path, ...]:
    names: dict[Path, set[str]] = {}
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == sources.package.name:
            names.setdefault(Path(inspect.getfile(base)), set()).add(base.__name__)
    if not names:
        raise DigestError(f"{kind.__module__}.{kind.__name__} is not in {sources.package}")
    found: set[Path] = set()
    waiting = list(names)
    while waiting:
        path = waiting.pop()
        if path not in found and path not in sources._serving:
            found.add(path)
            waiting += sources._imports(path, names.get(path))
    return tuple(sorted(found))


@cache
def _existing(sources: PythonSources) -> frozenset[Path]:
    """The infrastructure's files. Raises `DigestError` if one is missing."""
    paths = frozenset(sources.package / name for name in sources.infrastructure)
    for path in sorted(paths):
        if not path.is_file():
            raise DigestError(f"{path} is named as infrastructure of digests, and is not there")
    return paths


def _module_file(path: Path) -> Path | None:
    """The file of the module or package at `path`, written without its suffix."""
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def _statements(module: ast.Module, kept: Collection[str] | None = None) -> Iterator[ast.stmt]:
    """All statements but those under TYPE_CHECKING and in classes that are not kept."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        below: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Module) and kept is not None:
            below = [n for n in below if not isinstance(n, ast.ClassDef) or n.name in kept]
        waiting += (n for n in below if not _for_types(n))


@cache
def _bound(path: Path) -> frozenset[str]:
    """The names that a module binds outside of its functions and classes."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(_tree(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def _body(value: object) -> tuple[str, ...]:
    """A syntax tree as text, without imports, that is the same in every version of Python."""
    return tuple(_written(value))


def _written(value: object) -> Iterator[str]:
    if isinstance(value, ast.Constant):
        yield f"{type(value.value).__name__} {value.value!r}"
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, field in ast.iter_fields(value):
            # NOTE: empty fields are left out because newer versions of Python have more of them.
            if name not in ("kind", "type_comment", "ctx") and field not in (None, []):
                yield f".{name}"
                yield from _written(_significant(value) if name in ("body", "values") else field)
        yield ")"
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, (ast.Import, ast.ImportFrom)) and not _for_types(item):
                yield from _written(item)
    else:
        yield repr(value)


def _significant(node: ast.AST) -> object:
    """A node's body without its docstring; the parts of an f-string without empty ones, which
    Python 3.12.1 has where others have none."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, scopes) and ast.get_docstring(node) is not None:
        return node.body[1:]
    if isinstance(node, ast.JoinedStr):
        return [part for part in node.values if getattr(part, "value", None) != ""]
    return getattr(node, "body", None) or getattr(node, "values", None)


def _for_types(node: object) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`, which decides no result."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def _own_code(path: Path) -> str:
    """A module's digest without the code that its imports bring."""
    return combined(_body(_tree(path)))


@cache
def _code(sources: PythonSources, path: Path, files: tuple[Path, ...]) -> str:
    """A module's digest, in which an import of one of the files stands for what it brings."""
    return combined((*sources._imported(path, files), *_body(_tree(path))))


# -- CUDA C++ ----------------------------------------------------------------------------------

_TEXT = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<comment>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL,
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def cuda_files(path: Path, root: Path) -> tuple[Path, ...]:
    """A CUDA source and every header that it includes by `#include "…"`, each once; sorted.

    root: where the compiler looks for headers, after the folder of the file that includes.
    Raises `DigestError` for a header in neither.
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += _included(here, root).values()
    return tuple(sorted(found))


def cuda_digest(path: Path, root: Path) -> str:
    """sha256 over the code of `cuda_files`. Raises `DigestError`."""
    return combined(sorted(_cuda_code(file, root) for file in cuda_files(path, root)))


def _cuda_code(path: Path, root: Path) -> str:
    """A file's digest, in which an `#include` stands for the header's own code."""
    headers = _included(path, root)

    def own_code(name: str) -> str:
        return combined([cuda_tokens(_INCLUDE.sub("", headers[name].read_text("utf-8")))])

    text = path.read_text("utf-8")
    return combined([cuda_tokens(_INCLUDE.sub(lambda found: f"#{own_code(found[1])}", text))])


@lru_cache(maxsize=512)  # by text: kernels share headers, and a file may change
def cuda_tokens(text: str) -> str:
    """CUDA C++ without comments, blank lines and the difference between one space and many."""
    code = _TEXT.sub(lambda found: found["kept"] or " ", text.replace("\\\n", " "))
    lines = (" ".join(_spaced(line)) for line in code.splitlines())
    return "\n".join(line for line in lines if line)


def _spaced(line: str) -> Iterator[str]:
    """The words of a line; a string stays as it is written."""
    end = 0
    for found in _TEXT.finditer(line):
        yield from line[end : found.start()].split()
        yield found[0]
        end = found.end()
    yield from line[end:].split()


@lru_cache(maxsize=512)
def _include_names(text: str) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(text))


def _included(path: Path, root: Path) -> dict[str, Path]:
    """The headers that a file includes, by the text between the quotes."""
    found = {}
    for name in _include_names(path.read_text("utf-8")):
        files = [folder / name for folder in (path.parent, root) if (folder / name).is_file()]
        if not files:
            raise DigestError(
                f'{path} includes "{name}", which is neither next to it nor in {root}: '
                "no digest covers it"
            )
        found[name] = files[0].resolve()
    return found
