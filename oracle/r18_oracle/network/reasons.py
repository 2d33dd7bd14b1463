"""The differences of two runs in integers, each element with its reason.

Differences cascade: one integer that is another one changes all that reads it. So each run is
judged step by step from its own inputs: the specification is computed from what the run has in
front of a step, and compared with what it has behind. An element that differs there is the step's
own doing, and `r18_oracle.ops.integers.arithmetics` says which arithmetic gives it. An element in
which two runs differ although both are as specified follows from their inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Conv2d, MaxPool2d
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, product_scales, quantized, value_scales
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
)
from r18.graph.schedule import Schedule, Step
from r18_oracle.judge.compare import table
from r18_oracle.ops.integers.arithmetics import (
    AGAIN,
    CLASSES,
    SPECIFIED,
    UNEXPLAINED,
    Explained,
    Operands,
    explain,
    explain_quotient,
    from_others,
    quotients,
)
from r18_oracle.ops.integers.pairs import corrections


@dataclass(frozen=True)
class StepReasons:
    """The differences of two runs in one step.

    value:     the step's output. elements: of it. differ: those that are not equal.
    inherited: of them, those that both sides computed as specified, from other inputs.
    sides:     of each run, the elements that it computed differently from its own inputs.
    """

    step: str
    value: str
    elements: int
    differ: int
    inherited: int
    sides: tuple[Explained, Explained]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "value": self.value,
            "elements": self.elements,
            "differ": self.differ,
            "inherited": self.inherited,
            "sides": [
                {"classes": dict(one.classes), "arithmetic": one.arithmetic, "moved": one.moved}
                for one in self.sides
            ],
        }


@dataclass(frozen=True)
class Reasons:
    """The reasons of all steps, in network order; `runs` describes both sides."""

    runs: tuple[str, str]
    rows: tuple[StepReasons, ...]

    def total(self, side: int) -> Counter[str]:
        """Elements by class, of one run."""
        return sum((row.sides[side].classes for row in self.rows), Counter())

    @property
    def unexplained(self) -> int:
        """Elements of both runs that no arithmetic gives."""
        return sum(self.total(side)[UNEXPLAINED] for side in (0, 1))

    @property
    def ok(self) -> bool:
        return self.unexplained == 0

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": list(self.runs),
            "ok": self.ok,
            "unexplained": self.unexplained,
            "totals": [dict(self.total(side)) for side in (0, 1)],
            "steps": [row.to_json() for row in self.rows],
        }

    def text(self) -> str:
        """A line for each step, then each run's elements by class."""
        heads = ("step", "elements", "differ", "inherited", "own", "how they compute it")
        lines = [
            (
                row.step,
                f"{row.elements:,}",
                f"{row.differ:,}",
                f"{row.inherited:,}",
                " | ".join(f"{sum(one.classes.values()):,}" for one in row.sides),
                " | ".join(map(_how, row.sides)),
            )
            for row in self.rows
        ]
        parts = [f"a: {self.runs[0]}\nb: {self.runs[1]}", table(heads, lines)]
        for name, side in (("a", 0), ("b", 1)):
            found = self.total(side)
            names = [*CLASSES, *sorted(set(found) - {*CLASSES, UNEXPLAINED}), UNEXPLAINED]
            counts = ", ".join(f"{found[one]:,} {one}" for one in names)
            parts.append(f"{name} differs from the specification in {counts}")
        return "\n\n".join(parts)


def _how(one: Explained) -> str:
    words = one.arithmetic or "several ways"
    return f"{words} (moved by ≤ {one.moved:.2g})" if one.moved else words


def explain_values(
    schedule: Schedule,
    quantization: Quantization,
    a: Mapping[str, Array],
    b: Mapping[str, Array],
    names: tuple[str, str] = ("a", "b"),
) -> Reasons:
    """Why two runs of a schedule (at level `none`) in integers differ.

    a, b: the input and every value of the quantised schedule, by name. names: describe them.
    """
    integers = quantized(fuse(schedule, LEVEL), quantization.bits)
    rows = (explain_step(step, integers, quantization, a, b) for step in integers.steps)
    return Reasons(names, tuple(rows))


def explain_step(
    step: Step,
    schedule: Schedule,
    quantization: Quantization,
    a: Mapping[str, Array],
    b: Mapping[str, Array],
) -> StepReasons:
    """The reasons of one step of the quantised schedule.

    a, b: its inputs and output, by value, and the image if that was quantised for the step.
    """
    maker = _quantizer(step, schedule)
    names = (*step.inputs, step.output, *(maker.inputs if maker is not None else ()))
    sides = [{name: side[name] for name in names} for side in (a, b)]
    judged = [_judged(step, schedule, quantization, side) for side in sides]
    differ = sides[0][step.output] != sides[1][step.output]
    own = judged[0][0] | judged[1][0]
    return StepReasons(
        step.name,
        step.output,
        differ.size,
        int(differ.sum()),
        int((differ & ~own).sum()),
        (judged[0][1], judged[1][1]),
    )


