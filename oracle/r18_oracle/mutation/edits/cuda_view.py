"""A CUDA C++ source to mutate: its tokens, its statements, and the tokens that may change.

Code in functions and the values of `constexpr` and `#define` constants may change. Comments,
strings, static assertions, launch bounds and template lists may not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from r18_oracle.mutation.edits import Change, Edit, in_order
from r18_oracle.mutation.edits.cuda_tokens import Source

UNTOUCHED = {"static_assert", "__launch_bounds__", "__align__", "alignas", "template", "asm"}
"""Words followed by brackets that hold none of the kernel's arithmetic."""


class View:
    """A source, its tokens and statements, and for each token whether it may change."""

    def __init__(self, text: str) -> None:
        self.source = Source(text)
        self.tokens = self.source.tokens
        self.allowed = self._allowed()
        self.statements = list(self._statements())

    def text(self, first: int, last: int) -> str:
        """The source from token `first` to token `last`, both included."""
        return self.source.text[self.tokens[first].start : self.tokens[last].end]

    def replace(self, index: int, text: str) -> Change:
        return self.tokens[index].start, self.tokens[index].end, text

    def _allowed(self) -> list[bool]:
        tokens, partners = self.tokens, self.source.partners
        allowed = [bool(scope) for scope in self.source.scopes]
        defined = self._constants()
        index = 0
        while index < len(tokens):
            allowed[index] = allowed[index] or index in defined
            if tokens[index].text in UNTOUCHED:
                end = index + 1
                while end < len(tokens) and tokens[end].text not in ("(", "<", ";", "{"):
                    end += 1
                if end < len(tokens) and tokens[end].text == "<":
                    end = self._angle(end)
                end = partners.get(end, end)
                for inside in range(index, min(end + 1, len(tokens))):
                    allowed[inside] = False
                index = end
            index += 1
        return allowed

    def _angle(self, index: int) -> int:
        """The `>` that closes a template's list."""
        depth = 0
        while index < len(self.tokens):
            depth += {"<": 1, ">": -1, ">>": -2}.get(self.tokens[index].text, 0)
            if depth <= 0:
                return index
            index += 1
        return index - 1

    def _constants(self) -> set[int]:
        """The tokens of `constexpr` and `#define` values outside functions."""
        found: set[int] = set()
        for index, token in enumerate(self.tokens):
            if token.text == "constexpr" and not self.source.scopes[index]:
                end = index
                while end < len(self.tokens) and self.tokens[end].text not in (";", "{"):
                    end += 1
                equals = [i for i in range(index, end) if self.tokens[i].text == "="]
                if equals:
                    found |= set(range(equals[0] + 1, end))
        for line in _defines(self.source.text):
            found |= {i for i, t in enumerate(self.tokens) if line[0] <= t.start < line[1]}
        return found

    def _statements(self) -> Iterator[tuple[int, int]]:
        """(first, last) token of each simple statement in a function, including its `;`."""
        begin: int | None = None
        index = 0
        while index < len(self.tokens):
            token = self.tokens[index]
            if not self.source.scopes[index]:
                begin = None
            elif token.text in ("{", "}", ";"):
                if token.text == ";" and begin is not None:
                    yield begin, index
                begin = None
            elif begin is None:
                begin = index
            if token.text in ("(", "["):  # brackets and their content are part of the statement
                index = self.source.partners.get(index, index)
            index += 1


Operator = Callable[[View], Iterator[Change]]
"""Yields the changes that an operator makes to a source."""


@lru_cache(maxsize=8)
def view_of(source: str) -> View:
    """The view of a source, cached."""
    return View(source)


def edits_by(operators: Mapping[str, Operator], source: str) -> Iterator[Edit]:
    """Every change that these operators make to a source, in the order of the source."""
    view = view_of(source)
    yield from in_order(
        (start, order, end, text, view.source.scopes[view.source.at(start)], name)
        for order, (name, operator) in enumerate(operators.items())
        for start, end, text in operator(view)
    )


def _defines(text: str) -> Iterator[tuple[int, int]]:
    """The spans of directives, including continued lines."""
    for found in re.finditer(r"^[ \t]*#(?:\\\n|[^\n])*", text, re.MULTILINE):
        yield found.span()
