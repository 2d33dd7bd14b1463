"""The weights that a program of a precision is compiled from: floats, or the integers or scaled
e4m3 numbers that a calibration makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from r18.backend import CompileOptions
from r18.errors import UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.precision import FP8, INT8
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, integer_weights, quantized
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.scaled import SCALED_OPS
from r18.graph.scaling import calibrated, ranges_of, scaled, scaled_weights
from r18.graph.schedule import Schedule
from r18.weights.sources import Weights

CALIBRATED = (INT8.name, FP8.name)
"""The precisions that need the scales of a calibration."""


def in_precision(
    schedule: Schedule, weights: Mapping[str, Any], options: CompileOptions
) -> tuple[Schedule, Mapping[str, NDArray[Any]]]:
    """The schedule and weights to compile with these options: `backend.compile(*…, options)`.

    In int8 these are the quantised schedule and the integers of `weights.quantization`. In fp8 they
    are the scaled schedule and the float weights in e4m3, with the ranges of that calibration. In
    any other precision, and for a schedule that is one of these already, they are the given ones.

    Raises `WeightsError` for int8 or fp8 and weights without a quantisation, and `UsageError` for
    these at another fusion level than `all`, and for fp8 from pixels.
    """
    if options.precision not in CALIBRATED or is_calibrated(schedule):
        return schedule, weights
    check_level(options)
    quantization = quantization_of(weights, options.precision)
    folded = fuse(schedule, LEVEL) if schedule.level == "none" else schedule
    if options.precision == FP8.name:
        ranges = ranges_of(folded, quantization)
        return scaled(folded), scaled_weights(folded, weights, ranges)
    return quantized(folded, quantization.bits), integer_weights(folded, quantization)


USES = {INT8.name: "int8 computes with integers", FP8.name: "fp8 takes its scales from one"}


def quantization_of(weights: Mapping[str, Any], precision: str = INT8.name) -> Quantization:
    """The quantisation that the weights hold. Raises `WeightsError` where there is none.

    precision: one of `CALIBRATED`, for the message.
    """
    if isinstance(weights, Weights) and weights.quantization is not None:
        return weights.quantization
    source = weights.source if isinstance(weights, Weights) else "SOURCE"
    which = f"weights '{source}' hold" if isinstance(weights, Weights) else "the weights hold"
    raise WeightsError(
        f"{which} no quantisation, and {USES[precision]}\n"
        f"  quantise them: r18 quantize --weights {source} --images FOLDER --out OUT, and then "
        "use --weights OUT"
    )


def calibrated_schedule(schedule: Schedule, options: CompileOptions, bits: int = 8) -> Schedule:
    """The schedule (at level `none`) of a program with these options, for planning without weights.

    bits: of weights in int8. Raises `UsageError` as `in_precision`.
    """
    if options.precision in CALIBRATED:
        check_level(options)
    return calibrated(schedule, options.precision, bits)


def is_quantized(schedule: Schedule) -> bool:
    """Whether the schedule computes in integers."""
    return any(isinstance(step.op, QUANTIZED_OPS) for step in schedule.steps)


def is_scaled(schedule: Schedule) -> bool:
    """Whether the schedule computes in e4m3."""
    return any(isinstance(step.op, SCALED_OPS) for step in schedule.steps)


def is_calibrated(schedule: Schedule) -> bool:
    """Whether the schedule is what `in_precision` makes for one of `CALIBRATED`."""
    return is_quantized(schedule) or is_scaled(schedule)


def check_level(options: CompileOptions) -> None:
    """Raise `UsageError` for int8 or fp8 at another fusion level than `all`, and fp8 of pixels."""
    if options.precision == FP8.name and options.pixels is not None:
        raise UsageError("fp8 takes images, not pixels: normalise them before")
    if options.fusion != LEVEL:
        once = "stored" if options.precision == FP8.name else "requantised"
        raise UsageError(
            f"{options.precision} is computed at fusion level '{LEVEL}', where a sum is {once} "
            f"once; asked for '{options.fusion}'"
        )


__all__ = [
    "CALIBRATED",
    "calibrated_schedule",
    "in_precision",
    "is_calibrated",
    "is_quantized",
    "is_scaled",
    "quantization_of",
]
