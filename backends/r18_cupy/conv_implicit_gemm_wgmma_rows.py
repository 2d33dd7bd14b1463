"""Implicit GEMM on Hopper's tensor cores for stride 1: each pixel is copied once. NHWC.

What `conv_implicit_gemm_wgmma` gathers anew for each position of the window lies here in shared
memory already: a block has the image rows under its output rows, and reads them from shifted
places. See kernels/conv2d_implicit_gemm_wgmma_rows.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import RoundingContract
from r18.ops import Conv2d, Layout, Problem
from r18.precision import BF16, FP16, TF32, Precision
from r18_cupy.compiler import Entry
from r18_cupy.conv import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv_implicit_gemm_wgmma import (
    ALIGNMENT,
    BARRIER_NBYTES,
    WgmmaTile,
    WgmmaWeights,
    chunk_of,
    packed_depth,
)
from r18_cupy.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.tensor_map import MAX_BOX, ROW_BYTES, MatrixMap, PatchMap

SHARED_NBYTES = 227 * 1024  # a block's, of the device

# The host's side of `RowsShape` in the device code.
ROWS_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "rows",
            "padded",
            "per_place",
            "slots",
            "slot_pitch",
            "patch_nbytes",
            "slab_pitch",
            "shared_nbytes",
        )
    ]
)


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The tilings that are compiled: runs of pixels that the network's rows fill.

    4 rows of 58 pixels but for the last two, 14 of 16, 7 of 30; and half as many for small batches.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    return tuple(
        WgmmaTile(64, n, k, groups_m=1, groups_n=1, stages=4, blocks=2)
        for n in (232, 224, 208, 128)
    )


@dataclass(frozen=True)
class RowsBlocking:
    """How a block covers a problem.

    rows:   of output, of `width` pixels each.
    padded: pixels of an image row, padding included.
    height: image rows under them.
    chunks: of the input's channels, 128 bytes each.
    slabs:  of the residual's channels, likewise.
    """

    rows: int
    width: int
    padded: int
    height: int
    chunks: int
    slabs: int

    @property
    def patch_nbytes(self) -> int:
        """A chunk of the image rows."""
        return self.height * self.padded * ROW_BYTES

    @property
    def slab_pitch(self) -> int:
        """A slab of outputs, and a row behind it for what is none."""
        return aligned((self.rows * self.width + 1) * ROW_BYTES)

    @property
    def slots(self) -> int:
        """Chunks, and then slabs, that are in shared memory at once."""
        return min(2, self.chunks + self.slabs)

    @property
    def slot_pitch(self) -> int:
        return aligned(max(self.patch_nbytes, self.rows * self.width * ROW_BYTES))

    @property
    def slots_nbytes(self) -> int:
        """Of one chunk alone, the second slot has to hold no more than a slab."""
        if self.slots == 1:
            return self.slot_pitch
        return self.slot_pitch + (self.slot_pitch if self.chunks > 1 else self.slab_pitch)


def aligned(nbytes: int) -> int:
    """Up to where the next slot, or slab, may begin."""
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


def blocking_of(problem: Problem, tile: WgmmaTile) -> RowsBlocking:
    """As many rows as the tile's pixels hold; none where a row is longer. Pure."""
    op = cast(Conv2d, problem.op)
    _, c, _, w = problem.inputs[0]
    _, _, oh, ow = problem.output
    kh, kw = op.kernel_size
    padded = w + 2 * op.padding[1]
    rows = min((tile.n + kw - 1) // padded, oh)
    slabs = tile.m // tile.k if op.residual else 0
    return RowsBlocking(rows, ow, padded, rows + kh - 1, ceil_div(c, tile.k), slabs)


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaRows(WgmmaWeights, ConvKernel):
    """One tile for every problem."""

    algorithm = "implicit_gemm_wgmma_rows"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    layout: Layout = Layout.NHWC
    config: WgmmaTile = field(kw_only=True)

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        return RoundingContract("sum", p.accumulate, p.storage, truncates=True)

    @property
    def tile(self) -> str:
        return self.config.name

    @property
    def entry(self) -> Entry:
        name = "conv2d_implicit_gemm_wgmma_rows"
        return Entry(name, name, (self.storage, *self.config.defines), self.family)

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({chunk_of(self.precision), *self.config.edges}))

    def shared_nbytes(self, problem: Problem) -> int:
        """Slots and weights, and beyond these what is only reached into.

        Outputs take their place at the end. Where the rows are fewer than the tile's pixels,
        products that nobody wants read on behind the image rows.
        """
        tile, blocking = self.config, blocking_of(problem, self.config)
        weights = tile.stages * tile.m * ROW_BYTES
        barriers = (tile.stages + blocking.slots) * BARRIER_NBYTES
        last_slot = (blocking.slots - 1) * blocking.slot_pitch
        reach = blocking.height * blocking.padded + max(0, tile.n - blocking.rows * blocking.padded)
        return ALIGNMENT + max(
            blocking.slots_nbytes + weights + barriers,
            last_slot + (reach + MAX_BOX) * ROW_BYTES if blocking.chunks > 1 else 0,
            (reach + MAX_BOX) * ROW_BYTES,
            tile.m // tile.k * blocking.slab_pitch,
        )

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.stride != (1, 1):
            return f"reads its windows from whole rows, one pixel apart; the stride is {op.stride}"
        if reason := self.refuses_channels(op):
            return reason
        blocking = blocking_of(problem, self.config)
        if blocking.rows < 1:
            most = self.config.n + op.kernel_size[1] - 1
            return f"holds rows of {most} pixels with their padding, got {blocking.padded}"
        if max(blocking.height, blocking.padded, blocking.rows * blocking.width) > MAX_BOX:
            return f"copies at most {MAX_BOX} rows of {MAX_BOX} pixels, got {blocking}"
        needed = self.shared_nbytes(problem)
        if needed > SHARED_NBYTES:
            return f"has {SHARED_NBYTES} bytes of shared memory, and the image rows need {needed}"
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        tile, blocking = self.config, blocking_of(problem, self.config)
        n, o, oh, ow = problem.output
        _, c, h, w = problem.inputs[0]
        storage, depth = self.precision.storage, packed_depth(op, self.precision)
        bias, residual = bias_and_residual(op)
        out = MatrixMap(OUT, storage, oh * ow, o, blocking.rows * ow, n)
        shape = (
            blocking.rows,
            blocking.padded,
            ceil_div(2**16, blocking.padded),
            blocking.slots,
            blocking.slot_pitch,
            blocking.patch_nbytes,
            blocking.slab_pitch,
            blocking.slots_nbytes,
        )
        return (
            GridLaunch(
                self.entry,
                (n * ceil_div(oh, blocking.rows) * ceil_div(o, tile.m), 1, 1),
                (tile.threads, 1, 1),
                (
                    PatchMap(X, storage, (n, c, h, w), blocking.height, blocking.padded),
                    MatrixMap(Pointer(Role.WEIGHT), storage, o, depth, tile.m),
                    replace(out, pointer=residual) if isinstance(residual, Pointer) else out,
                    out,
                    bias,
                    np.int32(op.residual),
                    conv_shape(problem),
                    struct(np.array([shape], ROWS_SHAPE)),
                ),
                self.shared_nbytes(problem),
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_rows_kernels() -> tuple[ImplicitGemmWgmmaRows, ...]:
    """Per precision its tiles."""
    return tuple(
        ImplicitGemmWgmmaRows(precision, config=tile)
        for precision in (FP16, BF16, TF32)
        for tile in tiles_of(precision)
    )
