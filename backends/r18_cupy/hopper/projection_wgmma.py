"""A convolution and the projection of its residual, as one sum on `wgmma`. NHWC.

K of the implicit GEMM goes on over the window of the second image: the weights of both convolutions
are rows of one matrix, and the producer gathers the pixels of one after the other; see
kernels/hopper/gather.cuh. Bias is the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, ConvProjection, Layout, Problem, parts_of
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import NULL, OUT, GridLaunch, Pointer, Role, ceil_div
from r18_cupy.cuda.tensor_map import MatrixMap
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.hopper.wgmma import PRECISIONS, WgmmaTile, pack_weight, packed_depth
from r18_cupy.kernel import CudaKernel

Z = Pointer(Role.INPUT, 1)


@dataclass(frozen=True, eq=False)
class ProjectionWgmma(CudaKernel):
    """Implicit GEMM on `wgmma`, with the tile that suits the problem best."""

    op = ConvProjection
    algorithm = "implicit_gemm_wgmma"
    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    layout: Layout = Layout.NHWC

    @property
    def product(self) -> ImplicitGemmWgmma:
        """The convolution alone, whose tiles and consumers these are."""
        return ImplicitGemmWgmma(self.precision)

    @property
    def contract(self) -> RoundingContract:
        return self.product.contract

    @property
    def edges(self) -> tuple[int, ...]:
        return self.product.edges

    def entry(self, tile: WgmmaTile) -> Entry:
        entry = self.product.entry(tile)
        defines = (*entry.defines, ("PROJECTION", 1))
        return replace(entry, symbol=f"{self.op.name}_{self.algorithm}", defines=defines)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.product.tiles))

    def as_convolution(self, problem: Problem) -> Problem:
        """The matrix product that it computes, as a 1×1 convolution: its channels are all of K."""
        op = cast(ConvProjection, problem.op)
        n, o, oh, ow = problem.output
        depth = sum(packed_depth(conv, self.precision) for conv in (op.conv, op.projection))
        biased = op.conv.bias or op.projection.bias
        return Problem(Conv2d(depth, o, (1, 1), bias=biased), ((n, depth, oh, ow),))

    def tile_for(self, problem: Problem) -> WgmmaTile:
        """The tile with the lowest estimate. Pure."""
        return self.product.tile_for(self.as_convolution(problem))

    def refuses(self, problem: Problem) -> str | None:
        projection, conv = parts_of(problem)
        whole = cast(Conv2d, self.as_convolution(problem).op)
        return (
            self.product.refuses(conv)
            or self.product.refuses(projection)
            or self.product.refuses_channels(whole)
        )

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(ConvProjection, problem.op)
        count = len(op.conv.weights())
        parts = (op.conv, weights[:count]), (op.projection, weights[count:])
        rows = [pack_weight(weight, conv, self.precision) for conv, (weight, *_) in parts]
        biases = [bias for _, (_, *some) in parts for bias in some]
        matrix = np.concatenate(rows, axis=1)
        if not biases:
            return (matrix,)
        return matrix, np.asarray(np.sum(biases, axis=0, dtype=np.float64), np.float32)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        projection, conv = parts_of(problem)
        whole, own = cast(Conv2d, self.as_convolution(problem).op), cast(Conv2d, conv.op)
        tile, storage = self.tile_for(problem), self.precision.storage
        n, o, oh, ow = problem.output
        second = replace(self.product.pixels(projection, tile.n), pointer=Z)
        return (
            GridLaunch(
                self.entry(tile),
                (ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m), tile.parts, 1),
                (self.product.threads(tile), 1, 1),
                (
                    self.product.pixels(conv, tile.n),
                    second,
                    self.product.weights(whole, tile),
                    MatrixMap(OUT, storage, n * oh * ow, o, tile.n),
                    Pointer(Role.WEIGHT, 1) if whole.bias else NULL,
                    OUT,
                    conv_shape(conv),
                    conv_shape(projection),
                    np.int32(whole.in_channels // tile.k),
                    np.int32(packed_depth(own, self.precision) // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def projection_wgmma_kernels() -> tuple[ProjectionWgmma, ...]:
    return tuple(ProjectionWgmma(precision) for precision in PRECISIONS)
