"""From float weights and images to their quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from r18.backend import Array, Backend
from r18.calibration.adaround import Settings, adaround, check_torch
from r18.calibration.observe import Images, observe, scales
from r18.calibration.observers import METHODS
from r18.calibration.weights import nearest_weights
from r18.errors import UsageError, show, unknown
from r18.graph.quantization import Calibration, Quantization
from r18.graph.quantize import quantization
from r18.graph.quantized import LIMITS
from r18.graph.schedule import Schedule

ROUNDINGS = ("nearest", "adaround")
IMAGES = 256
"""The most images that calibration uses, by default."""

Progress = Callable[[str, int, int], None]
"""Called with the present activity, the parts of it that are done, and all parts."""


@dataclass(frozen=True)
class Method:
    """How scales and integers are found.

    method:   of activations: one of `METHODS`.
    bits:     of weights. rounding: of weights; None for the default of the bits.
    adaround: how long AdaRound optimises.

    Raises `UsageError` and `UnknownName` for values that make no sense.
    """

    method: str = "mse"
    bits: int = 8
    rounding: str | None = None
    adaround: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("calibration method", self.method, METHODS, error=UsageError)
        if isinstance(self.bits, bool) or self.bits not in LIMITS:
            raise UsageError(f"weights have 8, 4 or 2 bits, got {show(self.bits)}")
        if self.rounding not in (None, *ROUNDINGS):
            raise unknown("rounding", self.rounding, ROUNDINGS, error=UsageError)

    @property
    def chosen_rounding(self) -> str:
        """The rounding that was asked for, or the default of the bits."""
        return self.rounding or ("nearest" if self.bits == 8 else "adaround")

    def check(self) -> None:
        """Raise `R18Error` where PyTorch, which AdaRound needs, is not installed."""
        if self.chosen_rounding == "adaround":
            check_torch()


def calibrate(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    how: Method = Method(),
    progress: Progress = lambda what, done, total: None,
) -> Quantization:
    """The quantisation of a network's weights, with the scales that the images bring.

    schedule: at level `all`. weights: of level `none`. backend: computes in float32, and AdaRound's
    integers where it has kernels of int8; numpy's are used where not.

    Raises what compiling raises, `UsageError` for images of another size than the schedule's,
    `R18Error` for values that are not finite, and `WeightsError` for weights without a scale.
    """
    how.check()
    seen = observe(
        backend, schedule, weights, images, lambda done: progress("calibrating", done, len(images))
    )
    found = scales(seen, schedule, how.method)
    integers = nearest_weights(schedule, weights, how.bits)
    if how.chosen_rounding == "adaround":
        integers = adaround(
            backend,
            schedule,
            weights,
            images,
            found,
            integers,
            how.bits,
            how.adaround,
            lambda step, done, total: progress(f"rounding {step}", done, total),
        )
    made = Calibration(how.method, how.chosen_rounding, len(images), images.sha256)
    return quantization(schedule, weights, found, how.bits, integers, made)


__all__ = ["IMAGES", "ROUNDINGS", "Method", "Progress", "calibrate"]
