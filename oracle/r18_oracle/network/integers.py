"""A network in integers or e4m3 from any weights, so that every backend with the kernels can be
verified.

Weights that hold a quantisation keep it. Others get one here: rounded to nearest, with the scales
of a float64 run, so that a verification needs no calibration and no backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array, CompileOptions
from r18.graph.passes import fold_weights, from_pixels, fuse
from r18.graph.precision import E4M3_LARGEST, FP8
from r18.graph.quantize import LEVEL, quantized, quantized_weights, scaled_values
from r18.graph.scaling import scaled, scaled_weights
from r18.graph.schedule import Schedule
from r18.weights import Weights
from r18.weights.precisions import CALIBRATED, check_level, in_precision, is_calibrated
from r18_oracle.network.reference_runs import reference_run
from r18_oracle.ops.integers.requantize import RANGES

SATURATED = 0.9
"""The magnitude that becomes the largest number of the format, of the largest of a run: saturation
is tested, too."""
IMAGES = 4
"""The most images whose values scales are taken from."""


def executed(
    schedule: Schedule, weights: Mapping[str, Array], images: Array, options: CompileOptions
) -> tuple[Schedule, Mapping[str, Array]]:
    """The schedule and weights to compile with these options: `in_precision`, of any weights.

    schedule: at level `none`, or in integers or e4m3 already. images: float32 (N, …), or pixels
    where the options say so; scales follow from the first of them if the weights hold no
    quantisation.

    Raises what `in_precision` and `reference_run` raise, but nothing for weights that are floats.
    """
    own = isinstance(weights, Weights) and weights.quantization is not None
    if options.precision not in CALIBRATED or is_calibrated(schedule) or own:
        return in_precision(schedule, weights, options)
    check_level(options)
    folded = fuse(schedule, LEVEL)
    formats = scaled_values(quantized(folded))
    ranges = _ranges(folded, weights, images[:IMAGES], options, list(formats))
    if options.precision == FP8.name:
        ranges = {value: largest or E4M3_LARGEST for value, largest in ranges.items()}
        return scaled(folded), scaled_weights(folded, weights, ranges)
    scales = {
        value: float(np.float32(ranges[value] / RANGES[stored][1])) or 1.0
        for value, stored in formats.items()
    }
    return quantized(folded), quantized_weights(folded, weights, scales)


def _ranges(
    folded: Schedule,
    weights: Mapping[str, Array],
    images: Array,
    options: CompileOptions,
    values: list[str],
) -> dict[str, float]:
    """The magnitude of each value that does not saturate, of a schedule at level `all`."""
    begun = folded if options.pixels is None else from_pixels(folded, options.pixels)
    run = reference_run(begun, fold_weights(begun, weights), images, values)
    return {value: SATURATED * float(np.abs(run.take(value)).max()) for value in values}


__all__ = ["executed"]
