"""How a convolution fused with its max pooling is cut into blocks, in every format: pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from r18.graph.forms import ConvMaxPoolForm
from r18.graph.ops import ConvMaxPool, Layout, Shape
from r18_numba_cpu import blocking
from r18_numba_cpu.blocking import BAND_NBYTES
from r18_numba_cpu.compiled import ceil_div
from r18_numba_cpu.kernels.arguments import CACHE_LINE, Blocks, ConvShape
from r18_numba_cpu.packing import panels, round_up

MADE_NBYTES = 256 << 10
"""The convolution's rows of a block, of about this size, stay in a core's L2 cache."""


class Cut(NamedTuple):
    """How a problem is cut into blocks. rows: of pooled outputs in a block."""

    conv: ConvShape
    pool: ConvShape
    rows: int
    blocking: Blocks

    @property
    def line(self) -> int:
        """The elements of a row of the convolution's outputs."""
        return self.conv.out_w * self.conv.outputs


def shapes(op: ConvMaxPool | ConvMaxPoolForm, read: Shape) -> tuple[Shape, Shape]:
    """What the convolution makes and what pooling makes of it, channels last.

    read: (N, H, W, C).
    """
    n, height, width, channels = read
    middle = op.conv.infer((n, channels, height, width))
    made, written = map(Layout.NHWC.physical, (middle, op.pool.infer(middle)))
    return made, written


def cut(
    conv: ConvShape, pool: ConvShape, nbytes: int, band_nbytes: int, threads: int,
    after: Callable[[int], int], before: int = 0,
) -> Cut:  # fmt: skip
    """The blocks of a problem.

    nbytes, band_nbytes: of an element of the convolution's output, and of a band.
    after: the elements that are read beyond a band of a number of rows. before: those of a slot
    that are not for the band.
    """

    def made_rows(rows: int) -> int:
        """The convolution's rows that `rows` rows of pooled outputs need."""
        return min(conv.out_h, (rows - 1) * pool.stride_h + pool.kernel_h)

    def seen_rows(rows: int) -> int:
        return blocking.seen_rows(conv, made_rows(rows))

    length = blocking.row_length(conv)
    rows = 1
    while (
        rows < pool.out_h
        and made_rows(rows + 1) * conv.out_w * conv.outputs * nbytes <= MADE_NBYTES
        and seen_rows(rows + 1) * length * band_nbytes <= BAND_NBYTES
    ):
        rows += 1
    samples = conv.samples
    bands = max(ceil_div(pool.out_h, rows), ceil_div(2 * threads, samples))  # two blocks a thread
    if samples % threads:  # or as many more for each
        bands = round_up(bands, threads)
    rows = ceil_div(pool.out_h, bands)
    most = made_rows(rows)
    band = round_up(seen_rows(rows) * length, CACHE_LINE)
    slot = round_up(before + band + after(most), CACHE_LINE)
    return Cut(conv, pool, rows, Blocks(1, most, panels(conv.outputs), band, slot))


__all__ = ["MADE_NBYTES", "Cut", "cut", "shapes"]
