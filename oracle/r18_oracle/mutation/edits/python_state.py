"""Structural mutants of Python sources: mistakes in caching, sharing or waiting.

Such a mistake does not show in a first call, on one thread or on an idle machine. Each class is an
operator, named as in `r18_oracle.mutation.edits.STATE`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from r18_oracle.mutation.edits import Change, Edit
from r18_oracle.mutation.edits.python_view import Operator, View, called, edits_by

KEY = re.compile(r"(^|_)key$")
"""Names of cache keys."""
KEYED = re.compile(r"key|digest|fingerprint")
"""Functions that make cache keys."""
CACHES = {"cache", "lru_cache", "memo"}
SCRATCH = re.compile(r"scratch|workspace|shared|arena")
"""Names of memory that several uses share."""
PLACES = {"stage", "slot", "thread", "worker", "lane", "part", "turn"}
"""Names of indices that select a user's own part of such memory."""
ALLOCATIONS = {"empty", "zeros", "empty_like", "zeros_like"}
WAITS = {"synchronize", "wait", "wait_event", "join", "syncthreads", "syncwarp", "barrier"}
FLUSHES = {"flush", "fsync", "_flush", "_flush_folder", "commit"}
EXACT_TYPES = re.compile(r"float64|double|int|bool|object")
"""Conversions to these types round nothing that matters."""


def edits(source: str) -> Iterator[Edit]:
    """Every change that a class makes, in the order of the source."""
    return edits_by(OPERATORS, source)


# -- cache_key ---------------------------------------------------------------------------------


def _cache_key(view: View, node: ast.AST) -> Iterator[Change]:
    """A cached function that ignores an argument, or a key without one of its fields."""
    match node:
        case ast.FunctionDef(decorator_list=decorators):
            for decorator in decorators:
                yield from _uncached(view, node, decorator)
            if KEYED.search(node.name):
                for statement in node.body:  # not the annotations
                    for inner in ast.walk(statement):
                        yield from _fewer(view, inner)
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if KEY.search(name):
            function = view.function(node)
            if function is None or not KEYED.search(function.name):
                for inner in ast.walk(value):
                    yield from _fewer(view, inner)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault"), args=[ast.Tuple() as key, *_]):
            yield from _fewer(view, key)


def _uncached(view: View, node: ast.FunctionDef, decorator: ast.expr) -> Iterator[Change]:
    """The decorator as one whose key leaves out an argument, each argument in turn."""
    plain = decorator.func if isinstance(decorator, ast.Call) else decorator
    if getattr(plain, "id", "") == "cached_property":
        once = "kept[0] if kept else kept.append(f(self)) or kept[0]"
        yield view.replace(decorator, f"(lambda f, kept=[]: property(lambda self: {once}))")
    if getattr(plain, "id", "") not in CACHES:
        return
    for at, argument in enumerate((*node.args.posonlyargs, *node.args.args)):
        named = f'(n, v) for n, v in k.items() if n != "{argument.arg}"'
        key = f"(*a[:{at}], *a[{at + 1}:], *({named}))"
        keeps = f"kept[{key}] if {key} in kept else kept.setdefault({key}, f(*a, **k))"
        yield view.replace(decorator, f"(lambda f, kept={{}}: lambda *a, **k: {keeps})")


def _fewer(view: View, node: ast.AST) -> Iterator[Change]:
    """A tuple, a list, a dict or an f-string without one of its fields."""
    match node:
        case ast.Tuple(elts=parts, ctx=ast.Load()) | ast.List(elts=parts, ctx=ast.Load()):
            if len(parts) > 1:
                for part in parts:
                    rest = ", ".join(view.text(p) for p in parts if p is not part)
                    yield view.replace(
                        node, f"[{rest}]" if isinstance(node, ast.List) else f"({rest},)"
                    )
        case ast.Dict(keys=keys, values=values) if len(keys) > 1:
            pairs = [
                (f"{view.text(k)}: " if k else "**") + view.text(v)
                for k, v in zip(keys, values, strict=True)
            ]
            for at in range(len(pairs)):
                yield view.replace(node, "{" + ", ".join(pairs[:at] + pairs[at + 1 :]) + "}")
        case ast.FormattedValue(value=ast.Name() | ast.Attribute() | ast.Call() as value):
            if view.text(value) == ast.unparse(value):
                yield view.replace(value, "0")


