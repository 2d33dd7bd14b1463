"""Errors to one side within the bound: kernels that truncate without declaring it."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.conv import CONV, linear
from faults.fault import Fault, fault, kernel
from faults.summations import tf32_away, tf32_cut, tf32_nearest
from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction
from r18.graph.ops import Conv2d, Linear
from r18.graph.precision import TF32

Arrays = tuple[Array, ...]


def _factors(right: HostFunction, of_input: Any, of_weight: Any) -> HostFunction:
    """A kernel whose factors are rounded to tf32 by these functions."""

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        x = of_input(np.ascontiguousarray(inputs[0]))
        w = of_weight(np.ascontiguousarray(weights[0]))
        right(op, (x, *inputs[1:]), (w, *weights[1:]), out, workspace)

    return run


def _unchanged(values: Array) -> Array:
    return values


def _outputs(right: HostFunction, rounding: Any) -> HostFunction:
    """A kernel whose outputs are rounded to tf32 by this function."""

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        right(op, inputs, weights, out, workspace)
        out[...] = rounding(np.ascontiguousarray(out))

    return run


def _towards_zero(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """A linear layer with truncated float32 sums; every error is within twice u."""
    y = np.zeros(out.shape, np.float32)
    for k in range(inputs[0].shape[1]):
        product = inputs[0][:, k, None].astype(np.float64) * weights[0][None, :, k]
        y = _cut(y.astype(np.float64) + product)
    out[...] = _cut(y.astype(np.float64) + weights[1])


def _cut(values: Array) -> Array:
    nearest = values.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


TO_TF32 = RoundingContract("sum", "float32", "tf32")

FAULTS: tuple[Fault, ...] = (
    fault(
        Conv2d,
        "weights_cut",
        "cuts off tf32 weights, and declares that it rounds them",
        "bias",
        _factors(CONV, _unchanged, tf32_cut),
        precision=TF32,
    ),
    fault(
        Conv2d,
        "outputs_cut",
        "cuts off outputs that it declares to round to tf32",
        "exact",
        _outputs(CONV, tf32_cut),
        precision=TF32,
        contract=TO_TF32,
    ),
    fault(
        Conv2d,
        "outputs_whole",
        "leaves outputs in float32 that it declares to round to tf32",
        "exact",
        _outputs(CONV, _unchanged),
        precision=TF32,
        contract=TO_TF32,
    ),
    fault(
        Linear,
        "sums_cut",
        "cuts off float32 sums, and declares that it rounds them",
        "bias bound",
        _towards_zero,
    ),
)
TWINS = (
    kernel("twin", Linear, "tf32_even", _factors(linear, tf32_nearest, tf32_nearest), TF32),
    kernel("twin", Linear, "tf32_away", _factors(linear, tf32_away, tf32_away), TF32),
    kernel("twin", Linear, "to_tf32", _outputs(linear, tf32_away), TF32, TO_TF32),
)
"""The same kernels, rounded to nearest."""
