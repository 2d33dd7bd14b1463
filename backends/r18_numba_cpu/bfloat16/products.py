"""Convolution and linear of bfloat16: packed weights, cache blocking, the call.

How sums are rounded. Products of two bfloat16 have 16 significant bits, so they are exact in
float32. Each way adds an output's K products in a tree of its own:

- `vdpbf16ps` adds two products to a sum, the one of the upper halves first, each by a fused
  multiply-add (Intel SDM, volume 2, VDPBF16PS). A Zen 4 does the same to the bit, which
  `tests/backends/numba_cpu/test_bfloat16_instructions.py` verifies on the CPU that runs it.
- `tdpbf16ps` adds a tile's upper halves and its lower halves by a chain of fused multiply-adds
  each, which begin at 0, then the two sums, and then that to the sum so far (the same, TDPBF16PS).
- float32's micro-kernel adds product after product.

All round to the nearest, ties to even, and do not consult MXCSR. Adding to 0 is exact. So a
product passes at most K − 1 roundings in a chain, and in tiles of p pairs and s steps, K = 2ps, at
most (p − 1) + 1 + (s − 1). The bound of `sum`, γ_n·S, holds for every tree, with n = K and one for
each addend of the epilogue.

The two instructions flush: a factor below 2⁻¹²⁶ counts as 0, and so does a sum. That is what
`flush_to_zero` declares. A sum that is flushed is 0, and adding 0 loses nothing, so that each loss
takes at least one term out of the tree: K losses, of less than 2⁻¹²⁶ each, in any tree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Layout, Linear, Problem, Shape
from r18.graph.precision import BF16
from r18_numba_cpu import blocking
from r18_numba_cpu.compiled import counters, module, most_threads, run
from r18_numba_cpu.integers import tiles
from r18_numba_cpu.integers.packing import AMX, PORTABLE
from r18_numba_cpu.kernels.arguments import (
    MOST_NBYTES,
    SLICE,
    Blocks,
    ConvShape,
    Cover,
    Epilogue,
    paired_numbers,
)
from r18_numba_cpu.packing import (
    FLOAT_NBYTES,
    Arrays,
    channels_last,
    padded_bias,
    panels,
    problem_of,
    round_up,
    tile_size,
    weight_nbytes,
)

FLUSHED = replace(BF16, flush_to_zero=True)
"""The precision of AMX and `vdpbf16ps`, which flush subnormals to zero."""

PAIRS = 2
"""The elements that `vdpbf16ps` multiplies at a time, next to `AMX` and `PORTABLE`: its `group`."""

PAIR_NBYTES = 4

SLICED_NBYTES = 4 << 20
"""Weights of more than this have their channels in slices: twice what the L2 of a Xeon holds, so a
call reads them from L3.
"""

MOST_TAPS = 16
"""The most taps of a convolution in slices. Each is 2 KiB of a panel's slice, and 16 of them fit in
L1 together with the pixels that they read.
"""

NBYTES = 2
"""Bytes of a bfloat16."""

Sum = Conv2d | Linear


def as_conv(op: Sum) -> Conv2d:
    """A linear op is the 1×1 convolution of one image with a pixel for each sample."""
    if isinstance(op, Conv2d):
        return op
    return Conv2d(op.in_features, op.out_features, (1, 1), bias=True)


def band_shape(op: Sum, read: Shape, written: Shape, group: int) -> ConvShape:
    """The extents of a convolution (N, H, W, C), with the channels that a band has.

    AMX's are even.
    """
    conv = as_conv(op)
    if op is not conv:
        read, written = (1, 1, *read), (1, 1, *written)
    shape = problem_of(conv, read, written)[1]
    return shape._replace(channels=round_up(shape.channels, PAIRS if group == AMX else 1))


def cover(shape: ConvShape, rows: int) -> Cover:
    """Tiles whose steps end where a kernel row does."""
    return tiles.cover(shape, rows, False)._replace(step=step(shape.kernel_w * shape.channels))


def step(length: int) -> int:
    """Bytes of K in a tile: the most that divide a kernel row of `length` elements, an even number.

    A step across the end of the row would read values that may be infinite.
    """
    pairs = length // PAIRS
    most = MOST_NBYTES // PAIR_NBYTES
    return PAIR_NBYTES * max(count for count in range(1, most + 1) if pairs % count == 0)


def slices(op: Sum) -> int:
    """In how many slices of SLICE channels AMX's bands and panels have the channels; else one.

    Large weights come from L3 with a panel's first outputs, and from L2 with the others. In slices,
    a part of a panel, of up to MOST_TAPS taps, and what it multiplies stay in L1 for some outputs.
    Not worth it for a window of one tap, which reads each pixel once for a panel.
    """
    conv = as_conv(op)
    is_large = conv.depth * conv.out_channels * NBYTES > SLICED_NBYTES
    is_worth_it = is_large and 1 < math.prod(conv.kernel_size) <= MOST_TAPS
    return conv.in_channels // SLICE if is_worth_it and conv.in_channels % SLICE == 0 else 1


def several_slices() -> Problem:
    """A convolution in `slices`, whose sums wait in two turns, the second of them shorter.

    Rows and columns have different strides, tiles are full, and the last panel is not whole.
    """
    conv = Conv2d(128, 1850, (3, 3), (2, 1), (1, 2), bias=True, relu=True, residual=True)
    return Problem(conv, ((1, 128, 9, 30), (1, 1850, 5, 32)))


def blocks(shape: ConvShape, threads: int, group: int) -> Blocks:
    """The cache blocking. With AMX, bands end with room for what tiles read for outputs that are
    not there."""

    def after(rows: int) -> int:
        return beyond(shape, rows, group)

    dtype = scratch_dtype(group)
    return blocking.blocks(shape, threads, dtype.itemsize, weight_nbytes(shape, dtype), after)


def beyond(shape: ConvShape, rows: int, group: int) -> int:
    """The elements that are read behind a band of `rows` rows of outputs."""
    return tiles.beyond(shape, rows, cover(shape, rows)) if group == AMX else 0


def sums_size(group: int) -> int:
    """The float32 of a worker's sums: a register tile, or AMX's tiles."""
    return tiles.sums_size() if group == AMX else tile_size()


def workspace_nbytes(problem: Problem, group: int) -> int:
    """For each worker its sums, and its slot."""
    op = problem.op
    assert isinstance(op, Sum)
    read, written = map(Layout.NHWC.physical, (problem.inputs[0], problem.output))
    slot = blocks(band_shape(op, read, written, group), most_threads(), group).slot
    nbytes = sums_size(group) * FLOAT_NBYTES + slot * scratch_dtype(group).itemsize
    return most_threads() * nbytes


def pack(op: Sum, weights: Arrays, group: int, sliced: bool = False) -> Arrays:
    """Panels (panels, kh, ⌈kw·C/group⌉, columns, group), and the bias padded to panels.

    Weights are bfloat16 as uint16, with a zero at the end of an odd kernel row; portable ones are
    float32. AMX's are pairs, as uint32, in the order of `tiles.in_order`, with zeros for a channel
    more where C is odd. `sliced` ones, if they are in several `slices`, are (panels, slices·kh,
    kw·SLICE/2, columns, 1), slice after slice.
    """
    conv = as_conv(op)
    count, channels, kernel_h, kernel_w = len(weights[0]), conv.in_channels, *conv.kernel_size
    columns = module("micro_kernel").COLUMNS
    together = 1 if group == PORTABLE else PAIRS
    taps = weights[0].reshape(count, channels, kernel_h, kernel_w).transpose(2, 3, 1, 0)
    taps = taps.astype(np.float32) if group == PORTABLE else taps.view(np.uint16)
    if group == AMX:
        taps = np.pad(taps, ((0, 0), (0, 0), (0, channels % PAIRS), (0, 0)))
    pieces = slices(op) if sliced else 1
    by_slice = taps.reshape(kernel_h, kernel_w, pieces, -1, count).transpose(2, 0, 1, 3, 4)
    runs = by_slice.reshape(pieces * kernel_h, -1, count)
    length = round_up(runs.shape[1], together)
    whole: Array = np.zeros((len(runs), length, panels(count) * columns), runs.dtype)
    whole[:, : runs.shape[1], :count] = runs
    split = whole.reshape(len(runs), -1, together, panels(count), columns)
    packed = np.ascontiguousarray(split.transpose(3, 0, 1, 4, 2))
    if group == AMX:
        packed = tiles.in_order(packed.view(np.uint32), step(length))
    return packed, padded_bias(conv, weights)


@lru_cache(maxsize=1024)
def numbers(
    op: Sum, read: Shape, written: Shape, group: int, from_nchw: bool, sliced: bool
) -> Array:
    """The kernel's arguments that are not arrays, as int64. Cached: every run needs them."""
    conv = as_conv(op)
    shape = band_shape(op, read, written, group)
    cut = blocks(shape, most_threads(), group)
    how, pieces = Epilogue(conv.residual, conv.relu), slices(op) if sliced else 1
    return packed(shape, cut, how, from_nchw, conv, group, pieces)


