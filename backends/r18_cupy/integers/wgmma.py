"""The storage formats and the small test problems of the integer `wgmma` convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.quantized import STORAGES, QuantizedConv2d
from r18_cupy.bytes.wgmma import CHUNK, ByteTile, ByteWgmmaConv
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument
from r18_cupy.integers.kernel import IntegerKernel, factors


def small_problem(stored: str, channels: int, images: tuple[int, int, int]) -> Problem:
    """A 3×3 window in this storage format, with a residual in the other.

    channels: of the output. images: (N, H, W).
    """
    (other,) = set(STORAGES) - {stored}
    conv = Conv2d(CHUNK, channels, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True)
    op = QuantizedConv2d(conv, (stored, other))
    n, h, w = images
    return Problem(op, ((n, CHUNK, h, w), (n, channels, h, w)))


@dataclass(frozen=True, eq=False)
class QuantizedWgmmaConv(IntegerKernel, ByteWgmmaConv):
    """Each storage format of the input has a function of its own."""

    op = QuantizedConv2d

    layout: Layout = Layout.NHWC

    def entry(self, tile: ByteTile, storage: str) -> Entry:
        macros = (("X_SIGNED", int(storage == "int8")), *tile.defines)
        return Entry(self.source, f"qconv2d_{self.algorithm}", macros, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.entry(tile, storage) for storage in STORAGES for tile in self.tiles)

    def entry_of(self, problem: Problem, tile: ByteTile) -> Entry:
        return self.entry(tile, cast(QuantizedConv2d, problem.op).stored[0])

    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        return factors(cast(QuantizedConv2d, problem.op))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """One for each function of a tile: the storage format of the image."""
        return tuple(small_problem(stored, 3 * CHUNK, (2, 5, 6)) for stored in STORAGES)
