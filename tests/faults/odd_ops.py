"""Odd but correct ways to compute the controls' ops other than sums of products.

Each is a function (op, inputs, weights) → result; logical layouts, in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from faults.summations import pairwise_sum
from r18.backend import Array
from r18.graph.ops import (
    Add,
    AvgPoolLinear,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Layout,
    MaxPool2d,
    Normalize,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import Precision

Arrays = tuple[Array, ...]
Compute = Callable[[Any, Arrays, Arrays], Array]


def windows(op: Conv2d | MaxPool2d, x: Array, fill: float) -> Array:
    """Windows (N, C, OH, OW, kh, kw) of an image that is padded with `fill`."""
    (ph, pw), (sh, sw) = op.padding, op.stride
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=fill)
    return sliding_window_view(padded, op.kernel_size, axis=(2, 3))[:, :, ::sh, ::sw]


# -- BatchNorm ---------------------------------------------------------------------------------


def _parts(op: BatchNorm, weights: Arrays) -> Arrays:
    """Weight, bias, mean, and √(var + eps), as columns of channels."""
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    return weight, bias, mean, np.sqrt(var + var.dtype.type(op.eps))


def as_written(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, weights)
    y: Array = (inputs[0] - mean) / root * weight + bias
    return y


def reciprocal_root(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, weights)
    y: Array = (inputs[0] - mean) * (weight * (1 / root)) + bias
    return y


def weight_first(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, weights)
    y: Array = bias + weight * (inputs[0] - mean) / root
    return y


def scale_shift(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, weights)
    scale = weight * (1 / root)
    y: Array = inputs[0] * scale + (bias - mean * scale)
    return y


def scale_shift_fma(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, weights)
    scale = weight / root
    shift = (bias - mean * scale.astype(np.float64)).astype(scale.dtype)
    y: Array = (inputs[0] * scale.astype(np.float64) + shift).astype(scale.dtype)
    return y


def scale_shift_float64(op: BatchNorm, inputs: Arrays, weights: Arrays) -> Array:
    weight, bias, mean, root = _parts(op, tuple(w.astype(np.float64) for w in weights))
    scale = weight / root
    dtype = inputs[0].dtype
    y: Array = inputs[0] * scale.astype(dtype) + (bias - mean * scale).astype(dtype)
    return y


# -- pixels ------------------------------------------------------------------------------------


def _numbers(op: Normalize, x: Array) -> Arrays:
    """Mean, std, and 255; mean and std as columns of channels."""
    mean, std = (np.array(values, x.dtype)[:, None, None] for values in (op.mean, op.std))
    return mean, std, np.array(255, x.dtype)


def normalize_as_written(op: Normalize, inputs: Arrays, weights: Arrays) -> Array:
    mean, std, white = _numbers(op, inputs[0])
    y: Array = (inputs[0] / white - mean) / std
    return y


def normalize_reciprocals(op: Normalize, inputs: Arrays, weights: Arrays) -> Array:
    mean, std, white = _numbers(op, inputs[0])
    y: Array = (inputs[0] * (1 / white) - mean) * (1 / std)
    return y


def normalize_of_whole(op: Normalize, inputs: Arrays, weights: Arrays) -> Array:
    """Normalisation with mean and deviation scaled to the range of bytes."""
    mean, std, white = _numbers(op, inputs[0])
    y: Array = (inputs[0] - mean * white) / (std * white)
    return y


def normalize_scale_shift(op: Normalize, inputs: Arrays, weights: Arrays) -> Array:
    mean, std, white = _numbers(op, inputs[0])
    y: Array = inputs[0] * ((1 / white) * (1 / std)) + -mean / std
    return y


def normalize_table(op: Normalize, inputs: Arrays, weights: Arrays) -> Array:
    """Normalisation by a table of a channel's 256 values, computed in float64."""
    x = inputs[0]
    shades = np.arange(256) / 255
    mean, std = (np.array(values)[:, None] for values in (op.mean, op.std))
    table = ((shades - mean) / std).astype(x.dtype)
    y: Array = table[np.arange(op.channels)[:, None, None], x.astype(int)]
    return y


# -- pooling -----------------------------------------------------------------------------------


def _pixels(x: Array) -> Array:
    """An image as (H·W, N, C)."""
    return x.reshape(*x.shape[:2], -1).transpose(2, 0, 1)


def gap_sequential(op: GlobalAvgPool, inputs: Arrays, weights: Arrays) -> Array:
    pixels = _pixels(inputs[0])
    y: Array = np.add.accumulate(pixels, axis=0)[-1] / pixels.dtype.type(len(pixels))
    return y


def gap_pairwise(op: GlobalAvgPool, inputs: Arrays, weights: Arrays) -> Array:
    pixels = _pixels(inputs[0])
    y: Array = pairwise_sum(pixels) / pixels.dtype.type(len(pixels))
    return y


def gap_reciprocal(op: GlobalAvgPool, inputs: Arrays, weights: Arrays) -> Array:
    pixels = _pixels(inputs[0])[::-1]
    y: Array = np.add.accumulate(pixels, axis=0)[-1] * pixels.dtype.type(1 / len(pixels))
    return y


