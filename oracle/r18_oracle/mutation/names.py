"""The definitions that the names in a package's sources refer to, read without importing them.

Kernels import device code only when they need it, or by the name of its module, since it needs a
GPU or a compiler. The sources show what such names refer to.
"""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from r18_oracle.mutation.edits.python_view import first_line

Span = tuple[str, int, int]
"""(file in the package, first line, last line)."""

UNKNOWN = "."
"""The base of an attribute of an unnamed value, such as the result of a call."""
PREFIX = "..."
"""The base of a string that begins a module's name: `f"package.folder.{name}"`."""


@dataclass(frozen=True)
class Module:
    """A source file's names.

    definitions: (first line, last line) of each name that the module defines at its top level.
    imports: local name → (module, name in that module); the latter is empty for a module itself.
    words: (line, base, word), sorted by line, for every name (base ""), every attribute of a base,
    every string that could be a name, dotted or not (base `UNKNOWN`) and every string that begins a
    dotted name (base `PREFIX`).
    given: name → the lines of each function that is decorated with a call on it, such as
    `@overload(multiply)`.
    """

    definitions: dict[str, tuple[int, int]]
    imports: dict[str, tuple[str, str]]
    words: list[tuple[int, str, str]]
    given: dict[str, list[tuple[int, int]]]

    @classmethod
    def of(cls, source: str, dotted: str) -> Module:
        """The names of a source. dotted: the module's full name; a package's ends in `__init__`."""
        tree = ast.parse(source)
        definitions = {
            name: (first_line(node), node.end_lineno or node.lineno)
            for node in tree.body
            for name in _defined(node)
        }
        imports: dict[str, tuple[str, str]] = {}
        words: list[tuple[int, str, str]] = []
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(names=names, level=level, module=module):
                    base = dotted.split(".")[:-level] if level else []
                    origin = ".".join([*base, *([module] if module else [])])
                    imports |= {a.asname or a.name: (origin, a.name) for a in names}
                case ast.Import(names=names):
                    imports |= {a.asname: (a.name, "") for a in names if a.asname}
                case ast.Name(id=name):
                    words.append((node.lineno, "", name))
                case ast.Attribute(value=ast.Name(id=base_name), attr=name):
                    words.append((node.lineno, base_name, name))
                case ast.Attribute(attr=name):
                    words.append((node.lineno, UNKNOWN, name))
                case ast.Constant(value=str(text)) if all(map(str.isidentifier, text.split("."))):
                    words.append((node.lineno, UNKNOWN, text))
                case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                    words.append((node.lineno, PREFIX, text))
        given: dict[str, list[tuple[int, int]]] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                for name in _decorated(node):
                    given.setdefault(name, []).append(definitions[node.name])
        return cls(definitions, imports, sorted(words), given)

    def within(self, first: int, last: int) -> Iterator[tuple[str, str]]:
        """(base, word) of every word in these lines."""
        begin = bisect_left(self.words, (first,))
        end = bisect_right(self.words, (last + 1,))
        return ((base, word) for _, base, word in self.words[begin:end])


@dataclass
class Links:
    """The definitions and modules that the words of some lines refer to.

    spans: definitions. prefixes: beginnings of module names. loose: words that may complete a
    prefix, or be an attribute of the module that it then names.
    """

    spans: set[Span] = field(default_factory=set)
    prefixes: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)


class Names:
    """The modules of a package, or a single module."""

    def __init__(self, root: Path) -> None:
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        self._package = root.stem
        self._modules = {
            name: Module.of(path.read_text("utf-8"), self._dotted(name))
            for path in files
            for name in [path.name if path == root else path.relative_to(root).as_posix()]
        }
        self._links = cache(self._linked)

    def followed(self, spans: Iterable[Span]) -> set[Span]:
        """The spans, and every definition in the package that they refer to, transitively."""
        waiting, seen = list(spans), set(spans)
        prefixes: set[str] = set()
        loose: set[str] = set()
        named: set[str] = set()
        while waiting:
            found: set[Span] = set()
            before = set(loose)
            begun: set[str] = set()
            for span in waiting:
                links = self._links(span)
                found |= links.spans
                begun |= links.prefixes - prefixes
                loose |= links.loose
            # Only what was not tried before: each prefix with each word.
            tried = [(prefix, word) for prefix in begun for word in loose]
            tried += [(prefix, word) for prefix in prefixes for word in loose - before]
            prefixes |= begun
            named |= {file for prefix, word in tried if (file := self._file(prefix + word))}
            for name in named:
                defined = self._modules[name].definitions
                found |= {(name, *defined[word]) for word in loose & defined.keys()}
            waiting = sorted(found - seen)
            seen |= found
        return seen

    def _linked(self, span: Span) -> Links:
        file, first, last = span
        links = Links()
        if (module := self._modules.get(file)) is None:
            return links
        for base, word in module.within(first, last):
            if base == "":
                links.spans |= self._meant(file, word)
                continue
            there = self._imported(module, base)
            if there is not None:
                links.spans |= self._meant(there, word)
                continue
            if base == PREFIX:
                links.prefixes.add(word)
            else:
                links.loose.add(word)
        return links

    def _meant(self, file: str, name: str) -> set[Span]:
        """The definition of a name that a module defines or imports."""
        seen: set[tuple[str, str]] = set()
        while (file, name) not in seen:  # modules may import from each other
            seen.add((file, name))
            module = self._modules[file]
            if name in module.definitions:
                lines = [module.definitions[name], *module.given.get(name, ())]
                return {(file, *span) for span in lines}
            origin, there = module.imports.get(name, ("", ""))
            found = self._file(origin)
            if found is None or not there:
                break
            file, name = found, there
        return set()

    def _imported(self, module: Module, name: str) -> str | None:
        """The file of the module that a name refers to; None for any other name."""
        if name not in module.imports:
            return None
        origin, there = module.imports[name]
        return self._file(f"{origin}.{there}" if there else origin)

    def _file(self, dotted: str) -> str | None:
        package, _, inner = dotted.partition(".")
        if package != self._package:
            return None
        path = inner.replace(".", "/")
        names = (f"{path}.py", f"{path}/__init__.py") if path else ("__init__.py",)
        return next((name for name in names if name in self._modules), None)

    def _dotted(self, name: str) -> str:
        """The full name of a module; a package's ends in `__init__`, as relative imports see it."""
        return ".".join((self._package, *Path(name).with_suffix("").parts))


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            for target in targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _decorated(function: ast.FunctionDef) -> Iterator[str]:
    """The names that a function's decorators are called on."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            yield from (a.id for a in decorator.args if isinstance(a, ast.Name))
