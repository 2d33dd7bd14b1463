"""A suite's kernel as a function that takes the arguments of one of our operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def takes_all(*shapes: Any, **settings: Any) -> str | None:
    """The `refuses` of a kernel that takes every problem."""
    return None


@dataclass(frozen=True, eq=False)
class Adapted:
    """A kernel of a suite. All of them take PyTorch's tensors.

    like:    the name of the operator (`r18_oracle.functions.likes`).
    call:    called with the operator's arrays by position and its settings by name.
    refuses: called the same way with shapes in place of arrays; a sentence for a call that the
             kernel cannot be asked for.
    dtype:   the format of its arrays, or "" where the suite does not say.
    """

    like: str
    call: Callable[..., Any]
    refuses: Callable[..., str | None] = takes_all
    dtype: str = ""

    def __call__(self, *arrays: Any, **settings: Any) -> Any:
        return self.call(*arrays, **settings)


def pair(value: Any) -> tuple[int, int]:
    """A setting of two axes, given as one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


__all__ = ["Adapted", "pair", "takes_all"]
