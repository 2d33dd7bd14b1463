"""Quantised ops, wrong in one step each.

`SAID` has the words by which the finding must name a wrong step of the requantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import Layout
from r18.graph.precision import INT8
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)

Arrays = tuple[Array, ...]
F32 = np.float32

# -- the steps, as they should be --------------------------------------------------------------


def windows_of(op: QuantizedConv2d, x: Array, padding: int = 0) -> Array:
    """Windows (N, C, OH, OW, kh, kw) of a padded image."""
    (ph, pw), (sh, sw) = op.conv.padding, op.conv.stride
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=padding)
    return sliding_window_view(padded, op.conv.kernel_size, (2, 3))[:, :, ::sh, ::sw]


def products_of(
    op: QuantizedConv2d, x: Array, weight: Array, padding: int = 0, number: type[Any] = np.float64
) -> Array:
    """The sums of products, (N, O, OH, OW): exact in float64."""
    windows = windows_of(op, x.astype(number), padding).transpose(0, 2, 3, 1, 4, 5)
    n, oh, ow = windows.shape[:3]
    columns = weight.astype(number).reshape(len(weight), -1)
    found: Array = windows.reshape(-1, columns.shape[1]) @ columns.T
    return found.reshape(n, oh, ow, -1).transpose(0, 3, 1, 2)


def sums_of(op: QuantizedConv2d, x: Array, weight: Array, bias: Array, padding: int = 0) -> Array:
    """The sums with bias, (N, O, OH, OW) in int64."""
    products = products_of(op, x, weight, padding)
    return products.astype(np.int64) + bias.astype(np.int64)[:, None, None]


def scaled(sums: Array, multiplier: Array, added: Array | None, relu: bool = False) -> Array:
    """Steps 1 and 2 of the requantisation. added: the residual's contribution."""
    numbers = sums.astype(F32) * multiplier[:, None, None]
    return numbers if added is None else numbers + added


def stored(numbers: Array, relu: bool, low: int, high: int) -> Array:
    """Steps 3 and 4 of the requantisation."""
    return np.clip(np.rint(np.maximum(numbers, 0) if relu else numbers), low, high)


