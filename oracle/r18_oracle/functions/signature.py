"""Binding the arguments of a call to the parameters that a function has.

Arrays go by position, since everybody names them differently; settings go by name where the
function has that name, and by position where it has none of the names but enough parameters. A
first parameter that is called `out` gets memory for the result, as in `relu(out, x)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r18_oracle.functions.likes import Call, Setting

OUT = "out"
"""A first parameter of this name is written to."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, without an `OUT` in front.

    positional: their names, in order. named: those that can be given by name. required: those
    without a default. any_position, any_name: whether it has `*args`, `**kwargs`, or a signature
    that Python does not know. writes: whether there is an `OUT` in front.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    any_position: bool
    any_name: bool
    writes: bool = False
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        try:
            found = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # such as a function of PyTorch's in C++
            return cls((), frozenset(), True, True)
        positional = tuple(p.name for p in found if p.kind in POSITIONAL)
        keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        given = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        required = tuple(p.name for p in found if p.kind in given and p.default is p.empty)
        kinds = {p.kind for p in found}
        writes = positional[:1] == (OUT,)
        return cls(
            positional[1:] if writes else positional,
            frozenset(p.name for p in found if p.kind in keyword) - {OUT},
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
            writes,
            required[1:] if writes and required[:1] == (OUT,) else required,
        )

    def refusal(self, call: Call) -> str | None:
        """Why the function cannot be called with these arguments, or None."""
        room = len(call.arrays) if self.any_position else len(self.positional)
        for name, index in call.arrays[room:]:
            if index is not None:
                return f"takes no {name}"
        by_position, by_name, left = self._settings(call)
        for setting in left:
            if not setting.is_default:
                return f"takes no {setting.name}"
        filled = {*self.positional[: len(call.arrays) + len(by_position)], *by_name}
        if missing := [name for name in self.required if name not in filled]:
            return f"needs {' and '.join(missing)}, and is called with {call.names}"
        return None

    def bound(
        self, call: Call, arrays: list[Any], out: Any = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments.

        arrays: one for each of the call's, None where it is. out: what it `writes`, if it does.
        """
        room = len(arrays) if self.any_position else len(self.positional)
        given = arrays[:room]
        by_position, by_name, _ = self._settings(call)
        return [*([out] if self.writes else ()), *given, *by_position], by_name

    def _settings(self, call: Call) -> tuple[list[Any], dict[str, Any], list[Setting]]:
        """The settings given by position, those given by name, and those that find no parameter."""
        if self.any_name:
            return [], {s.name: s.value for s in call.settings}, []
        known = [s for s in call.settings if s.name in self.named]
        others = [s for s in call.settings if s.name not in self.named]
        count = len(call.arrays) + len(call.settings)
        if not known and (self.any_position or len(self.positional) >= count):
            return [s.value for s in call.settings], {}, []
        return [], {s.name: s.value for s in known}, others


__all__ = ["Signature"]
