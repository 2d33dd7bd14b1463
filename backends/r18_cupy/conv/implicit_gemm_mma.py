"""Implicit GEMM on tensor cores (mma.sync): fp16, bf16, tf32 and fp16x3. NHWC.

M = N·OH·OW output pixels, N = O channels, K = kh·kw·C; pixels are gathered as they are needed, see
kernels/conv/implicit_gemm_mma.cu. Split-K: where M·N has too few tiles to fill a GPU, each split
writes its sums to the workspace, and a second launch adds them in order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape, output_format
from r18_cupy.conv.operands import round_to_tf32, split
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS, SHARED_BYTES_PER_CYCLE
from r18_cupy.cuda.launch import (
    NULL,
    OUT,
    WORKSPACE,
    GridLaunch,
    Pointer,
    Role,
    X,
    ceil_div,
)
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import MAX_ELEMENTS

CHUNK_BYTES = 16  # of a cp.async
ROW_BYTES = 128  # of K per row of a tile
REDUCE_THREADS = 256
PROMOTED = 16  # products of fp16x3 per sum that is added in registers: a step


@dataclass(frozen=True)
class MmaTile(TileConfig):
    """`m` pixels by `n` channels per block, over `k` products (128 bytes) per step.

    warps_m, warps_n: the grid of warps that share the tile.
    stages: K tiles in shared memory at a time.
    blocks: resident blocks per SM if shared memory allows; limits registers.
    split:  fp16x3: float32 operands as two float16 numbers each.

    Legal tiles: kernels/conv/implicit_gemm_mma.cu asserts 128-byte rows, whole mma tiles per warp,
    and accumulators that fit in the memory of the stages.
    """

    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    split: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_nbytes(self) -> int:
        return self.stages * (self.m + self.n) * ROW_BYTES


@dataclass(frozen=True)
class Blocking:
    """How a problem is computed: tile, and number of splits of K."""

    tile: MmaTile
    parts: int = 1


def tiles_of(precision: Precision) -> tuple[MmaTile, ...]:
    """The compiled tiles, largest first.

    A warp of 64×64 outputs reads the fewest bytes of shared memory per product; smaller ones give
    more blocks to problems with few tiles. fp16x3 has two accumulators per output, so a warp has
    registers for 64×32.
    """
    k = ROW_BYTES // precision.dtype.itemsize
    if precision.splits:
        return (
            MmaTile(128, 64, k, warps_m=2, warps_n=2, stages=3, blocks=2, split=True),
            MmaTile(64, 64, k, warps_m=2, warps_n=2, stages=4, blocks=3, split=True),
        )
    return (
        MmaTile(128, 128, k, warps_m=2, warps_n=2, stages=3, blocks=2),
        MmaTile(128, 64, k, warps_m=2, warps_n=2, stages=3, blocks=3),
        MmaTile(64, 64, k, warps_m=2, warps_n=2, stages=4, blocks=3),
    )


def chunk_of(precision: Precision) -> int:
    """Elements per 16-byte copy."""
    return CHUNK_BYTES // precision.dtype.itemsize


def gathers(op: Conv2d, precision: Precision) -> bool:
    """Whether pixels are not whole chunks, so that they are loaded element by element."""
    return op.in_channels % chunk_of(precision) != 0


def packed_row(op: Conv2d, precision: Precision) -> int:
    """Elements of K per window row: kw·C, padded to whole chunks."""
    chunk = chunk_of(precision)
    return ceil_div(op.kernel_size[1] * op.in_channels, chunk) * chunk


def packed_depth(op: Conv2d, precision: Precision) -> int:
    """K as packed: kh rows, padded to whole K tiles."""
    step = ROW_BYTES // precision.dtype.itemsize
    return ceil_div(op.kernel_size[0] * packed_row(op, precision), step) * step


# -- choosing ----------------------------------------------------------------------------------

# Figures of an H200, like those in cuda/h200.py.
PRODUCTS_PER_CYCLE = {2: 1280, 4: 640}  # per SM by mma.sync, by bytes of an operand
STEP_LATENCY = 250  # cycles per step for the barrier and the first fragments
BLOCK_LATENCY = 2500  # cycles until the first tile has arrived, and for the epilogue
REDUCE_LATENCY = 3500  # cycles of one more launch
PARTIAL_BYTES_PER_CYCLE = 2000  # of the device: partial sums, written and read
MAX_PARTS = 32


def step_cycles(tile: MmaTile, itemsize: int) -> float:
    """Cycles of an SM for one step of a block: the maximum of products and shared memory.

    A row of pixels is written once and read by `warps_n` warps, a row of weights by `warps_m`.
    """
    products = tile.m * tile.n * tile.k / PRODUCTS_PER_CYCLE[itemsize]
    if tile.split:
        products = 3 * tile.m * tile.n * tile.k / PRODUCTS_PER_CYCLE[2]
    rows = tile.m * (1 + tile.warps_n) + tile.n * (1 + tile.warps_m)
    return max(products, rows * ROW_BYTES / SHARED_BYTES_PER_CYCLE)


def estimate(problem: Problem, precision: Precision, blocking: Blocking) -> float:
    """Rough cycles of the busiest SM: the maximum of throughput and latency."""
    op = cast(Conv2d, problem.op)
    n, o, oh, ow = problem.output
    tile, itemsize = blocking.tile, precision.dtype.itemsize
    steps = ceil_div(packed_depth(op, precision) // tile.k, blocking.parts)
    blocks = ceil_div(n * oh * ow, tile.m) * ceil_div(o, tile.n) * blocking.parts
    share = ceil_div(blocks, MULTIPROCESSORS)
    work = step_cycles(tile, itemsize)
    busy = share * steps * work
    waiting = ceil_div(share, tile.blocks) * (steps * (work + STEP_LATENCY) + BLOCK_LATENCY)
    reduction = 0.0
    if blocking.parts > 1:
        partial_nbytes = 2 * 4 * blocking.parts * math.prod(problem.output)
        reduction = REDUCE_LATENCY + partial_nbytes / PARTIAL_BYTES_PER_CYCLE
    return max(busy, waiting) + reduction


def possible_parts(steps: int) -> tuple[int, ...]:
    """The split counts without empty splits for `steps` K steps."""
    return tuple(sorted({ceil_div(steps, ceil_div(steps, p)) for p in range(1, MAX_PARTS + 1)}))


@lru_cache(maxsize=4096)
def choose(problem: Problem, precision: Precision) -> Blocking:
    """The tile and split count with the lowest estimate. Pure."""
    op = cast(Conv2d, problem.op)
    depth = packed_depth(op, precision)
    tiles = tiles_of(precision)
    if gathers(op, precision):
        tiles = (gather_tile(precision),)
    blockings = [Blocking(t, p) for t in tiles for p in possible_parts(depth // t.k)]
    return min(blockings, key=lambda blocking: estimate(problem, precision, blocking))


def gather_tile(precision: Precision) -> MmaTile:
    """The only tile that takes any number of channels: few rows per thread, more blocks."""
    return tiles_of(precision)[-1]


# -- weights -----------------------------------------------------------------------------------


def pack_weight(weight: Array, op: Conv2d, precision: Precision) -> Array:
    """OIHW to [O][depth], in storage format: position (r, s, c) at r·row + s·C + c, zeros
    elsewhere.

    tf32: rounded to 11 significand bits, like the pixels on the device. fp16x3: see `pack_split`.
    """
    kh, kw = op.kernel_size
    row = packed_row(op, precision)
    with np.errstate(over="ignore"):  # overflow to infinity is intended
        stored = np.asarray(weight, precision.dtype)
    lines = np.zeros((op.out_channels, kh, row), precision.dtype)
    lines[:, :, : kw * op.in_channels] = stored.transpose(0, 2, 3, 1).reshape(*lines.shape[:2], -1)
    packed = np.zeros((op.out_channels, packed_depth(op, precision)), precision.dtype)
    packed[:, : kh * row] = lines.reshape(op.out_channels, -1)
    if precision.splits:
        return pack_split(packed)
    return round_to_tf32(packed) if precision.multiply == "tf32" else packed


def pack_split(rows: Array) -> Array:
    """[O][depth] in float32 to [O][K tile][half][position]; a row keeps its number of bytes.

    In every sixteen elements, 4·i + q goes to position 2·q + i of eight, or from i = 2 on to 8 +
    2·q + i − 2: the order in which ldmatrix delivers pixels.
    """
    k = ROW_BYTES // 4
    parts = np.stack(split(rows)).reshape(2, len(rows), -1, k // 16, 2, 2, 4)
    placed = parts.transpose(1, 2, 0, 3, 4, 6, 5)
    return np.ascontiguousarray(placed).reshape(len(rows), -1, 2, k)


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImplicitGemmMma(ConvKernel):
    """Implicit GEMM with mma.sync; subclasses choose the blocking."""

    algorithm = "implicit_gemm_mma"
    minimum_capability: ClassVar[tuple[int, int]] = (8, 0)  # cp.async, m16n8k16, bf16 and tf32

    layout: Layout = Layout.NHWC

    @abstractmethod
    def blocking(self, problem: Problem) -> Blocking:
        """Tile and splits. Pure."""

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        promoted = PROMOTED if p.splits else 0
        return RoundingContract(
            "sum", p.accumulate, output_format(p), truncates=True, promoted=promoted
        )

    def entry(self, tile: MmaTile, gather: bool) -> Entry:
        return Entry(
            "conv/implicit_gemm_mma",
            "conv2d_implicit_gemm_mma",
            (*self.formats, *tile.defines, ("GATHER", int(gather))),
        )

    @property
    def reduction(self) -> Entry:
        return Entry("conv/split_k_reduce", "split_k_reduce", self.formats)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        _, c, h, w = problem.inputs[0]
        reach = max(h + 2 * op.padding[0], (w + 2 * op.padding[1]) * c)
        if reach > MAX_ELEMENTS:
            return f"indexes with 32 bits; the padded image reaches over {reach} elements"
        if op.out_channels * packed_depth(op, self.precision) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def scratch(self, problem: Problem) -> int:
        """Bytes of the partial sums, float32 [splits][N·OH·OW][O], if there are several."""
        parts = self.blocking(problem).parts
        return 4 * parts * math.prod(problem.output) if parts > 1 else 0

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(Conv2d, problem.op)
        biases = (np.ascontiguousarray(bias, np.float32) for bias in weights[1:])
        return (pack_weight(weights[0], op, self.precision), *biases)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        blocking = self.blocking(problem)
        tile, parts = blocking.tile, blocking.parts
        n, o, oh, ow = problem.output
        shape = conv_shape(problem)
        depth = packed_depth(op, self.precision)
        bias, residual = bias_and_residual(op)
        split = parts > 1
        ends = (NULL, NULL, NULL, WORKSPACE) if split else (bias, residual, OUT, NULL)
        sizes = (packed_row(op, self.precision), depth, ceil_div(depth // tile.k, parts))
        product = GridLaunch(
            self.entry(tile, gathers(op, self.precision)),
            (ceil_div(n * oh * ow, tile.m) * ceil_div(o, tile.n), parts, 1),
            (tile.threads, 1, 1),
            (X, Pointer(Role.WEIGHT), *ends, shape, *map(np.int32, sizes)),
            tile.shared_nbytes,
            "gemm" if split else "",
        )
        if not split:
            return (product,)
        reduction = GridLaunch(
            self.reduction,
            (ceil_div(math.prod(problem.output), REDUCE_THREADS), 1, 1),
            (REDUCE_THREADS, 1, 1),
            (WORKSPACE, bias, residual, OUT, shape, np.int32(parts)),
            phase="reduce",
            overlaps=True,
        )
        return (product, reduction)


@dataclass(frozen=True, eq=False)
class ChosenMma(ImplicitGemmMma):
    """Tile and splits are chosen per problem; see `choose`."""

    # The number of splits depends on the batch.
    batch_invariant: ClassVar[bool] = False

    def blocking(self, problem: Problem) -> Blocking:
        return choose(problem, self.precision)

    def entries(self) -> tuple[Entry, ...]:
        tiles = [self.entry(tile, False) for tile in tiles_of(self.precision)]
        return (*tiles, self.entry(gather_tile(self.precision), True), self.reduction)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {size for tile in tiles_of(self.precision) for size in tile.edges}
        return tuple(sorted({chunk_of(self.precision), *sizes}))


@dataclass(frozen=True, eq=False)
class FixedMma(ImplicitGemmMma):
    """One tile for every problem, no split-K."""

    config: MmaTile = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.config not in tiles_of(self.precision):
            raise ValueError(f"{self.config} is no tile of {self.precision}")

    @property
    def tile(self) -> str:
        return self.config.name

    def blocking(self, problem: Problem) -> Blocking:
        return Blocking(self.config)

    @property
    def _takes_any_channels(self) -> bool:
        return self.config == gather_tile(self.precision)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if gathers(op, self.precision) and not self._takes_any_channels:
            chunk = chunk_of(self.precision)
            return f"copies {chunk} channels at a time, and {op.in_channels} is not a multiple"
        return super().refuses(problem)

    def entries(self) -> tuple[Entry, ...]:
        ways = (False, True) if self._takes_any_channels else (False,)
        return tuple(self.entry(self.config, gather) for gather in ways)

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({chunk_of(self.precision), *self.config.edges}))


def implicit_gemm_mma_kernels() -> tuple[ImplicitGemmMma, ...]:
    """Per precision the kernel that chooses, then one per tile."""
    return tuple(
        kernel
        for precision in (FP16, BF16, TF32, FP16X3)
        for kernel in (
            ChosenMma(precision),
            *(FixedMma(precision, config=tile) for tile in tiles_of(precision)),
        )
    )