def conv(
    sums: Callable[..., Array] = sums_of,
    scale: Callable[..., Array] = scaled,
    store: Callable[..., Array] = stored,
    unpack: Callable[[Array, int], Array] = lambda weight, bits: weight,
    precise: type[Any] = F32,
    read: Callable[[Array], Array] = lambda residual: residual,
) -> HostFunction:
    """A quantised convolution. precise: the format of residual products. read: alters residuals."""

    def run(
        op: QuantizedConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier, *more = weights
        added = read(inputs[1]).astype(precise) * more[0] if more else None
        total = sums(op, inputs[0], unpack(weight, op.bits), bias)
        limits = np.iinfo(out.dtype)
        numbers = scale(total, multiplier, added, op.conv.relu)
        out[...] = store(numbers, op.conv.relu, limits.min, limits.max)

    return run


# -- wrong ones --------------------------------------------------------------------------------


def _with(round_: Callable[[Array], Array]) -> HostFunction:
    def store(numbers: Array, relu: bool, low: int, high: int) -> Array:
        wide = numbers.astype(np.float64)
        return np.clip(round_(np.maximum(wide, 0) if relu else wide), low, high)

    return conv(store=store)


def _away(numbers: Array) -> Array:
    return np.copysign(np.floor(np.abs(numbers) + 0.5), numbers)


def _fused(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    wide = sums.astype(F32).astype(np.float64) * multiplier[:, None, None]
    return (wide if added is None else wide + added).astype(F32)


def _fused_residual(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    numbers = sums.astype(F32) * multiplier[:, None, None]
    return numbers if added is None else (numbers.astype(np.float64) + added).astype(F32)


def _converted_first(numbers: Array, relu: bool, low: int, high: int) -> Array:
    integers = np.rint(np.maximum(numbers, 0) if relu else numbers).astype(np.float64)
    return np.clip(np.where(np.abs(integers) < 2.0**31, integers, -(2.0**31)), low, high)


def _unconverted(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    numbers = (sums.astype(np.float64) * multiplier[:, None, None]).astype(F32)
    return numbers if added is None else numbers + added


def _residual_in_integers(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    numbers = np.rint(sums.astype(F32) * multiplier[:, None, None])
    return numbers if added is None else numbers + np.rint(added)


def _saturated_first(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    if added is None:
        return scaled(sums, multiplier, added)
    return np.clip(np.rint(scaled(sums, multiplier, None)), -128, 127).astype(F32) + added


def _saturated_before_relu(numbers: Array, relu: bool, low: int, high: int) -> Array:
    integers = np.clip(np.rint(numbers), -128, 127)
    return np.clip(np.maximum(integers, 0) if relu else integers, low, high)


def _symmetric(numbers: Array, relu: bool, low: int, high: int) -> Array:
    return stored(numbers, relu, max(low, -127), high)


def _wrapped(numbers: Array, relu: bool, low: int, high: int) -> Array:
    integers = np.rint(np.maximum(numbers, 0) if relu else numbers)
    return (np.clip(integers, -(2.0**31), 2.0**31 - 1).astype(np.int64) - low) % 256 + low


def _relu_first(sums: Array, multiplier: Array, added: Array | None, relu: bool) -> Array:
    numbers = scaled(sums, multiplier, None)
    if added is None:
        return numbers
    return (np.maximum(numbers, 0) if relu else numbers) + added


def _signed_image(op: QuantizedConv2d, x: Array, weight: Array, bias: Array) -> Array:
    return sums_of(op, x.view(np.int8), weight, bias)


def _unsigned_weight(op: QuantizedConv2d, x: Array, weight: Array, bias: Array) -> Array:
    return sums_of(op, x, weight.view(np.uint8), bias)


def _float32_sum(op: QuantizedConv2d, x: Array, weight: Array, bias: Array) -> Array:
    return products_of(op, x, weight, number=F32) + bias.astype(F32)[:, None, None]


def _saturated_pairs(op: QuantizedConv2d, x: Array, weight: Array, bias: Array) -> Array:
    """The sums of `pmaddubsw`: two products of uint8 and int8 are added in saturating int16."""
    windows = windows_of(op, x.astype(np.int32)).transpose(1, 4, 5, 0, 2, 3)
    windows = windows.reshape(-1, *windows.shape[3:])
    flat = weight.reshape(len(weight), -1).T[:, :, None, None].astype(np.int32)
    total = np.broadcast_to(bias.astype(np.int64)[:, None, None], _output_of(op, x)).copy()
    for k in range(0, len(flat), 2):
        pair = sum(windows[i][:, None] * flat[i] for i in range(k, min(k + 2, len(flat))))
        total += np.clip(pair, -(2**15), 2**15 - 1)
    return total


def _output_of(op: QuantizedConv2d, x: Array) -> tuple[int, ...]:
    return replace(op.conv, residual=False).infer(x.shape)


def _offset_weights(op: QuantizedConv2d, x: Array, weight: Array, bias: Array) -> Array:
    """Σ x·(w − 1) in saturating int32, plus Σ x."""
    lower = weight.astype(np.int16) - 1
    both = products_of(op, x, np.concatenate([lower, np.ones_like(lower[:1])]))
    offset, image = both[:, :-1], both[:, -1:]
    sums = np.clip(offset, -(2.0**31), 2.0**31 - 1) + image
    return sums.astype(np.int64) + bias.astype(np.int64)[:, None, None]


def _pairs(weight: Array) -> Array:
    """Weights packed two a byte, lowest bits first; a last odd weight has a byte of its own."""
    flat = weight.reshape(len(weight), -1) & 15
    flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
    return np.asarray(flat[:, ::2] | flat[:, 1::2] << 4)


def _unpacked(weight: Array, bits: int, *, swapped: bool = False, signed: bool = True) -> Array:
    """int4 weights packed to bytes and unpacked again; others as they are."""
    if bits != 4:
        return weight
    low, high = _pairs(weight) & 15, _pairs(weight) >> 4 & 15
    if swapped:
        low, high = high, low
    both = np.stack([low, high], axis=2).reshape(len(weight), -1)
    both = both[:, : weight[0].size].reshape(weight.shape)
    return np.where(both > 7, both - 16, both).astype(np.int8) if signed else both


def _conv_fault(name: str, wrong: str, run: HostFunction, checks: str = "bound edges") -> Fault:
    return fault(QuantizedConv2d, name, wrong, checks, run, precision=INT8)


SAID = {
    "ties_away": "ties are rounded away from zero",
    "ties_up": "ties are rounded up",
    "truncated": "the result is rounded towards zero",
    "fused_multiply_add": "a fused multiply-add leaves out a rounding",
    "fused_residual": "a fused multiply-add takes the residual's product",
    "converted_first": "it is converted to int32 before it is saturated",
    "product_before_conversion": "the sum is multiplied before it is rounded to float32",
    "residual_in_integers": "the residual is added in integers",
    "saturated_before_residual": "the sum is saturated before the residual is added",
    "saturated_before_relu": "the result is saturated before ReLU",
    "symmetric": "it saturates to −127, not −128",
    "wrapped": "it wraps and does not saturate",
    "relu_before_residual": "ReLU comes before the residual",
}
CONV_FAULTS = (
    _conv_fault("ties_away", "rounds ties away from zero", _with(_away)),
    _conv_fault("ties_up", "rounds ties up", _with(lambda t: np.floor(t + 0.5))),
    _conv_fault("truncated", "rounds towards zero", _with(np.trunc)),
    _conv_fault("fused_multiply_add", "rounds steps 1 and 2 once", conv(scale=_fused)),
    _conv_fault(
        "fused_residual",
        "does not round the residual's product",
        conv(scale=_fused_residual, precise=np.float64),
    ),
    _conv_fault(
        "converted_first", "converts to int32 before it saturates", conv(store=_converted_first)
    ),
    _conv_fault(
        "product_before_conversion",
        "multiplies the sum before it is rounded",
        conv(scale=_unconverted),
    ),
    _conv_fault(
        "residual_in_integers",
        "rounds sum and residual, and adds them then",
        conv(scale=_residual_in_integers),
    ),
    _conv_fault(
        "saturated_before_residual",
        "saturates before it adds the residual",
        conv(scale=_saturated_first),
    ),
    _conv_fault(
        "saturated_before_relu", "saturates to int8 before ReLU", conv(store=_saturated_before_relu)
    ),
    _conv_fault("symmetric", "saturates to −127", conv(store=_symmetric)),
    _conv_fault("wrapped", "keeps the last eight bits", conv(store=_wrapped)),
    _conv_fault("relu_before_residual", "clamps before the residual", conv(scale=_relu_first)),
    _conv_fault(
        "padded_with_a_zero_point",
        "pads with 128, as if that were zero",
        conv(sums=partial(sums_of, padding=128)),
        "impulse bound",
    ),
    _conv_fault("signed_image", "reads uint8 as int8", conv(sums=_signed_image)),
    _conv_fault(
        "unsigned_weight", "reads weights as uint8", conv(sums=_unsigned_weight), "impulse bound"
    ),
    _conv_fault(
        "residual_as_signed",
        "reads a residual of uint8 as int8",
        conv(read=lambda residual: residual.view(np.int8)),
    ),
    _conv_fault(
        "residual_as_unsigned",
        "reads a residual of int8 as uint8",
        conv(read=lambda residual: residual.view(np.uint8)),
    ),
    _conv_fault("saturated_pairs", "adds pairs of products in int16", conv(sums=_saturated_pairs)),
    _conv_fault("float32_sum", "adds in float32", conv(sums=_float32_sum)),
    _conv_fault(
        "offset_weights", "adds x·(w − 1) in int32, which saturates", conv(sums=_offset_weights)
    ),
    _conv_fault(
        "unpacked_high_first",
        "unpacks the higher bits of a byte first",
        conv(unpack=partial(_unpacked, swapped=True)),
        "impulse bound",
    ),
    _conv_fault(
        "sign_not_extended",
        "unpacks int4 without its sign",
        conv(unpack=partial(_unpacked, signed=False)),
        "impulse bound",
    ),
)


def linear(
    convert: Callable[[Array], Array] = lambda sums: sums.astype(F32), number: type[Any] = np.int64
) -> HostFunction:
    def run(
        op: QuantizedLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier = weights
        sums = inputs[0].astype(number) @ weight.astype(number).T + bias.astype(number)
        out[...] = convert(sums) * multiplier

    return run


def _total(x: Array, kind: type[Any] = np.int64) -> Array:
    return x.sum(axis=(2, 3), dtype=kind)


def _one_by_one(x: Array) -> Array:
    """Sums in float32, one number after another, as one thread adds."""
    return np.asarray(np.cumsum(x.reshape(*x.shape[:2], -1), axis=2, dtype=F32)[..., -1])


def gap(
    round_: Callable[[Array], Array] = np.rint,
    total: Callable[[Array], Array] = _total,
    number: type[Any] = F32,
) -> HostFunction:
    def run(
        op: QuantizedGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        limits = np.iinfo(out.dtype)
        numbers = total(inputs[0]).astype(number) * weights[0]
        out[...] = np.clip(round_(numbers), limits.min, limits.max)

    return run


def maxpool(lowest: Callable[[np.dtype[np.generic]], int]) -> HostFunction:
    def run(
        op: QuantizedMaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        (ph, pw), (sh, sw) = op.pool.padding, op.pool.stride
        around = ((0, 0), (0, 0), (ph, ph), (pw, pw))
        padded = np.pad(inputs[0], around, constant_values=lowest(out.dtype))
        windows = sliding_window_view(padded, op.pool.kernel_size, (2, 3))
        out[...] = windows[:, :, ::sh, ::sw].max(axis=(4, 5))

    return run


def _nearest(x: Array, scale: Array) -> Array:
    found: Array = np.clip(np.rint(x / scale), -128, 127)
    return found


def integers_of(
    op: QuantizedConvMaxPool,
    x: Array,
    weight: Array,
    nearest: Callable[[Array, Array], Array] = _nearest,
) -> Array:
    """The integers of pixels (N, H, W, C) by a table, or of numbers (N, C, H, W) by a scale.

    The convolution's padding is around them.
    """
    by_table = op.of_pixels
    found = (
        weight[np.arange(len(weight)), x].transpose(0, 3, 1, 2) if by_table else nearest(x, weight)
    )
    (ph, pw) = op.conv.conv.padding
    return np.pad(found, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def _padded_first(op: QuantizedConvMaxPool, x: Array, table: Array) -> Array:
    """Black pixels around the image, converted by the table with it."""
    if not op.of_pixels:
        return integers_of(op, x, table)
    (ph, pw) = op.conv.conv.padding
    around = np.pad(x, ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    found: Array = table[np.arange(len(table)), around].transpose(0, 3, 1, 2)
    return found


def _of_channel_before(op: QuantizedConvMaxPool, x: Array, table: Array) -> Array:
    return integers_of(op, x, np.roll(table, 1, axis=0))


def _of_numbers(nearest: Callable[[Array, Array], Array]) -> HostFunction:
    return stem(lambda op, x, weight: integers_of(op, x, weight, nearest))


def stem(
    read: Callable[[QuantizedConvMaxPool, Array, Array], Array] = integers_of,
    outside: Callable[[np.dtype[np.generic]], int] = lambda dtype: np.iinfo(dtype).min,
    first: Callable[[Array], Array] | None = None,
) -> HostFunction:
    """A stem. outside: the pooling's padding. first: pools its results from sums, and then
    requantises; without it, pools integers."""

    def run(
        op: QuantizedConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier, *of_image = weights
        conv, image = op.conv, inputs[0]
        if of_image:
            image = read(op, image, of_image[0])
            conv = replace(conv, conv=replace(conv.conv, padding=(0, 0)))
        sums = sums_of(conv, image, weight, bias)
        limits = np.iinfo(out.dtype)
        finish = partial(stored, relu=conv.conv.relu, low=limits.min, high=limits.max)
        if first is None:
            made = finish(scaled(sums, multiplier, None)).astype(out.dtype)
            maxpool(outside)(op, (made,), (), out, workspace)
            return
        largest = np.empty(out.shape, np.int64)
        maxpool(lambda dtype: np.iinfo(dtype).min)(op, (first(sums),), (), largest, workspace)
        out[...] = finish(scaled(largest, multiplier, None))

    return run


def quantize(number: Callable[[Array, Array], Array] = np.divide) -> HostFunction:
    def run(op: Quantize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        out[...] = np.clip(np.rint(number(inputs[0], weights[0])), -128, 127)

    return run


def of_pixels(turn: int = 0) -> HostFunction:
    def run(
        op: QuantizePixels, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        for channel, table in enumerate(np.roll(weights[0], turn, axis=0)):
            out[:, channel] = table[inputs[0][..., channel]]

    return run


def relayout(axes: Callable[[QuantizedRelayout], tuple[int, ...]]) -> HostFunction:
    def run(
        op: QuantizedRelayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        out[...] = inputs[0].transpose(axes(op)).reshape(out.shape)

    return run


def _axes(op: QuantizedRelayout) -> tuple[int, ...]:
    if op.source is op.target:
        return 0, 1, 2, 3
    return (0, 2, 3, 1) if op.target is Layout.NHWC else (0, 3, 1, 2)


FAULTS = (
    *CONV_FAULTS,
    fault(
        QuantizedRelayout,
        "not_moved",
        "copies values as they lie",
        "impulse bound",
        relayout(lambda op: (0, 1, 2, 3)),
        precision=INT8,
    ),
    fault(
        QuantizedLinear,
        "sum_not_rounded",
        "multiplies in float64",
        "bound edges",
        linear(lambda sums: sums.astype(np.float64)),
        precision=INT8,
    ),
    fault(
        QuantizedLinear,
        "float32_sum",
        "adds in float32",
        "bound edges",
        linear(number=F32),
        precision=INT8,
    ),
    fault(
        QuantizedGlobalAvgPool,
        "ties_up",
        "rounds ties up",
        "bound edges",
        gap(lambda t: np.floor(t + F32(0.5))),
        precision=INT8,
    ),
    fault(
        QuantizedGlobalAvgPool,
        "sum_in_int16",
        "adds in int16",
        "bound edges",
        gap(total=partial(_total, kind=np.int16)),
        precision=INT8,
    ),
    fault(
        QuantizedGlobalAvgPool,
        "float32_sum",
        "adds in float32",
        "bound edges",
        gap(total=_one_by_one),
        precision=INT8,
    ),
    fault(
        QuantizedGlobalAvgPool,
        "in_float64",
        "multiplies in float64",
        "bound edges",
        gap(number=np.float64),
        precision=INT8,
    ),
    fault(
        QuantizedMaxPool2d,
        "padded_with_zero",
        "pads with 0",
        "bound edges",
        maxpool(lambda dtype: 0),
        precision=INT8,
    ),
    fault(
        Quantize,
        "reciprocal",
        "multiplies by the reciprocal of the scale",
        "bound edges",
        quantize(lambda x, scale: x * (F32(1) / scale)),
        precision=INT8,
    ),
    fault(
        QuantizePixels,
        "table_of_another_channel",
        "takes the table of the channel before",
        "impulse bound",
        of_pixels(1),
        precision=INT8,
    ),
)
FAULTS += (
    fault(
        QuantizedConvMaxPool,
        "padding_wins",
        "pads the pooling with 0",
        "impulse bound",
        stem(outside=lambda dtype: 0),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "sums_in_int16",
        "pools sums that it keeps in int16",
        "bound edges",
        stem(first=lambda sums: sums.astype(np.int16).astype(np.int64)),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "padded_before_the_table",
        "takes padding for black pixels",
        "impulse bound",
        stem(_padded_first),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "table_of_another_channel",
        "takes the table of the channel before",
        "impulse bound",
        stem(_of_channel_before),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "reciprocal_of_the_scale",
        "multiplies numbers by the reciprocal of their scale",
        "bound edges",
        _of_numbers(lambda x, scale: np.clip(np.rint(x * (F32(1) / scale)), -128, 127)),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "image_wraps",
        "keeps the lowest byte of a number beyond the ends",
        "bound edges",
        _of_numbers(
            lambda x, scale: np.clip(np.rint(x / scale), -1e9, 1e9).astype(int).astype("i1")
        ),
        precision=INT8,
    ),
    fault(
        QuantizedConvMaxPool,
        "image_ties_up",
        "rounds ties of the image upwards",
        "bound edges",
        _of_numbers(lambda x, scale: np.clip(np.floor(x / scale + F32(0.5)), -128, 127)),
        precision=INT8,
    ),
)
TWINS = (
    kernel("twin", QuantizedConvMaxPool, "as_written", stem(), INT8),
    kernel("twin", QuantizedConvMaxPool, "sums_first", stem(first=lambda sums: sums), INT8),
    kernel("twin", QuantizedConv2d, "as_written", conv(), INT8, batch_invariant=True),
    kernel("twin", QuantizedConv2d, "unpacked", conv(unpack=_unpacked), INT8),
    kernel("twin", QuantizedLinear, "as_written", linear(), INT8),
    kernel("twin", QuantizedGlobalAvgPool, "as_written", gap(), INT8),
    kernel(
        "twin", QuantizedMaxPool2d, "as_written", maxpool(lambda dtype: np.iinfo(dtype).min), INT8
    ),
    kernel("twin", QuantizedRelayout, "as_written", relayout(_axes), INT8),
    kernel("twin", Quantize, "as_written", quantize(), INT8),
    kernel("twin", QuantizePixels, "as_written", of_pixels(), INT8),
)
