"""The code that problems left out: branches, lines and functions of host code; device functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from r18_oracle.branches.measure import Lines

EXIT = "exit"
"""The target of a branch that leaves its function."""


@dataclass(frozen=True, order=True)
class Untaken:
    """A branch, a line, a function of host code or a device function that no problem executed.

    file:  relative to the backend's package; empty for a device function.
    line:  where the branch begins; or the line; or the function's `def`.
    to:    the line that the branch leads to; 0 if it leaves its function, and without a branch.
    scope: the function's qualified name.
    text:  the source of `line` without indentation; the label of a device function.
    to_text: the source of `to`; `EXIT` if the branch leaves its function, empty without a branch.
    called: whether its function was called.
    """

    file: str
    line: int
    to: int
    scope: str
    text: str
    to_text: str = ""
    called: bool = True

    @classmethod
    def device(cls, label: str) -> Untaken:
        """A device function that no problem launched."""
        return cls("", 0, 0, "", label, called=False)

    def __str__(self) -> str:
        if not self.file:
            return f"device function {self.text}: never launched"
        where = f"{self.file}:{self.line}"
        if not self.called:
            return f"{where}, {self.scope}: never called"
        if not self.to_text:
            return f"{where}, {self.scope}: never run: {self.text}"
        target = self.to if self.to else EXIT
        more = "" if self.to_text == EXIT else f" → {self.to_text}"
        return f"{where} → {target}, {self.scope}: {self.text}{more}"


@dataclass(frozen=True)
class Function:
    """A function of a module.

    scope: its qualified name. begin: the line of its first decorator, or else of its `def`. line:
    the line of its `def`. first, last: the lines of its body. parent: the function around it.
    """

    scope: str
    begin: int
    line: int
    first: int
    last: int
    parent: Function | None = None


@dataclass(frozen=True)
class Source:
    """The text of a module and its functions, inner ones after outer ones."""

    lines: Sequence[str]
    functions: tuple[Function, ...]

    @classmethod
    def of(cls, path: Path) -> Source:
        text = path.read_text("utf-8")
        return cls(text.splitlines(), tuple(_functions(ast.parse(text), "", None)))

    def text(self, line: int) -> str:
        return self.lines[line - 1].strip()

    def owner(self, line: int) -> Function | None:
        """The innermost function with this line in its body; None for code that imports run."""
        inside = (f for f in self.functions if f.first <= line <= f.last)
        return max(inside, key=lambda f: f.first, default=None)

    def texts(self, scope: str) -> set[str]:
        """Every line of the functions of that name, without indentation, `def` included."""
        return {
            self.text(line)
            for function in self.functions
            if function.scope == scope
            for line in (function.line, *range(function.first, function.last + 1))
        }


def untaken(
    file: str, source: Source, lines: Lines, functions: Sequence[Function]
) -> Iterator[Untaken]:
    """The lines and branches left out of these functions, function by function and line by line."""
    own: dict[Function, list[int]] = {}
    for line in sorted(lines.code):
        if (function := source.owner(line)) is not None:
            own.setdefault(function, []).append(line)
    for function in functions:
        code = own.get(function, [])
        if not code or _hidden(function, lines):
            continue
        scope = function.scope
        if not lines.ran & {*code}:
            text = source.text(function.line)
            yield Untaken(file, function.line, 0, scope, text, called=False)
            continue
        branches = sorted(b for b in lines.untaken if source.owner(b[0]) == function)
        branches = [branch for branch in branches if branch[0] in lines.ran]
        for line, to in branches:
            target = source.text(to) if to > 0 else EXIT
            yield Untaken(file, line, max(0, to), scope, source.text(line), target)
        explained = {to for _, to in branches}
        for first in _runs(code, lines.missed):
            if first not in explained:
                yield Untaken(file, first, 0, scope, source.text(first))


def of_functions(source: Source, spans: Sequence[tuple[int, int]]) -> list[Function]:
    """The functions whose `def` is in one of these spans of lines."""
    return [
        function
        for function in source.functions
        if any(first <= function.line <= last for first, last in spans)
    ]


def _functions(node: ast.AST, prefix: str, parent: Function | None) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            last = child.end_lineno or child.lineno
            scope = f"{prefix}{child.name}"
            begin = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            function = Function(scope, begin, child.lineno, child.body[0].lineno, last, parent)
            if not _declares(child):
                yield function
            yield from _functions(child, f"{scope}.", function)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", parent)
        else:
            yield from _functions(child, prefix, parent)


def _declares(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has no code, only a docstring or an ellipsis."""
    return all(
        isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in node.body
    )


def _hidden(function: Function, lines: Lines) -> bool:
    """Whether the function was never defined, because the code around it did not run."""
    head = range(function.begin, function.line + 1)
    return function.parent is not None and not any(line in lines.ran for line in head)


def _runs(code: Sequence[int], missed: frozenset[int]) -> Iterator[int]:
    """The first line of each run of missed lines."""
    before = False
    for line in code:
        if line in missed and not before:
            yield line
        before = line in missed
