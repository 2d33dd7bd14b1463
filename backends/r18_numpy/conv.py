"""Convolution in two ways: direct, tap by tap, and im2col with a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostBuffer, HostKernel
from r18.graph.ops import EXTRAS, Conv2d, Problem, Shape
from r18.graph.precision import Precision
from r18_numpy.blocks import Block, block_extents, blocks_of, ceil_div
from r18_numpy.taps import shift, unfolded
from r18_numpy.threads import run_all, single_threaded_blas, thread_count

Arrays = tuple[Array, ...]


def conv_kernels(precision: Precision) -> tuple[HostKernel, ...]:
    """The convolution kernels, the preferred algorithm first."""
    contract = RoundingContract("sum", precision.accumulate, precision.storage)
    return (
        HostKernel(
            "numpy",
            Conv2d,
            "im2col",
            precision,
            contract,
            run=conv_im2col,
            scratch=lambda problem: im2col_nbytes(problem, precision.dtype.itemsize),
            pack=lambda op, weights: (weights[0].reshape(op.out_channels, -1), *weights[1:]),
            edges=(1, 7, 8, 14, 16, 28, 56),
            extras=EXTRAS,
        ),
        HostKernel(
            "numpy",
            Conv2d,
            "direct",
            precision,
            contract,
            run=conv_direct,
            scratch=lambda problem: _direct_nbytes(problem, precision.dtype.itemsize),
            extras=EXTRAS,
        ),
    )


def epilogue(op: Conv2d, y: Array, *, bias: Array | None, residual: Array | None) -> None:
    """Bias, residual and ReLU, in place. The shape of `bias` broadcasts over `y`."""
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    if op.relu:
        np.maximum(y, 0, out=y)


# -- direct ------------------------------------------------------------------------------------


def conv_direct(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """For each tap (r, s) of the window, add w[:, :, r, s] times the channels of the shifted image.

    inputs: (N, C, H, W), and the residual (N, O, OH, OW) if the op has one. weights:
    (O, C/groups, kh, kw), and the bias (O,) if the op has one. out: (N, O, OH, OW).
    """
    shifted = HostBuffer(workspace).as_array(_shifted_shape(op, out.shape), out.dtype)
    columns = shifted.reshape(len(out), op.groups, op.group_channels, -1)
    taps = np.ascontiguousarray(weights[0].transpose(2, 3, 0, 1))
    taps = taps.reshape(*op.kernel_size, op.groups, -1, op.group_channels)
    out[...] = 0
    with single_threaded_blas():
        for r, s in np.ndindex(op.kernel_size):
            shift(op, inputs[0], r, s, 0, shifted)
            out += (taps[r, s] @ columns).reshape(out.shape)
    epilogue(
        op,
        out,
        bias=weights[1][:, None, None] if op.bias else None,
        residual=inputs[1] if op.residual else None,
    )


def _shifted_shape(op: Conv2d, output: Shape) -> Shape:
    """(N, C, OH, OW): the pixels that one tap reads for all outputs."""
    n, _, oh, ow = output
    return n, op.in_channels, oh, ow


def _direct_nbytes(problem: Problem, itemsize: int) -> int:
    op = problem.op
    assert isinstance(op, Conv2d)
    return math.prod(_shifted_shape(op, problem.output)) * itemsize


# -- im2col ------------------------------------------------------------------------------------


def conv_im2col(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Unfold each output's window into a column of C·kh·kw values; one matrix product per block,
    and of several groups one for each.

    inputs: (N, C, H, W), and the residual (N, O, OH, OW) if the op has one. weights:
    (O, C/groups·kh·kw), and the bias (O,) if the op has one. out: (N, O, OH, OW).
    """

    def finish(block: Block, product: Array) -> None:
        place = block.images, block.channels, block.rows
        bias = weights[1][block.channels, None, None, None] if op.bias else None
        residual = inputs[1][place].swapaxes(0, 1) if op.residual else None
        epilogue(op, product, bias=bias, residual=residual)
        out[place].swapaxes(0, 1)[...] = product

    problem = Problem(op, tuple(a.shape for a in inputs))
    im2col(problem, inputs[0], weights[0], out.dtype, workspace, finish)


