"""Implicit GEMM of bytes with TMA and `wgmma`. NHWC.

TMA gathers the pixels of each window position, `wgmma` multiplies them; see
kernels/bytes/hopper/gather_kernel.cuh. Split-K: where there are too few tiles to fill a GPU, the
CTAs of a cluster divide K.
"""

from __future__ import annotations

import numpy as np

from r18.graph.ops import Problem
from r18_cupy.bytes.conv import conv_of, conv_op, residual_of
from r18_cupy.bytes.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.bytes.wgmma import SLAB_ROW, ByteTile, ByteWgmmaConv, packed_depth
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.h200 import MULTIPROCESSORS, PRODUCT_BYTES_PER_CYCLE, SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, X, ceil_div

# -- choosing ----------------------------------------------------------------------------------

# Fitted so that the estimates order the times of every tile on an H200, for every convolution of a
# ResNet-18: the chosen tiles took 0.6 % longer than the best ones. Those of a cluster are from
# before its CTAs sent their sums; the shipped table names the best tiles that `r18 tune` found.
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


def step_cycles(tile: ByteTile) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory."""
    products = tile.m * tile.n * tile.k / PRODUCT_BYTES_PER_CYCLE
    rows = tile.m * (1 + tile.groups_n) + tile.n * (1 + tile.groups_m)
    return max(products, rows * tile.k / SHARED_BYTES_PER_CYCLE) + STEP_LATENCY


def estimate(problem: Problem, tile: ByteTile) -> float:
    """Rough cycles: the tiles that a block computes in turn, while others share its SM.

    A step takes the maximum of its products, the L2 traffic of all blocks, and the latency of its
    loads over the stages that are loaded ahead.
    """
    op = conv_op(problem)
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


def blocks_at_once(tile: ByteTile) -> int:
    """Blocks that an H200 runs at a time."""
    return MULTIPROCESSORS * tile.blocks


class ByteImplicitGemmWgmma(ByteWgmmaConv):
    """Implicit GEMM, with the tile that suits the problem best."""

    algorithm = "implicit_gemm_wgmma"

    def tile_for(self, problem: Problem) -> ByteTile:
        """The tile with the lowest estimate. Pure."""
        return min(self.tiles, key=lambda tile: estimate(problem, tile))

    def pixels(self, problem: Problem, tile: ByteTile) -> ByteIm2colMap:
        """The tensor map of the input."""
        op = conv_op(problem)
        n, c, h, w = problem.inputs[0]
        windows = (op.kernel_size, op.stride, op.padding)
        return ByteIm2colMap(X, "uint8", (n, c, h, w), *windows, tile.n, tile.k)

    def refuses(self, problem: Problem) -> str | None:
        if reason := self.refuses_channels(conv_op(problem)):
            return reason
        if reason := self.pixels(problem, self.tiles[0]).refusal():
            return f"TMA takes {reason}"
        return None

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = conv_op(problem)
        tile = self.tile_for(problem)
        n, o, oh, ow = problem.output
        tiles = ceil_div(n * oh * ow, tile.n) * ceil_div(o, tile.m)
        blocks = tiles if tile.parts > 1 else min(tiles, blocks_at_once(tile))
        residual = residual_of(problem)
        bias, multiplier, *others = self.factors(problem)

        def slab(pointer: Pointer) -> ByteMap:
            return ByteMap(pointer, (o, n * oh * ow), (SLAB_ROW, tile.group_n))

        return (
            GridLaunch(
                self.entry_of(problem, tile),
                (blocks, tile.parts, 1),
                (tile.threads, 1, 1),
                (
                    self.pixels(problem, tile),
                    self.weights(op, tile),
                    slab(residual if isinstance(residual, Pointer) else OUT),
                    slab(OUT),
                    *(bias, multiplier, residual, *others),
                    OUT,
                    conv_shape(conv_of(problem)),
                    np.int32(tiles),
                    np.int32(packed_depth(op, tile.k) // tile.k),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )
