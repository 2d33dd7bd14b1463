"""Convolution, twice: summed tap by tap as it is defined, and as im2col with a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from r18.backend import Array, RoundingContract
from r18.host import HostKernel
from r18.ops import Conv2d, Problem, Shape
from r18.precision import Precision

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
            scratch=lambda problem: _Blocks.of(problem, precision.dtype.itemsize).nbytes,
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
class _Blocks:
    """How im2col cuts the output: some images at once, or some rows of one image at once.

    Small images are taken several at a time, so that the product has enough columns; large ones
    in bands of rows, so that the columns stay in the cache. Byte counts are of the three parts of
    the workspace: padded input of one group, columns, and the product where it cannot be written
    in place.
    """

    images: int
    rows: int
    padded_nbytes: int
    columns_nbytes: int
    product_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.padded_nbytes + self.columns_nbytes + self.product_nbytes

    @classmethod
    def of(cls, problem: Problem, itemsize: int) -> _Blocks:
        op = problem.op
        assert isinstance(op, Conv2d)
        n, out_channels, oh, ow = problem.output
        fitting = max(1, BLOCK_NBYTES // (op.depth * itemsize))  # columns in a block
        rows = min(oh, max(1, fitting // ow))
        images = min(n, max(1, fitting // (oh * ow))) if rows == oh else 1
        padded = _padded_shape(op, problem.inputs[0])[1:] if op.padding != (0, 0) else (0,)
        columns = images * rows * ow
        return cls(
            images,
            rows,
            _align(images * int(np.prod(padded)) * itemsize),
            _align(op.depth * columns * itemsize),
            _align(out_channels * columns * itemsize) if images > 1 else 0,
        )


def _align(nbytes: int) -> int:
    return -(-nbytes // HOST_ALIGNMENT) * HOST_ALIGNMENT


HOST_ALIGNMENT = 64


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
    x, w = inputs[0], weights[0]
    n, channels_out, oh, ow = out.shape
    blocks = _Blocks.of(Problem(op, tuple(a.shape for a in inputs)), x.itemsize)
    padded_space, columns_space, product_space = np.split(
        workspace, [blocks.padded_nbytes, blocks.padded_nbytes + blocks.columns_nbytes]
    )
    bias = weights[1][:, None] if op.bias else None
    residual = inputs[1] if op.residual else None
    for first in range(0, n, blocks.images):
        group = slice(first, min(first + blocks.images, n))
        windows = _windows(op, _padded(op, x[group], padded_space), oh, ow)
        images = windows.shape[3]
        for top in range(0, oh, blocks.rows):
            band = slice(top, min(top + blocks.rows, oh))
            taken = windows[:, :, :, :, band]
            columns: Array = (
                columns_space[: taken.size * x.itemsize].view(x.dtype).reshape(taken.shape)
            )
            columns[...] = taken
            matrix = columns.reshape(op.depth, -1)
            if images == 1:
                y = out[first, :, band].reshape(channels_out, -1)
                np.matmul(w, matrix, out=y)
                near = None if residual is None else residual[first, :, band].reshape(y.shape)
                epilogue(op, y, bias, near)
            else:
                size = channels_out * matrix.shape[1] * x.itemsize
                y = product_space[:size].view(x.dtype).reshape(channels_out, -1)
                np.matmul(w, matrix, out=y)
                nchw = y.reshape(channels_out, images, oh, ow).transpose(1, 0, 2, 3)
                # The epilogue runs on the block, which is in the cache, and the copy comes last.
                epilogue(
                    op,
                    nchw,
                    None if bias is None else bias[:, :, None],
                    None if residual is None else residual[group],
                )
                out[group] = nchw


def _windows(op: Conv2d, x: Array, oh: int, ow: int) -> Array:
    """A view of the padded images as (C, kh, kw, N, OH, OW): x[n, c, i·sh + r, j·sw + s]."""
    n, c = x.shape[:2]
    bn, bc, bh, bw = x.strides
    (kh, kw), (sh, sw) = op.kernel_size, op.stride
    return as_strided(
        x, (c, kh, kw, n, oh, ow), (bc, bh, bw, bn, bh * sh, bw * sw), writeable=False
    )
