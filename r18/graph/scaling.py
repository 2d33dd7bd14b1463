"""The pass from a folded schedule to a scaled one, in e4m3, and the weights that it reads.

`scaled` replaces each op by its scaled form (`r18.graph.scaled`). `scaled_weights` computes what
the scaled schedule reads from float weights and the largest magnitude of every value, which becomes
448. A calibration for integers knows these: `ranges_of`. Values keep their names.

A weight's scale brings the largest of its output channel to 448. A floating-point format rounds
relatively, so scales decide only what saturates and what becomes subnormal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from r18.errors import UsageError, WeightsError, show
from r18.graph.ops import Conv2d, GlobalAvgPool, Linear, MaxPool2d, Op
from r18.graph.passes import SCALE, fold_weights, fuse
from r18.graph.precision import E4M3, E4M3_LARGEST, FP8, INT8, as_stored
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, quantized, scaled_values
from r18.graph.quantized import check_factors
from r18.graph.scaled import Scale, ScaledConv2d, ScaledGlobalAvgPool, ScaledLinear
from r18.graph.schedule import Schedule, Step

Array = npt.NDArray[Any]

STEP = "scale"
"""The step in front, which stores the network's input in e4m3."""
LARGEST = {"uint8": 255, "int8": 127}
"""The largest integer of a storage format, which stands for the largest magnitude of a value."""


def scaled(schedule: Schedule) -> Schedule:
    """The schedule (at level `all`) in e4m3.

    Its first step stores the input in e4m3; means and logits are float32. The names of weights are
    `{step}.e4m3_weight`, `.scaled_bias`, `.multiplier`, `.residual_multiplier`, and
    `{input}.scale`. Raises `UsageError` for a schedule at another level, one of pixels, and an op
    that has no scaled form.
    """
    if schedule.level != LEVEL:
        raise UsageError(
            f"schedule '{schedule.name}' is at level '{schedule.level}': only one at level "
            f"'{LEVEL}' is scaled"
        )
    if schedule.of_pixels:
        raise UsageError(f"schedule '{schedule.name}' is of pixels: fp8 takes images")
    image = f"{schedule.input}.e4m3"
    steps = [Step(STEP, Scale(), (schedule.input,), image, (schedule.input + SCALE,))]
    for step in schedule.steps:
        inputs = tuple(image if value == schedule.input else value for value in step.inputs)
        op = _scaled_op(step)
        steps.append(Step(step.name, op, inputs, step.output, _names(step.name, op)))
    return replace(schedule, steps=tuple(steps), folds=())


def _scaled_op(step: Step) -> Op:
    match step.op:
        case Conv2d() as conv:
            return ScaledConv2d(replace(conv, bias=True))
        case MaxPool2d() as pool:
            return pool
        case GlobalAvgPool():
            return ScaledGlobalAvgPool()
        case Linear() as linear:
            return ScaledLinear(linear)
    raise UsageError(f"step '{step.name}': {step.op.label} has no scaled form")


def _names(step: str, op: Op) -> tuple[str, ...]:
    own = {"weight": "e4m3_weight", "bias": "scaled_bias"}
    return tuple(f"{step}.{own.get(spec.role, spec.role)}" for spec in op.weights())


def ranges_of(schedule: Schedule, quantization: Quantization) -> dict[str, float]:
    """The largest magnitude of every value that a calibration for integers has a scale of.

    schedule: at level `all`.
    """
    formats = scaled_values(quantized(schedule, quantization.bits))
    scales = quantization.scales
    return {
        value: float(scales[value]) * LARGEST[stored]
        for value, stored in formats.items()
        if value in scales
    }


def calibrated(schedule: Schedule, precision: str, bits: int = 8) -> Schedule:
    """The schedule (at level `none`) in the ops of a precision that computes with the scales of a
    calibration: in integers in int8, with weights of these bits, and scaled in fp8. In any other
    precision, itself.

    Raises what `quantized` and `scaled` raise.
    """
    if precision == INT8.name:
        return quantized(fuse(schedule, LEVEL), bits)
    return scaled(fuse(schedule, LEVEL)) if precision == FP8.name else schedule


def scaled_weights(
    schedule: Schedule, weights: Mapping[str, Array], ranges: Mapping[str, float]
) -> dict[str, Array]:
    """The weights of `scaled(schedule)`.

    schedule: at level `all`. weights: float ones of level `none`. ranges: the largest magnitudes of
    the input and of each convolution's output. Raises `WeightsError` for a missing range, and for a
    range, scale or multiplier that is not positive and finite in float32, and what `fold_weights`
    raises.
    """
    read = fold_weights(schedule, weights)
    scales = value_scales(schedule, ranges)
    first, *others = scaled(schedule).steps
    found: dict[str, Array] = {schedule.input + SCALE: _float32(scales[first.output])}
    for step, target in zip(schedule.steps, others, strict=True):
        if not isinstance(step.op, Conv2d | Linear):
            continue
        source, made = scales[target.inputs[0]], scales[step.output]
        names = dict(zip([spec.role for spec in target.op.weights()], target.weights, strict=True))
        weight = np.asarray(read[step.weights[0]], np.float64)
        by_channel = _channel_scales(weight)
        shaped = by_channel.reshape(-1, *[1] * (weight.ndim - 1))
        found[names["weight"]] = as_stored(weight / shaped, E4M3)
        bias = read[step.weights[1]] if len(step.weights) > 1 else np.zeros(len(weight))
        found[names["bias"]] = _float32(np.asarray(bias, np.float64) / made)
        found[names["multiplier"]] = _factors(step, "multiplier", source * by_channel / made)
        if "residual_multiplier" in names:
            shortcut = scales[target.inputs[1]] / made
            name = names["residual_multiplier"]
            found[name] = _factors(step, "residual multiplier", np.array(shortcut))
    return found


def value_scales(schedule: Schedule, ranges: Mapping[str, float]) -> dict[str, float]:
    """The scale of every value that `scaled(schedule)` makes; 1 of logits.

    Max-pooling and means keep their input's. Raises as `scaled_weights` does for ranges.
    """
    first, *others = scaled(schedule).steps
    found = {first.output: _scale(schedule.input, ranges)}
    for step in others:
        match step.op:
            case ScaledConv2d():
                found[step.output] = _scale(step.output, ranges)
            case ScaledLinear():
                found[step.output] = 1.0
            case _:
                found[step.output] = found[step.inputs[0]]
    return found


def _scale(value: str, ranges: Mapping[str, float]) -> float:
    """The scale with which the largest magnitude of a value is 448, in float32."""
    if value not in ranges:
        raise WeightsError(f"the calibration has no range for '{value}'")
    with np.errstate(over="ignore"):
        scale = np.float32(ranges[value] / E4M3_LARGEST)
    if not (np.isfinite(scale) and scale > 0):
        raise WeightsError(
            f"the range of '{value}' must be positive and finite, got {show(ranges[value])}"
        )
    return float(scale)


def _channel_scales(weight: Array) -> Array:
    """The scales with which the largest weight of each channel is 448; 1 for a channel of zeros."""
    largest = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    return np.where(largest == 0, 1.0, largest / E4M3_LARGEST)


def _float32(values: Array | float) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.atleast_1d(np.asarray(values, np.float32))


def _factors(step: Step, what: str, values: Array) -> Array:
    found = _float32(values)
    check_factors(f"step '{step.name}'", what, found)
    return found


__all__ = ["LARGEST", "calibrated", "ranges_of", "scaled", "scaled_weights", "value_scales"]
