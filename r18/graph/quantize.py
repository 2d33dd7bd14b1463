"""The pass from a folded schedule to a quantised one, and the weights that it reads.

`quantized` replaces each op by its integer form (`r18.graph.quantized`). `quantization` computes
integers from float weights and the scales of a calibration; `integer_weights` computes the
multipliers, and gives all that the quantised schedule reads. Values keep their names, so a
checkpoint is the same tensor in numbers and in integers: q · scale of the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from r18.errors import UsageError, WeightsError, show
from r18.graph.ops import (
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
)
from r18.graph.passes import SCALE, fold_weights
from r18.graph.quantization import GIVEN, Calibration, Quantization, QuantizedWeight
from r18.graph.quantized import (
    MOST_SUM,
    STORAGES,
    Quantize,
    QuantizedConv2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    check_factors,
    limit_of,
)
from r18.graph.schedule import Schedule, Step

Array = npt.NDArray[Any]

LEVEL = "all"
"""The fusion level of quantised schedules: a sum is requantised once, with all that is fused."""
STEP = "quantize"
"""The step in front, which makes integers of the network's input."""


def quantized(schedule: Schedule, bits: int = 8) -> Schedule:
    """The schedule (at level `all`) in integers, with weights of 8, 4 or 2 bits.

    Its first step makes int8 of the input; logits are float32. The names of weights are
    `{step}.int_weight`, `.int_bias`, `.multiplier`, `.residual_multiplier`, and `{input}.scale`.

    Raises `UsageError` for a schedule at another level, one of pixels, and an op that has no
    integer form; `ShapeError` for sums that may leave int32, and for bits other than 8, 4 and 2.
    """
    if schedule.level != LEVEL:
        raise UsageError(
            f"schedule '{schedule.name}' is at level '{schedule.level}': only one at level "
            f"'{LEVEL}' is quantised"
        )
    if schedule.of_pixels:
        raise UsageError(
            f"schedule '{schedule.name}' is of pixels: quantise the one of images, and compile it "
            "with `pixels`"
        )
    image = f"{schedule.input}.int8"
    stored = {image: "int8"}
    steps = [Step(STEP, Quantize(), (schedule.input,), image, (schedule.input + SCALE,))]
    for step in schedule.steps:
        inputs = tuple(image if value == schedule.input else value for value in step.inputs)
        op = _integer_op(step, tuple(stored[value] for value in inputs), bits)
        stored[step.output] = op.output_storage
        steps.append(Step(step.name, op, inputs, step.output, _names(step.name, op)))
    return replace(schedule, steps=tuple(steps), folds=())


def has_integer_form(schedule: Schedule) -> bool:
    """Whether `quantized` takes every op of the schedule."""
    return all(
        isinstance(s.op, Conv2d | MaxPool2d | GlobalAvgPool | Linear) for s in schedule.steps
    )


def _integer_op(step: Step, stored: tuple[str, ...], bits: int) -> Op:
    match step.op:
        case Conv2d() as conv:
            return QuantizedConv2d(replace(conv, bias=True), stored, bits)
        case MaxPool2d() as pool:
            return QuantizedMaxPool2d(pool, stored[0])
        case GlobalAvgPool():
            return QuantizedGlobalAvgPool(stored[0])
        case Linear() as linear:
            return QuantizedLinear(linear, stored[0], bits)
    raise UsageError(f"step '{step.name}': {step.op.label} has no integer form")


def _names(step: str, op: Op) -> tuple[str, ...]:
    own = {"weight": "int_weight", "bias": "int_bias"}
    return tuple(f"{step}.{own.get(spec.role, spec.role)}" for spec in op.weights())


def rounded(weight: Array, bits: int) -> QuantizedWeight:
    """A weight rounded to nearest, ties to even, with the largest of each channel at the limit.

    A channel of zeros has the scale 1. Raises `WeightsError` for a weight that is not finite, or so
    large or small that float32 does not hold its scale; `ShapeError` for other bits than 8, 4, 2.
    """
    limit = limit_of(bits)
    wide = np.asarray(weight, np.float64)
    largest = np.abs(wide).reshape(len(wide), -1).max(axis=1)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.where(largest == 0, 1.0, largest / limit).astype(np.float32)
    check_factors("a weight", "scale", scale)
    by_channel = scale.astype(np.float64).reshape(-1, *[1] * (wide.ndim - 1))
    integers = np.clip(np.rint(wide / by_channel), -limit, limit).astype(np.int8)
    return QuantizedWeight(integers, scale)


def quantized_weights(
    schedule: Schedule,
    weights: Mapping[str, Array],
    scales: Mapping[str, float],
    bits: int = 8,
    given: Mapping[str, QuantizedWeight] | None = None,
) -> dict[str, Array]:
    """`integer_weights` of a `quantization` with these arguments; raises what they raise."""
    return integer_weights(schedule, quantization(schedule, weights, scales, bits, given))