# -- wait, store_wait --------------------------------------------------------------------------


def _is_wait(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Expr(value=ast.Call() as call):
            return called(call) in names
    return False


def _wait(view: View, node: ast.AST) -> Iterator[Change]:
    """A wait that is moved after the next statement."""
    if not isinstance(node, ast.Expr) or not _is_wait(node, WAITS):
        return
    after = _next(view, node)
    if after is None or isinstance(after, ast.FunctionDef | ast.ClassDef):
        return
    between = view.source[view.end(node) : view.start(after)]
    if isinstance(after, ast.Return):
        if after.value is not None and not isinstance(after.value, ast.Constant):
            early = f"early = {view.text(after.value)}{between}{view.text(node)}"
            yield view.start(node), view.end(after), f"{early}{between}return early"
    elif not _is_wait(after, WAITS):
        swapped = f"{view.text(after)}{between}{view.text(node)}"
        yield view.start(node), view.end(after), swapped


def _next(view: View, node: ast.stmt) -> ast.stmt | None:
    """The statement after this one in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(view.parent(node), name, None)
        if isinstance(block, list) and node in block[:-1]:
            found = block[block.index(node) + 1]
            return found if isinstance(found, ast.stmt) else None
    return None


def _store_wait(view: View, node: ast.AST) -> Iterator[Change]:
    """A missing wait or flush."""
    if isinstance(node, ast.Expr) and _is_wait(node, WAITS | FLUSHES):
        yield view.replace(node, "pass")


# -- scratch -----------------------------------------------------------------------------------


def _scratch(view: View, node: ast.AST) -> Iterator[Change]:
    """One allocation for all calls, or one part of a scratch buffer for all of its users."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in ALLOCATIONS:
            if view.function(node) is not None and not _compiled(view, node):
                given = ", ".join(view.text(a) for a in (*node.args, *_values(node)))
                kept = 'globals().setdefault("_kept", {})'
                yield view.replace(node, f"{kept}.setdefault(str(({given},)), {view.text(node)})")
        case ast.Call(func=ast.Attribute(attr="view"), args=[ast.expr() as offset, _]):
            yield view.replace(offset, "0")
        case ast.Subscript(value=value, slice=ast.Slice(lower=ast.expr() as lower, upper=upper)):
            if SCRATCH.search(view.text(value)) and not isinstance(lower, ast.Constant):
                yield view.replace(lower, "0")
                if upper is not None:
                    text = f"0 : ({view.text(upper)}) - ({view.text(lower)})"
                    yield view.start(lower), view.end(upper), text
        case ast.Name(id=name, ctx=ast.Load()) if name in PLACES and _indexes(view, node):
            yield view.replace(node, "0")
        case ast.For(body=body) if not isinstance(view.parent(node), ast.Module):
            for inner in body:
                match inner:
                    case ast.Assign(value=ast.Call(func=ast.Attribute(attr=name))):
                        if name in ALLOCATIONS | {"array"}:
                            yield _hoisted(view, node, inner)


def _values(node: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords]


def _compiled(view: View, node: ast.AST) -> bool:
    """Whether Numba compiles the function, which then has no globals to change."""
    function = view.function(node)
    return function is not None and any("jit" in ast.dump(d) for d in function.decorator_list)


def _indexes(view: View, node: ast.AST) -> bool:
    """Whether a name is part of a subscript."""
    while isinstance(parent := view.parent(node), ast.Tuple | ast.BinOp | ast.Slice):
        node = parent
    return isinstance(parent, ast.Subscript) and parent.slice is node


def _hoisted(view: View, loop: ast.For, inner: ast.Assign) -> Change:
    """The allocation before its loop."""
    indent = "\n" + " " * loop.col_offset
    head = view.source[view.start(loop) : view.start(inner)]
    return view.start(loop), view.end(inner), f"{view.text(inner)}{indent}{head}pass"


# -- loop_rest ---------------------------------------------------------------------------------


def _loop_rest(view: View, node: ast.AST) -> Iterator[Change]:
    """Only the first iteration of a loop, or the first half of a parallel loop."""
    match node:
        case ast.For(iter=ast.Call() as counted, orelse=[]) if called(counted) == "prange":
            stop = counted.args[min(1, len(counted.args) - 1)]
            yield view.replace(stop, f"({view.text(stop)} + 1) // 2")
        case ast.For(body=[first, *_] as body, orelse=[]) if first.lineno > node.lineno:
            if not isinstance(body[-1], ast.Return | ast.Break | ast.Continue | ast.Raise):
                indent = "\n" + " " * first.col_offset
                yield view.end(body[-1]), view.end(body[-1]), f"{indent}break"


# -- rounding ----------------------------------------------------------------------------------


def _rounding(view: View, node: ast.AST) -> Iterator[Change]:
    """Towards zero instead of to nearest; down instead of up."""
    match node:
        case ast.Call(func=ast.Attribute(value=module, attr="rint"), args=args):
            given = ", ".join(map(view.text, args))
            yield view.replace(node, f"{view.text(module)}.trunc({given})")
        case ast.Call(func=ast.Name(id="round"), args=[only]):
            yield view.replace(node, f"int({view.text(only)})")
        case ast.Call(func=ast.Attribute(value=value, attr="astype"), args=[kind]):
            if not EXACT_TYPES.search(view.text(kind)):
                cut = "np.where(abs(r) > abs(v), np.nextafter(r, np.zeros_like(r)), r)"
                given = f"{view.text(value)}, {view.text(node)}"
                yield view.replace(node, f"(lambda v, r: {cut}.astype(r.dtype))({given})")
        case ast.Call(func=ast.Name(id="ceil_div"), args=[top, below]):
            yield view.replace(node, f"(({view.text(top)}) // ({view.text(below)}))")
        case ast.UnaryOp(op=ast.USub(), operand=ast.BinOp(op=ast.FloorDiv()) as inner):
            if isinstance(inner.left, ast.UnaryOp) and isinstance(inner.left.op, ast.USub):
                left, right = view.text(inner.left.operand), view.text(inner.right)
                yield view.replace(node, f"({left} // {right})")


# -- resume ------------------------------------------------------------------------------------


def _resume(view: View, node: ast.AST) -> Iterator[Change]:
    """Skip as many items as are done, whichever those are."""
    match node:
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
            for part in node.generators:
                for test in part.ifs:
                    match test:
                        case ast.Compare(ops=[ast.NotIn()], comparators=[ast.expr() as done]):
                            if not isinstance(done, ast.Tuple | ast.List | ast.Set | ast.Constant):
                                yield _by_count(view, part.iter, test, done)
        case ast.For(iter=listed, body=[ast.If(test=test, body=[ast.Continue()]) as skip, *_]):
            match test:
                case ast.Compare(ops=[ast.In()], comparators=[ast.expr() as done]):
                    yield _by_count(view, listed, skip, done, "pass")


def _by_count(
    view: View,
    listed: ast.expr,
    test: ast.expr | ast.stmt,
    done: ast.expr,
    instead: str = "True",
) -> Change:
    between = view.source[view.end(listed) : view.start(test)]
    counted = f"list({view.text(listed)})[len(list({view.text(done)})) :]"
    return view.start(listed), view.end(test), f"{counted}{between}{instead}"


OPERATORS: dict[str, Operator] = {
    "cache_key": _cache_key,
    "wait": _wait,
    "scratch": _scratch,
    "loop_rest": _loop_rest,
    "rounding": _rounding,
    "store_wait": _store_wait,
    "resume": _resume,
}
