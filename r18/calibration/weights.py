"""Integers of weights, to nearest, with a scale for each output channel.

In 8 bits the largest weight of a channel is at the limit. With 4 or 2 bits that wastes most
integers on a few large weights, so the scale is the one with the least squared error.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Linear
from r18.graph.passes import fold_weights
from r18.graph.quantization import QuantizedWeight
from r18.graph.quantize import rounded
from r18.graph.quantized import limit_of
from r18.graph.schedule import Schedule

CANDIDATES = 80
"""Scales that are compared: equal parts of the one at which nothing saturates, from a fifth on."""


def nearest_weights(
    schedule: Schedule, weights: Mapping[str, Array], bits: int
) -> dict[str, QuantizedWeight]:
    """The weight of every layer, by step. schedule: at level `all`. weights: of level `none`.

    Raises as `rounded` and `fold_weights`.
    """
    read = fold_weights(schedule, weights)
    make = rounded if bits == 8 else least_error
    return {
        step.name: make(read[step.weights[0]], bits)
        for step in schedule.steps
        if isinstance(step.op, Conv2d | Linear)
    }


def least_error(weight: Array, bits: int) -> QuantizedWeight:
    """A weight to nearest, each channel with the scale of least squared error."""
    largest = rounded(weight, bits)
    limit = limit_of(bits)
    rows = np.asarray(weight, np.float64).reshape(len(weight), -1)
    best = largest.scale.copy()
    least = np.full(len(rows), np.inf)
    for part in range(CANDIDATES, CANDIDATES // 5 - 1, -1):
        scale = (largest.scale.astype(np.float64) * part / CANDIDATES).astype(np.float32)
        wide = scale.astype(np.float64)[:, None]
        error = np.square(np.clip(np.rint(rows / wide), -limit, limit) * wide - rows).sum(axis=1)
        better = error < least
        best[better], least[better] = scale[better], error[better]
    integers = np.clip(np.rint(rows / best.astype(np.float64)[:, None]), -limit, limit)
    return QuantizedWeight(integers.astype(np.int8).reshape(weight.shape), best)


__all__ = ["least_error", "nearest_weights"]
