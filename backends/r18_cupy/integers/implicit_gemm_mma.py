"""Implicit GEMM of integers on tensor cores (mma.sync). NHWC.

M = N·OH·OW output pixels, N = O channels, K = kh·kw·C; pixels are gathered as they are needed, see
kernels/integers/implicit_gemm_mma.cu. Weights of 4 and 2 bits stay packed in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.quantized import LIMITS, QuantizedConv2d
from r18_cupy.bytes.conv import conv_of
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS, SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.integers.kernel import BYTES, IntegerKernel, ends, epilogue
from r18_cupy.kernel import MAX_ELEMENTS

CHUNK = 16  # bytes of a cp.async, and channels
STEP = 128  # bytes of K per row of a tile


@dataclass(frozen=True)
class IntegerMmaTile(TileConfig):
    """`m` pixels by `n` channels per block, over `k` products (128 bytes) per step.

    warps_m, warps_n: the grid of warps that share the tile.
    stages: K tiles in shared memory at a time.
    blocks: resident blocks per SM if shared memory allows; limits registers.

    Legal tiles: kernels/integers/implicit_gemm_mma.cu asserts 128-byte rows, whole mma tiles per
    warp, and accumulators that fit in the memory of the stages.
    """

    warps_m: int
    warps_n: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_nbytes(self) -> int:
        return self.stages * (self.m + self.n) * STEP


TILES = (
    IntegerMmaTile(128, 128, STEP, warps_m=2, warps_n=2, stages=3, blocks=2),
    IntegerMmaTile(128, 64, STEP, warps_m=2, warps_n=2, stages=3, blocks=3),
    IntegerMmaTile(64, 64, STEP, warps_m=2, warps_n=2, stages=4, blocks=3),
    IntegerMmaTile(32, 32, STEP, warps_m=2, warps_n=2, stages=4, blocks=6),
)
"""The compiled tiles, largest first.

A warp of 64×64 outputs reads the fewest bytes of shared memory per product; smaller ones give more
blocks to problems with few tiles.
"""

GATHER_TILE = TILES[2]
"""The only tile that takes any number of channels: few rows per thread."""


def gathers(op: Conv2d) -> bool:
    """Whether pixels are not whole chunks, so that they are loaded byte by byte."""
    return op.in_channels % CHUNK != 0


def packed_row(op: Conv2d) -> int:
    """Bytes of K per window row: kw·C, padded to whole chunks."""
    return ceil_div(op.kernel_size[1] * op.in_channels, CHUNK) * CHUNK


def packed_depth(op: Conv2d) -> int:
    """K as packed: kh rows, padded to whole K tiles."""
    return ceil_div(op.kernel_size[0] * packed_row(op), STEP) * STEP


# -- choosing ----------------------------------------------------------------------------------

# Figures of an H200, like those in cuda/h200.py.
PRODUCTS_PER_CYCLE = 2048  # per SM by mma.sync
STEP_LATENCY = 250  # cycles per step for the barrier and the first fragments
BLOCK_LATENCY = 2500  # cycles until the first tile has arrived, and for the epilogue


def step_cycles(tile: IntegerMmaTile) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory.

    A row of pixels is written once and read by `warps_n` warps, a row of weights by `warps_m`.
    """
    products = tile.m * tile.n * tile.k / PRODUCTS_PER_CYCLE
    rows = tile.m * (1 + tile.warps_n) + tile.n * (1 + tile.warps_m)
    return max(products, rows * STEP / SHARED_BYTES_PER_CYCLE)


def estimate(problem: Problem, tile: IntegerMmaTile) -> float:
    """Rough cycles of the busiest SM: the maximum of throughput and latency."""
    n, o, oh, ow = problem.output
    steps = packed_depth(cast(QuantizedConv2d, problem.op).conv) // tile.k
    blocks = ceil_div(n * oh * ow, tile.m) * ceil_div(o, tile.n)
    share = ceil_div(blocks, MULTIPROCESSORS)
    work = step_cycles(tile)
    waiting = ceil_div(share, tile.blocks) * (steps * (work + STEP_LATENCY) + BLOCK_LATENCY)
    return max(share * steps * work, waiting)


@lru_cache(maxsize=4096)
def choose(problem: Problem) -> IntegerMmaTile:
    """The tile with the lowest estimate. Pure."""
    if gathers(cast(QuantizedConv2d, problem.op).conv):
        return GATHER_TILE
    return min(TILES, key=lambda tile: estimate(problem, tile))


# -- weights -----------------------------------------------------------------------------------


def pack_weight(weight: Array, op: Conv2d, bits: int) -> Array:
    """OIHW in int8 to [O][depth] of `bits` each, as bytes: position (r, s, c) at r·row + s·C + c,
    zeros elsewhere.
    """
    kh, kw = op.kernel_size
    row = packed_row(op)
    lines: Array = np.zeros((op.out_channels, kh, row), np.int8)
    lines[:, :, : kw * op.in_channels] = weight.transpose(0, 2, 3, 1).reshape(*lines.shape[:2], -1)
    packed: Array = np.zeros((op.out_channels, packed_depth(op)), np.int8)
    packed[:, : kh * row] = lines.reshape(op.out_channels, -1)
    return pack_narrow(packed, bits)


