"""A tokenizer for CUDA C++ that keeps positions, for as much of the language as edits need.

There is no parser. A mutant that does not compile is not counted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(
    r"""
      (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
    | (?P<directive>^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<number>(?:0[xX][\da-fA-F']+|(?:\d[\d']*\.?[\d]*|\.\d+)(?:[eE][+-]?\d+)?)[uUlLfF]*)
    | (?P<mark><<=|>>=|\+\+|--|->|::|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|[^\s\w])
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
OPENING = {"(": ")", "[": "]", "{": "}"}
# Keywords of the language: before a `(` they are not function names.
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "decltype"}


@dataclass(frozen=True)
class Token:
    """A token: its kind (a group of the pattern), text, and span in the source."""

    kind: str
    text: str
    start: int
    end: int


class Source:
    """A file's code: its tokens without comments and directives, except the values of `#define`s.

    `scopes[i]` is the name of the function that token i is in, empty outside functions.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_code(text))
        self.partners = _partners(self.tokens)
        self.scopes = _scopes(self.tokens, self.partners)

    @cached_property
    def _starts(self) -> list[int]:
        return [token.start for token in self.tokens]

    def line(self, start: int, end: int) -> tuple[int, int]:
        """The span of the whole lines that hold [start, end)."""
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        return first, len(self.text) if last < 0 else last

    def at(self, position: int) -> int:
        """The index of the last token that begins at or before this position."""
        return bisect_right(self._starts, position) - 1

    def spaced(self, index: int) -> bool | None:
        """Whether a token has blanks on both sides; None if only on one side.

        A binary operator has blanks on both sides or on neither, unlike `T* x` and `-x`.
        """
        token = self.tokens[index]
        before = self.text[token.start - 1 : token.start].isspace()
        after = self.text[token.end : token.end + 1].isspace()
        return before if before == after else None


def words(text: str) -> tuple[str, ...]:
    """The tokens of a piece of source, without comments and independent of spacing."""
    return tuple(
        " ".join(found[0].split())
        for found in _TOKEN.finditer(text)
        if found.lastgroup != "comment"
    )


def _code(text: str, offset: int = 0) -> Iterator[Token]:
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or ""
        if kind == "directive":
            define = re.match(r"[ \t]*#[ \t]*define[ \t]+\w+(?:\([^)]*\))?", found[0])
            if define is not None:
                rest = found[0][define.end() :]
                yield from _code(rest.replace("\\\n", "  "), offset + found.start() + define.end())
        elif kind != "comment":
            yield Token(kind, found[0], offset + found.start(), offset + found.end())


def _partners(tokens: list[Token]) -> dict[int, int]:
    """The index of the matching bracket for each bracket."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    for index, token in enumerate(tokens):
        if token.text in OPENING:
            waiting.append(index)
        elif waiting and token.text == OPENING[tokens[waiting[-1]].text]:
            opening = waiting.pop()
            found[opening], found[index] = index, opening
    return found


def _scopes(tokens: list[Token], partners: dict[int, int]) -> list[str]:
    """The function of each token; a function is an outermost `name(...) {`."""
    scopes = [""] * len(tokens)
    index = 0
    while index < len(tokens):
        close = partners.get(index - 1, -1) if index else -1
        named = (
            tokens[index].text == "{"
            and tokens[index - 1].text == ")"
            and close > 0
            and tokens[close - 1].kind == "name"
            and tokens[close - 1].text not in KEYWORDS
        )
        end = partners.get(index)
        if named and end is not None:
            for inside in range(index, end + 1):
                scopes[inside] = tokens[close - 1].text
            index = end
        index += 1
    return scopes
