"""Convolutions on Hopper's tensor cores (`wgmma`): what the kernels share. NHWC.

M = O channels, N = output pixels, K = kh·kw·C, of which 128 bytes a step: tiles, packed weights,
and what every one of these kernels promises.
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
from r18_cupy.conv.base import ConvKernel
from r18_cupy.conv.operands import round_to_tf32, split
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Pointer, Role, ceil_div
from r18_cupy.cuda.tensor_map import ROW_BYTES, MatrixMap
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import MAX_ELEMENTS

PRECISIONS: tuple[Precision, ...] = (FP16, BF16, TF32, FP16X3)
CHUNK_BYTES = 16  # of a pixel's channels: the unit of the copy engine's strides
STEPS = 4  # of a row of 128 bytes, 32 each
SPLIT_STEPS = 6  # of a row whose factors are split: two high by high, four high by low
PRODUCER_THREADS = 32
BARRIER_NBYTES = 16  # of a stage
ALIGNMENT = 1024  # of the stages, in shared memory that the device begins where it likes


@dataclass(frozen=True)
class WgmmaTile(TileConfig):
    """`m` channels by `n` pixels a block, over `k` products (128 bytes) a step.

    groups_m, groups_n: the grid of warpgroups among which they are divided.
    stages: steps whose weights and pixels are in shared memory at once.
    blocks: of a multiprocessor at once.
    parts:  of K, each a block of a cluster's.
    """

    groups_m: int
    groups_n: int
    stages: int
    blocks: int
    parts: int = 1

    @property
    def threads(self) -> int:
        return 128 * self.groups_m * self.groups_n + PRODUCER_THREADS

    @property
    def stage_nbytes(self) -> int:
        """Of its weights and pixels."""
        return (self.m + self.n) * ROW_BYTES

    @property
    def shared_nbytes(self) -> int:
        return self.stages * (self.stage_nbytes + BARRIER_NBYTES) + ALIGNMENT

    @property
    def name(self) -> str:
        """`m64n64k64s4` of four stages, and `p2` where K has two parts."""
        parts = f"p{self.parts}" if self.parts > 1 else ""
        return f"{super().name}s{self.stages}{parts}"


def chunk_of(precision: Precision) -> int:
    """Channels of 16 bytes."""
    return CHUNK_BYTES // precision.dtype.itemsize


def steps_of(precision: Precision) -> int:
    """Instructions that multiply a row of 128 bytes, of 32 bytes of each factor."""
    return SPLIT_STEPS if precision.splits else STEPS


def packed_channels(op: Conv2d, precision: Precision) -> int:
    """Elements of K at a position of the window: C, padded to whole steps of a tile."""
    step = ROW_BYTES // precision.dtype.itemsize
    return ceil_div(op.in_channels, step) * step


def packed_depth(op: Conv2d, precision: Precision) -> int:
    """K as weights are packed: every position of the window."""
    return math.prod(op.kernel_size) * packed_channels(op, precision)


def pack_weight(weight: Array, op: Conv2d, precision: Precision) -> Array:
    """OIHW to [O][depth], in storage format: position (r, s), then channels, zeros else.

    tf32: rounded to 11 significand bits. The unit itself cuts off what is beyond, as it does of the
    pixels. fp16x3: 32 high halves, then 32 low ones, in the 128 bytes of as many float32 numbers;
    as integers, of which nothing is known but their bits.
    """
    with np.errstate(over="ignore"):  # beyond the largest finite value lies infinity
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
    """A convolution of one launch, by the tile of `tiles` that suits the problem best."""

    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"
    source: ClassVar[str]  # see `Entry`

    layout: Layout = Layout.NHWC

    @property
    @abstractmethod
    def tiles(self) -> tuple[WgmmaTile, ...]:
        """Those that are compiled."""

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        return RoundingContract("sum", p.accumulate, p.storage, truncates=True)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {size for tile in self.tiles for size in tile.edges}
        return tuple(sorted({chunk_of(self.precision), *sizes}))

    def entry(self, tile: WgmmaTile) -> Entry:
        factors = (("SPLIT", 1),) if self.precision.splits else ()
        macros = (self.storage, *factors, *tile.defines)
        return Entry(self.source, f"conv2d_{self.algorithm}", macros, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, self.tiles))

    def weights(self, op: Conv2d, tile: WgmmaTile) -> MatrixMap:
        """What the copy engine is told of packed weights."""
        kind = "int32" if self.precision.splits else self.precision.storage
        depth = packed_depth(op, self.precision)
        return MatrixMap(Pointer(Role.WEIGHT), kind, op.out_channels, depth, tile.m)

    def refuses_channels(self, op: Conv2d) -> str | None:
        """Why a number of channels is not taken, or None."""
        chunk = chunk_of(self.precision)
        if op.out_channels % chunk:
            return f"writes {chunk} channels at once, and {op.out_channels} is no multiple of it"
        if op.in_channels % chunk:
            return f"copies {chunk} channels at once, and {op.in_channels} is no multiple of it"
        if op.out_channels * packed_depth(op, self.precision) > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(Conv2d, problem.op)
        biases = (np.ascontiguousarray(bias, np.float32) for bias in weights[1:])
        return (pack_weight(weights[0], op, self.precision), *biases)
