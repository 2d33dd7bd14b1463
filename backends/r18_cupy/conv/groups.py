"""The slots of output channels and the grid of grouped convolutions.

See kernels/conv/groups.cuh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from r18.graph.ops import Conv2d, Layout, Problem
from r18_cupy.cuda.launch import ceil_div, struct

THREADS = 128
SLOT = 4  # output channels of a thread
PIXELS = (8, 2)  # per thread: many where the grid is large enough, else few
LARGE_GRID = 132 * 1024  # threads: half of what an H200 holds

# Mirrors `Groups` in kernels/conv/groups.cuh.
GROUPS = np.dtype(
    [
        (name, np.int32)
        for name in ("channels", "outputs", "slots", "slots_of_group", "dilation_h", "dilation_w")
    ]
)


@dataclass(frozen=True)
class Slots:
    """The output channels of a convolution in slots of four; no slot spans two groups.

    outputs: of a group. of_group: its slots.
    """

    groups: int
    outputs: int

    @classmethod
    def of(cls, op: Conv2d) -> Slots:
        return cls(op.groups, op.out_channels // op.groups)

    @property
    def of_group(self) -> int:
        return ceil_div(self.outputs, SLOT)

    @property
    def count(self) -> int:
        return self.groups * self.of_group

    def split(self, weight: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """A weight (O, C/groups, kh, kw) as (slots, 4, C/groups, kh, kw), padded with zeros."""
        rest = weight.shape[1:]
        padded = np.zeros((self.groups, self.of_group * SLOT, *rest), weight.dtype)
        padded[:, : self.outputs] = weight.reshape(self.groups, self.outputs, *rest)
        return padded.reshape(self.count, SLOT, *rest)


def groups_struct(op: Conv2d) -> npt.NDArray[np.void]:
    """`Groups` as an argument."""
    slots = Slots.of(op)
    fields = (op.group_channels, slots.outputs, slots.count, slots.of_group, *op.dilation)
    return struct(np.array([fields], GROUPS))


def pixels_of(op: Conv2d, output: tuple[int, ...]) -> int:
    """The output pixels of a thread. output: (N, O, OH, OW)."""
    threads = math.prod(output) // op.out_channels * Slots.of(op).count
    return PIXELS[0] if threads >= LARGE_GRID * PIXELS[0] else PIXELS[1]


def blocks_of(op: Conv2d, output: tuple[int, ...], layout: Layout) -> int:
    """The CTAs of a launch. output: (N, O, OH, OW)."""
    points, slots = math.prod(output) // op.out_channels, Slots.of(op).count
    if layout is Layout.NHWC:
        return ceil_div(ceil_div(points, pixels_of(op, output)) * slots, THREADS)
    return ceil_div(points, pixels_of(op, output) * THREADS) * slots


def paths() -> tuple[Problem, ...]:
    """A problem for each function: channels read four at a time or singly, with few and with many
    pixels a thread. (The drawn problems have few pixels and single channels.)
    """
    few = Conv2d(8, 8, (3, 3), (2, 1), (1, 2), bias=True, relu=True, groups=2, dilation=(1, 2))
    many = Conv2d(8, 128, (1, 3), padding=(0, 1), bias=True, groups=2)
    depthwise = Conv2d(97, 97, (1, 3), padding=(0, 1), bias=True, groups=97)
    return (
        Problem(few, ((1, 8, 9, 10),)),
        *(Problem(op, (_enough_points(op),)) for op in (many, depthwise)),
    )


def _enough_points(op: Conv2d) -> tuple[int, ...]:
    """The smallest square image whose outputs fill `LARGE_GRID` with many pixels a thread.

    op: whose outputs are as many as its pixels.
    """
    extent = math.isqrt(ceil_div(LARGE_GRID * PIXELS[0], Slots.of(op).count)) + 1
    return (1, op.in_channels, extent, extent)


__all__ = [
    "LARGE_GRID",
    "PIXELS",
    "SLOT",
    "THREADS",
    "Slots",
    "blocks_of",
    "groups_struct",
    "paths",
    "pixels_of",
]
