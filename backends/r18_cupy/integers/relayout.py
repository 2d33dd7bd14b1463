"""Layout changes of a quantised network: the transposition of kernels/ops/relayout.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedRelayout
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.integers.kernel import IntegerKernel
from r18_cupy.ops.relayout import (
    NARROW,
    NARROW_LENGTH,
    THREADS,
    TILE,
    TRANSPOSE_SHAPE,
    matrices,
    tile_extents,
)

BITS = {"uint8": "unsigned char", "int8": "unsigned char", "float32": "unsigned"}
"""Values move as bits: C++ types of their size."""


@dataclass(frozen=True, eq=False)
class QuantizedTranspose(IntegerKernel):
    """Tile by tile; both sides are accessed in memory order."""

    op = QuantizedRelayout
    algorithm = "transpose"

    @property
    def edges(self) -> tuple[int, ...]:
        return (NARROW, TILE, NARROW_LENGTH)

    def entry(self, stored: str) -> Entry:
        sizes = (("TILE", TILE), ("NARROW", NARROW), ("NARROW_LENGTH", NARROW_LENGTH))
        return Entry("ops/relayout", "relayout_transpose", (("BITS", BITS[stored]), *sizes))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(dict.fromkeys(map(self.entry, BITS)))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        count, rows, columns = matrices(problem)
        height, width = tile_extents(rows, columns)
        blocks = count * ceil_div(rows, height) * ceil_div(columns, width)
        shape = np.array([(count, rows, columns, height, width)], TRANSPOSE_SHAPE)
        entry = self.entry(cast(QuantizedRelayout, problem.op).stored)
        arguments = (X, OUT, struct(shape))
        return (GridLaunch(entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)
