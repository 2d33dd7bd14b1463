"""Persistent implicit GEMM with TMA and `wgmma` for stride 1, fp16 and bf16. NHWC.

Each block computes several tiles of implicit_gemm_wgmma_halo.py: the image rows of the next tile
arrive while the last one ends. See kernels/hopper/implicit_gemm_wgmma_persistent.cu. The id keeps
the algorithm's earlier word, `implicit_gemm_wgmma_stream`.
"""

from __future__ import annotations

from dataclasses import dataclass

from r18.graph.precision import BF16, FP16, Precision
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.tensor_map import ROW_BYTES
from r18_cupy.hopper.implicit_gemm_wgmma_halo import (
    HaloBlocking,
    ImplicitGemmWgmmaHalo,
    Slots,
    aligned,
    tile_of,
)
from r18_cupy.hopper.wgmma import WgmmaTile


def tiles_of(precision: Precision) -> tuple[WgmmaTile, ...]:
    """The compiled tiles: 4 and 3 rows of 58 pixels, 14 of 16, 7 of 30."""
    k = ROW_BYTES // precision.dtype.itemsize
    return tuple(tile_of(n, k, stages=4, blocks=2) for n in (232, 224, 208, 176))


@dataclass(frozen=True, eq=False)
class ImplicitGemmWgmmaPersistent(ImplicitGemmWgmmaHalo):
    """As many blocks as an H200 runs at a time, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma_stream"
    source = "hopper/implicit_gemm_wgmma_persistent"

    @property
    def tiles(self) -> tuple[WgmmaTile, ...]:
        return tiles_of(self.precision)

    def slots(self, blocking: HaloBlocking, tile: WgmmaTile) -> Slots:
        """Two slots, each for a chunk of image rows or a slab of outputs; with one chunk and one
        slab per tile, the second slot holds only slabs.
        """
        pitch = aligned(max(blocking.patch_nbytes, blocking.slab_pitch))
        alternate = blocking.chunks == tile.m // tile.k == 1
        return Slots(2, pitch, pitch + (blocking.slab_pitch if alternate else pitch))

    def blocks(self, tiles: int, tile: WgmmaTile) -> int:
        return min(tiles, MULTIPROCESSORS * tile.blocks)


def implicit_gemm_wgmma_persistent_kernels() -> tuple[ImplicitGemmWgmmaPersistent, ...]:
    """Kernels with 16-bit storage only. With float32 two output slabs would delay the next image
    rows, and one block per tile is faster.
    """
    return tuple(ImplicitGemmWgmmaPersistent(precision) for precision in (FP16, BF16))
