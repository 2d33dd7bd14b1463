"""The float32 GEMM behind convolutions: tiles, shape struct, packed weights.

M = O output channels, N = n·OH·OW output pixels, K = C·kh·kw products. The host side of
kernels/conv/sgemm.cuh and kernels/common/fast_divide.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18_cupy.cuda.launch import ceil_div, struct
from r18_cupy.cuda.tile import TileConfig

LANES_M, LANES_N = 4, 8  # of a warp
THREADS_OF_A_MULTIPROCESSOR = 512  # at 128 registers each

FAST_DIVISOR = np.dtype([(name, np.uint32) for name in ("divisor", "multiplier", "shift")])

GEMM_SHAPE = np.dtype(
    [
        *((name, np.int32) for name in ("pixels", "depth", "k_tiles", "split_tiles", "m_tiles")),
        ("first_pixel", np.int32),
        ("split_size", np.uint64),
        *((name, FAST_DIVISOR) for name in ("plane", "row", "window", "window_row")),
    ],
    align=True,
)


@dataclass(frozen=True)
class GemmTile(TileConfig):
    """`m` channels by `n` pixels per block, over `k` products per step.

    tm, tn: accumulators per thread, multiples of 4.
    stages: pairs of tiles in shared memory; one pair is being multiplied.

    Legal tiles: kernels/conv/sgemm.cuh asserts that warps fill the tile, at most 256 threads, at
    least 2 stages, and 48 KB of shared memory.
    """

    tm: int
    tn: int
    stages: int

    @property
    def threads(self) -> int:
        return self.m // (LANES_M * self.tm) * (self.n // (LANES_N * self.tn)) * 32

    @property
    def resident(self) -> int:
        """Resident blocks per SM."""
        return THREADS_OF_A_MULTIPROCESSOR // self.threads


def fast_divisor(divisor: int) -> tuple[int, int, int]:
    """The fields of `FastDivisor`: n // divisor == (n·multiplier) >> (32 + shift), for n < 2³¹.

    Granlund and Montgomery, PLDI 1994, section 4. Multiplier 0 stands for division by 1.
    """
    if divisor == 1:
        return (1, 0, 0)
    bits = (divisor - 1).bit_length()
    return (divisor, ceil_div(2 ** (31 + bits), divisor), bits - 1)


def divisor_struct(divisor: int) -> npt.NDArray[Any]:
    """`FastDivisor` as an argument."""
    return struct(np.array([fast_divisor(divisor)], FAST_DIVISOR))


def gemm_shape(
    problem: Problem,
    tile: TileConfig,
    k_tiles: int,
    *,
    split_tiles: int | None = None,
    split_size: int = 0,
    first_pixel: int = 0,
) -> npt.NDArray[Any]:
    """The problem as the kernels' `GemmShape` argument. Default: no split-K."""
    op = cast(Conv2d, problem.op)
    n, o, oh, ow = problem.output
    kh, kw = op.kernel_size
    fields = (
        n * oh * ow,
        op.depth,
        k_tiles,
        k_tiles if split_tiles is None else split_tiles,
        ceil_div(o, tile.m),
        first_pixel,
        split_size,
        *(fast_divisor(d) for d in (oh * ow, ow, kh * kw, kw)),
    )
    return struct(np.array([fields], GEMM_SHAPE))


def pack_rows(matrix: Array, tile: TileConfig) -> Array:
    """Pack the M side of a GEMM, (K, M), as tiles in the order in which a block reads them.

    Returns (M tiles, K, m), K padded to a multiple of `tile.k`; padding is zero.
    """
    depth, rows = matrix.shape
    padded = np.pad(matrix, ((0, -depth % tile.k), (0, -rows % tile.m)))
    tiles = padded.reshape(padded.shape[0], -1, tile.m).transpose(1, 0, 2)
    return np.ascontiguousarray(tiles)
