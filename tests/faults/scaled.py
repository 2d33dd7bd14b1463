"""Scaled ops in e4m3: correct kernels that add up in odd ways, and kernels wrong in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from faults import odd_ops
from faults.fault import Fault, fault, kernel
from faults.summations import Products, Summation, forward, in_order, promoted, tensor_core
from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction
from r18.graph.ops import Conv2d, MaxPool2d
from r18.graph.precision import E4M3_LARGEST, FP8, round_to_e4m3
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)

Arrays = tuple[Array, ...]
F32 = np.float32

FRACTION, RUN, STEP = 13, 128, 32
"""Hopper's e4m3 `wgmma`: bits of fraction, products per promoted sum, products per step."""
NARROW = RoundingContract(
    "scaled_sum", "float32", FP8.storage, truncates=True, promoted=RUN, fraction=FRACTION
)
UNIT = tensor_core(STEP, significand=FRACTION + 1)


# -- the steps, as they should be --------------------------------------------------------------


def sums_of(op: Conv2d, x: Array, weight: Array, total: Summation) -> Array:
    """The sums of products, (N, O, OH, OW) in float32."""
    found = odd_ops.windows(op, x.astype(F32), 0.0)
    n, _, oh, ow, kh, kw = found.shape
    columns = found.transpose(1, 4, 5, 0, 2, 3).reshape(op.depth, -1)
    made = total(Products(columns, weight.astype(F32).reshape(len(weight), -1), kh * kw))
    return made.reshape(-1, n, oh, ow).transpose(1, 0, 2, 3)