def quantization(
    schedule: Schedule,
    weights: Mapping[str, Array],
    scales: Mapping[str, float],
    bits: int = 8,
    given: Mapping[str, QuantizedWeight] | None = None,
    calibration: Calibration = GIVEN,
) -> Quantization:
    """Integers of float weights.

    schedule: at level `all`. weights: float ones of level `none`. scales: of the input and of every
    value that a step makes in integers. given: weights that are integers already, by step name;
    others are `rounded`.

    Raises `WeightsError` for a scale that is missing, not finite or not positive, for weights that
    have none, and for a bias that takes a sum out of int32; `UnknownName` for a step of `given`
    that is not there; and what `quantized` and `fold_weights` raise.
    """
    given = given or {}
    for name in given:
        schedule.step(name)  # raises for a step that is not there
    read = fold_weights(schedule, weights)
    integers = quantized(schedule, bits)
    known = _Scales(schedule, scales)
    found: dict[str, QuantizedWeight] = {}
    biases: dict[str, Array] = {}
    for step, target in zip(schedule.steps, integers.steps[1:], strict=True):
        if not isinstance(step.op, Conv2d | Linear):
            continue
        weight = _weight_of(step, read[step.weights[0]], bits, given.get(step.name))
        products = product_scales(step, known.of(step.inputs[0]), weight.scale)
        bias = read[step.weights[1]] if len(step.weights) > 1 else np.zeros(len(products))
        exact = np.rint(np.asarray(bias, np.float64) / products.astype(np.float64))
        check_sums(step.name, target.op.input_storage[0], weight.integers, exact)
        found[step.name], biases[step.name] = weight, exact.astype(np.int32)
    used = {value: known.of(value) for value in scaled_values(integers)}
    return Quantization(bits, used, found, biases, calibration)


def integer_weights(schedule: Schedule, quantization: Quantization) -> dict[str, Array]:
    """The weights of `quantized(schedule, quantization.bits)`; schedule: at level `all`.

    Raises `WeightsError` for a scale that is missing, for a scale or multiplier that is not
    positive and finite in float32, and for weights of the full range, which kernels do not take.
    """
    check_range(quantization.bits, quantization.full_range)
    scales = {name: weight.scale for name, weight in quantization.weights.items()}
    found = multipliers(schedule, quantization.bits, quantization.scales, scales)
    for step in quantized(schedule, quantization.bits).steps:
        if isinstance(step.op, QuantizedConv2d | QuantizedLinear):
            names = _by_role(step)
            found[names["weight"]] = quantization.weights[step.name].integers
            found[names["bias"]] = quantization.biases[step.name]
    return found


def check_range(bits: int, full_range: bool) -> None:
    """Raise `WeightsError` for weights of the full range, which no kernel takes."""
    limit = limit_of(bits)
    if full_range:
        raise WeightsError(
            f"the quantisation is full_range, and its weights may be −{limit + 1}: kernels take "
            f"−{limit} … {limit}\n"
            "  quantise again, r18 quantize makes no such weights; or compute with the floats, in "
            "another precision"
        )


def multipliers(
    schedule: Schedule,
    bits: int,
    scales: Mapping[str, np.float32],
    weight_scales: Mapping[str, Array],
) -> dict[str, Array]:
    """The float32 weights of `quantized(schedule, bits)`: the input's scale and every multiplier.

    schedule: at level `all`. scales: by value. weight_scales: by step, (O,) each. Raises
    `WeightsError` for a scale that is missing, and for one that is not positive and finite.
    """
    known = _Scales(schedule, scales)
    found = {schedule.input + SCALE: np.array([known.of(schedule.input)], np.float32)}
    for step, target in zip(schedule.steps, quantized(schedule, bits).steps[1:], strict=True):
        names = _by_role(target)
        source = known.of(step.inputs[0])
        if isinstance(step.op, GlobalAvgPool):
            _, _, height, width = schedule.shapes(1)[step.inputs[0]]
            divisor = height * width * np.float64(known.of(step.output))
            ratio = np.float64(source) / divisor
            found[names["multiplier"]] = _factors(step, "multiplier", np.array([ratio]))
        if not isinstance(step.op, Conv2d | Linear):
            continue
        if step.name not in weight_scales:
            raise WeightsError(f"the quantisation has no weight for step '{step.name}'")
        products = product_scales(step, source, weight_scales[step.name])
        if isinstance(step.op, Linear):
            found[names["multiplier"]] = products
            continue
        made = known.of(step.output)
        with np.errstate(over="ignore", under="ignore"):
            found[names["multiplier"]] = _factors(step, "multiplier", products / made)
            if step.op.residual:
                shortcut = np.array([known.of(step.inputs[1]) / made])
                found[names["residual_multiplier"]] = _factors(step, "residual", shortcut)
    return found


