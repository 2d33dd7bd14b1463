"""Convolutions with their max-pooling that are wrong in one place each.

They are made of the pieces of `conv.Conv` and of `others.pool`: a fault replaces one, or joins the
two wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from faults.conv import (
    CONV,
    Conv,
    cut_to_float16,
    finish,
    in_float16,
    mix_in_float16,
    total_in_float16,
)
from faults.fault import Fault, fault, kernel
from faults.others import pool
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d
from r18.graph.precision import FP16, FP64

Arrays = tuple[Array, ...]

TILE = 4
"""Pooled rows that are computed at once, where a fault lies between tiles."""


def made(op: Conv2d, inputs: Arrays, weights: Arrays, conv: Conv = CONV) -> Array:
    """What the convolution gives, in the format that it sums in."""
    return conv.result(op, inputs, weights, np.empty(op.infer(inputs[0].shape), np.bool_))


def pooled(op: MaxPool2d, y: Array, out: Array, largest: HostFunction = pool()) -> None:
    """The maxima of what the convolution gave, into `out`."""
    largest(op, (y,), (), out, np.empty(0, np.uint8))


def stem(conv: Conv = CONV, largest: HostFunction = pool()) -> HostFunction:
    """As the op defines it, unless a piece is another."""

    def run(op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        pooled(op.pool, made(op.conv, inputs, weights, conv), out, largest)

    return run


def _stem(name: str, wrong: str, checks: str, run: HostFunction, **options: Any) -> Fault:
    return fault(ConvMaxPool, name, wrong, checks, run, **options)


# -- where the two meet ------------------------------------------------------------------------


def _computed_padding(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    conv, (ph, pw) = op.conv, op.pool.padding
    _, _, h, w = conv.infer(inputs[0].shape)
    beyond = (conv.padding[0] + ph * conv.stride[0], conv.padding[1] + pw * conv.stride[1])
    y = made(replace(conv, padding=beyond), inputs, weights)
    pooled(replace(op.pool, padding=(0, 0)), y[:, :, : h + 2 * ph, : w + 2 * pw], out)


def _padded_as_the_pool(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    (sh, sw), (ph, pw) = op.conv.stride, op.pool.padding
    shifted = replace(
        CONV,
        row=lambda op, i, r, height: i * sh - ph + r,
        column=lambda op, j, s, width: j * sw - pw + s,
    )
    pooled(op.pool, made(op.conv, inputs, weights, shifted), out)


def _steps_as_the_convolution(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    pooled(replace(op.pool, stride=op.conv.stride), made(op.conv, inputs, weights), out)


def _sums_first(
    finished: Callable[[ConvMaxPool, Array, Array], Array], outside: float = -np.inf
) -> HostFunction:
    """Pools the bare sums; `finished` applies bias and ReLU to them (op, sums, bias)."""

    def run(op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        bare = replace(op.conv, bias=False, relu=False)
        pooled(op.pool, made(bare, inputs, weights[:1]), out, pool(outside))
        bias = weights[1] if op.conv.bias else np.zeros(op.conv.out_channels, out.dtype)
        out[...] = finished(op, out, bias[:, None, None])

    return run


def _finished(op: ConvMaxPool, sums: Array, bias: Array) -> Array:
    y: Array = sums + bias
    return np.maximum(y, 0) if op.conv.relu else y


def _bias_by_count(op: ConvMaxPool, sums: Array, bias: Array) -> Array:
    """The bias once more where the first row of the window is padding."""
    begins = np.arange(sums.shape[2]) * op.pool.stride[0] - op.pool.padding[0]
    return _finished(op, sums, np.where((begins < 0)[:, None], 2 * bias, bias))


def _swallowing(op: Conv2d, y: Array, bias: Array, residual: Array) -> Array:
    y = finish(replace(op, relu=False), y, bias, residual)
    return np.fmax(y, 0) if op.relu else y


# -- tiles of rows -----------------------------------------------------------------------------


def _tiled(above: int, below: int) -> HostFunction:
    """Tile after tile, each from rows of the convolution of its own: without so many of those
    that it needs at its top, and at its bottom, where there is another tile."""

    def run(op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        y = made(op.conv, inputs, weights)
        kh, sh, ph = op.pool.kernel_size[0], op.pool.stride[0], op.pool.padding[0]
        for begin in range(0, out.shape[2], TILE):
            end = min(begin + TILE, out.shape[2])
            first = begin * sh - ph + (above if begin else 0)
            last = (end - 1) * sh - ph + kh - (below if end < out.shape[2] else 0)
            own = np.full_like(y, -np.inf)
            rows = slice(max(first, 0), max(last, 0))
            own[:, :, rows] = y[:, :, rows]
            whole = np.empty_like(out)
            pooled(op.pool, own, whole)
            out[:, :, begin:end] = whole[:, :, begin:end]

    return run


def _row_of_the_tile_before(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    stem()(op, inputs, weights, out, workspace)
    for begin in range(TILE, out.shape[2], TILE):
        out[:, :, begin] = out[:, :, begin - 1]


def _last_tile_unwritten(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    whole = np.empty_like(out)
    stem()(op, inputs, weights, whole, workspace)
    rows = max(TILE, out.shape[2] // TILE * TILE)
    out[:, :, :rows] = whole[:, :, :rows]


def _rows_by_stride(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """As many rows of the convolution as the pooling steps over."""
    y = made(op.conv, inputs, weights)
    y[:, :, out.shape[2] * op.pool.stride[0] :] = -np.inf
    pooled(op.pool, y, out)


def _in_halves(
    op: ConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    pooled(op.pool, made(op.conv, inputs, weights).astype(np.float16).astype(out.dtype), out)


FAULTS = (
    _stem("padding_wins", "the pool's padding counts as 0", "exact", stem(largest=pool(0.0))),
    _stem(
        "finite_padding",
        "the pool's padding counts as the least finite number, which is more than −Inf",
        "edges",
        stem(largest=pool(float(np.finfo(np.float32).min))),
    ),
    _stem(
        "padding_is_computed",
        "the pool's padding is what the convolution gives outside of its output",
        "exact",
        _computed_padding,
    ),
    _stem(
        "padding_is_a_sum_of_zero",
        "sums are pooled before the bias is added, and padding counts as a sum of 0",
        "exact",
        _sums_first(_finished, outside=0.0),
    ),
    _stem(
        "padded_as_the_pool",
        "the convolution is padded as the pool is",
        "exact",
        _padded_as_the_pool,
    ),
    _stem(
        "steps_as_the_convolution",
        "the pool steps by the convolution's stride",
        "exact",
        _steps_as_the_convolution,
    ),
    _stem(
        "swapped_pool_strides",
        "the pool's strides in the wrong order",
        "exact",
        stem(largest=pool(flipped=True)),
    ),
    _stem(
        "first_row_ignored",
        "each window of the pool begins with its second row",
        "exact",
        stem(largest=pool(first=1)),
    ),
    _stem(
        "halo_off_by_one",
        "the convolution's window starts one column too far right",
        "exact",
        stem(replace(CONV, column=lambda op, j, s, w: j * op.stride[1] - op.padding[1] + s + 1)),
    ),
    _stem(
        "relu_before_bias",
        "the bias is added after the ReLU",
        "exact",
        _sums_first(lambda op, sums, b: np.maximum(sums, 0) + b if op.conv.relu else sums + b),
    ),
    _stem(
        "relu_missing",
        "the ReLU is not applied",
        "exact",
        _sums_first(lambda op, sums, b: sums + b),
    ),
    _stem(
        "bias_ignored",
        "the bias is not added",
        "exact",
        _sums_first(lambda op, sums, b: _finished(op, sums, np.zeros_like(b))),
    ),
    _stem(
        "bias_of_next_channel",
        "channel o gets the bias of channel o + 1",
        "exact",
        _sums_first(lambda op, sums, b: _finished(op, sums, np.roll(b, -1, axis=0))),
    ),
    _stem(
        "bias_by_count",
        "a window that is cut at the top gets the bias twice",
        "exact",
        _sums_first(_bias_by_count),
    ),
    _stem(
        "pool_swallows_nan",
        "in the pool NaN loses against any number",
        "edges",
        stem(largest=pool(larger=np.fmax)),
    ),
    _stem(
        "relu_swallows_nan",
        "ReLU(NaN) is 0",
        "edges",
        stem(replace(CONV, finish=_swallowing)),
    ),
    _stem(
        "row_above_missing",
        "a tile lacks the first row that it shares with the one above",
        "exact impulse",
        _tiled(1, 0),
        edges=(TILE,),
    ),
    _stem(
        "row_below_missing",
        "a tile lacks the last row that it needs",
        "exact impulse",
        _tiled(0, 1),
        edges=(TILE,),
    ),
    _stem(
        "row_of_the_tile_before",
        "the first row of a tile is the last of the one before",
        "exact",
        _row_of_the_tile_before,
        edges=(TILE,),
    ),
    _stem(
        "last_tile_unwritten",
        "the rows of a tile that is cut are not written",
        "full_write",
        _last_tile_unwritten,
        edges=(TILE,),
    ),
    _stem(
        "rows_by_stride",
        "the convolution makes as many rows as the pool steps over",
        "exact impulse",
        _rows_by_stride,
    ),
    _stem("kept_in_halves", "what is pooled is kept in float16", "exact", _in_halves),
    _stem(
        "factors_in_float16",
        "float32 factors are rounded to float16",
        "bound",
        stem(replace(CONV, mix=in_float16)),
    ),
    _stem(
        "sums_in_float16",
        "sums of float16 products are kept in float16",
        "bound exact",
        stem(replace(CONV, mix=mix_in_float16, total=total_in_float16)),
        precision=FP16,
    ),
    _stem(
        "stores_cut_off",
        "results are cut off, not rounded, to float16",
        "exact bound",
        stem(replace(CONV, finish=cut_to_float16)),
        precision=FP16,
    ),
)

TWINS = (
    kernel("twin", ConvMaxPool, "taps", stem()),
    kernel("twin", ConvMaxPool, "tiles", _tiled(0, 0), edges=(TILE,)),
    kernel("twin", ConvMaxPool, "sums_first", _sums_first(_finished)),
    kernel("twin", ConvMaxPool, "taps", stem(), precision=FP16),
    kernel("twin", ConvMaxPool, "taps", stem(replace(CONV, wide=np.float64)), precision=FP64),
)
"""The same kernels without a fault, so that it is the fault that is caught."""