def finished(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    """The numbers to store: multiplier, bias, residual, ReLU. added: the residual's part."""
    numbers = sums * multiplier[:, None, None] + bias[:, None, None] + added
    return np.maximum(numbers, 0) if op.relu else numbers


def saturated(numbers: Array) -> Array:
    return round_to_e4m3(numbers)


def conv(
    total: Summation = in_order(forward),
    finish: Callable[..., Array] = finished,
    store: Callable[[Array], Array] = saturated,
    factor: Callable[[Array], Array] = lambda multiplier: multiplier,
) -> HostFunction:
    """A scaled convolution. factor: changes the residual's multiplier."""

    def run(
        op: ScaledConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier, *more = weights
        sums = sums_of(replace(op.conv, residual=False), inputs[0], weight, total)
        added = inputs[1].astype(F32) * factor(more[0]) if more else np.zeros(1, F32)
        out[...] = store(finish(op.conv, sums, bias, multiplier, added))

    return run


def linear(total: Summation, scale_bias: bool = False) -> HostFunction:
    def run(
        op: ScaledLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier = weights
        sums = total(Products(np.ascontiguousarray(inputs[0].T), weight.astype(F32))).T
        out[...] = (sums + bias) * multiplier if scale_bias else sums * multiplier + bias

    return run


def scale(divide: Callable[[Array, Array], Array], store: Callable[[Array], Array]) -> HostFunction:
    def run(op: Scale, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        out[...] = store(divide(inputs[0], weights[0]))

    return run


def mean(x: Array) -> Array:
    return np.asarray(np.sum(x, axis=(2, 3)) * F32(1 / (x.shape[2] * x.shape[3])))


def gap(
    op: ScaledGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    out[...] = mean(inputs[0].astype(F32))


def _rounded_gap(
    op: ScaledGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Average pooling whose means are rounded to e4m3."""
    gap(op, inputs, weights, out, workspace)
    out[...] = round_to_e4m3(out)


def classifier(
    means: Callable[[Array], Array] = mean,
    total: Summation = in_order(forward),
    scale_bias: bool = False,
) -> HostFunction:
    """A classifier. means: of pixels in float32, (N, C, H, W) to (N, C)."""
    layer = linear(total, scale_bias)

    def run(
        op: ScaledAvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        layer(op.linear, (means(inputs[0].astype(F32)),), weights, out, workspace)

    return run


def maxpool(outside: float) -> HostFunction:
    def run(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        windows = odd_ops.windows(op, inputs[0].astype(F32), outside)
        out[...] = windows.max(axis=(4, 5))

    return run


def stem(
    total: Summation = in_order(forward),
    divide: Callable[[Array, Array], Array] = np.divide,
    store: Callable[[Array], Array] = saturated,
    outside: float = -np.inf,
    largest: Callable[[Array], Array] = lambda windows: windows.max(axis=(4, 5)),
    read: Callable[[Conv2d, Array], tuple[Conv2d, Array]] = lambda conv, x: (conv, x),
) -> HostFunction:
    """A stem that pools sums, and then finishes and stores the largest.

    divide, store: how the image becomes e4m3. read: changes the convolution and its image.
    """

    def run(
        op: ScaledConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier, *scales = weights
        x = inputs[0].astype(F32)
        if scales:
            x = store(divide(x, scales[0])).astype(F32)
        windows = odd_ops.windows(op.pool, sums_of(*read(op.conv.conv, x), weight, total), outside)
        out[...] = saturated(finished(op.conv.conv, largest(windows), bias, multiplier, F32(0)))

    return run


# -- right ones --------------------------------------------------------------------------------


def _plain(name: str, total: Summation, contract: RoundingContract | None = None) -> Any:
    options = {"contract": contract, "edges": (4, 8, 16), "batch_invariant": True}
    return kernel("control", ScaledConv2d, name, conv(total), FP8, **options)


WIDE = RoundingContract("scaled_sum", "float32", "float32")
MEANS = RoundingContract("mean", "float32", "float32")
OF_MEANS = RoundingContract("mean_sum", "float32", "float32")
CONTROLS = (
    _plain("sum_forward", in_order(forward)),
    _plain("tensor_core_promoted", promoted(RUN, UNIT), NARROW),
    _plain(
        "tensor_core_promoted_32",
        promoted(32, tensor_core(4, significand=FRACTION + 1)),
        replace(NARROW, promoted=32),
    ),
    kernel("control", ScaledLinear, "sum_forward", linear(in_order(forward)), FP8, WIDE),
    kernel("control", ScaledGlobalAvgPool, "reciprocal", gap, FP8, MEANS),
    kernel("control", ScaledAvgPoolLinear, "sum_forward", classifier(), FP8, OF_MEANS),
    kernel("control", Scale, "divide", scale(np.divide, saturated), FP8),
    kernel("control", Scale, "reciprocal", scale(lambda x, s: x * (F32(1) / s), saturated), FP8),
    kernel("control", MaxPool2d, "windows", maxpool(-E4M3_LARGEST), FP8),
    kernel("control", ScaledConvMaxPool, "sum_forward", stem(), FP8),
    kernel(
        "control",
        ScaledConvMaxPool,
        "tensor_core_promoted",
        stem(promoted(RUN, UNIT), lambda x, s: x * (F32(1) / s)),
        FP8,
        NARROW,
    ),
)
"""Correct kernels with the arithmetic of units that keep few bits."""


# -- wrong ones --------------------------------------------------------------------------------


def _quanta(numbers: Array) -> tuple[Array, Array]:
    """Numbers, clipped to e4m3's range, in units of their last place; and the unit."""
    wide = np.clip(numbers.astype(np.float64), -E4M3_LARGEST, E4M3_LARGEST)
    units = np.exp2(np.maximum(np.frexp(wide)[1] - 1, -6) - 3.0)
    return wide / units, units


def _cut(numbers: Array) -> Array:
    parts, units = _quanta(numbers)
    return np.asarray(np.trunc(parts) * units)


def _away(numbers: Array) -> Array:
    parts, units = _quanta(numbers)
    return np.asarray(np.copysign(np.floor(np.abs(parts) + 0.5), parts) * units)


def _twice(numbers: Array) -> Array:
    """Rounded to float16 first, so that a number just above a tie becomes one."""
    return round_to_e4m3(np.clip(numbers, -500, 500).astype(np.float16))


def _overflowing(numbers: Array) -> Array:
    """Converted as by NumPy, with NaN beyond the largest number."""
    return np.where(np.abs(numbers) > 464, np.nan, round_to_e4m3(numbers))


def _flushed(numbers: Array) -> Array:
    return np.where(np.abs(numbers) < 2.0**-6, 0.0, round_to_e4m3(numbers))


def _to_240(numbers: Array) -> Array:
    """Clipped to 240, the largest number of the other e4m3, which has infinities."""
    return round_to_e4m3(np.clip(numbers, -240, 240))


def _relu_first(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    numbers = sums * multiplier[:, None, None] + bias[:, None, None]
    return (np.maximum(numbers, 0) if op.relu else numbers) + added


def _bias_in_sum(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    return finished(op, sums + bias[:, None, None], bias * 0, multiplier, added)


def _one_multiplier(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    return finished(op, sums, bias, multiplier[:1].repeat(len(multiplier)), added)


def _stored_sum(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    """Sums that are rounded to e4m3 before the epilogue."""
    return finished(op, round_to_e4m3(sums).astype(F32), bias, multiplier, added)


def _no_nan(op: Conv2d, sums: Array, bias: Array, multiplier: Array, added: Array) -> Array:
    """A ReLU that prefers numbers to NaN, as `fmaxf` does."""
    numbers = finished(replace(op, relu=False), sums, bias, multiplier, added)
    return np.fmax(numbers, 0) if op.relu else numbers


def _conv_fault(name: str, wrong: str, run: HostFunction, checks: str = "exact") -> Fault:
    return fault(ScaledConv2d, name, wrong, checks, run, precision=FP8)


def _no_nan_wins(windows: Array) -> Array:
    return np.asarray(np.fmax.reduce(windows, axis=(4, 5)))


def _one_column_more(conv: Conv2d, x: Array) -> tuple[Conv2d, Array]:
    """A pixel is NaN if its right neighbour is: 0 · NaN in a product beyond the window."""
    beyond = np.isnan(np.roll(x, -1, axis=3))
    beyond[..., -1] = False
    return conv, np.where(beyond, F32(np.nan), x)


def _odd_lines_only(conv: Conv2d, x: Array) -> tuple[Conv2d, Array]:
    """NaN becomes 0 where, of four rows and those above and below, only even rows have any: readers
    mark lines with NaN, and the marks of even lines are lost."""
    noted = np.isnan(x).any(axis=(0, 1, 3))
    noted = np.pad(noted, (4, 4 + -len(noted) % 4)).reshape(-1, 2, 2).any(axis=1)
    few = noted[:, 0] & ~noted[:, 1]
    lost = (few[:-2] & few[1:-1] & few[2:]).repeat(4)[: x.shape[2], None]
    return conv, np.where(lost & np.isnan(x), F32(0), x)


def _stem_fault(name: str, wrong: str, run: HostFunction, checks: str) -> Fault:
    return fault(ScaledConvMaxPool, name, wrong, checks, run, precision=FP8)


FAULTS = (
    _conv_fault("cut", "rounds towards zero", conv(store=_cut), "impulse bound"),
    _conv_fault("ties_away", "rounds ties away from zero", conv(store=_away)),
    _conv_fault(
        "overflowing",
        "stores NaN beyond 464",
        conv(store=_overflowing),
        "impulse bound edges",
    ),
    _conv_fault("to_240", "saturates at 240", conv(store=_to_240), "impulse bound"),
    _conv_fault("flushed", "stores no subnormals", conv(store=_flushed), "bound edges"),
    _conv_fault("relu_first", "clamps before the residual", conv(finish=_relu_first)),
    _conv_fault("bias_in_sum", "scales the bias as the sum", conv(finish=_bias_in_sum)),
    _conv_fault("one_multiplier", "scales by the first channel's", conv(finish=_one_multiplier)),
    _conv_fault(
        "stored_sum", "stores the sum before the epilogue", conv(finish=_stored_sum), "exact bound"
    ),
    _conv_fault(
        "residual_as_it_is",
        "does not scale the residual",
        conv(factor=lambda f: f * 0 + 1),
        "exact bound",
    ),
    _conv_fault("nan_lost", "a ReLU of NaN is 0", conv(finish=_no_nan), "edges"),
    _conv_fault(
        "coarse_unit",
        "cuts sums off at 7 bits of fraction",
        conv(tensor_core(STEP, significand=8)),
        "exact bound",
    ),
    fault(
        ScaledLinear,
        "bias_scaled",
        "scales the bias too",
        "exact",
        linear(in_order(forward), scale_bias=True),
        precision=FP8,
        contract=WIDE,
    ),
    fault(
        ScaledGlobalAvgPool,
        "rounded",
        "stores means in e4m3",
        "exact bound",
        _rounded_gap,
        precision=FP8,
        contract=MEANS,
    ),
    fault(
        Scale, "multiplied", "multiplies by the scale", "exact", scale(np.multiply, saturated),
        precision=FP8,
    ),
    fault(
        Scale, "twice", "rounds to float16 first", "exact bound", scale(np.divide, _twice),
        precision=FP8,
    ),
    fault(MaxPool2d, "zero_padding", "pads with 0", "exact", maxpool(0.0), precision=FP8),
    _stem_fault("padding_wins", "pads the pooling with 0", stem(outside=0.0), "exact bound"),
    _stem_fault("nan_loses", "a number wins over NaN", stem(largest=_no_nan_wins), "edges"),
    _stem_fault(
        "nan_spreads", "reads a column more than the window", stem(read=_one_column_more), "edges"
    ),
    _stem_fault(
        "nan_in_few_lines", "forgets NaN in even rows alone", stem(read=_odd_lines_only), "edges"
    ),
    _stem_fault(
        "image_multiplied",
        "multiplies by the scale",
        stem(divide=np.multiply),
        "exact impulse",
    ),
    _stem_fault("image_cut", "rounds the image towards zero", stem(store=_cut), "bound"),
)  # fmt: skip
TWINS = (
    kernel("twin", ScaledConv2d, "float32", conv(), FP8),
    kernel("twin", ScaledLinear, "float32", linear(in_order(forward)), FP8, WIDE),
    kernel("twin", ScaledGlobalAvgPool, "float32", gap, FP8, MEANS),
    kernel("twin", Scale, "float32", scale(np.divide, saturated), FP8),
    kernel("twin", ScaledConvMaxPool, "float32", stem(), FP8),
    kernel("twin", ScaledAvgPoolLinear, "float32", classifier(), FP8, OF_MEANS),
)

__all__ = [
    "CONTROLS",
    "FAULTS",
    "FRACTION",
    "NARROW",
    "OF_MEANS",
    "RUN",
    "STEP",
    "TWINS",
    "UNIT",
    "classifier",
    "mean",
]
