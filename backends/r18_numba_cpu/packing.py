"""Sizes, shapes and packed weights that the kernels of this backend share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, MaxPool2d, Problem, Shape
from r18_numba_cpu.compiled import ceil_div, module
from r18_numba_cpu.kernels.arguments import ConvShape

Arrays = tuple[Array, ...]
FLOAT_NBYTES = 4

VECTOR, PANEL = 16, 32
"""float32 lanes of the widest register, and columns of the widest panel. The numbers of
narrower registers divide them."""

TILE_ROWS = (6, 14)
"""The most rows of a register tile, with narrow and with wide registers."""


@lru_cache(maxsize=1024)
def problem_of(op: Conv2d | MaxPool2d, read: Shape, written: Shape) -> tuple[Problem, ConvShape]:
    """The problem of arrays (N, H, W, C) of these shapes, and its extents as kernels take them.

    Cached, because every run needs both.
    """
    logical = [(n, channels, height, width) for n, height, width, channels in (read, written)]
    problem = Problem(op, tuple(logical[: op.arity]))
    extents = (*logical[0], *problem.output[1:], *op.kernel_size, *op.stride, *op.padding)
    return problem, ConvShape._make(extents)


def channels_last(image: Array, from_nchw: bool) -> Shape:
    """The shape (N, H, W, C) of an image that is in this order, or in NCHW."""
    if not from_nchw:
        return image.shape
    n, channels, height, width = image.shape
    return n, height, width, channels


def conv(problem: Problem) -> Conv2d:
    assert isinstance(problem.op, Conv2d)
    return problem.op


def round_up(elements: int, multiple: int = VECTOR) -> int:
    return ceil_div(elements, multiple) * multiple


def tile_size() -> int:
    """Elements of a register tile."""
    micro_kernel = module("micro_kernel")
    return int(micro_kernel.ROWS * micro_kernel.COLUMNS)


def panels(outputs: int) -> int:
    """The number of panels, of `micro_kernel.COLUMNS` columns each, that hold the outputs."""
    return ceil_div(outputs, module("micro_kernel").COLUMNS)


def weight_nbytes(shape: ConvShape, dtype: np.dtype[np.generic]) -> int:
    """The bytes of packed weights of this type, without the padding of K."""
    columns = panels(shape.outputs) * int(module("micro_kernel").COLUMNS)
    return shape.kernel_h * shape.kernel_w * shape.channels * columns * dtype.itemsize


def to_panels(matrix: Array) -> Array:
    """(…, K, O) as (…, panels, K, columns), with zeros in the columns beyond O."""
    *leading, depth, outputs = matrix.shape
    columns = module("micro_kernel").COLUMNS
    packed: Array = np.empty((*leading, panels(outputs), depth, columns), np.float32)
    whole, rest = divmod(outputs, columns)
    split = matrix[..., : whole * columns].reshape(*leading, depth, whole, columns)
    packed[..., :whole, :, :] = split.swapaxes(-3, -2)
    if rest:
        packed[..., whole, :, :rest] = matrix[..., whole * columns :]
        packed[..., whole, :, rest:] = 0
    return packed


def padded_bias(op: Conv2d, weights: Arrays) -> Array:
    """The bias, padded with zeros to whole panels; zeros if the op has none."""
    bias: Array = np.zeros(panels(op.out_channels) * module("micro_kernel").COLUMNS, np.float32)
    if op.bias:
        bias[: op.out_channels] = weights[1]
    return bias
