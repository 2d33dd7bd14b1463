"""Direct convolution of integers: the plain baseline in either layout, and groups and dilation.

See kernels/integers/direct.cu and kernels/integers/direct_grouped.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import EXTRAS, Conv2d, Layout, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_cupy.bytes.conv import ByteDirect, conv_of, conv_op
from r18_cupy.conv import groups
from r18_cupy.conv.base import conv_shape
from r18_cupy.conv.groups import PIXELS, SLOT, Slots
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.integers.kernel import BYTES, IntegerKernel, ends, epilogue, factors
from r18_cupy.kernel import MAX_ELEMENTS

WORD = 4  # channels whose products are one instruction


@dataclass(frozen=True, eq=False)
class QuantizedDirect(IntegerKernel, ByteDirect):
    """Sums in int32. Weights of any number of bits are stored as int8."""

    op = QuantizedConv2d

    def entry(self, stored: str) -> Entry:
        symbol = f"qconv2d_direct_{self.layout.value}"
        return Entry("integers/direct", symbol, (("IMAGE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def entry_of(self, problem: Problem) -> Entry:
        return self.entry(cast(QuantizedConv2d, problem.op).stored[0])

    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        return factors(cast(QuantizedConv2d, problem.op))

    def ends(self, problem: Problem) -> tuple[Argument, ...]:
        return ends(cast(QuantizedConv2d, problem.op).output_storage)


@dataclass(frozen=True, eq=False)
class QuantizedDirectGrouped(IntegerKernel):
    """A thread computes four channels of a group at some pixels. NHWC.

    Weights of any number of bits are stored as int8.
    """

    op = QuantizedConv2d
    algorithm = "direct_grouped"
    extras = EXTRAS

    layout: Layout = Layout.NHWC

    @property
    def edges(self) -> tuple[int, ...]:
        return (SLOT, *PIXELS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(QuantizedConv2d(cast(Conv2d, path.op), (stored,)), path.inputs)
            for stored in BYTES
            for path in groups.paths()
        )

    def entry(self, stored: str, channels: int, pixels: int) -> Entry:
        """channels: that are loaded at a time."""
        macros = (("CHANNELS", channels), ("PIXELS", pixels), ("NHWC", 1))
        image = ("IMAGE", BYTES[stored])
        return Entry("integers/direct_grouped", "qconv2d_direct_grouped", (image, *macros))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(
            self.entry(stored, channels, pixels)
            for stored in BYTES
            for channels in (1, WORD)
            for pixels in PIXELS
        )

    def refuses(self, problem: Problem) -> str | None:
        op = conv_op(problem)
        words = math.prod(op.kernel_size) * ceil_div(op.group_channels, WORD)
        elements = words * Slots.of(op).count * SLOT * WORD
        if elements > MAX_ELEMENTS:
            return f"indexes with 32 bits; its packed weights have {elements} elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weight (O, C/groups, kh, kw) as (kh, kw, C/groups/4, slots, 4, 4 channels), with
        zeros for channels that do not exist.
        """
        weight, *others = super().pack(problem, weights)
        slots = Slots.of(conv_op(problem)).split(weight)
        missing = -slots.shape[2] % WORD
        padded = np.pad(slots, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
        words = padded.reshape(*padded.shape[:2], -1, WORD, *padded.shape[3:])
        return np.ascontiguousarray(words.transpose(4, 5, 2, 0, 1, 3)), *others

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, conv = cast(QuantizedConv2d, problem.op), conv_op(problem)
        step = WORD if conv.group_channels % WORD == 0 else 1
        return (
            GridLaunch(
                self.entry(op.stored[0], step, groups.pixels_of(conv, problem.output)),
                (groups.blocks_of(conv, problem.output, self.layout), 1, 1),
                (groups.THREADS, 1, 1),
                (
                    *(X, Pointer(Role.WEIGHT), *epilogue(op), OUT),
                    *(conv_shape(conv_of(problem)), *ends(op.output_storage)),
                    groups.groups_struct(conv),
                ),
                overlaps=True,
            ),
        )
