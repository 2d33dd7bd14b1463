"""A network in integers from any weights, so that every backend with the kernels can be verified.

Weights that hold a quantisation keep it. Others get one here: rounded to nearest, with the scales
of a float64 run, so that a verification needs no calibration and no backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array, CompileOptions
from r18.graph.passes import fold_weights, from_pixels, fuse
from r18.graph.precision import INT8
from r18.graph.quantize import LEVEL, quantized, quantized_weights, scaled_values
from r18.graph.schedule import Schedule
from r18.weights import Weights
from r18.weights.precisions import check_level, in_precision, is_quantized
from r18_oracle.network.reference_runs import reference_run
from r18_oracle.ops.integers.requantize import RANGES

SATURATED = 0.9
"""The magnitude that is the largest integer, of the largest of a run: saturation is tested, too."""
IMAGES = 4
"""The most images whose values scales are taken from."""


def executed(
    schedule: Schedule, weights: Mapping[str, Array], images: Array, options: CompileOptions
) -> tuple[Schedule, Mapping[str, Array]]:
    """The schedule and weights to compile with these options: `in_precision`, of any weights.

    schedule: at level `none`, or in integers already. images: float32 (N, …), or pixels where the
    options say so; scales follow from the first of them if the weights hold no quantisation.

    Raises what `in_precision` and `reference_run` raise, but nothing for weights that are floats.
    """
    own = isinstance(weights, Weights) and weights.quantization is not None
    if options.precision != INT8.name or is_quantized(schedule) or own:
        return in_precision(schedule, weights, options)
    check_level(options)
    folded = fuse(schedule, LEVEL)
    scales = _scales(folded, weights, images[:IMAGES], options)
    return quantized(folded), quantized_weights(folded, weights, scales)


def _scales(
    folded: Schedule, weights: Mapping[str, Array], images: Array, options: CompileOptions
) -> dict[str, float]:
    """The scale of every value that a quantised schedule stores, of one at level `all`."""
    formats = scaled_values(quantized(folded))
    begun = folded if options.pixels is None else from_pixels(folded, options.pixels)
    run = reference_run(begun, fold_weights(begun, weights), images, list(formats))
    found = {}
    for value, stored in formats.items():
        largest = SATURATED * float(np.abs(run.take(value)).max())
        found[value] = float(np.float32(largest / RANGES[stored][1])) or 1.0
    return found


__all__ = ["executed"]
