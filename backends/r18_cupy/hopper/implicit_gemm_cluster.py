"""Implicit GEMM in float32 on CUDA cores with split-K across a cluster. NCHW.

Where the output has too few tiles to fill a GPU: one launch, and no workspace for partial sums. See
kernels/hopper/implicit_gemm_cluster.cu, and conv/implicit_gemm.py for tiles and packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.implicit_gemm import GatherTile, Tiling, launch_cycles
from r18_cupy.conv.sgemm import gemm_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div

# Estimated cycles per block of a cluster: launching it, and adding its sums.
PART_LATENCY = 300


@dataclass(frozen=True)
class ClusterTile(GatherTile):
    """A tile with split-K across a cluster.

    parts: the blocks of a cluster, at most 8. One without K steps adds zeros.
    """

    parts: int = 1

    @property
    def name(self) -> str:
        """`m64n64k16p4` with four parts."""
        return f"{super().name}p{self.parts}"

    @property
    def entry(self) -> Entry:
        source = "hopper/implicit_gemm_cluster"
        return Entry(source, "conv2d_implicit_gemm_cluster", self.defines)


def _large(parts: int) -> ClusterTile:
    return ClusterTile(64, 64, 16, tm=8, tn=4, stages=3, parts=parts)


def _small(parts: int) -> ClusterTile:
    return ClusterTile(32, 64, 16, tm=4, tn=4, stages=4, parts=parts)


TILES = (*map(_large, (2, 4, 6, 8)), *map(_small, (2, 4)))


def estimate(problem: Problem, tile: ClusterTile) -> float:
    """Rough cycles of the busiest SM, with the addition of the parts."""
    return launch_cycles(problem, Tiling(tile, tile.parts)) + PART_LATENCY * tile.parts


@dataclass(frozen=True, eq=False)
class ImplicitGemmCluster(ConvKernel):
    """One launch; the tile and the number of parts are chosen per problem."""

    algorithm = "implicit_gemm_cluster"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    batch_invariant: ClassVar[bool] = False  # larger batches use fewer parts

    precision: Precision = FP32

    @property
    def tiles(self) -> tuple[ClusterTile, ...]:
        return TILES

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({size for tile in self.tiles for size in tile.edges}))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(tile.entry for tile in self.tiles)

    def tile_for(self, problem: Problem) -> ClusterTile:
        """The tile with the lowest estimate. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, tile))

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *bias = super().pack(problem, weights)
        return (self.tile_for(problem).pack(weight), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, tile = cast(Conv2d, problem.op), self.tile_for(problem)
        n, o, oh, ow = problem.output
        tiling = Tiling(tile, tile.parts)
        gemm = gemm_shape(problem, tile, tile.k_tiles(op), split_tiles=tiling.split_tiles(op))
        return (
            GridLaunch(
                tile.entry,
                (ceil_div(o, tile.m) * ceil_div(n * oh * ow, tile.n), 1, tile.parts),
                (tile.threads, 1, 1),
                (X, Pointer(Role.WEIGHT), *bias_and_residual(op), OUT, conv_shape(problem), gemm),
                overlaps=True,
            ),
        )


def implicit_gemm_cluster_kernels() -> tuple[ImplicitGemmCluster, ...]:
    return (ImplicitGemmCluster(),)