def im2col(
    problem: Problem,
    x: Array,
    matrix: Array,
    dtype: np.dtype[np.generic],
    workspace: Array,
    finish: Callable[[Block, Array], None],
) -> None:
    """The sums of a convolution, block by block, on all threads.

    x: (N, C, H, W). matrix: (O, C/groups·kh·kw) in `dtype`, the format of columns and sums.
    workspace: of `im2col_nbytes`. finish: gets a block and its sums (channels, images, rows, OW),
    which it may overwrite, while they are in the cache.
    """
    workers = thread_count()
    extents = block_extents(problem, dtype.itemsize, workers)
    slots = HostBuffer(workspace).as_array((workers, _slot_size(problem, extents)), dtype)

    def compute(block: Block, worker: int) -> None:
        finish(block, _sums(problem, x, matrix, block, slots[worker]))

    run_all(compute, blocks_of(problem, extents), workers)


def _slot_size(problem: Problem, extents: tuple[int, int, int]) -> int:
    """Elements of a worker's scratch: the columns of a block, their product, and its band."""
    op = problem.op
    assert isinstance(op, Conv2d)
    images, channels, rows = extents
    columns = (op.groups * op.depth + channels) * images * rows * problem.output[3]
    return columns + math.prod(_band_shape(op, images, rows, problem.inputs[0][3]))


def _band_shape(op: Conv2d, images: int, rows: int, width: int) -> Shape:
    """(C, N, rows, W) of the padded image that this many rows of outputs read."""
    seen = (rows - 1) * op.stride[0] + (op.kernel_size[0] - 1) * op.dilation[0] + 1
    return op.in_channels, images, seen, width + 2 * op.padding[1]


def im2col_nbytes(problem: Problem, itemsize: int) -> int:
    """The workspace of `im2col`, in a format of this size."""
    workers = thread_count()
    return workers * _slot_size(problem, block_extents(problem, itemsize, workers)) * itemsize


def band_of(op: Conv2d, images: Array, rows: slice, room: Array) -> Array:
    """The rows of padded images (C, N, H, W) that rows of outputs read: a view if none is padding.

    room: for a copy.
    """
    (sh, _), (ph, pw), (h, w) = op.stride, op.padding, images.shape[2:]
    shape = _band_shape(op, images.shape[1], rows.stop - rows.start, w)
    top = rows.start * sh - ph  # of the band, in the image
    first, last = max(0, top), min(h, top + shape[2])
    if (pw, first, last) == (0, top, top + shape[2]):
        return images[:, :, first:last]
    band = room[: math.prod(shape)].reshape(shape)
    band[...] = 0
    if first < last:
        band[:, :, first - top : last - top, pw : pw + w] = images[:, :, first:last]
    return band


def _sums(problem: Problem, x: Array, matrix: Array, block: Block, slot: Array) -> Array:
    """A block's products (channels, images, rows, OW), in its slot."""
    op = problem.op
    assert isinstance(op, Conv2d)
    channels, images, rows = (s.stop - s.start for s in (block.channels, block.images, block.rows))
    shape = (op.in_channels, *op.kernel_size, images, rows, problem.output[3])
    sums_shape = (channels, *shape[3:])
    windows, sums, room = np.split(slot, np.cumsum([math.prod(shape), math.prod(sums_shape)]))
    windows, sums = windows.reshape(shape), sums.reshape(channels, -1)
    windows[...] = unfolded(
        op, band_of(op, x[block.images].swapaxes(0, 1), block.rows, room), shape
    )
    columns = windows.reshape(op.groups, op.depth, -1)
    for group, of_group in _groups(op, block.channels):
        to = slice(of_group.start - block.channels.start, of_group.stop - block.channels.start)
        np.matmul(matrix[of_group], columns[group], out=sums[to])
    return sums.reshape(sums_shape)


def _groups(op: Conv2d, channels: slice) -> Iterator[tuple[int, slice]]:
    """The groups that these output channels are in, each with those of them that are its own."""
    size = op.out_channels // op.groups
    for group in range(channels.start // size, ceil_div(channels.stop, size)):
        first, last = group * size, (group + 1) * size
        yield group, slice(max(first, channels.start), min(last, channels.stop))
