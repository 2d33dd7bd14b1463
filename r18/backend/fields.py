"""The fields of a kernel: which one is missing or of the wrong type, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from r18.backend.kernel import Kernel, RoundingContract
from r18.errors import show
from r18.graph.ops import EXTRAS, Layout, Op, Problem
from r18.graph.precision import PRECISIONS, Precision

PROBED = ("id", "op", "algorithm", "precision", "contract", "layout", "reads", "extras", "edges")
"""The fields that every command reads; `extra_problems` may take long to make."""
MISSING = object()


def field_objection(kernel: Kernel, fields: Iterable[str] = PROBED) -> str | None:
    """A sentence about the first of these fields that is missing or of the wrong type; or None.

    Raises what a property of the kernel raises.
    """
    for what in fields:
        value: object = getattr(kernel, what, MISSING)
        if value is MISSING:
            return f"'{what}' is missing"
        if wrong := _OBJECTIONS[what](what, value):
            return wrong
    return None


def named(value: object) -> str:
    """A value of the wrong type, for a message: `the string 'fp32'`, `a function`, `1024`."""
    if isinstance(value, str):
        return f"the string {show(value)}"
    if callable(value) and not isinstance(value, type):
        return "a function"
    return show(value)


RETURN = "is a return missing?"


def missing_return(value: object) -> str:
    """The question to add to a message about what a function returned; '' unless that is None."""
    return f": {RETURN}" if value is None else ""


def _text(what: str, value: object) -> str | None:
    if isinstance(value, str) and value:
        return None
    return f"{what} must be a string that is not empty, not {show(value)}"


def _op(what: str, value: object) -> str | None:
    if isinstance(value, type) and issubclass(value, Op):
        return None
    if isinstance(value, Op):
        return (
            f"op must be a class of r18.graph.ops, not one of its objects: {type(value).__name__}"
        )
    return f"op must be a class of r18.graph.ops, not {show(value)}"


def _precision(what: str, value: object) -> str | None:
    if isinstance(value, Precision):
        return None
    known = PRECISIONS.get(str(value).lower())
    meant = f": use {known.name.upper()}" if known else ""
    return f"precision must be an r18.graph.precision.Precision, not {named(value)}{meant}"


def _contract(what: str, value: object) -> str | None:
    if isinstance(value, RoundingContract):
        return None
    if callable(value) and not isinstance(value, type):
        return "contract must be a RoundingContract, not a function: are contract and run swapped?"
    return f"contract must be a RoundingContract, not {named(value)}"


def _layout(what: str, value: object) -> str | None:
    if isinstance(value, Layout) or (what == "reads" and value is None):
        return None
    known = " or ".join(f"Layout.{one.name}" for one in Layout)
    return f"{what} must be {known}, not {named(value)}"


def _extras(what: str, value: object) -> str | None:
    if isinstance(value, frozenset) and value <= EXTRAS:
        return None
    known = ", ".join(map(repr, sorted(EXTRAS)))
    return f"extras must be a frozenset of some of {known}, not {show(value)}"


def _tuple_of(kind: type, noun: str) -> Callable[[str, object], str | None]:
    def objection(what: str, value: object) -> str | None:
        if isinstance(value, kind):
            return f"{what} must be a tuple of {noun}: ({show(value)},)"
        if not isinstance(value, tuple | list) or not all(isinstance(one, kind) for one in value):
            return f"{what} must be a tuple of {noun}, not {show(value)}"
        return None

    return objection


_OBJECTIONS: Mapping[str, Callable[[str, object], str | None]] = {
    "id": _text,
    "algorithm": _text,
    "op": _op,
    "precision": _precision,
    "contract": _contract,
    "layout": _layout,
    "reads": _layout,
    "extras": _extras,
    "edges": _tuple_of(int, "integers"),
    "extra_problems": _tuple_of(Problem, "problems"),
}

__all__ = ["RETURN", "field_objection", "missing_return", "named"]
