"""Tiles, packed weights and rounding contract shared by the `wgmma` convolutions. NHWC.

M = O channels, N = output pixels, K = kh·kw·C, 128 bytes per step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18_cupy.conv.base import ConvKernel, output_format
from r18_cupy.conv.operands import round_to_tf32, split
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Pointer, Role, ceil_div
from r18_cupy.cuda.tensor_map import ROW_BYTES, MatrixMap
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import MAX_ELEMENTS

PRECISIONS: tuple[Precision, ...] = (FP16, BF16, TF32, FP16X3)
CHUNK_BYTES = 16  # of a pixel's channels: TMA's unit of strides
STEPS = 4  # instructions per row of 128 bytes, 32 bytes each
PROMOTED = 32  # products of fp16x3 per sum that is added in registers: a K tile
SPLIT_STEPS = 6  # with fp16x3: two high·high, four high·low
PRODUCER_THREADS = 32
PRODUCER_GROUP_THREADS = 128  # a whole warpgroup, which can give registers away
BARRIER_NBYTES = 16  # a full/empty pair of mbarriers per stage
ALIGNMENT = 1024  # of the stages; dynamic shared memory itself is not aligned that far


@dataclass(frozen=True)
class WgmmaTile(TileConfig):
    """`m` channels by `n` pixels per block, over `k` products (128 bytes) per step.

    groups_m, groups_n: the grid of consumer warpgroups that share the tile.
    stages: K tiles in shared memory at a time.
    blocks: resident blocks per SM.
    parts:  split-K: the CTAs of a cluster that divide K.

    Legal tiles: m = 64·groups_m, since `wgmma` has 64 rows; n / groups_n a multiple of 8 with an
    instance in kernels/hopper/wgmma.cuh, at most 256 for TMA's box; k rows of 128 bytes, the
    swizzle's span; `shared_nbytes` times `blocks` within an SM. The device code asserts them; the
    tests check shared memory.
    """

    groups_m: int
    groups_n: int
    stages: int
    blocks: int
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of the consumer warpgroups."""
        return 128 * self.groups_m * self.groups_n

    @property
    def stage_nbytes(self) -> int:
        """Bytes of a stage: weights and pixels."""
        return (self.m + self.n) * ROW_BYTES

    @property
    def received_nbytes(self) -> int:
        """Bytes of the sums that a CTA receives from the others of its cluster, and of their
        mbarrier: from each of them 16 bytes for each consumer thread and each block of sums that
        this CTA adds up (kernels/hopper/cluster_split_k.cuh). Where pixels are split in registers,
        B's rows are channels; in those tiles m = n.
        """
        if self.parts == 1:
            return 0
        threads = 128 * self.groups_m * self.groups_n
        blocks = ceil_div(self.n // self.groups_n // 8, self.parts)
        return (self.parts - 1) * blocks * threads * 16 + BARRIER_NBYTES

    @property
    def shared_nbytes(self) -> int:
        stages = self.stages * (self.stage_nbytes + BARRIER_NBYTES)
        return stages + self.received_nbytes + ALIGNMENT

    @property
    def name(self) -> str:
        """`m64n64k64s4` with four stages, plus `p2` with two splits of K."""
        parts = f"p{self.parts}" if self.parts > 1 else ""
        return f"{super().name}s{self.stages}{parts}"


def chunk_of(precision: Precision) -> int:
    """Channels per 16 bytes."""
    return CHUNK_BYTES // precision.dtype.itemsize


def steps_of(precision: Precision) -> int:
    """`wgmma` instructions per row of 128 bytes, 32 bytes of each operand."""
    return SPLIT_STEPS if precision.splits else STEPS


def packed_channels(op: Conv2d, precision: Precision) -> int:
    """Elements of K per window position: C, padded to whole K tiles."""
    step = ROW_BYTES // precision.dtype.itemsize
    return ceil_div(op.in_channels, step) * step


def packed_depth(op: Conv2d, precision: Precision) -> int:
    """K as packed: all window positions."""
    return math.prod(op.kernel_size) * packed_channels(op, precision)


def pack_weight(weight: Array, op: Conv2d, precision: Precision) -> Array:
    """OIHW to [O][depth] in storage format: position (r, s), then channels, zeros elsewhere.

    tf32: rounded to 11 significand bits. The hardware truncates pixels; the convolution that wrote
    them has rounded them to as many bits, so nothing is lost (`output_format`).
    fp16x3: 32 high halves, then 32 low ones, in the 128 bytes of as many float32 numbers, typed as
    int32 because TMA only moves bits.
    """
    with np.errstate(over="ignore"):  # overflow to infinity is intended
        stored = np.asarray(weight, precision.dtype)
    shape = (op.out_channels, *op.kernel_size, packed_channels(op, precision))
    packed = np.zeros(shape, precision.dtype)
    packed[..., : op.in_channels] = stored.transpose(0, 2, 3, 1)
    packed = packed.reshape(op.out_channels, -1)
    if precision.splits:
        halves = split(packed.reshape(op.out_channels, -1, ROW_BYTES // packed.itemsize))
        return np.concatenate(halves, axis=-1).view(np.int32).reshape(op.out_channels, -1)
    return round_to_tf32(packed) if precision.multiply == "tf32" else packed


@dataclass(frozen=True, eq=False)
class WgmmaConv(ConvKernel):
    """A convolution in one launch, with the tile of `tiles` that suits the problem best."""

    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    source: ClassVar[str]  # see `Entry`

    layout: Layout = Layout.NHWC
    # Whether another convolution may follow; not after the product of a linear layer.
    feeds: bool = True

    @property
    @abstractmethod
    def tiles(self) -> tuple[WgmmaTile, ...]:
        """The compiled tiles."""

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        output = output_format(p) if self.feeds else p.storage
        promoted = PROMOTED if p.splits else 0
        return RoundingContract("sum", p.accumulate, output, truncates=True, promoted=promoted)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {size for tile in self.tiles for size in tile.edges}
        return tuple(sorted({chunk_of(self.precision), *sizes}))

    def entry(self, tile: WgmmaTile) -> Entry:
        factors = (("SPLIT", 1),) if self.precision.splits else ()
        if self.producers(tile) > PRODUCER_THREADS:
            factors = (*factors, ("PRODUCER_GROUP", 1))
        macros = (*self.formats, *factors, *tile.defines)
        return Entry(self.source, f"conv2d_{self.algorithm}", macros, self.family)

    def producers(self, tile: WgmmaTile) -> int:
        """Threads that load. fp16x3 splits pixels in shared memory with a third accumulator per
        output, for which consumers need the registers of a whole warpgroup of producers.
        """
        alone = tile.blocks * tile.groups_m * tile.groups_n == 1  # a thread has all it can have
        return PRODUCER_GROUP_THREADS if self.precision.splits and not alone else PRODUCER_THREADS

    def threads(self, tile: WgmmaTile) -> int:
        """Threads of a block, consumers and producers."""
        return tile.threads + self.producers(tile)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def weights(self, op: Conv2d, tile: WgmmaTile) -> MatrixMap:
        """The tensor map of the packed weights."""
        kind = "int32" if self.precision.splits else self.precision.storage
        depth = packed_depth(op, self.precision)
        return MatrixMap(Pointer(Role.WEIGHT), kind, op.out_channels, depth, tile.m)

    def refuses_channels(self, op: Conv2d) -> str | None:
        """Why a number of channels is rejected, or None."""
        chunk = chunk_of(self.precision)
        if op.out_channels % chunk:
            return f"writes {chunk} channels at a time, and {op.out_channels} is not a multiple"
        if op.in_channels % chunk:
            return f"copies {chunk} channels at a time, and {op.in_channels} is not a multiple"
        if op.out_channels * packed_depth(op, self.precision) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(Conv2d, problem.op)
        biases = (np.ascontiguousarray(bias, np.float32) for bias in weights[1:])
        return (pack_weight(weights[0], op, self.precision), *biases)
