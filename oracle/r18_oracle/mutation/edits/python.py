"""The mutation operators on Python sources: common mistakes, one at a time.

The source is parsed for positions and edited as text, so that a diff shows only the change.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import cast

from r18_oracle.mutation.edits import Change, Edit
from r18_oracle.mutation.edits.python_view import (
    NEUTRAL,
    Operator,
    View,
    called,
    edits_by,
    is_declaration,
    view_of,
)

UNORDERED = {"axis", "axes"}
"""Keywords whose tuples are sets."""

COMMUTATIVE = {"maximum", "minimum", "fmax", "fmin", "add", "multiply", "min", "max", "swapaxes"}
"""Functions whose two arguments can be swapped."""

UNTOUCHED_CALLS = {"isinstance", "cast", "getattr", "hasattr", "print", "super", "TypeVar"}
"""Calls that only deal with types or names, or do not contribute to a result."""

BUILTINS = {"int", "float", "bool", "str", "len", "tuple", "list", "set", "dict", "range", "iter"}

RENAMES = {
    "maximum": ("minimum", "fmax"),
    "minimum": ("maximum",),
    "fmax": ("maximum",),
    "max": ("min",),
    "min": ("max",),
    "mean": ("sum", "max"),
    "sum": ("max", "mean"),
    "exp": ("exp2", "expm1"),
    "multiply": ("add", "divide"),
    "divide": ("multiply",),
    "add": ("subtract",),
    "subtract": ("add",),
    "floor": ("ceil",),
    "ceil": ("floor",),
}
"""Functions and methods that are easily confused. For the built-in min and max see `_bound`."""

UNWRAPPED = {"sqrt", "abs", "absolute", "exp", "transpose", "swapaxes", "copy", "square"}
"""Functions and methods that are easily forgotten."""

PARTNERS = {"r": "s", "row": "column", "rows": "columns", "height": "width", "top": "left"}
"""Names of the two image axes that differ in more than an h or a w."""

SWAPPED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
BOUNDARIES = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
EQUALITIES = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}


def edits(source: str) -> Iterator[Edit]:
    """Every change that an operator makes, in the order of the source."""
    return edits_by(OPERATORS, source)


def code(source: str) -> str:
    """The source without comments and docstrings, in one layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def meaning(source: str, start: int, end: int, text: str) -> object | None:
    """The position and the syntax tree of the smallest changed statement; see `Language`."""
    first, last, indent = view_of(source).whole(start, end, text)
    changed = indent + source[first:start] + text + source[end:last]
    return _meaning(first, changed) if text or start < end else _unchanged(first, changed)


def _meaning(first: int, statement: str) -> object | None:
    try:
        tree = ast.parse(f"if 1:\n{statement}" if statement[0] == " " else statement)
    except SyntaxError:
        return None
    words: list[str] = []
    _tell(tree, words.append)
    return first, " ".join(words)


_unchanged = lru_cache(maxsize=64)(_meaning)
"""The meaning of an unchanged statement, cached since every change in it is compared with it."""


def _tell(value: object, tell: Callable[[str], None]) -> None:
    """A syntax tree as words: equal for equal trees, after `_folded`.

    There are thousands of edits, so this is one pass instead of a transformer and `ast.dump`.
    """
    if isinstance(value, ast.AST):
        node = _folded(value) if isinstance(value, ast.BinOp) else value
        tell(type(node).__name__)
        for name in node._fields:
            _tell(getattr(node, name, None), tell)
        tell(")")
    elif isinstance(value, list):
        tell("[")
        for one in value:
            _tell(one, tell)
        tell("]")
    else:
        tell(repr(value))


def _folded(node: ast.AST) -> ast.AST:
    """Integers folded: n + 1 + 1 becomes n + 2, n + 1 - 1 and 1 * n become n."""
    if not isinstance(node, ast.BinOp):
        return node
    node.left = base = cast(ast.expr, _folded(node.left))
    node.right = cast(ast.expr, _folded(node.right))
    if isinstance(node.op, ast.Mult) and 1 in (_integer(base), _integer(node.right)):
        return node.right if _integer(base) == 1 else base
    added = _added(node)
    if added is None:
        return node
    if isinstance(base, ast.BinOp) and (inner := _added(base)) is not None:
        added, base = added + inner, base.left
    op = ast.Add() if added > 0 else ast.Sub()
    return ast.BinOp(base, op, ast.Constant(abs(added))) if added else base


def _added(node: ast.BinOp) -> int | None:
    """The integer that a sum adds on its right side."""
    value = _integer(node.right)
    if value is None or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    return value if isinstance(node.op, ast.Add) else -value


