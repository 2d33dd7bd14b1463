"""Convolution with groups and dilation, in either layout. See kernels/conv/direct_grouped.cu.

A group of ResNeXt has 4 to 32 channels: too few for a tile of a tensor core, whose other columns
would be zeros. Each load serves few products, so these are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import EXTRAS, Conv2d, Layout, Problem
from r18.graph.precision import BF16, FP16, FP16X3, FP32, TF32
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.groups import (
    PIXELS,
    SLOT,
    THREADS,
    Slots,
    blocks_of,
    groups_struct,
    paths,
    pixels_of,
)
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X
from r18_cupy.kernel import MAX_ELEMENTS


@dataclass(frozen=True, eq=False)
class DirectGrouped(ConvKernel):
    """A thread computes four channels of a group at some pixels, with float32 weights."""

    algorithm = "direct_grouped"
    extras = EXTRAS

    @property
    def edges(self) -> tuple[int, ...]:
        return (SLOT, *PIXELS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        return paths()

    def entry(self, channels: int, pixels: int) -> Entry:
        """The function that loads `channels` channels at a time."""
        nhwc = int(self.layout is Layout.NHWC)
        macros = (("CHANNELS", channels), ("PIXELS", pixels), ("NHWC", nhwc))
        return Entry("conv/direct_grouped", "conv2d_direct_grouped", (*self.formats, *macros))

    def entries(self) -> tuple[Entry, ...]:
        steps = (1, SLOT) if self.layout is Layout.NHWC else (1,)
        return tuple(self.entry(channels, pixels) for channels in steps for pixels in PIXELS)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        elements = math.prod(op.kernel_size) * op.group_channels * Slots.of(op).count * SLOT
        if elements > MAX_ELEMENTS:
            return f"indexes with 32 bits; its packed weights have {elements} elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Weights (O, C/groups, kh, kw) as (kh, kw, C/groups, slots, 4) in float32, rounded to the
        storage format before.
        """
        weight, *bias = super().pack(problem, weights)
        slots = Slots.of(cast(Conv2d, problem.op)).split(weight)
        return (np.ascontiguousarray(slots.transpose(3, 4, 2, 0, 1), np.float32), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        aligned = op.group_channels % SLOT == 0 and Slots.of(op).outputs % SLOT == 0
        step = SLOT if self.layout is Layout.NHWC and aligned else 1
        return (
            GridLaunch(
                self.entry(step, pixels_of(op, problem.output)),
                (blocks_of(op, problem.output, self.layout), 1, 1),
                (THREADS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), *bias_and_residual(op), OUT),
                    *(conv_shape(problem), groups_struct(op)),
                ),
                overlaps=True,
            ),
        )


@dataclass(frozen=True, eq=False)
class DirectGroupedOfProducts(DirectGrouped):
    """`DirectGrouped` in tf32 and fp16x3, which Turing's tensor cores do not support."""

    minimum_capability = (8, 0)


def direct_grouped_kernels() -> tuple[DirectGrouped, ...]:
    """Kernels in the layout of the precision's other convolutions: float32 in NCHW, others in
    NHWC."""
    return (
        DirectGrouped(FP32),
        *(DirectGrouped(one, Layout.NHWC) for one in (FP16, BF16)),
        *(DirectGroupedOfProducts(one, Layout.NHWC) for one in (TF32, FP16X3)),
    )


__all__ = ["DirectGrouped", "DirectGroupedOfProducts", "direct_grouped_kernels"]
