"""A violation of a rule of memory ordering."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Disorder:
    """A violation of a rule: the rule, the function, the lines of its PTX, and what is wrong."""

    rule: str
    function: str
    lines: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        word = "line" if len(self.lines) == 1 else "lines"
        where = f"PTX {word} {', '.join(map(str, self.lines))}"
        return f"{self.rule}: {self.function}, {where}: {self.message}"
