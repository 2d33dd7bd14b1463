"""Layout changes: each image is a matrix, transposed through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import RoundingContract
from r18.graph.ops import Layout, Problem, Relayout
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel

THREADS = 256
TILE = 32
# A matrix at most this narrow (for example 3 channels) is tiled only along its length.
NARROW, NARROW_LENGTH = 8, 256

# Mirrors `TransposeShape` in kernels/ops/relayout.cu.
TRANSPOSE_SHAPE = np.dtype(
    [(name, np.int32) for name in ("count", "rows", "columns", "tile_rows", "tile_columns")]
)


def matrices(problem: Problem) -> tuple[int, int, int]:
    """(count, rows, columns) of the matrices whose transposition is the change of layout."""
    op = cast(Relayout, problem.op)
    n, c, h, w = problem.inputs[0]
    if op.source is op.target:  # a transposed row has the same memory order
        return 1, 1, n * c * h * w
    return (n, c, h * w) if op.source is Layout.NCHW else (n, h * w, c)


def tile_extents(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns per block: square, or a narrow side entirely."""
    if rows <= NARROW:
        return rows, NARROW_LENGTH
    if columns <= NARROW:
        return NARROW_LENGTH, columns
    return TILE, TILE


@dataclass(frozen=True, eq=False)
class Transpose(CudaKernel):
    """Tile by tile; both sides are accessed in memory order. Elements move as bits."""

    op = Relayout
    algorithm = "transpose"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("exact", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (NARROW, TILE, NARROW_LENGTH)

    @property
    def entry(self) -> Entry:
        bits = {2: "unsigned short", 4: "unsigned"}[self.precision.dtype.itemsize]
        sizes = (("TILE", TILE), ("NARROW", NARROW), ("NARROW_LENGTH", NARROW_LENGTH))
        return Entry("ops/relayout", "relayout_transpose", (("BITS", bits), *sizes))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        count, rows, columns = matrices(problem)
        height, width = tile_extents(rows, columns)
        blocks = count * ceil_div(rows, height) * ceil_div(columns, width)
        shape = np.array([(count, rows, columns, height, width)], TRANSPOSE_SHAPE)
        arguments = (X, OUT, struct(shape))
        return (GridLaunch(self.entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)
