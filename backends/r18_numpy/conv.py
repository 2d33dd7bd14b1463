"""Convolution, twice: summed tap by tap as it is defined, and as im2col with a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.lib.stride_tricks import as_strided

from r18.backend import Array, RoundingContract
from r18.host import HostKernel, HostMemory
from r18.ops import Conv2d, Problem, Shape
from r18.precision import Precision
from r18_numpy.threads import run_all, thread_count

# im2col works on blocks of columns of about this size: the block, the weights' panel and the
# result then stay in a core's second-level cache between copy, product and epilogue.
BLOCK_NBYTES = 1 << 20


def conv_kernels(precision: Precision) -> tuple[HostKernel, ...]:
    """The preferred algorithm first."""
    contract = RoundingContract("sum", precision.accumulate, precision.storage)
    return (
        HostKernel(
            "numpy",
            Conv2d,
            "im2col",
            precision,
            contract,
            run=conv_im2col,
            scratch=lambda problem: _im2col_nbytes(problem, precision.dtype.itemsize),
            pack=lambda op, weights: (weights[0].reshape(op.out_channels, -1), *weights[1:]),
            edges=(1, 7, 8, 14, 16, 28, 56),
        ),
        HostKernel(
            "numpy",
            Conv2d,
            "direct",
            precision,
            contract,
            run=conv_direct,
            scratch=lambda problem: _padded_nbytes(problem, precision.dtype.itemsize),
        ),
    )


def epilogue(op: Conv2d, y: Array, bias: Array | None, residual: Array | None) -> None:
    """Bias, residual, ReLU, in place; `bias` comes in a shape that broadcasts over `y`."""
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    if op.relu:
        np.maximum(y, 0, out=y)


# -- direct ------------------------------------------------------------------------------------


def conv_direct(
    op: Conv2d,
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
    out: Array,
    workspace: Array,
) -> None:
    """For each tap (r, s) of the window: the channels of the shifted image, mixed by w[:, :, r, s].

    inputs: (N, C, H, W) and the residual (N, O, OH, OW), if fused; weights: (O, C, kh, kw) and the
    bias (O,), if fused; out: (N, O, OH, OW).
    """
    x = _padded(op, inputs[0], workspace)
    w = weights[0]
    (sh, sw), (oh, ow) = op.stride, out.shape[2:]
    out[...] = 0
    for r in range(op.kernel_size[0]):
        for s in range(op.kernel_size[1]):
            shifted = x[:, :, r : r + sh * (oh - 1) + 1 : sh, s : s + sw * (ow - 1) + 1 : sw]
            out += np.einsum("oc,nchw->nohw", w[:, :, r, s], shifted, optimize=True)
    bias = weights[1][:, None, None] if op.bias else None
    epilogue(op, out, bias, inputs[1] if op.residual else None)


def _padded_shape(op: Conv2d, image: Shape) -> Shape:
    n, c, h, w = image
    return (n, c, h + 2 * op.padding[0], w + 2 * op.padding[1])


def _padded_nbytes(problem: Problem, itemsize: int) -> int:
    op = problem.op
    assert isinstance(op, Conv2d)
    if op.padding == (0, 0):
        return 0
    return int(np.prod(_padded_shape(op, problem.inputs[0]))) * itemsize


def _padded(op: Conv2d, x: Array, workspace: Array) -> Array:
    """The image with its border of zeros, in the workspace; the image itself when it has none."""
    ph, pw = op.padding
    if (ph, pw) == (0, 0):
        return x
    shape = _padded_shape(op, x.shape)
    padded: Array = workspace[: int(np.prod(shape)) * x.itemsize].view(x.dtype).reshape(shape)
    h, w = x.shape[2:]
    padded[:, :, :ph] = 0
    padded[:, :, ph + h :] = 0
    padded[:, :, ph : ph + h, :pw] = 0
    padded[:, :, ph : ph + h, pw + w :] = 0
    padded[:, :, ph : ph + h, pw : pw + w] = x
    return padded


# -- im2col ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Output rows [top, bottom) of images [first, last): the unit that im2col works on."""

    first: int
    last: int
    top: int
    bottom: int