def packed(
    shape: ConvShape, cut: Blocks, how: Epilogue, from_nchw: bool, conv: Conv2d, group: int,
    pieces: int = 1,
) -> Array:  # fmt: skip
    """`paired_numbers` as int64, with what AMX's tiles take. pieces: the `slices` of a band."""
    shape = shape._replace(channels=shape.channels // pieces)
    extra: tuple[int, ...] = ()
    if group == AMX:
        stride = blocking.seen_rows(shape, cut.rows) * blocking.row_length(shape)
        found = cover(shape, cut.rows)._replace(slices=pieces, slice_stride=stride)
        extra = tiles.arguments(shape, cut.rows, found)
    sizes = conv.in_channels, sums_size(group)
    return np.array(paired_numbers(shape, cut, how, from_nchw, *sizes, *extra), np.int64)


def multiply(
    op: Sum, inputs: Arrays, weights: Arrays, out: Array, workspace: Array, group: int,
    from_nchw: bool = False, sliced: bool = False,
) -> None:  # fmt: skip
    """sliced: whether weights are packed so."""
    read = channels_last(inputs[0], from_nchw)
    sums = most_threads() * sums_size(group) * FLOAT_NBYTES
    run(
        module("bfloat16.implicit_gemm").implicit_gemm,
        *(inputs[0].view(np.uint16), *weights, inputs[-1].view(np.uint16), out.view(np.uint16)),
        *(workspace[:sums].view(np.float32), workspace[sums:].view(scratch_dtype(group))),
        *(numbers(op, read, out.shape, group, from_nchw, sliced), counters()),
    )


def scratch_dtype(group: int) -> np.dtype[np.generic]:
    """The dtype of the scratch for a band of the image."""
    return np.dtype(np.float32 if group == PORTABLE else np.uint16)