def _judged(
    step: Step, schedule: Schedule, quantization: Quantization, values: Mapping[str, Array]
) -> tuple[Array, Explained]:
    got = values[step.output].astype(np.float64)
    scales = value_scales(schedule, quantization.scales)
    match step.op:
        case Quantize():
            numbers = values[step.inputs[0]].astype(np.float32)
            scale = np.float32(scales[step.output])
            return explain_quotient(numbers, scale, step.op.output_storage, got)
        case QuantizedMaxPool2d(pool):
            wrong = got != _pooled(pool, values[step.inputs[0]])
            count = int(wrong.sum())
            return wrong, Explained(Counter({UNEXPLAINED: count} if count else {}), SPECIFIED)
        case QuantizedGlobalAvgPool():
            return explain(_mean(step, values, scales), got, sums=False)
    conv = step.op.conv if isinstance(step.op, QuantizedConv2d) else None
    image, weight = values[step.inputs[0]], quantization.weights[step.name].integers
    given = _sums(step, quantization, values, scales)
    found = explain(given, got, saturated=lambda: corrections(conv, image, weight))
    maker = _quantizer(step, schedule)
    if maker is None or not found[1].unexplained:
        return found
    numbers, scale = values[maker.inputs[0]].astype(np.float32), np.float32(scales[maker.output])
    best, how = found, ""
    for way, again in quotients(numbers, scale, maker.op.output_storage):
        inside = {**values, maker.output: again.astype(image.dtype)}
        judged = explain(_sums(step, quantization, inside, scales), got)
        if judged[1].unexplained < best[1].unexplained:
            best, how = judged, AGAIN if way.name == SPECIFIED else f"{AGAIN} ({way.name})"
        if not best[1].unexplained:
            break
    return from_others(AGAIN, how, found[0], best) if how else found


def _quantizer(step: Step, schedule: Schedule) -> Step | None:
    """The step that quantises the image that this one reads.

    A library may quantise it once more where it is read, by another arithmetic: what a model puts
    out is computed for that output.
    """
    makers = (one for one in schedule.steps if one.output == step.inputs[0])
    return next((one for one in makers if isinstance(one.op, Quantize)), None)


def _pooled(pool: MaxPool2d, image: Array) -> Array:
    wide = torch.from_numpy(image.astype(np.float64))
    found: Array = torch.nn.functional.max_pool2d(
        wide, pool.kernel_size, pool.stride, pool.padding
    ).numpy()
    return found


def _mean(step: Step, values: Mapping[str, Array], scales: Mapping[str, float]) -> Operands:
    image = values[step.inputs[0]].astype(np.float64)
    total = image.sum(axis=(2, 3))
    pixels = image.shape[2] * image.shape[3]
    return Operands(
        total,
        np.zeros_like(total),
        np.abs(image).sum(axis=(2, 3)),
        pixels,
        np.full((1, 1), scales[step.inputs[0]], np.float32),
        np.float32(scales[step.output]),
        step.op.output_storage,
        divisor=pixels,
    )


def _sums(
    step: Step,
    quantization: Quantization,
    values: Mapping[str, Array],
    scales: Mapping[str, float],
) -> Operands:
    """The operands of a convolution or a linear layer."""
    op = step.op
    assert isinstance(op, QuantizedConv2d | QuantizedLinear)
    weight = quantization.weights[step.name]
    conv = op.conv if isinstance(op, QuantizedConv2d) else None
    across = (-1, 1, 1) if conv is not None else (-1,)
    bias = quantization.biases[step.name].astype(np.float64).reshape(across)
    image, filters = values[step.inputs[0]], weight.integers
    products = product_scales(step, np.float32(scales[step.inputs[0]]), weight.scale)
    residual = conv is not None and conv.residual
    return Operands(
        _exact(conv, image, filters) + bias,
        bias,
        _exact(conv, np.abs(image.astype(np.int16)), np.abs(filters)) + np.abs(bias),
        int(np.prod(filters.shape[1:])),
        products.reshape(across),
        None if conv is None else np.float32(scales[step.output]),
        op.output_storage,
        residual=values[step.inputs[1]].astype(np.float64) if residual else None,
        residual_scale=np.float32(scales[step.inputs[1]]) if residual else None,
        relu=conv is not None and conv.relu,
    )


def _exact(conv: Conv2d | None, image: Array, weight: Array) -> Array:
    """Sums of products of integers: float64 adds them exactly in any order."""
    x, w = (torch.from_numpy(array.astype(np.float64)) for array in (image, weight))
    with torch.inference_mode():
        if conv is None:
            found: Array = (x @ w.T).numpy()
        else:
            around = conv.stride, conv.padding, conv.dilation, conv.groups
            found = torch.nn.functional.conv2d(x, w, None, *around).numpy()
    return found


__all__ = ["Reasons", "StepReasons", "explain_step", "explain_values"]