def scaled_values(schedule: Schedule) -> dict[str, str]:
    """The values of a quantised schedule that have a scale of their own, and their formats.

    The input's is the format that the first step makes of it; max-pooling keeps its input's scale.
    """
    first, *others = schedule.steps
    found = {first.inputs[0]: first.op.output_storage}
    for step in others:
        if step.op.output_storage in STORAGES and not isinstance(step.op, QuantizedMaxPool2d):
            found[step.output] = step.op.output_storage
    return found


def value_scales(schedule: Schedule, scales: Mapping[str, float | np.float32]) -> dict[str, float]:
    """The scale of every value of a quantised schedule that is stored in integers.

    scales: by value, as `scaled_values` names them; max-pooling keeps its input's.
    """
    first, *others = schedule.steps
    found = {first.output: float(scales[first.inputs[0]])}
    for step in others:
        if step.op.output_storage in STORAGES:
            kept = isinstance(step.op, QuantizedMaxPool2d)
            found[step.output] = found[step.inputs[0]] if kept else float(scales[step.output])
    return found


def product_scales(step: Step, source: np.float32, weight: Array) -> Array:
    """fl(s_x · s_w[o]) of each output channel. Raises `WeightsError` where it is 0 or infinite."""
    with np.errstate(over="ignore", under="ignore"):
        products: Array = source * weight  # float32, rounded
    check_factors(f"step '{step.name}'", "scale of a product", products)
    return products


def _by_role(step: Step) -> dict[str, str]:
    return dict(zip([spec.role for spec in step.op.weights()], step.weights, strict=True))


def _weight_of(
    step: Step, weight: Array, bits: int, given: QuantizedWeight | None
) -> QuantizedWeight:
    """The step's weight in integers; raises `WeightsError` for another shape, or more bits."""
    if given is None:
        try:
            return rounded(weight, bits)
        except WeightsError as error:
            raise WeightsError(f"step '{step.name}': {error}") from None
    if given.integers.shape != weight.shape:
        raise WeightsError(
            f"step '{step.name}': its quantised weight has shape {given.integers.shape}, not "
            f"{weight.shape}"
        )
    if np.abs(given.integers.astype(np.int64)).max() > limit_of(bits):
        limit = limit_of(bits)
        raise WeightsError(
            f"step '{step.name}': weights of {bits} bits are −{limit} … {limit}, got "
            f"{given.integers.min()} … {given.integers.max()}"
        )
    return given


def _factors(step: Step, what: str, values: Array) -> Array:
    """Multipliers in float32."""
    with np.errstate(over="ignore", under="ignore"):
        found = values.astype(np.float32)
    check_factors(f"step '{step.name}'", what, found)
    return found


@dataclass(frozen=True)
class _Scales:
    schedule: Schedule
    given: Mapping[str, float | np.float32]

    def of(self, value: str) -> np.float32:
        """The scale of a value; max-pooling keeps its input's."""
        maker = {step.output: step for step in self.schedule.steps}.get(value)
        if maker is not None and isinstance(maker.op, MaxPool2d):
            return self.of(maker.inputs[0])
        if value not in self.given:
            raise WeightsError(f"the quantisation has no scale for '{value}'")
        with np.errstate(over="ignore"):
            scale = np.float32(self.given[value])
        if not (np.isfinite(scale) and scale > 0):
            raise WeightsError(
                f"the scale of '{value}' must be positive and finite, got {show(self.given[value])}"
            )
        return scale


def check_sums(step: str, stored: str, weight: Array, bias: Array) -> None:
    """Raise `WeightsError` where a bias may take a sum out of int32.

    stored: the storage format of the step's input. bias: integers of any magnitude.
    """
    largest = 255 if stored == "uint8" else 128
    terms = largest * np.abs(weight.astype(np.int64)).reshape(len(weight), -1).sum(axis=1)
    beyond = np.flatnonzero(~(np.abs(bias.astype(np.float64)) <= MOST_SUM - terms))
    if beyond.size:
        channel = int(beyond[0])
        raise WeightsError(
            f"step '{step}': the bias of channel {channel} is {bias[channel]:.4g} times "
            f"the scale of a product, and with it a sum may leave int32"
        )


__all__ = [
    "LEVEL",
    "check_range",
    "check_sums",
    "has_integer_form",
    "integer_weights",
    "multipliers",
    "quantization",
    "quantized",
    "quantized_weights",
    "rounded",
    "scaled_values",
    "value_scales",
]