def gap_divided_first(op: GlobalAvgPool, inputs: Arrays, weights: Arrays) -> Array:
    pixels = _pixels(inputs[0])
    y: Array = np.add.accumulate(pixels / pixels.dtype.type(len(pixels)), axis=0)[-1]
    return y


def exp_by_exp2(x: Array) -> Array:
    return np.asarray(np.exp2(x * x.dtype.type(np.log2(np.e))))


def softmax(exp: Callable[[Array], Array]) -> Compute:
    def compute(op: Softmax, inputs: Arrays, weights: Arrays) -> Array:
        powers = exp(inputs[0] - inputs[0].max(axis=1, keepdims=True))
        y: Array = powers / np.add.accumulate(powers, axis=1)[:, -1:]
        return y

    return compute


def softmax_reciprocal(op: Softmax, inputs: Arrays, weights: Arrays) -> Array:
    powers = np.exp(inputs[0] - inputs[0].max(axis=1, keepdims=True))
    y: Array = powers * (1 / pairwise_sum(powers.T[::-1]))[:, None]
    return y


def _taps(op: MaxPool2d, x: Array) -> list[Array]:
    found = windows(op, x, -np.inf)
    return list(found.transpose(4, 5, 0, 1, 2, 3).reshape(-1, *found.shape[:4]))


def maxpool_reversed(op: MaxPool2d, inputs: Arrays, weights: Arrays) -> Array:
    best, *rest = reversed(_taps(op, inputs[0]))
    for tap in rest:
        best = np.maximum(best, tap)
    return best


def maxpool_tree(op: MaxPool2d, inputs: Arrays, weights: Arrays) -> Array:
    taps = _taps(op, inputs[0])
    while len(taps) > 1:
        taps = [np.maximum(one, other) for one, other in pairwise(taps)]
    return taps[0]


def maxpool_rows_first(op: MaxPool2d, inputs: Arrays, weights: Arrays) -> Array:
    """Maxima down each column, and then along the rows of these."""
    (kh, kw), (sh, sw), (ph, pw) = op.kernel_size, op.stride, op.padding
    down = MaxPool2d((kh, 1), (sh, 1), (ph, 0))
    along = MaxPool2d((1, kw), (1, sw), (0, pw))
    return maxpool_reversed(along, (maxpool_reversed(down, inputs, ()),), ())


def pooled(conv: Compute, pool: Compute) -> Compute:
    """A convolution and its pooling, in turn."""

    def compute(op: ConvMaxPool, inputs: Arrays, weights: Arrays) -> Array:
        return pool(op.pool, (conv(op.conv, inputs, weights),), ())

    return compute


def projected(projection: Compute, conv: Compute) -> Compute:
    """A projection, and the convolution that adds it."""

    def compute(op: ConvProjection, inputs: Arrays, weights: Arrays) -> Array:
        count = len(op.conv.weights())
        residual = projection(op.projection, inputs[1:], weights[count:])
        return conv(op.conv, (inputs[0], residual), weights[:count])

    return compute


def classified(mean: Compute, layer: Compute, kept: Precision | None = None) -> Compute:
    """A mean and a linear layer of it. kept: the precision in which means are stored."""

    def compute(op: AvgPoolLinear, inputs: Arrays, weights: Arrays) -> Array:
        pooling, linear = op.parts
        means = mean(pooling, inputs, ())
        if kept is not None:
            means = means.astype(kept.dtype).astype(means.dtype)
        return layer(linear, (means,), weights)

    return compute


def epilogue_last(conv: Compute, pool: Compute) -> Compute:
    """Pooling of the bare sums; bias and ReLU, which keep order as rounding does, come after."""

    def compute(op: ConvMaxPool, inputs: Arrays, weights: Arrays) -> Array:
        bare = replace(op.conv, bias=False, relu=False)
        y = pool(op.pool, (conv(bare, inputs, weights[:1]),), ())
        if op.conv.bias:
            y = y + weights[1][:, None, None]
        return np.maximum(y, 0) if op.conv.relu else y

    return compute


def started_at_zero(conv: Compute) -> Compute:
    """Maxima that start at 0 if a ReLU follows, which is then their last step."""

    def compute(op: ConvMaxPool, inputs: Arrays, weights: Arrays) -> Array:
        y = conv(replace(op.conv, relu=False), inputs, weights)
        first = 0.0 if op.conv.relu else -np.inf
        best: Array = np.maximum(windows(op.pool, y, first).max(axis=(4, 5)), y.dtype.type(first))
        return best

    return compute


def relu_select(op: ReLU, inputs: Arrays, weights: Arrays) -> Array:
    x = inputs[0]
    return np.where(x < 0, x.dtype.type(0), x)


def add_swapped(op: Add, inputs: Arrays, weights: Arrays) -> Array:
    y = inputs[1] + inputs[0]
    return np.maximum(y, 0) if op.relu else y


def relayout_by_channel(
    op: Relayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    x = inputs[0]
    if op.source is op.target:
        out[...] = x
        return
    forth = op.source is Layout.NCHW
    for channel in reversed(range(x.shape[1 if forth else 3])):
        if forth:
            out[..., channel] = x[:, channel]
        else:
            out[:, channel] = x[..., channel]
