"""The mutation operators on CUDA C++: common mistakes, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from r18_oracle.mutation.edits import Change, Edit
from r18_oracle.mutation.edits.cuda_tokens import KEYWORDS, words
from r18_oracle.mutation.edits.cuda_view import Operator, View, edits_by, view_of

SWAPPED = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "^": "|"}
BOUNDARIES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
EQUALITIES = {"==": "!=", "!=": "=="}
ACCUMULATIONS = {"+=": ("=", "-="), "-=": ("=", "+="), "*=": ("=",), "|=": ("=",), "^=": ("=",)}
LOGIC = {"&&": "||", "||": "&&"}
PARTNERS = {"sh": "sw", "ph": "pw", "kh": "kw", "oh": "ow", "h": "w", "x": "y", "n": "c", "o": "c"}
PARTNERS |= {other: name for name, other in PARTNERS.items() if other not in PARTNERS}
"""Members that are easily confused: the two image axes, and a shape's extents."""
RENAMES = {
    "fmaxf": "fminf",
    "fminf": "fmaxf",
    "max": "min",
    "min": "max",
    "expf": "exp2f",
    "__shfl_down_sync": "__shfl_up_sync",
    "__float2half_rn": "__float2half_rz",
    "__float2bfloat16_rn": "__float2bfloat16_rz",
}
SYNCHRONISATION = ("__syncthreads", "__syncwarp", "__threadfence", "cluster_sync")


def edits(source: str) -> Iterator[Edit]:
    """Every change that an operator makes to tokens that may change, in the order of the source."""
    view = view_of(source)
    for name, scope, start, end, text in edits_by(OPERATORS, source):
        if view.allowed[view.source.at(start)]:
            yield name, scope, start, end, text


def meaning(source: str, start: int, end: int, text: str) -> object | None:
    """The position and the tokens of the changed lines; see `Language.meaning`."""
    first, last = view_of(source).source.line(start, end)
    return first, words(source[first:start] + text + source[end:last])


# -- the operators -----------------------------------------------------------------------------


def _binary(view: View, index: int) -> bool:
    """Whether an operator stands between two operands."""
    if not 0 < index < len(view.tokens) - 1 or view.source.spaced(index) is None:
        return False
    before, after = view.tokens[index - 1], view.tokens[index + 1]
    left = before.kind in ("name", "number") or before.text in (")", "]")
    right = after.kind in ("name", "number") or after.text in ("(", "-", "*", "&", "!")
    return left and right and before.text not in KEYWORDS


def _index(view: View) -> Iterator[Change]:
    """Off-by-one subscripts."""
    for index, token in enumerate(view.tokens):
        close = view.source.partners.get(index)
        if token.text == "[" and close is not None and close > index + 1:
            inside = view.text(index + 1, close - 1)
            span = view.tokens[index + 1].start, view.tokens[close - 1].end
            yield *span, f"({inside}) + 1"
            if inside.strip() != "0":
                yield *span, f"({inside}) - 1"


def _bound(view: View) -> Iterator[Change]:
    """< for ≤."""
    for index, token in enumerate(view.tokens):
        if token.text in BOUNDARIES and view.source.spaced(index) and _binary(view, index):
            yield view.replace(index, BOUNDARIES[token.text])


def _stride(view: View) -> Iterator[Change]:
    """Another member: the other image axis, or another extent."""
    for (left, right), index in zip(pairwise(view.tokens), range(len(view.tokens)), strict=False):
        if left.text == "." and right.text in PARTNERS:
            yield view.replace(index + 1, PARTNERS[right.text])


def _constant(view: View) -> Iterator[Change]:
    """Off-by-one integers, and other fractions."""
    for index, token in enumerate(view.tokens):
        if token.kind != "number":
            continue
        digits = token.text.rstrip("uUlL").replace("'", "")
        if digits.isdecimal():
            value, suffix = int(digits), token.text[len(token.text.rstrip("uUlL")) :]
            yield view.replace(index, f"{value + 1}{suffix}")
            if value:
                yield view.replace(index, f"{value - 1}{suffix}")
        elif digits[:2].lower() != "0x":
            zero = float(digits.rstrip("fF")) == 0
            yield view.replace(index, "1.0f" if zero else f"(2 * {token.text})")


def _arithmetic(view: View) -> Iterator[Change]:
    """Another operator, or only its left operand."""
    for index, token in enumerate(view.tokens):
        if token.text in SWAPPED and _binary(view, index):
            yield view.replace(index, SWAPPED[token.text])
            after = view.tokens[index + 1]
            if after.kind in ("name", "number") and view.tokens[index + 2].text in (")", "]", ";"):
                before = view.tokens[index - 1]
                yield before.end, after.end, ""


