"""Convolution of e4m3 images of few channels by `mma.sync`: the stem. NHWC.

See kernels/float8/few_channels_mma.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.bytes.conv import conv_of
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import (
    DEFAULT_SHARED,
    MAX_GRID,
    OUT,
    GridLaunch,
    Pointer,
    Role,
    X,
    ceil_div,
)
from r18_cupy.float8.kernel import Float8Kernel, factors, narrow_sum

ROWS, COLUMNS, CHANNELS = 4, 32, 64  # outputs of a block
TAPS, WORD = 8, 4  # of a row of the window, and channels of a tap
VECTOR = 16  # channels of a store
THREADS = 32 * ROWS


@dataclass(frozen=True, eq=False)
class ScaledFewChannelsMma(Float8Kernel):
    """K is a row of the window at a time. Sums are never promoted: the longest has 256 products."""

    op = ScaledConv2d
    algorithm = "few_channels_mma"
    minimum_capability: ClassVar[tuple[int, int]] = (8, 9)

    layout: Layout = Layout.NHWC

    @property
    def contract(self) -> RoundingContract:
        return narrow_sum(promoted=0)

    @property
    def edges(self) -> tuple[int, ...]:
        return (ROWS, WORD, TAPS, VECTOR, COLUMNS, CHANNELS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """A small stem, and windows of the largest width."""
        stem = Conv2d(3, 80, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
        wide = Conv2d(WORD, VECTOR, (TAPS, TAPS), (1, 3), (4, 4), bias=True)
        return (
            Problem(ScaledConv2d(stem), ((2, 3, 13, 70),)),
            Problem(ScaledConv2d(wide), ((1, WORD, 9, 101),)),
        )

    @property
    def entry(self) -> Entry:
        return Entry("float8/few_channels_mma", "sconv2d_few_channels_mma")

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(ScaledConv2d, problem.op).conv
        if op.in_channels > WORD:
            return f"takes at most {WORD} channels, not {op.in_channels}"
        if max(op.kernel_size) > TAPS:
            return f"takes windows of at most {TAPS} × {TAPS}, not {op.kernel_size}"
        if op.out_channels % VECTOR:
            return f"writes {VECTOR} channels at a time, and {op.out_channels} is not a multiple"
        if op.residual:
            return "adds no residual"
        if shared_nbytes(op) > DEFAULT_SHARED:
            return f"strides of {op.stride} take {shared_nbytes(op)} bytes of shared memory"
        if ceil_div(op.out_channels, CHANNELS) > MAX_GRID[1]:
            return f"a grid has no room for {op.out_channels} channels"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        weight, *others = super().pack(problem, weights)
        return pack_weight(weight), *others

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(ScaledConv2d, problem.op)
        n, o, oh, ow = problem.output
        bias, multiplier, _ = factors(op)
        return (
            GridLaunch(
                self.entry,
                (n * ceil_div(oh, ROWS) * ceil_div(ow, COLUMNS), ceil_div(o, CHANNELS), 1),
                (THREADS, 1, 1),
                (X, Pointer(Role.WEIGHT), bias, multiplier, OUT, conv_shape(conv_of(problem))),
                shared_nbytes(op.conv),
                overlaps=True,
            ),
        )


def pack_weight(weight: Array) -> Array:
    """OIHW to [channel tile][row][half][64 channels][4 taps][4 channels], zeros elsewhere."""
    o, c, kh, kw = weight.shape
    tiles = ceil_div(o, CHANNELS)
    packed = np.zeros((tiles * CHANNELS, kh, TAPS, WORD), weight.dtype)
    packed[:o, :, :kw, :c] = weight.transpose(0, 2, 3, 1)
    halves = packed.reshape(tiles, CHANNELS, kh, 2, TAPS // 2, WORD)
    return np.ascontiguousarray(halves.transpose(0, 2, 3, 1, 4, 5))


def shared_nbytes(op: Conv2d) -> int:
    """Weights and pixels, or the outputs that take their place."""
    (kh, _), (sh, sw) = op.kernel_size, op.stride
    pixels = ((ROWS - 1) * sh + kh) * ((COLUMNS - 1) * sw + TAPS)
    words = kh * CHANNELS * TAPS + pixels
    return max(WORD * words, ROWS * COLUMNS * CHANNELS)
