"""Convolution of narrow groups on tensor cores. NHWC. See kernels/conv/grouped_mma.cu.

A group of ResNeXt has 4 to 32 channels. A tensor core multiplies by 8 output channels over 8 or 16
input channels: groups of four waste three quarters of its products, all others none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import EXTRAS, Conv2d, Layout, Problem
from r18.graph.precision import BF16, FP16, Precision
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape, output_format
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import DEFAULT_SHARED, OUT, GridLaunch, Pointer, Role, X, ceil_div

TILE = 8  # rows and columns of outputs of a CTA
CHANNELS, WARPS = 64, 4  # of a CTA
WINDOW = (3, 3)
ITEMSIZE = 2
WIDTHS = (4, 8, 16, 32)  # channels of a group


@dataclass(frozen=True, eq=False)
class GroupedMma(ConvKernel):
    """A warp computes 16 output channels, and keeps their weights in registers."""

    algorithm = "grouped_mma"
    extras = EXTRAS
    minimum_capability = (8, 0)

    layout: Layout = Layout.NHWC

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract(
            "sum", self.precision.accumulate, output_format(self.precision), truncates=True
        )

    @property
    def edges(self) -> tuple[int, ...]:
        return (TILE, CHANNELS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """A problem for every supported width of a group, since these are rarely drawn."""
        return tuple(_problems())

    def entry(self, width: int) -> Entry:
        """width: the channels of a group."""
        macros = (self.storage, ("WIDTH", width))
        return Entry("conv/grouped_mma", "conv2d_grouped_mma", macros)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, WIDTHS))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != WINDOW:
            return f"takes windows of 3×3, not {op.kernel_size[0]}×{op.kernel_size[1]}"
        if op.in_channels != op.out_channels or op.in_channels % CHANNELS:
            return (
                f"takes as many output as input channels, a multiple of {CHANNELS}, not "
                f"{op.in_channels} and {op.out_channels}"
            )
        if op.group_channels not in WIDTHS:
            return f"takes groups of 4, 8, 16 or 32 channels, not {op.group_channels}"
        if shared_nbytes(op) > DEFAULT_SHARED:
            return (
                f"the pixels under a tile take {shared_nbytes(op)} bytes of shared memory; a block "
                f"has {DEFAULT_SHARED}"
            )
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Weights (O, C/groups, 3, 3) in the order of fragments:
        (O/16, taps, steps, 2, 32 lanes, halves of K, 2).

        Of 16 output channels, a tap, and a step over their input channels: the second operand of
        two products, each of eight output channels. Lane i has output channel i / 4, and input
        channels 2·(i % 4) and the one after it; where K is 16, the same plus 8.
        """
        op = cast(Conv2d, problem.op)
        weight, *bias = super().pack(problem, weights)
        width, depth, halves = op.group_channels, depth_of(op), 1 if op.group_channels <= 8 else 2
        square = np.zeros((op.out_channels, depth, *WINDOW), weight.dtype)
        for o in range(op.out_channels):
            first = o // width * width % depth
            square[o, first : first + width] = weight[o]
        # o = (block, eight, row); channel = (step, half, pair, parity).
        parts = square.reshape(-1, 2, 8, depth // (8 * halves), halves, 4, 2, 9)
        order = parts.transpose(0, 7, 3, 1, 2, 5, 4, 6)
        return (np.ascontiguousarray(order), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        n, o, oh, ow = problem.output
        blocks = n * ceil_div(oh, TILE) * ceil_div(ow, TILE) * (o // CHANNELS)
        return (
            GridLaunch(
                self.entry(op.group_channels),
                (blocks, 1, 1),
                (32 * WARPS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), *bias_and_residual(op), OUT, conv_shape(problem)),
                    *map(np.int32, op.dilation),
                ),
                shared_nbytes=shared_nbytes(op),
                overlaps=True,
            ),
        )


def depth_of(op: Conv2d) -> int:
    """The input channels that eight output channels are multiplied with."""
    return max(8, op.group_channels)


def shared_nbytes(op: Conv2d) -> int:
    """Bytes of the pixels under a tile, in the channels of a CTA."""
    extents = ((TILE - 1) * s + 2 * d + 1 for s, d in zip(op.stride, op.dilation, strict=True))
    height, width = extents
    return height * width * CHANNELS * ITEMSIZE


def _problems() -> list[Problem]:
    """Each width of groups with another image, stride, padding or dilation."""
    around = (
        ((1, 1), (1, 1), (1, 1), (2, 9, 17)),
        ((2, 2), (1, 1), (1, 1), (1, 19, 14)),
        ((1, 1), (2, 3), (2, 3), (3, 7, 8)),
        ((2, 1), (0, 2), (1, 2), (1, 11, 5)),
        ((1, 2), (2, 0), (2, 1), (2, 8, 23)),
        ((1, 3), (2, 2), (1, 1), (1, 3, 26)),
    )
    found = []
    for i, (stride, padding, dilation, (n, h, w)) in enumerate(around * 2):
        width, channels = WIDTHS[(i + i // len(around)) % len(WIDTHS)], CHANNELS * (1 + i % 3)
        op = Conv2d(channels, channels, WINDOW, stride, padding, bias=True)
        op = replace(op, groups=channels // width, dilation=dilation)
        image = (n, channels, h, w)
        if i < len(around):
            found.append(Problem(op, (image,)))
        else:
            added = replace(op, residual=True, relu=True)
            found.append(Problem(added, (image, op.infer(image))))
    return found


def grouped_mma_kernels() -> tuple[GroupedMma, ...]:
    return tuple(map(GroupedMma, PRECISIONS))


PRECISIONS: tuple[Precision, ...] = (FP16, BF16)

__all__ = ["GroupedMma", "depth_of", "grouped_mma_kernels", "shared_nbytes"]
