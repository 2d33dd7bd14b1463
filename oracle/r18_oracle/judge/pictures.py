"""Pictures of a fault: where in the output the error sits, small enough for a finding's file.

A picture is plain data: rows of words, each a cell's largest error/bound ("0" exact, "inf" where
no bound is kept), so that whoever opens the file sees it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from r18.backend import Array

CELLS = 28
"""The largest number of cells along an axis: the extents of ResNet-18's values divide by it or are
smaller."""
SAMPLES = 4
"""The largest number of samples that are distinguished."""


def error_map(ratios: Array, coordinate: Sequence[int]) -> dict[str, Any]:
    """The picture of error/bound over a whole output, around its worst element.

    shape: the output's; of a vector, as one row.
    plane: rows over the last two axes, those through the worst element; `cell` elements a cell.
    outer: of a four-dimensional output, a row a sample and a column a channel, `outer_cell` each.
    """
    if ratios.ndim < 2:
        ratios, coordinate = ratios.reshape(1, -1), (0, *coordinate)
    picture: dict[str, Any] = {"shape": list(ratios.shape)}
    plane = ratios[tuple(coordinate[:-2])]
    cell = [-(-extent // CELLS) for extent in plane.shape]
    picture |= {"cell": cell, "plane": _rows(plane, cell)}
    if ratios.ndim == 4:
        outer = ratios.max(axis=(2, 3))
        cell = [-(-outer.shape[0] // SAMPLES), -(-outer.shape[1] // CELLS)]
        picture |= {"outer_cell": cell, "outer": _rows(outer, cell)}
    return picture


def read_rows(rows: Sequence[str]) -> list[list[float]]:
    """The numbers of a picture's rows; raises `ValueError` where they are none, or ragged."""
    table = [[float(word) for word in row.split()] for row in rows]
    if not table or not table[0] or any(len(row) != len(table[0]) for row in table):
        raise ValueError("a picture's rows are empty or of unlike lengths")
    return table


def _rows(plane: Array, cell: Sequence[int]) -> list[str]:
    down, across = cell
    height, width = plane.shape
    return [
        " ".join(
            _word(float(plane[top : top + down, left : left + across].max()))
            for left in range(0, width, across)
        )
        for top in range(0, height, down)
    ]


def _word(ratio: float) -> str:
    """Two digits, one below 0.1, in as few characters as `float` reads; never 1 for a fault."""
    if ratio == 0 or not math.isfinite(ratio):
        return f"{ratio:g}"
    if 1 < ratio < 1.05:
        return "1.1"
    if 0.01 <= ratio < 99.5:
        return f"{ratio:.{1 + (ratio >= 0.1)}g}".removeprefix("0")
    mantissa, exponent = f"{ratio:.{int(ratio >= 100)}e}".split("e")
    power = int(exponent) - int(ratio >= 100)
    return f"{mantissa.replace('.', '')}e{power}"


__all__ = ["CELLS", "SAMPLES", "error_map", "read_rows"]