def _integer(node: ast.AST | None) -> int | None:
    """The value of an integer literal, which may be negative."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return None


def _neighbours(value: int) -> tuple[int, ...]:
    return (value + 1, value - 1) if value else (1,)


# -- the operators -----------------------------------------------------------------------------


def _index(view: View, node: ast.AST) -> Iterator[Change]:
    """Off-by-one subscripts and slice bounds."""
    if not isinstance(node, ast.Subscript):
        return
    for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        if isinstance(part, ast.Slice):
            yield from _slice(view, part)
        elif (value := _integer(part)) is not None:
            for other in _neighbours(value):
                yield view.replace(part, str(other))


def _slice(view: View, part: ast.Slice) -> Iterator[Change]:
    for bound in (part.lower, part.upper):
        if bound is None:
            continue
        if (value := _integer(bound)) is not None:
            for other in _neighbours(value):
                yield view.replace(bound, str(other))
        else:
            yield from view.nudges(bound)
    if part.lower is None and part.upper is not None:
        yield view.start(part), view.start(part), "1"
    if part.upper is None and part.lower is not None:
        colon = view.source.index(":", view.end(part.lower))
        yield colon + 1, colon + 1, "-1"


def _bound(view: View, node: ast.AST) -> Iterator[Change]:
    """Off-by-one ranges, min for max, < for ≤."""
    match node:
        case ast.Call(func=ast.Name(id="range" | "slice"), args=args):
            for bound in args[:2]:
                if not isinstance(bound, ast.Constant):
                    yield from view.nudges(bound)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield view.replace(node.func, {"min": "max", "max": "min"}[name])
        case ast.Compare():
            yield from _compared(view, node, BOUNDARIES)


def _comparison(view: View, node: ast.AST) -> Iterator[Change]:
    """= for ≠."""
    if isinstance(node, ast.Compare):
        yield from _compared(view, node, EQUALITIES)


def _compared(
    view: View, node: ast.Compare, table: dict[type[ast.cmpop], tuple[str, str]]
) -> Iterator[Change]:
    sides = [node.left, *node.comparators]
    for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
        if type(op) in table:
            yield view.token(left, right, *table[type(op)])


def _stride(view: View, node: ast.AST) -> Iterator[Change]:
    """The other image axis, or a missing step."""
    match node:
        case ast.Slice(step=ast.expr() as step):
            colon = view.source.rindex(":", 0, view.start(step))
            yield colon, view.end(step), ""
        case ast.Call(func=ast.Name(id="range"), args=[_, stop, step]):
            yield view.end(stop), view.end(step), ""
        case ast.Name(id=name, ctx=ast.Load()):
            partners = _partners(name)
            function = view.function(node) if partners else None
            if function is not None:
                for other in sorted(partners & view.names(function)):
                    yield view.replace(node, other)


def _partners(name: str) -> set[str]:
    """The same name for the other image axis: sh and sw, rows and columns."""
    table = PARTNERS | {other: one for one, other in PARTNERS.items()}
    table |= {"h": "w", "w": "h"}
    found = {table[name]} if name in table else set()
    for at, letter in enumerate(name):
        if letter in "hw" and len(name) <= 3:
            found.add(name[:at] + table[letter] + name[at + 1 :])
    return found


def _axes(view: View, node: ast.AST) -> Iterator[Change]:
    """Two neighbours of a tuple, a subscript or an einsum operand swapped."""
    match node:
        case ast.Tuple(elts=parts):
            parent = view.parent(node)
            if not (isinstance(parent, ast.keyword) and parent.arg in UNORDERED):
                yield from view.swaps(parts)
        case ast.Call(args=[ast.Constant(value=str(spec)) as literal, *_]):
            if called(node) != "einsum":
                return
            begin = view.start(literal) + 1
            for at, (one, two) in enumerate(pairwise(spec)):
                if one.isalpha() and two.isalpha():
                    yield begin + at, begin + at + 2, two + one


def _constant(view: View, node: ast.AST) -> Iterator[Change]:
    """Off-by-one numbers, negated booleans, a finite number for infinity."""
    match node:
        case ast.Constant(value=bool(value)):
            yield view.replace(node, str(not value))
        case ast.Constant(value=int(value)):
            if not view.is_index(node) and not isinstance(view.parent(node), ast.UnaryOp):
                for other in _neighbours(value):
                    yield view.replace(node, str(other))
        case ast.Constant(value=float(value)):
            yield view.replace(node, repr(2 * value or 1.0))
            yield view.replace(node, "0.0")
        case ast.Attribute(attr="inf"):
            yield view.replace(node, "0")


def _arithmetic(view: View, node: ast.AST) -> Iterator[Change]:
    """Another operator, a missing operand, a missing sign."""
    match node:
        case ast.BinOp(left=left, right=right, op=op) if type(op) in SWAPPED:
            yield view.token(left, right, *SWAPPED[type(op)])
            for operand in view.operands(node, SWAPPED[type(op)][0]):
                yield view.replace(node, operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield view.replace(node, view.text(operand))
        case ast.AugAssign(target=target, value=value, op=op) if type(op) in SWAPPED:
            old, new = SWAPPED[type(op)]
            yield view.token(target, value, old + "=", new + "=")


def _accumulator(view: View, node: ast.AST) -> Iterator[Change]:
    """Assignment for accumulation and vice versa, or a lost sum."""
    match node:
        case ast.AugAssign(target=ast.Name() as target, value=value, op=ast.Add()):
            yield view.token(target, value, "+=", "=")
            at, end, _ = view.token(target, value, " +=", "")
            yield at, end, "[...] ="
        case ast.AugAssign(target=target, value=value, op=ast.Add()):
            yield view.token(target, value, "+=", "=")
        case ast.Assign(targets=[ast.Subscript() as target], value=value):
            yield view.token(target, value, "=", "+=")


def _statement(view: View, node: ast.AST) -> Iterator[Change]:
    """A missing statement."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.For() | ast.While():
            yield view.replace(node, "pass")
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(orelse=[]):
            yield view.replace(node, "pass")
        case ast.Assign(targets=targets):
            for one, other in pairwise(targets):
                yield view.start(one), view.start(other), ""
            if len(targets) > 1:
                yield view.end(targets[-2]), view.end(targets[-1]), ""
            if isinstance(targets[0], ast.Subscript) or _rebinds(view, node):
                yield view.replace(node, "pass")


