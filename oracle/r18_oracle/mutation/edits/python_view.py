"""A Python source to mutate: its tree, the position of each node, and the nodes that may change.

Docstrings, messages, annotations, decorators, imports, assertions and the arguments of kernel
declarations (`DECLARATIONS`), except lambdas, are never changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from r18_oracle.mutation.edits import Change, Edit, in_order

DECLARATIONS = ("kernel", "kernels", "contract", "deviceinfo")
"""Calls of names with these endings make metadata, from which no result is computed."""

NEUTRAL = {"optimize", "writeable", "strict", "copy"}
"""Keywords that affect how or how safely a result is computed, but not the result."""

TYPES = {"tuple", "list", "dict", "set", "type", "Callable", "Iterator", "Sequence", "Mapping"}
"""The subscript of these names is a type."""


@dataclass
class View:
    """A source, its tree, and the positions of nodes. Offsets count characters, not bytes."""

    source: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.source)
        self._lines = self.source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._parents: dict[ast.AST, ast.AST] = {}
        self._names: dict[ast.FunctionDef, set[str]] = {}
        functions = {(self._first(node), self.end(node), "") for node in self.tree.body}
        inner: set[tuple[int, int, str]] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and (indent := self._indent(node)) is not None:
                spans = functions if isinstance(node, ast.FunctionDef) else inner
                spans.add((self._first(node), self.end(node), indent))
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self._functions = sorted(functions, key=lambda span: span[1] - span[0])
        self._statements = sorted(functions | inner, key=lambda span: span[1] - span[0])

    def parent(self, node: ast.AST) -> ast.AST:
        return self._parents[node]

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, byte: int) -> int:
        text = self._lines[line - 1]
        within = byte if text.isascii() else len(text.encode()[:byte].decode())
        return self._starts[line - 1] + within

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self.start(node) : self.end(node)]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Change:
        return self.start(node), self.end(node), text

    def token(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Change:
        """Replace `old` between two neighbours by `new`."""
        at = self.source.index(old, self.end(left), self.start(right))
        return at, at + len(old), new

    def operands(self, node: ast.BinOp, token: str) -> tuple[str, str]:
        """Both operands, with the parentheses around them."""
        at, after, _ = self.token(node.left, node.right, token, token)
        left, right = self.source[self.start(node) : at], self.source[after : self.end(node)]
        return left.strip(), right.strip()

    def swap(self, left: ast.expr, right: ast.expr) -> Change:
        between = self.source[self.end(left) : self.start(right)]
        swapped = self.text(right) + between + self.text(left)
        return self.start(left), self.end(right), swapped

    def swaps(self, parts: list[ast.expr]) -> Iterator[Change]:
        """Swaps of neighbours that differ."""
        for left, right in pairwise(parts):
            pair = (left, right)
            fixed = any(isinstance(p, ast.Starred) or is_declaration(p) for p in pair)
            if not fixed and ast.dump(left) != ast.dump(right):
                yield self.swap(left, right)

    def nudges(self, node: ast.expr) -> Iterator[Change]:
        """An expression plus one and minus one."""
        low = isinstance(node, ast.IfExp | ast.Compare | ast.BoolOp | ast.Lambda)
        text = f"({self.text(node)})" if low else self.text(node)
        for step in (" + 1", " - 1"):
            yield self.replace(node, text + step)

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        """The function that a node is in."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.FunctionDef):
                return node
        return None

    def names(self, function: ast.FunctionDef) -> set[str]:
        """The names in a function."""
        if function not in self._names:
            every = ast.walk(function)
            self._names[function] = {node.id for node in every if isinstance(node, ast.Name)}
        return self._names[function]

    def whole(self, start: int, end: int, text: str) -> tuple[int, int, str]:
        """The span of the smallest statement that a change is part of, and the blanks before it.

        A change of all of a statement may leave nothing of it, and one of several lines may end a
        block: the smallest function or top-level statement around them.
        """
        lines = "\n" in text or "\n" in self.source[start:end]
        return next(
            (first, last, indent)
            for first, last, indent in (self._functions if lines else self._statements)
            if first <= start and end <= last and (not indent or (first, last) != (start, end))
        )

    def _indent(self, node: ast.stmt) -> str | None:
        """The blanks before an inner statement; None if it does not begin its line, or is an
        `elif`, which is not a statement by itself."""
        first = self._first(node)
        indent = self.source[self._starts[first_line(node) - 1] : first]
        alone = indent.isspace() and not self.source.startswith("elif", first)
        return indent if alone else None

    def _first(self, node: ast.stmt) -> int:
        """Where a statement begins, decorators included."""
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        return (
            self.source.rindex("@", 0, self.start(decorators[0]))
            if decorators
            else self.start(node)
        )

    def is_index(self, node: ast.AST) -> bool:
        """Whether a node itself is an index or a bound of a subscript."""
        parent = self.parent(node)
        if isinstance(parent, ast.UnaryOp):
            return self.is_index(parent)
        if isinstance(parent, ast.Tuple) and isinstance(self.parent(parent), ast.Subscript):
            return True
        return isinstance(parent, ast.Slice | ast.Subscript)


Operator = Callable[[View, ast.AST], Iterator[Change]]
"""Yields the changes that an operator makes at a node."""


@lru_cache(maxsize=8)
def view_of(source: str) -> View:
    """The view of a source, cached."""
    return View(source)


def first_line(node: ast.stmt) -> int:
    """The line on which a statement begins, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def edits_by(operators: Mapping[str, Operator], source: str) -> Iterator[Edit]:
    """Every change that these operators make to a source, in the order of the source."""
    view = view_of(source)
    yield from in_order(
        (start, order, end, text, scope, name)
        for node, scope in visible(view.tree, "")
        for order, (name, operator) in enumerate(operators.items())
        for start, end, text in operator(view, node)
    )


def visible(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
    """The nodes that may be mutated, each with the function that it is in."""
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in TYPES:
        return
    yield node, scope
    inner = scope
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inner = f"{scope}.{node.name}" if scope else node.name
    for child in _children(node):
        yield from visible(child, inner)


def _children(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Module() | ast.ClassDef():
            return list(node.body)
        case ast.FunctionDef():
            return [*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body]
        case ast.Lambda():
            return [node.body]
        case ast.AnnAssign():
            return [node.target, *([node.value] if node.value else [])]
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise() | ast.JoinedStr():
            return []
        case ast.Expr(value=ast.Constant()):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return []
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return []
        case ast.Call() if is_declaration(node):
            parts = [*node.args, *(k.value for k in node.keywords)]
            return [part for part in parts if isinstance(part, ast.Lambda)]
        case ast.Call():
            keywords = [k for k in node.keywords if k.arg not in NEUTRAL]
            return [node.func, *node.args, *keywords]
    return list(ast.iter_child_nodes(node))


def called(call: ast.Call) -> str:
    """The last name of the called function: `np.maximum(…)` calls `maximum`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def is_declaration(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node).lower().endswith(DECLARATIONS)
