"""A convolution in bfloat16 fused with its max pooling: cache blocking, arguments, the call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from r18.backend import Array
from r18.graph.ops import ConvMaxPool, Layout, Problem, Shape
from r18_numba_cpu.bfloat16 import products
from r18_numba_cpu.blocking import BAND_NBYTES
from r18_numba_cpu.compiled import ceil_div, module, most_threads, run, workers
from r18_numba_cpu.kernels.arguments import CACHE_LINE, Blocks, ConvShape, Epilogue
from r18_numba_cpu.packing import FLOAT_NBYTES, Arrays, channels_last, panels, problem_of, round_up

NBYTES = 2
"""Bytes of a bfloat16."""

MADE_NBYTES = 256 << 10
"""The convolution's rows of a block, of about this size, stay in a core's L2 cache."""


class Cut(NamedTuple):
    """How a problem is cut into blocks. rows: of pooled outputs in a block."""

    conv: ConvShape
    pool: ConvShape
    rows: int
    blocking: Blocks


def cut(op: ConvMaxPool, read: Shape, group: int, threads: int) -> Cut:
    """The blocks of a problem. read: (N, H, W, C)."""
    n, height, width, channels = read
    middle = op.conv.infer((n, channels, height, width))
    made, written = map(Layout.NHWC.physical, (middle, op.pool.infer(middle)))
    conv = products.band_shape(op.conv, read, made, group)
    pool = problem_of(op.pool, made, written)[1]

    def made_rows(rows: int) -> int:
        """The convolution's rows that `rows` rows of pooled outputs need."""
        return min(conv.out_h, (rows - 1) * pool.stride_h + pool.kernel_h)

    def seen_rows(rows: int) -> int:
        return (made_rows(rows) - 1) * conv.stride_h + conv.kernel_h

    itemsize = products.scratch_dtype(group).itemsize
    length = ((conv.out_w - 1) * conv.stride_w + conv.kernel_w) * conv.channels
    rows = 1
    while (
        rows < pool.out_h
        and made_rows(rows + 1) * conv.out_w * conv.outputs * NBYTES <= MADE_NBYTES
        and seen_rows(rows + 1) * length * itemsize <= BAND_NBYTES
    ):
        rows += 1
    bands = max(ceil_div(pool.out_h, rows), ceil_div(2 * threads, n))  # two blocks a thread
    if n % threads:  # or as many more for each
        bands = round_up(bands, threads)
    rows = ceil_div(pool.out_h, bands)
    most = made_rows(rows)
    band = round_up(seen_rows(rows) * length, CACHE_LINE)
    slot = round_up(band + products.beyond(conv, most, group), CACHE_LINE)
    return Cut(conv, pool, rows, Blocks(1, most, panels(conv.outputs), band, slot))


def sizes(found: Cut, group: int) -> tuple[int, ...]:
    """The bytes of all workers' sums, bands, rows of the convolution, and lines."""
    line = found.conv.out_w * found.conv.outputs * NBYTES
    each = (
        products.sums_size(group) * FLOAT_NBYTES,
        found.blocking.slot * products.scratch_dtype(group).itemsize,
        found.blocking.rows * line,
        line,
    )
    return tuple(most_threads() * nbytes for nbytes in each)


def workspace_nbytes(problem: Problem, group: int) -> int:
    op = problem.op
    assert isinstance(op, ConvMaxPool)
    read = Layout.NHWC.physical(problem.inputs[0])
    return sum(sizes(cut(op, read, group, most_threads()), group))


def pack(op: ConvMaxPool, weights: Arrays, group: int) -> Arrays:
    """The packed weights of the convolution."""
    return products.pack(op.conv, weights, group)


@lru_cache(maxsize=1024)
def _arguments(
    op: ConvMaxPool, read: Shape, group: int, from_nchw: bool
) -> tuple[Array, Array, tuple[int, ...]]:
    """`numbers` and `pooling` of the kernel, and where the parts of its workspace end."""
    found = cut(op, read, group, most_threads())
    how = Epilogue(False, op.conv.relu)
    numbers = products.packed(found.conv, found.blocking, how, from_nchw, op.conv, group)
    ends = tuple(np.cumsum(sizes(found, group)).tolist())
    return numbers, np.array((*found.pool, found.rows), np.int64), ends


def conv_maxpool(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array, group: int,
    from_nchw: bool = False,
) -> None:  # fmt: skip
    read = channels_last(inputs[0], from_nchw)
    numbers, pooling, (sums, bands, made, lines) = _arguments(op, read, group, from_nchw)
    run(
        module("bfloat16.conv_maxpool").conv_maxpool,
        *(inputs[0].view(np.uint16), *weights, out.view(np.uint16)),
        workspace[:sums].view(np.float32),
        workspace[sums:bands].view(products.scratch_dtype(group)),
        *(workspace[bands:made].view(np.uint16), workspace[made:lines].view(np.uint16)),
        *(numbers, pooling, workers()),
    )
