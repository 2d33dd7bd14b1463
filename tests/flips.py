"""JSON documents with one value changed, and files with one bit changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Where = tuple[str | int, ...]


def flipped(document: Any) -> Iterator[tuple[Where, Any]]:
    """The document with each of its values changed to the nearest other one of its kind."""
    for where in _leaves(document, ()):
        yield where, _changed(document, where, _other)


def without(document: Any) -> Iterator[tuple[Where, Any]]:
    """The document without each of its fields, and without each element of its lists."""
    for where in _nodes(document, ()):
        yield where, _changed(document, where, None)


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file; a negative one counts from the end."""
    data = bytearray(path.read_bytes())
    index = bit // 8 % len(data)
    data[index] ^= 1 << bit % 8
    path.write_bytes(data)


def _nodes(node: Any, where: Where) -> Iterator[Where]:
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield (*where, key)
            yield from _nodes(node[key], (*where, key))


def _leaves(node: Any, where: Where) -> Iterator[Where]:
    if not isinstance(node, dict | list):
        yield where
        return
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield from _leaves(node[key], (*where, key))


def _changed(document: Any, where: Where, change: Any) -> Any:
    made = copy.deepcopy(document)
    node = made
    for key in where[:-1]:
        node = node[key]
    if change is None:
        del node[where[-1]]
    else:
        node[where[-1]] = change(node[where[-1]])
    return made


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 1e-3
    if isinstance(value, str) and len(value) == 64:  # a digest stays one
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    return f"{value}x"