@dataclass(frozen=True)
class _Cut:
    """How im2col cuts the output into blocks, and each block's product into channel slices.

    Small images are taken several at a time, so that the product has enough columns; large ones
    in bands of rows, so that the columns stay in the cache. Where there are fewer blocks than
    workers, each takes a slice of the output channels. A single image is left to one worker and
    to BLAS's own threads: measured, that is the faster of the two ways there, and the slower one
    from two images on. Byte counts are those of a block's scratch: the padded input, the columns,
    and the product where it cannot be written in place.
    """

    workers: int
    blocks: tuple[_Block, ...]
    slices: int
    padded_nbytes: int
    columns_nbytes: int
    product_nbytes: int

    @property
    def slots(self) -> int:
        """Blocks in work at once."""
        return min(len(self.blocks), self.workers)

    @property
    def slot_nbytes(self) -> int:
        return self.padded_nbytes + self.columns_nbytes + self.product_nbytes

    @classmethod
    def of(cls, problem: Problem, itemsize: int) -> _Cut:
        op = problem.op
        assert isinstance(op, Conv2d)
        n, channels, oh, ow = problem.output
        workers = thread_count() if n > 1 else 1
        fitting = max(1, BLOCK_NBYTES // (op.depth * itemsize))  # columns in a block
        rows = min(oh, max(1, fitting // ow))
        rows = -(-oh // -(-oh // rows))  # as many bands, but of nearly one height
        images = max(1, min(fitting // (oh * ow), -(-n // workers))) if rows == oh else 1
        blocks = tuple(
            _Block(first, min(first + images, n), top, min(top + rows, oh))
            for first in range(0, n, images)
            for top in range(0, oh, rows)
        )
        _, c, _, w = problem.inputs[0]
        window = c * ((rows - 1) * op.stride[0] + op.kernel_size[0]) * (w + 2 * op.padding[1])
        columns = images * rows * ow
        return cls(
            workers,
            blocks,
            min(channels, -(-workers // len(blocks))),
            _align(images * window * itemsize) if op.padding != (0, 0) else 0,
            _align(op.depth * columns * itemsize),
            _align(channels * columns * itemsize) if images > 1 else 0,
        )


def _align(nbytes: int) -> int:
    return -(-nbytes // HostMemory.alignment) * HostMemory.alignment


def _im2col_nbytes(problem: Problem, itemsize: int) -> int:
    cut = _Cut.of(problem, itemsize)
    return cut.slots * cut.slot_nbytes


def conv_im2col(
    op: Conv2d,
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
    out: Array,
    workspace: Array,
) -> None:
    """Unfold each output's window into a column of C·kh·kw values; then one product a block.

    inputs: (N, C, H, W) and the residual (N, O, OH, OW), if fused; weights: (O, C·kh·kw) and the
    bias (O,), if fused; out: (N, O, OH, OW).
    """
    cut = _Cut.of(Problem(op, tuple(a.shape for a in inputs)), out.itemsize)
    free: SimpleQueue[Array] = SimpleQueue()
    for slot in range(cut.slots):
        free.put(workspace[slot * cut.slot_nbytes : (slot + 1) * cut.slot_nbytes])
    call = _Call(op, inputs, weights, out, cut)
    if cut.slices == 1:

        def whole(block: _Block) -> None:
            scratch = free.get()
            try:
                call.multiply(block, call.columns(block, scratch), scratch, slice(None))
            finally:
                free.put(scratch)

        run_all(whole, cut.blocks, cut.workers)
        return
    scratches = {block: free.get() for block in cut.blocks}  # fewer blocks than threads
    columns: dict[_Block, Array] = {}

    def unfold(block: _Block) -> None:
        columns[block] = call.columns(block, scratches[block])

    def multiply(part: tuple[_Block, slice]) -> None:
        block, channels = part
        call.multiply(block, columns[block], scratches[block], channels)

    run_all(unfold, cut.blocks, cut.workers)
    size = -(-op.out_channels // cut.slices)
    starts = range(0, op.out_channels, size)
    parts = [(block, slice(o, o + size)) for block in cut.blocks for o in starts]
    run_all(multiply, parts, cut.workers)


@dataclass(frozen=True)
class _Call:
    """One convolution's arrays, and the two halves of a block's work."""

    op: Conv2d
    inputs: tuple[Array, ...]
    weights: tuple[Array, ...]
    out: Array
    cut: _Cut

    def columns(self, block: _Block, scratch: Array) -> Array:
        """The block's windows as a matrix (C·kh·kw, images·rows·OW), in the scratch."""
        x = self.inputs[0][block.first : block.last]
        rows, ow = block.bottom - block.top, self.out.shape[3]
        windows = _windows(self.op, _band(self.op, x, block, scratch), rows, ow)
        space = scratch[self.cut.padded_nbytes :]
        columns: Array = space[: windows.size * x.itemsize].view(x.dtype).reshape(windows.shape)
        columns[...] = windows
        return columns.reshape(self.op.depth, -1)

    def multiply(self, block: _Block, columns: Array, scratch: Array, channels: slice) -> None:
        """Some output channels of the block: product and epilogue, while they are in the cache."""
        op, images, rows = self.op, block.last - block.first, slice(block.top, block.bottom)
        weight = self.weights[0][channels]
        bias = self.weights[1][channels, None] if op.bias else None
        if images == 1:
            y = self.out[block.first, channels, rows].reshape(len(weight), -1)
            near = self.inputs[1][block.first, channels, rows] if op.residual else None
            np.matmul(weight, columns, out=y)
            epilogue(op, y, bias, None if near is None else near.reshape(y.shape))
            return
        space = scratch[self.cut.padded_nbytes + self.cut.columns_nbytes :]
        size = self.out.itemsize * op.out_channels * columns.shape[1]
        y = space[:size].view(self.out.dtype).reshape(op.out_channels, -1)[channels]
        np.matmul(weight, columns, out=y)
        group = slice(block.first, block.last)
        nchw = y.reshape(len(weight), images, *self.out.shape[2:]).transpose(1, 0, 2, 3)
        near = self.inputs[1][group, channels] if op.residual else None
        epilogue(op, nchw, None if bias is None else bias[:, :, None], near)
        self.out[group, channels] = nchw


def _band(op: Conv2d, x: Array, block: _Block, scratch: Array) -> Array:
    """The input rows that a block reads, with their zero border, in the scratch.

    x: (images, C, H, W). Without padding it is a view of the input.
    """
    (ph, pw), sh, (h, w) = op.padding, op.stride[0], x.shape[2:]
    first = block.top * sh - ph
    count = (block.bottom - 1 - block.top) * sh + op.kernel_size[0]
    if (ph, pw) == (0, 0):
        return x[:, :, first : first + count]
    shape = (*x.shape[:2], count, w + 2 * pw)
    band: Array = scratch[: int(np.prod(shape)) * x.itemsize].view(x.dtype).reshape(shape)
    above, below = min(max(0, -first), count), min(max(0, first + count - h), count)
    band[:, :, :above] = 0
    band[:, :, count - below :] = 0
    inside = band[:, :, above : count - below]
    inside[..., :pw] = 0
    inside[..., pw + w :] = 0
    inside[..., pw : pw + w] = x[:, :, first + above : first + count - below]
    return band


def _windows(op: Conv2d, x: Array, oh: int, ow: int) -> Array:
    """A view of the padded rows as (C, kh, kw, N, OH, OW): x[n, c, i·sh + r, j·sw + s]."""
    n, c = x.shape[:2]
    bn, bc, bh, bw = x.strides
    (kh, kw), (sh, sw) = op.kernel_size, op.stride
    return as_strided(
        x, (c, kh, kw, n, oh, ow), (bc, bh, bw, bn, bh * sh, bw * sw), writeable=False
    )
