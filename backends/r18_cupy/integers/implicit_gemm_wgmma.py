"""Implicit GEMM of integers with TMA and `wgmma`. NHWC.

TMA gathers the pixels of each window position, `wgmma` multiplies them; see
kernels/integers/hopper/implicit_gemm_wgmma.cu. Split-K: where there are too few tiles to fill a
GPU, the CTAs of a cluster divide K.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from r18.graph.ops import Conv2d, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.h200 import MULTIPROCESSORS, PRODUCT_BYTES_PER_CYCLE, SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.integers.kernel import conv_of, epilogue
from r18_cupy.integers.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.integers.wgmma import (
    CHUNK,
    GROUP_M,
    SLAB_ROW,
    IntegerTile,
    QuantizedWgmmaConv,
    packed_depth,
)


def tile_of(
    k: int, m: int, n: int, stages: int, blocks: int, parts: int = 1, groups_n: int = 1
) -> IntegerTile:
    """The tile with as many warpgroups as its channels need, times `groups_n`."""
    return IntegerTile(m, n, k, m // GROUP_M, groups_n, stages, blocks, parts)


TILES = (
    # A warpgroup with many pixels reads the fewest bytes of shared memory per product.
    tile_of(128, 128, 256, stages=4, blocks=1),
    tile_of(128, 128, 192, stages=4, blocks=1),
    tile_of(128, 128, 112, stages=3, blocks=2),
    tile_of(128, 128, 96, stages=3, blocks=2),
    tile_of(128, 64, 256, stages=4, blocks=1, groups_n=2),
    tile_of(128, 64, 128, stages=4, blocks=2),
    tile_of(128, 64, 64, stages=4, blocks=3),
    # For a few images, K is split, and as much is prefetched as fits.
    tile_of(128, 128, 128, stages=6, blocks=1, parts=4),
    tile_of(128, 64, 128, stages=8, blocks=1, parts=4),
    tile_of(128, 128, 64, stages=6, blocks=1, parts=2),
    tile_of(128, 128, 64, stages=8, blocks=1, parts=4),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=2),
    tile_of(128, 64, 64, stages=6, blocks=2, parts=4),
    tile_of(128, 64, 64, stages=8, blocks=1, parts=8),
    # For 64 channels or fewer.
    tile_of(64, 128, 256, stages=8, blocks=1),
    tile_of(64, 128, 192, stages=8, blocks=1),
    tile_of(64, 128, 112, stages=6, blocks=2),
    tile_of(64, 64, 128, stages=8, blocks=2),
    tile_of(64, 64, 64, stages=8, blocks=3),
    tile_of(64, 64, 64, stages=12, blocks=2, parts=2),
)
"""The compiled tiles, by K and by outputs."""

# -- choosing ----------------------------------------------------------------------------------

# Fitted so that the estimates order the times of every tile on an H200, for every convolution of a
# ResNet-18: the chosen tiles take 0.6 % longer than the best ones.
STEP_LATENCY = 30  # cycles per step on top of its products: waiting, issuing
COPY_LATENCY = 2700  # cycles from issuing a stage's loads until they arrive,
COPY_BYTES_PER_CYCLE = 1500  # plus a part that grows with its bytes
ISSUE_LATENCY = 520  # cycles per stage that is filled before the first product
L2_BYTES_PER_CYCLE = 4400  # to all SMs together
TILE_LATENCY = 2000  # cycles per tile outside of its steps,
OUTPUTS_PER_CYCLE = 2.5  # plus a part that grows with its outputs
CLUSTER_LATENCY = 5300  # cycles for a cluster: launching it, waiting for each other,
PART_LATENCY = 550  # plus a part for each of its CTAs
CLUSTER_MULTIPROCESSORS = {8: 104}  # a cluster must fit in one GPC


def step_cycles(tile: IntegerTile) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory."""
    products = tile.m * tile.n * tile.k / PRODUCT_BYTES_PER_CYCLE
    rows = tile.m * (1 + tile.groups_n) + tile.n * (1 + tile.groups_m)
    return max(products, rows * tile.k / SHARED_BYTES_PER_CYCLE) + STEP_LATENCY


