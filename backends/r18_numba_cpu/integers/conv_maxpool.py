"""A convolution of bytes fused with its max pooling: cache blocking, arguments, the call."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Layout, Problem, Shape
from r18.graph.quantized import QuantizedConvMaxPool
from r18_numba_cpu.compiled import counters, module, most_threads, run
from r18_numba_cpu.conv_maxpool import Cut, cut, shapes
from r18_numba_cpu.integers import gemm, packing, tiles
from r18_numba_cpu.kernels.arguments import ConvShape, packed_numbers
from r18_numba_cpu.packing import Arrays, problem_of, tile_size


def blocks(op: QuantizedConvMaxPool, read: Shape, group: int, threads: int) -> Cut:
    """The blocks of a problem. read: (N, H, W, C)."""
    conv, _ = stacked(op, read, group)
    pool = problem_of(op.pool, *shapes(op, read))[1]

    def after(rows: int) -> int:
        return gemm.beyond(conv, rows, group)

    itemsize = gemm.scratch_dtype(group).itemsize
    return cut(conv, pool, 1, itemsize, threads, after, tile_size())


def stacked(op: QuantizedConvMaxPool, read: Shape, group: int) -> tuple[ConvShape, int]:
    """The convolution over stacked rows, and which row begins the first; see `tiles.stacked`."""
    shape = gemm.conv_shape(op.conv, read, shapes(op, read)[0])
    return tiles.stacked(shape, packing.stack_of(op.conv.conv, group))


def sizes(found: Cut, group: int) -> tuple[int, ...]:
    """The bytes of all workers' sums, bands, rows of the convolution, and lines."""
    line = max(found.line, found.conv.width * found.conv.channels)
    each = (
        gemm.sums_size(group) * gemm.INT_NBYTES,
        found.blocking.slot * gemm.scratch_dtype(group).itemsize,
        found.blocking.rows * found.line,
        line,
    )
    return tuple(most_threads() * nbytes for nbytes in each)


def workspace_nbytes(problem: Problem, group: int) -> int:
    op = problem.op
    assert isinstance(op, QuantizedConvMaxPool)
    read = Layout.NHWC.physical(problem.inputs[0])
    return sum(sizes(blocks(op, read, group, most_threads()), group))


def pack(op: QuantizedConvMaxPool, weights: Arrays, group: int) -> Arrays:
    """The convolution's packed weights, and the image's scale or its table as bytes."""
    conv, maker = weights[:3], weights[3:]
    packed = packing.pack(op.conv, conv, group, packing.stack_of(op.conv.conv, group))
    return *packed, maker[0] if maker else np.zeros(1, np.int8)


@lru_cache(maxsize=1024)
def _arguments(
    op: QuantizedConvMaxPool, read: Shape, group: int
) -> tuple[Array, Array, tuple[int, ...]]:
    """`numbers` and `pooling` of the kernel, and where the parts of its workspace end."""
    found = blocks(op, read, group, most_threads())
    how = gemm.requantization(op.conv, group)
    extra = gemm.tiled(found.conv, found.blocking.rows, op.conv) if group == packing.AMX else ()
    numbers = packed_numbers(found.conv, found.blocking, how, gemm.sums_size(group), *extra)
    *_, line = (nbytes // most_threads() for nbytes in sizes(found, group))
    flip = int(packing.flip_of(op.output_storage))
    stack, (_, shift) = packing.stack_of(op.conv.conv, group), stacked(op, read, group)
    pooling = (*found.pool, found.rows, line, op.of_pixels, flip, stack, shift)
    ends = tuple(np.cumsum(sizes(found, group)).tolist())
    return np.array(numbers, np.int64), np.array(pooling, np.int64), ends


def conv_maxpool(
    op: QuantizedConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array,
    group: int,
) -> None:  # fmt: skip
    """inputs: (N, C, H, W) of int8 or float32, or pixels (N, H, W, C). out: (N, PH, PW, O)."""
    x, maker = inputs[0], weights[-1]
    read = x.shape if op.of_pixels else Layout.NHWC.physical(x.shape)
    numbers, pooling, (sums, bands, made, lines) = _arguments(op, read, group)
    run(
        module("integers.conv_maxpool").conv_maxpool,
        x if x.dtype == np.float32 else x.view(np.uint8),
        *weights[:-1],
        maker if maker.dtype == np.float32 else maker.view(np.uint8),
        out.view(np.uint8),
        workspace[:sums].view(np.int32),
        workspace[sums:bands].view(gemm.scratch_dtype(group)),
        *(workspace[bands:made], workspace[made:lines]),
        *(numbers, pooling, counters()),
    )
