"""Whether a quantisation is one of these float weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array
from r18.errors import WeightsError
from r18.graph.ops import Conv2d, Linear
from r18.graph.passes import fold_weights
from r18.graph.quantization import Quantization
from r18.graph.quantize import quantization as quantised
from r18.graph.quantized import limit_of
from r18.graph.schedule import Schedule

SLACK = 1.001
"""Up or down is less than one unit; AdaRound takes the quotient in float32."""


def check_fit(schedule: Schedule, weights: Mapping[str, Array], quantization: Quantization) -> None:
    """Raise `WeightsError` unless each integer is the float weight, rounded up or down.

    schedule: at level `all`. weights: of level `none`. Beyond the limit of the bits an integer is
    the limit. Biases, in units of their products' scales, are also rounded up or down.
    """
    missing = sorted(
        step.name
        for step in schedule.steps
        if isinstance(step.op, Conv2d | Linear) and step.name not in quantization.weights
    )
    if missing:
        raise WeightsError(f"the quantisation has no weight for step '{missing[0]}'")
    read = fold_weights(schedule, weights)
    # Raises for weights of another shape, and for scales that are missing.
    scales = {name: float(scale) for name, scale in quantization.scales.items()}
    exact = quantised(schedule, weights, scales, quantization.bits, quantization.weights)
    limit = limit_of(quantization.bits)
    for step in schedule.steps:
        if not isinstance(step.op, Conv2d | Linear):
            continue
        found = quantization.weights[step.name]
        scale = found.scale.astype(np.float64).reshape(-1, *[1] * (found.integers.ndim - 1))
        units = np.clip(np.asarray(read[step.weights[0]], np.float64) / scale, -limit, limit)
        _check(step.name, "weight", found.integers, units)
        _check(step.name, "bias", quantization.biases[step.name], exact.biases[step.name])


def _check(step: str, what: str, integers: Array, units: Array) -> None:
    if integers.shape != units.shape:
        raise WeightsError(
            f"step '{step}': its {what} has shape {integers.shape}, not {units.shape}"
        )
    away = np.abs(integers - units.astype(np.float64))
    if not (away <= SLACK).all():
        raise WeightsError(
            f"step '{step}': the quantised {what} is not the model's, from which it is up to "
            f"{away.max():.3g} units away; rounding moves it by less than 1"
        )


__all__ = ["check_fit"]