def _rebinds(view: View, node: ast.Assign) -> bool:
    """Whether an assigned name has another value too, so that the code runs without this one."""
    function, target = view.function(node), node.targets[0]
    if function is None or not isinstance(target, ast.Name):
        return False
    bound = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    for other in ast.walk(function):
        if isinstance(other, ast.Name) and isinstance(other.ctx, ast.Store) and other is not target:
            bound.add(other.id)
    return target.id in bound


def _argument(view: View, node: ast.AST) -> Iterator[Change]:
    """Two neighbouring arguments swapped."""
    if not isinstance(node, ast.Call) or is_declaration(node):
        return
    if called(node) not in COMMUTATIVE | UNTOUCHED_CALLS:
        yield from view.swaps(node.args)


def _condition(view: View, node: ast.AST) -> Iterator[Change]:
    """A negated condition, one side of a conditional expression, or `and` for `or`."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(test=test) | ast.While(test=test):
            yield view.replace(test, f"not ({view.text(test)})")
        case ast.IfExp(body=body, orelse=orelse):
            yield view.replace(node, view.text(body))
            yield view.replace(node, view.text(orelse))
        case ast.BoolOp(op=op, values=values):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            for left, right in pairwise(values):
                yield view.token(left, right, old, new)


def _keyword(view: View, node: ast.AST) -> Iterator[Change]:
    """A missing keyword argument."""
    if not isinstance(node, ast.Call) or is_declaration(node):
        return
    parts: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    for before, part in zip([None, *parts], parts, strict=False):
        if isinstance(part, ast.keyword) and part.arg and part.arg not in NEUTRAL and before:
            yield view.end(before), view.end(part), ""


def _function(view: View, node: ast.AST) -> Iterator[Change]:
    """A similar function instead, or a missing call."""
    match node:
        case ast.Attribute(value=value, attr="T"):
            yield view.replace(node, view.text(value))
        case ast.Call(func=ast.Attribute(value=value, attr=name) as func, args=args):
            at = view.end(func) - len(name)
            for other in RENAMES.get(name, ()):
                yield at, at + len(name), other
            if name in UNWRAPPED:
                of_module = isinstance(value, ast.Name) and value.id in ("np", "math", "torch")
                if not of_module:
                    yield view.replace(node, view.text(value))
                elif args:
                    yield view.replace(node, view.text(args[0]))
        case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]):
            if name not in BUILTINS | UNTOUCHED_CALLS and not is_declaration(node):
                yield view.replace(node, view.text(only))


OPERATORS: dict[str, Operator] = {
    "index": _index,
    "bound": _bound,
    "stride": _stride,
    "axes": _axes,
    "constant": _constant,
    "arithmetic": _arithmetic,
    "accumulator": _accumulator,
    "statement": _statement,
    "comparison": _comparison,
    "condition": _condition,
    "argument": _argument,
    "keyword": _keyword,
    "function": _function,
}