def _accumulator(view: View) -> Iterator[Change]:
    """A sum that loses its previous value."""
    for index, token in enumerate(view.tokens):
        for other in ACCUMULATIONS.get(token.text, ()):
            yield view.replace(index, other)
        if token.text in ("fmaf", "__fmaf_rn"):
            arguments = _arguments(view, index + 1)
            if len(arguments) == 3:
                first, last = arguments[2]
                yield view.tokens[first].start, view.tokens[last].end, "0.0f"


def _synchronisation(view: View) -> Iterator[Change]:
    """A missing barrier."""
    for first, last in view.statements:
        if view.tokens[first].text in SYNCHRONISATION:
            yield view.tokens[first].start, view.tokens[last].end, ";"


def _statement(view: View) -> Iterator[Change]:
    """A missing statement: an assignment, a call, or a condition with its body."""
    for first, last in view.statements:
        head = view.tokens[first].text
        if head in SYNCHRONISATION or head == "else":
            continue
        if head in ("if", "for", "while") and view.tokens[first + 1].text == "(":
            body = view.source.partners.get(first + 1, last) + 1
            if head == "if" and view.tokens[body].text in ("return", "continue", "break"):
                yield view.tokens[first].start, view.tokens[last].end, ";"
            elif head == "if":
                yield view.tokens[body].start, view.tokens[last].end, ";"
        elif _effect(view, first, last):
            yield view.tokens[first].start, view.tokens[last].end, ";"


def _effect(view: View, first: int, last: int) -> bool:
    """Whether a statement is an assignment or a call, not a declaration."""
    if view.tokens[first].kind != "name":
        return view.tokens[first].text in ("++", "--", "*")
    after = first + 1
    while view.tokens[after].text in (".", "->", "::", "["):
        if view.tokens[after].text == "[":
            after = view.source.partners.get(after, after) + 1
        else:
            after += 2
    text = view.tokens[after].text
    if text == "<":
        return True  # a call with template arguments, if it compiles without them
    return text in ("(", "=", "++", "--") or text in ACCUMULATIONS


def _comparison(view: View) -> Iterator[Change]:
    """= for ≠."""
    for index, token in enumerate(view.tokens):
        if token.text in EQUALITIES:
            yield view.replace(index, EQUALITIES[token.text])


def _condition(view: View) -> Iterator[Change]:
    """`&&` for `||`, a negated condition, or one side of a `?:`."""
    for index, token in enumerate(view.tokens):
        if token.text in LOGIC and _binary(view, index):
            yield view.replace(index, LOGIC[token.text])
        close = view.source.partners.get(index + 1)
        if token.text == "if" and view.tokens[index + 1].text == "(" and close is not None:
            inside = view.text(index + 2, close - 1)
            span = view.tokens[index + 2].start, view.tokens[close - 1].end
            yield *span, f"!({inside})"
        if token.text == "?":
            yield view.replace(index, "|| true ?")
            yield view.replace(index, "&& false ?")


def _argument(view: View) -> Iterator[Change]:
    """Two neighbouring arguments swapped."""
    for index, token in enumerate(view.tokens[:-1]):
        if token.kind != "name" or token.text in {*KEYWORDS, *RENAMES, "fmaf"}:
            continue
        arguments = _arguments(view, index + 1)
        for (a, b), (c, d) in pairwise(arguments):
            one, other = view.text(a, b), view.text(c, d)
            if one != other:
                between = view.source.text[view.tokens[b].end : view.tokens[c].start]
                yield view.tokens[a].start, view.tokens[d].end, f"{other}{between}{one}"


def _arguments(view: View, index: int) -> list[tuple[int, int]]:
    """(first, last) token of each argument in the brackets that open at `index`, if any."""
    close = view.source.partners.get(index)
    if view.tokens[index].text != "(" or close is None or close == index + 1:
        return []
    found: list[tuple[int, int]] = []
    first = here = index + 1
    while here < close:
        if view.tokens[here].text in ("(", "[", "{"):
            here = view.source.partners.get(here, here)
        elif view.tokens[here].text == ",":
            found.append((first, here - 1))
            first = here + 1
        here += 1
    return [*found, (first, close - 1)] if all(a <= b for a, b in found) and first < close else []


def _function(view: View) -> Iterator[Change]:
    """A similar function instead."""
    for index, token in enumerate(view.tokens):
        if token.text in RENAMES and view.tokens[index + 1].text == "(":
            yield view.replace(index, RENAMES[token.text])


OPERATORS: dict[str, Operator] = {
    "index": _index,
    "bound": _bound,
    "stride": _stride,
    "constant": _constant,
    "arithmetic": _arithmetic,
    "accumulator": _accumulator,
    "synchronisation": _synchronisation,
    "statement": _statement,
    "comparison": _comparison,
    "condition": _condition,
    "argument": _argument,
    "function": _function,
}