def pack_narrow(rows: Array, bits: int) -> Array:
    """[O][depth] in int8 to [O][depth · bits / 8]: bits of a weight, two's complement, per byte.

    In a word of four bytes, bits i·bits to (i + 1)·bits − 1 of its bytes are the weights 4·i to
    4·i + 3: kernels/integers/narrow_weights.cuh unpacks four at a time.
    """
    per_byte = 8 // bits
    words = rows.view(np.uint8).reshape(len(rows), -1, per_byte, 4) & np.uint8(2**bits - 1)
    shifts = np.arange(per_byte, dtype=np.uint8)[:, np.newaxis] * np.uint8(bits)
    packed: Array = np.bitwise_or.reduce(words << shifts, axis=2)
    return packed.reshape(len(rows), -1)


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class QuantizedImplicitGemmMma(IntegerKernel):
    """Implicit GEMM with mma.sync; subclasses choose the tile."""

    op = QuantizedConv2d
    algorithm = "implicit_gemm_mma"
    minimum_capability: ClassVar[tuple[int, int]] = (8, 0)  # cp.async, m16n8k32

    layout: Layout = Layout.NHWC

    @abstractmethod
    def chosen(self, problem: Problem) -> IntegerMmaTile:
        """The problem's tile. Pure."""

    def entry(self, tile: IntegerMmaTile, stored: str, bits: int, gather: bool) -> Entry:
        """stored: the storage format of the image. bits: of a weight."""
        macros = (("IMAGE", BYTES[stored]), ("BITS", bits), ("GATHER", int(gather)))
        return Entry(
            "integers/implicit_gemm_mma",
            "qconv2d_implicit_gemm_mma",
            (*tile.defines, *macros),
        )

    def entries_of(self, tile: IntegerMmaTile) -> tuple[Entry, ...]:
        return tuple(
            self.entry(tile, stored, bits, gather)
            for gather in ((False, True) if tile == GATHER_TILE else (False,))
            for bits in LIMITS
            for stored in BYTES
        )

    def refuses(self, problem: Problem) -> str | None:
        op = cast(QuantizedConv2d, problem.op).conv
        _, c, h, w = problem.inputs[0]
        if op.out_channels % CHUNK:
            return f"stores {CHUNK} channels at a time, and {op.out_channels} is not a multiple"
        reach = max(h + 2 * op.padding[0], (w + 2 * op.padding[1]) * c)
        if reach > MAX_ELEMENTS:
            return f"indexes with 32 bits; the padded image reaches over {reach} elements"
        if op.out_channels * packed_depth(op) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(QuantizedConv2d, problem.op)
        weight, *others = super().pack(problem, weights)
        return pack_weight(weight, op.conv, op.bits), *others

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, tile = cast(QuantizedConv2d, problem.op), self.chosen(problem)
        n, o, oh, ow = problem.output
        return (
            GridLaunch(
                self.entry(tile, op.stored[0], op.bits, gathers(op.conv)),
                (ceil_div(n * oh * ow, tile.m) * ceil_div(o, tile.n), 1, 1),
                (tile.threads, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), *epilogue(op), OUT),
                    *(conv_shape(conv_of(problem)), *ends(op.output_storage)),
                    *(np.int32(packed_row(op.conv)), np.int32(packed_depth(op.conv))),
                ),
                tile.shared_nbytes,
                overlaps=True,
            ),
        )


@dataclass(frozen=True, eq=False)
class ChosenQuantizedMma(QuantizedImplicitGemmMma):
    """The tile is chosen per problem; see `choose`."""

    def chosen(self, problem: Problem) -> IntegerMmaTile:
        return choose(problem)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for tile in TILES for entry in self.entries_of(tile))

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({CHUNK, *(size for tile in TILES for size in tile.edges)}))


@dataclass(frozen=True, eq=False)
class FixedQuantizedMma(QuantizedImplicitGemmMma):
    """One tile for every problem."""

    config: IntegerMmaTile = field(kw_only=True)

    @property
    def tile(self) -> str:
        return self.config.name

    def chosen(self, problem: Problem) -> IntegerMmaTile:
        return self.config

    def refuses(self, problem: Problem) -> str | None:
        op = cast(QuantizedConv2d, problem.op).conv
        if gathers(op) and self.config != GATHER_TILE:
            return f"copies {CHUNK} channels at a time, and {op.in_channels} is not a multiple"
        return super().refuses(problem)

    def entries(self) -> tuple[Entry, ...]:
        return self.entries_of(self.config)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """One for each function: the storage format of the image, bits, and gathered pixels."""
        return tuple(
            _small(channels, stored, bits)
            for channels in ((CHUNK, CHUNK + 1) if self.config == GATHER_TILE else (CHUNK,))
            for bits in LIMITS
            for stored in BYTES
        )

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({CHUNK, *self.config.edges}))


def _small(channels: int, stored: str, bits: int) -> Problem:
    conv = Conv2d(channels, CHUNK, (3, 3), (1, 1), (1, 1), bias=True, relu=True)
    return Problem(QuantizedConv2d(conv, (stored,), bits), ((1, channels, 3, 5),))


def implicit_gemm_mma_kernels() -> tuple[QuantizedImplicitGemmMma, ...]:
    """The kernel that chooses, then one per tile."""
    return (ChosenQuantizedMma(), *(FixedQuantizedMma(config=tile) for tile in TILES))
