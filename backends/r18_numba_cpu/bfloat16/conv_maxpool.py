"""A convolution in bfloat16 fused with its max pooling: cache blocking, arguments, the call."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import ConvMaxPool, Layout, Problem, Shape
from r18_numba_cpu.bfloat16 import products
from r18_numba_cpu.compiled import counters, module, most_threads, run
from r18_numba_cpu.conv_maxpool import Cut, cut, shapes
from r18_numba_cpu.kernels.arguments import Epilogue
from r18_numba_cpu.packing import FLOAT_NBYTES, Arrays, channels_last, problem_of


def blocks(op: ConvMaxPool, read: Shape, group: int, threads: int) -> Cut:
    """The blocks of a problem. read: (N, H, W, C)."""
    made, written = shapes(op, read)
    conv = products.band_shape(op.conv, read, made, group)
    pool = problem_of(op.pool, made, written)[1]

    def after(rows: int) -> int:
        return products.beyond(conv, rows, group)

    return cut(conv, pool, products.NBYTES, products.scratch_dtype(group).itemsize, threads, after)


def sizes(found: Cut, group: int) -> tuple[int, ...]:
    """The bytes of all workers' sums, bands, rows of the convolution, and lines."""
    line = found.line * products.NBYTES
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
    return sum(sizes(blocks(op, read, group, most_threads()), group))


def pack(op: ConvMaxPool, weights: Arrays, group: int) -> Arrays:
    """The packed weights of the convolution."""
    return products.pack(op.conv, weights, group)


@lru_cache(maxsize=1024)
def _arguments(
    op: ConvMaxPool, read: Shape, group: int, from_nchw: bool
) -> tuple[Array, Array, tuple[int, ...]]:
    """`numbers` and `pooling` of the kernel, and where the parts of its workspace end."""
    found = blocks(op, read, group, most_threads())
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
        *(numbers, pooling, counters()),
    )
