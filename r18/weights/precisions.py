"""What a program of a precision is compiled from: the float weights, or their integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from r18.backend import CompileOptions
from r18.errors import UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, integer_weights, quantized
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.schedule import Schedule
from r18.weights.sources import Weights


def in_precision(
    schedule: Schedule, weights: Mapping[str, Any], options: CompileOptions
) -> tuple[Schedule, Mapping[str, NDArray[Any]]]:
    """The schedule and weights to compile with these options: `backend.compile(*…, options)`.

    In int8 these are the quantised schedule and the integers of `weights.quantization`. In any
    other precision, and for a schedule that is quantised already, they are the given ones.

    Raises `WeightsError` for int8 and weights without a quantisation, and `UsageError` for int8 at
    another fusion level than `all`.
    """
    if options.precision != INT8.name or is_quantized(schedule):
        return schedule, weights
    check_level(options)
    quantization = quantization_of(weights)
    folded = fuse(schedule, LEVEL) if schedule.level == "none" else schedule
    return quantized(folded, quantization.bits), integer_weights(folded, quantization)


def quantization_of(weights: Mapping[str, Any]) -> Quantization:
    """The quantisation that the weights hold. Raises `WeightsError` where there is none."""
    if isinstance(weights, Weights) and weights.quantization is not None:
        return weights.quantization
    source = weights.source if isinstance(weights, Weights) else "SOURCE"
    which = f"weights '{source}' hold" if isinstance(weights, Weights) else "the weights hold"
    raise WeightsError(
        f"{which} no quantisation, and int8 computes with integers\n"
        f"  quantise them: r18 quantize --weights {source} --images FOLDER --out OUT, and then "
        "use --weights OUT"
    )


def integer_schedule(schedule: Schedule, options: CompileOptions, bits: int = 8) -> Schedule:
    """The schedule (at level `none`) of a program with these options, for planning without weights.

    bits: of weights in int8. Raises `UsageError` as `in_precision`.
    """
    if options.precision != INT8.name:
        return schedule
    check_level(options)
    return quantized(fuse(schedule, LEVEL), bits)


def is_quantized(schedule: Schedule) -> bool:
    """Whether the schedule computes in integers."""
    return any(isinstance(step.op, QUANTIZED_OPS) for step in schedule.steps)


def check_level(options: CompileOptions) -> None:
    """Raise `UsageError` for int8 at another fusion level than `all`."""
    if options.fusion != LEVEL:
        raise UsageError(
            f"int8 is computed at fusion level '{LEVEL}', where a sum is requantised once; asked "
            f"for '{options.fusion}'"
        )


__all__ = ["in_precision", "integer_schedule", "is_quantized", "quantization_of"]
