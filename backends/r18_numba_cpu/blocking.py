"""Cache blocking of products in bfloat16 and of bytes: it affects the speed, not the result."""

from __future__ import annotations

from collections.abc import Callable

from r18.graph.ops import Conv2d, Problem
from r18_numba_cpu.compiled import ceil_div
from r18_numba_cpu.kernels.arguments import CACHE_LINE, Blocks, ConvShape
from r18_numba_cpu.packing import panels, round_up

BAND_NBYTES = 128 << 10
"""A band of the padded image of about this size stays in a core's L2 cache, next to a panel."""

RESIDENT_NBYTES = 1 << 20
"""Weights of no more than this stay in a core's L2 cache from one band to the next."""

BANDS_NBYTES = 768 << 10
"""Where the weights do not, the bands of a block's samples together: these stay in L2."""

COPIED = 3
"""How many times as long it takes to copy part of an image to a band as to read as many weights, if
another worker has written some of it."""


def blocks(
    shape: ConvShape, threads: int, nbytes: int, weight_nbytes: int, after: Callable[[int], int],
    before: int = 0,
) -> Blocks:  # fmt: skip
    """Bands as high as the cache holds, and few enough panels that each thread has two blocks.

    Of an image with few weights each thread has its own bands, and reads all weights; of one with
    many it copies all bands, and reads its own weights.

    nbytes: of an element of a band. weight_nbytes: of all weights.
    after: the elements that are read beyond a band of a number of rows. before: those of a slot
    that are not for bands.
    """
    length = row_length(shape)
    fitting = BAND_NBYTES // (nbytes * length)
    rows = max(1, min(shape.out_h, (fitting - shape.kernel_h) // shape.stride_h + 1))
    if weight_nbytes <= COPIED * seen_rows(shape, shape.out_h) * length * nbytes:
        rows = min(rows, ceil_div(shape.out_h, ceil_div(threads, shape.samples)))
    rows = ceil_div(shape.out_h, ceil_div(shape.out_h, rows))
    band = round_up(seen_rows(shape, rows) * length, CACHE_LINE)
    samples = 1
    if weight_nbytes > RESIDENT_NBYTES:
        samples = max(1, min(shape.samples, BANDS_NBYTES // (band * nbytes)))
        samples = ceil_div(shape.samples, ceil_div(shape.samples, samples))
    parts = ceil_div(shape.samples, samples) * ceil_div(shape.out_h, rows)
    splits = min(panels(shape.outputs), ceil_div(2 * threads, parts))
    slot = power_of_two(before + samples * band + after(rows))
    return Blocks(samples, rows, ceil_div(panels(shape.outputs), splits), band, slot)


def row_length(shape: ConvShape) -> int:
    """The elements of a band's row: the channels of all pixels that a row of outputs reads."""
    return ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels


def seen_rows(shape: ConvShape, rows: int) -> int:
    """The rows of the padded image that `rows` rows of outputs read."""
    return (rows - 1) * shape.stride_h + shape.kernel_h


def power_of_two(size: int) -> int:
    """The least one that is not smaller. Slots of similar sizes become equal, so that a worker's
    slot is where it was for the kernel before (`Memory.by_size_nbytes`).
    """
    return 1 << (size - 1).bit_length()


def several_samples(channels: int) -> Problem:
    """A small convolution whose weights are not resident: its blocks have several samples, and
    there are several sets of them.
    """
    return Problem(Conv2d(channels, 64, (3, 3), bias=True, relu=True), ((25, channels, 4, 4),))


__all__ = [
    "BANDS_NBYTES",
    "BAND_NBYTES",
    "RESIDENT_NBYTES",
    "blocks",
    "row_length",
    "seen_rows",
    "several_samples",
]
