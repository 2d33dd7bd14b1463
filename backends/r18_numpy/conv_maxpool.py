"""A convolution and its max-pooling, a few images at a time, of integers and of e4m3 numbers.

Both store a byte for a value. The workspace holds the convolution's own, what it makes, and the
images that the op makes its bytes of, if it does.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from r18.backend import Array
from r18.graph.forms import ConvForm
from r18.graph.ops import MaxPool2d, Problem, parts_of
from r18_numpy.blocks import BLOCK_NBYTES
from r18_numpy.conv import im2col_nbytes
from r18_numpy.taps import inside

Dtype = np.dtype[np.generic]


def conv_nbytes(problem: Problem, sums: Dtype) -> int:
    """The workspace of a convolution whose windows are unfolded in the format of its sums."""
    assert isinstance(problem.op, ConvForm)
    return im2col_nbytes(Problem(problem.op.conv, problem.inputs), sums.itemsize)


def maxima(pool: MaxPool2d, x: Array, out: Array, least: float) -> None:
    """The maximum over the window's taps, each of them the image shifted by the tap.

    x: (N, C, H, W). least: of the format: the padding, which never wins.
    """
    (h, w), (oh, ow) = x.shape[2:], out.shape[2:]
    (sh, sw), (ph, pw) = pool.stride, pool.padding
    out[...] = least
    for r, s in np.ndindex(pool.kernel_size):
        to_rows, rows = inside(r - ph, sh, h, oh)
        to_columns, columns = inside(s - pw, sw, w, ow)
        part = out[..., to_rows, to_columns]
        np.maximum(part, x[..., rows, columns], out=part)


def at_a_time(problem: Problem) -> int:
    """Images whose convolution's outputs fit a block."""
    *_, pool = parts_of(problem)
    return max(1, min(problem.batch, BLOCK_NBYTES // math.prod(pool.inputs[0][1:])))


def areas(
    problem: Problem, count: int, workspace: Array, sums: Dtype, made: Dtype, image: Dtype
) -> tuple[Array, Array, Array]:
    """The workspace for `count` images: the convolution's scratch, its outputs, and the images in
    bytes."""
    *makers, conv, pool = parts_of(problem)
    shape, given = (count, *pool.inputs[0][1:]), (count, *conv.inputs[0][1:])
    first = _scratch_nbytes(problem, sums)
    second = first + math.prod(shape)
    scratch, outputs, images = workspace[:first], workspace[first:second], workspace[second:]
    if makers:
        images = images[: math.prod(given)].view(image).reshape(given)
    return scratch, outputs.view(made).reshape(shape), images


def workspace_nbytes(problem: Problem, sums: Dtype) -> int:
    *makers, conv, pool = parts_of(problem)
    image = math.prod(conv.inputs[0][1:]) if makers else 0
    made = math.prod(pool.inputs[0][1:])
    return _scratch_nbytes(problem, sums) + at_a_time(problem) * (made + image)


def _scratch_nbytes(problem: Problem, sums: Dtype) -> int:
    """The workspace of the convolution of as many images as are taken at a time, or of the rest."""
    *_, conv, _ = parts_of(problem)
    most = at_a_time(problem)
    counts = {most, problem.batch % most or most}
    return max(
        conv_nbytes(replace(conv, inputs=tuple((n, *shape[1:]) for shape in conv.inputs)), sums)
        for n in counts
    )