def estimate(problem: Problem, tile: IntegerTile) -> float:
    """Rough cycles: the tiles that a block computes in turn, while others share its SM.

    A step takes the maximum of its products, the L2 traffic of all blocks, and the latency of its
    loads over the stages that are loaded ahead.
    """
    op = cast(QuantizedConv2d, problem.op).conv
    n, o, oh, ow = problem.output
    steps = ceil_div(packed_depth(op, tile.k) // tile.k, tile.parts)
    blocks = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m) * tile.parts
    multiprocessors = CLUSTER_MULTIPROCESSORS.get(tile.parts, MULTIPROCESSORS)
    resident = multiprocessors * tile.blocks
    together = min(tile.blocks, ceil_div(blocks, multiprocessors))
    stage = tile.stage_nbytes
    copy = COPY_LATENCY + stage / COPY_BYTES_PER_CYCLE
    reading = min(blocks, resident) * stage / L2_BYTES_PER_CYCLE
    step = max(together * step_cycles(tile), copy / (tile.stages - 1), reading)
    ends = TILE_LATENCY + together * tile.m * tile.n / OUTPUTS_PER_CYCLE
    ahead = ISSUE_LATENCY * min(steps, tile.stages)
    parts = CLUSTER_LATENCY + PART_LATENCY * tile.parts if tile.parts > 1 else 0
    return ahead + ceil_div(blocks, resident) * (steps * step + ends) + parts


# -- kernel ------------------------------------------------------------------------------------


def blocks_at_once(tile: IntegerTile) -> int:
    """Blocks that an H200 runs at a time."""
    return MULTIPROCESSORS * tile.blocks


class QuantizedImplicitGemmWgmma(QuantizedWgmmaConv):
    """Implicit GEMM on integer `wgmma`, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma"
    source = "integers/hopper/implicit_gemm_wgmma"

    @property
    def tiles(self) -> tuple[IntegerTile, ...]:
        return TILES

    def tile_for(self, problem: Problem) -> IntegerTile:
        """The tile with the lowest estimate. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, tile))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """And several tiles for each persistent block, with a residual and without."""
        run = max((blocks_at_once(t) * t.n for t in self.tiles if t.parts == 1), default=0)
        image = (ceil_div(2 * run + 1, 7 * 9), CHUNK, 7, 9)
        plain = Conv2d(CHUNK, CHUNK, (1, 3), padding=(0, 1), bias=True)
        added = replace(plain, residual=True, relu=True)
        several = (
            Problem(QuantizedConv2d(added, ("uint8", "int8")), (image, image)),
            Problem(QuantizedConv2d(plain, ("int8",)), (image,)),
        )
        return (*super().extra_problems, *(several if run else ()))

    def pixels(self, problem: Problem, tile: IntegerTile) -> ByteIm2colMap:
        """The tensor map of the input."""
        op = cast(QuantizedConv2d, problem.op).conv
        n, c, h, w = problem.inputs[0]
        windows = (op.kernel_size, op.stride, op.padding)
        return ByteIm2colMap(X, "uint8", (n, c, h, w), *windows, tile.n, tile.k)

    def refuses(self, problem: Problem) -> str | None:
        if reason := self.refuses_channels(cast(QuantizedConv2d, problem.op).conv):
            return reason
        if reason := self.pixels(problem, self.tiles[0]).refusal():
            return f"TMA takes {reason}"
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(QuantizedConv2d, problem.op)
        tile = self.tile_for(problem)
        n, o, oh, ow = problem.output
        tiles = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m)
        blocks = tiles if tile.parts > 1 else min(tiles, blocks_at_once(tile))

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, n * oh * ow), (SLAB_ROW, tile.group_n))

        return (
            GridLaunch(
                self.entry(tile, op.stored[0]),
                (blocks, tile.parts, 1),
                (tile.threads, 1, 1),
                (
                    self.pixels(problem, tile),
                    self.weights(op.conv, tile),
                    slab(Pointer(Role.INPUT, 1) if op.conv.residual else OUT),
                    slab(OUT),
                    *epilogue(op),
                    OUT,
                    conv_shape(conv_of(problem)),
                    np.int32(tiles),
                    np.int32(packed_depth(op.conv, tile.k) // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


def implicit_gemm_wgmma_kernels() -> tuple[QuantizedImplicitGemmWgmma, ...]:
    return (QuantizedImplicitGemmWgmma(),)
