"""Implicit GEMM on Hopper's tensor cores for stride 1, by blocks that stay for many tiles. NHWC.

The tiles of `conv_implicit_gemm_wgmma_rows`, one after the other: image rows of the next arrive
while the last one ends. See kernels/conv2d_implicit_gemm_wgmma_stream.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from r18.ops import Conv2d, Problem
from r18.precision import BF16, FP16, TF32, Precision
from r18_cupy.conv import bias_and_residual, conv_shape
from r18_cupy.conv_implicit_gemm_wgmma import (
    ALIGNMENT,
    BARRIER_NBYTES,
    MULTIPROCESSORS,
    WgmmaTile,
    packed_depth,
)
from r18_cupy.conv_implicit_gemm_wgmma_rows import (
    ImplicitGemmWgmmaRows,
    RowsBlocking,
    aligned,
    blocking_of,
    reach_nbytes,
)
from r18_cupy.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.tensor_map import ROW_BYTES, MatrixMap, PatchMap

SLOTS = 2

# The host's side of `StreamShape` in the device code.
STREAM_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "tiles",
            "rows",
            "padded",
            "per_place",
            "patch_nbytes",
            "slot_pitch",
            "slots_nbytes",
            "has_residual",
        )
    ]
)


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The tilings that are compiled: 4 and 3 rows of 58 pixels, 14 of 16, 7 of 30."""
    k = ROW_BYTES // precision.dtype.itemsize
    return tuple(
        WgmmaTile(64, n, k, groups_m=1, groups_n=1, stages=4, blocks=2)
        for n in (232, 224, 208, 176)
    )


def slot_pitch(blocking: RowsBlocking) -> int:
    """A slot that takes a chunk of image rows, or a slab of outputs."""
    return aligned(max(blocking.patch_nbytes, blocking.slab_pitch))


def slots_nbytes(blocking: RowsBlocking, tile: WgmmaTile) -> int:
    """Both slots; the second is only ever for slabs where a tile has one chunk and one slab."""
    alternate = blocking.chunks == tile.m // tile.k == 1
    return slot_pitch(blocking) + (blocking.slab_pitch if alternate else slot_pitch(blocking))


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaStream(ImplicitGemmWgmmaRows):
    """As many blocks as an H200 runs at once, of the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma_stream"

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    def shared_nbytes(self, problem: Problem, tile: WgmmaTile) -> int:
        """Slots and weights, and what products that nobody wants reach into behind them."""
        blocking = blocking_of(problem, tile)
        weights = tile.stages * tile.m * ROW_BYTES
        barriers = (tile.stages + SLOTS) * BARRIER_NBYTES
        last_slot = slot_pitch(blocking) if blocking.chunks > 1 else 0
        return ALIGNMENT + max(
            slots_nbytes(blocking, tile) + weights + barriers,
            last_slot + reach_nbytes(blocking, tile),
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        tile = self.tile_for(problem)
        assert tile is not None, "a problem that is refused has no launches"
        blocking = blocking_of(problem, tile)
        n, o, oh, ow = problem.output
        _, c, h, w = problem.inputs[0]
        storage, depth = self.precision.storage, packed_depth(op, self.precision)
        bias, residual = bias_and_residual(op)
        out = MatrixMap(OUT, storage, oh * ow, o, blocking.rows * ow, n)
        tiles = n * ceil_div(oh, blocking.rows) * ceil_div(o, tile.m)
        shape = (
            tiles,
            blocking.rows,
            blocking.padded,
            ceil_div(2**16, blocking.padded),
            blocking.patch_nbytes,
            slot_pitch(blocking),
            slots_nbytes(blocking, tile),
            int(op.residual),
        )
        return (
            GridLaunch(
                self.entry(tile),
                (min(tiles, MULTIPROCESSORS * tile.blocks), 1, 1),
                (tile.threads, 1, 1),
                (
                    PatchMap(X, storage, (n, c, h, w), blocking.height, blocking.padded),
                    MatrixMap(Pointer(Role.WEIGHT), storage, o, depth, tile.m),
                    replace(out, pointer=residual) if isinstance(residual, Pointer) else out,
                    out,
                    bias,
                    conv_shape(problem),
                    struct(np.array([shape], STREAM_SHAPE)),
                ),
                self.shared_nbytes(problem, tile),
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_stream_kernels() -> tuple[ImplicitGemmWgmmaStream, ...]:
    return tuple(ImplicitGemmWgmmaStream(precision) for precision in (FP16, BF16, TF32))
