"""Convolution and linear of bytes as an implicit GEMM: cache blocking, the call. See `kernels`.

`group` says which micro-kernel: the bytes that it multiplies at a time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Layout, Problem, Shape
from r18.graph.quantized import QuantizedConv2d, QuantizedLinear
from r18_numba_cpu import blocking
from r18_numba_cpu.compiled import counters, module, most_threads, run
from r18_numba_cpu.integers import tiles
from r18_numba_cpu.integers.packing import AMX, BANDS, flip_of, plain
from r18_numba_cpu.kernels.arguments import Blocks, ConvShape, Requantization, packed_numbers
from r18_numba_cpu.packing import Arrays, problem_of, tile_size, weight_nbytes

INT_NBYTES = 4

Sum = QuantizedConv2d | QuantizedLinear


def blocks(shape: ConvShape, threads: int, group: int) -> Blocks:
    """The cache blocking.

    A slot begins with a register tile in float32, for the portable micro-kernel. Bands end with
    room for what a group reads beyond a kernel row, where weights are 0, and what AMX's tiles read
    for outputs that are not there.
    """

    def after(rows: int) -> int:
        return beyond(shape, rows, group)

    dtype = scratch_dtype(group)
    weights = weight_nbytes(shape, dtype)
    return blocking.blocks(shape, threads, dtype.itemsize, weights, after, tile_size())


def beyond(shape: ConvShape, rows: int, group: int) -> int:
    """The elements that are read behind a band of `rows` rows of outputs."""
    return tiles.beyond(shape, rows, tiles.cover(shape, rows, False)) if group == AMX else group


def sums_size(group: int) -> int:
    """The int32 of a worker's sums: a register tile, or AMX's tiles."""
    return tiles.sums_size() if group == AMX else tile_size()


def workspace_nbytes(problem: Problem, group: int) -> int:
    """For each worker its sums, and its slot."""
    op, shapes = problem.op, (problem.inputs[0], problem.output)
    assert isinstance(op, Sum)
    shape = conv_shape(op, *map(Layout.NHWC.physical, shapes))
    slot = blocks(shape, most_threads(), group).slot * scratch_dtype(group).itemsize
    return most_threads() * (sums_size(group) * INT_NBYTES + slot)


def conv_shape(op: Sum, read: Shape, written: Shape) -> ConvShape:
    """The extents of a convolution, (N, H, W, C) in memory, or of a linear op, (N, K).

    A convolution with several groups or dilation has the extents of its `plain` one. A linear op is
    the 1×1 convolution of one image with a pixel for each sample.
    """
    if isinstance(op, QuantizedConv2d):
        return problem_of(plain(op.conv), read, written)[1]
    conv = Conv2d(op.linear.in_features, op.linear.out_features, (1, 1))
    return problem_of(conv, (1, 1, *read), (1, 1, *written))[1]


@lru_cache(maxsize=1024)
def numbers(op: Sum, read: Shape, written: Shape, group: int) -> Array:
    """The kernel's arguments that are not arrays, as int64. Cached: every run needs them."""
    shape = conv_shape(op, read, written)
    cut, how = blocks(shape, most_threads(), group), requantization(op, group)
    extra = tiled(shape, cut.rows, op) if group == AMX else ()
    return np.array(packed_numbers(shape, cut, how, sums_size(group), *extra), np.int64)


def tiled(shape: ConvShape, rows: int, op: Sum) -> tuple[int, ...]:
    """What AMX's tiles take of a band of `rows` rows of outputs."""
    cover = tiles.cover(shape, rows, op.input_storage[0] == "int8")
    return tiles.arguments(shape, rows, cover)


def requantization(op: Sum, group: int) -> Requantization:
    stored = op.input_storage
    ends = (0, 0)  # logits do not saturate
    if isinstance(op, QuantizedConv2d):
        limits = np.iinfo(op.output_storage)
        ends = int(limits.min), int(limits.max)
    flip = int(flip_of(stored[0], group))
    return Requantization(flip, len(stored) > 1, stored[-1] == "int8", *ends)


def gemm(
    op: Sum, inputs: Arrays, weights: Arrays, out: Array, workspace: Array, group: int
) -> None:
    weight, bias, multiplier, residual_multiplier = weights
    x, residual = inputs[0].view(np.uint8), inputs[-1].view(np.uint8)
    written = out.view(np.uint8) if isinstance(op, QuantizedConv2d) else out
    sums = most_threads() * sums_size(group) * INT_NBYTES
    run(
        module("integers.implicit_gemm").implicit_gemm,
        *(x, weight, bias, multiplier, residual, residual_multiplier, written),
        *(workspace[:sums].view(np.int32), workspace[sums:].view(scratch_dtype(group))),
        *(numbers(op, inputs[0].shape, out.shape, group), counters()),
    )


def scratch_dtype(group: int) -> np.dtype[np.generic]:
    """The dtype of the scratch for a band of the image."""
    return np.dtype(BANDS[group])
