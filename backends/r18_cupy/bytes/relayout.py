"""Layout changes of bytes: the transposition of kernels/ops/relayout.cu."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from r18.graph.ops import Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.relayout import (
    NARROW,
    NARROW_LENGTH,
    THREADS,
    TILE,
    TRANSPOSE_SHAPE,
    matrices,
    tile_extents,
)

BYTE = "unsigned char"


def transposing(bits: str) -> Entry:
    """The function for values of a C++ type: they move as bits."""
    sizes = (("TILE", TILE), ("NARROW", NARROW), ("NARROW_LENGTH", NARROW_LENGTH))
    return Entry("ops/relayout", "relayout_transpose", (("BITS", bits), *sizes))


@dataclass(frozen=True, eq=False)
class ByteTranspose(CudaKernel):
    """Tile by tile; both sides are accessed in memory order."""

    algorithm = "transpose"

    @abstractmethod
    def entry_of(self, problem: Problem) -> Entry:
        """The function that computes a problem."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (NARROW, TILE, NARROW_LENGTH)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        count, rows, columns = matrices(problem)
        height, width = tile_extents(rows, columns)
        blocks = count * ceil_div(rows, height) * ceil_div(columns, width)
        shape = np.array([(count, rows, columns, height, width)], TRANSPOSE_SHAPE)
        arguments, entry = (X, OUT, struct(shape)), self.entry_of(problem)
        return (GridLaunch(entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)
