"""A quantised network's errors against float64: of every value, of the logits, of the classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from r18.backend import Array, Backend, Program
from r18.backend.registry import load_backend
from r18.calibration.observe import REFERENCE, Images, compiled
from r18.errors import NoKernel
from r18.evaluate.margins import calls
from r18.graph.quantization import Quantization
from r18.graph.quantize import integer_weights, quantized, value_scales
from r18.graph.schedule import Schedule
from r18.quantize.photographs import Photographs


@dataclass(frozen=True)
class ValueLoss:
    """A value's signal to noise in decibels, of all that was lost up to there; infinite for none.

    scale: None for logits, which are floats.
    """

    value: str
    storage: str
    scale: float | None
    decibels: float


@dataclass(frozen=True)
class Changed:
    """An image whose class is another one. margin: of its logits in float64."""

    file: str
    exact: int
    got: int
    margin: float


@dataclass(frozen=True)
class Losses:
    """The errors on the images: in network order, the logits last."""

    images: int
    values: tuple[ValueLoss, ...]
    changed: tuple[Changed, ...]

    @property
    def agree(self) -> int:
        """Images with float64's class."""
        return self.images - len(self.changed)

    @property
    def decibels(self) -> float:
        """The logits' decibels."""
        return self.values[-1].decibels

    def to_json(self) -> dict[str, Any]:
        def plain(number: float) -> float | str:
            return number if math.isfinite(number) else str(number)

        return {
            "images": self.images,
            "agree_top1": self.agree,
            "decibels": plain(self.decibels),
            "values": [asdict(v) | {"decibels": plain(v.decibels)} for v in self.values],
            "changed": [asdict(image) for image in self.changed],
        }


def measure(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    quantization: Quantization,
    images: Photographs,
    progress: Callable[[int], None] = lambda done: None,
) -> Losses:
    """Run the network in float64 and in integers on the images, value by value.

    schedule: at level `all`. weights: of level `none`. progress: called with the number of images
    done. Raises what compiling raises.
    """
    integers = quantized(schedule, quantization.bits)
    scales = value_scales(integers, quantization.scales)
    own = {step.output: step.op.output_storage for step in integers.steps[1:]}
    signal, noise = dict.fromkeys(own, 0.0), dict.fromkeys(own, 0.0)
    changed: list[Changed] = []
    exact = with_kernels(backend, "fp64", schedule, weights, images, own)
    try:
        small = integer_weights(schedule, quantization)
        got = with_kernels(backend, "int8", integers, small, images, own)
        try:
            for first, pixels in images.batches():
                wanted, logits = exact(pixels), got(pixels)
                count = min(len(pixels), len(images) - first)
                for name in own:
                    right = exact.fetch(name)[:count].astype(np.float64)
                    found = got.fetch(name)[:count].astype(np.float64) * scales.get(name, 1.0)
                    signal[name] += float(np.square(right).sum())
                    noise[name] += float(np.square(found - right).sum())
                changed += [
                    Changed(images.files[call.image], call.first, call.got, call.margin)
                    for call in calls(logits[:count], wanted[:count], first)
                    if call.got != call.first
                ]
                progress(first + count)
        finally:
            got.close()
    finally:
        exact.close()
    values = tuple(
        ValueLoss(name, storage, scales.get(name), decibels(signal[name], noise[name]))
        for name, storage in own.items()
    )
    return Losses(len(images), values, tuple(changed))


def with_kernels(
    backend: Backend,
    precision: str,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    taps: Mapping[str, str],
) -> Program:
    """The program on the backend, or on numpy where it has no kernels of the precision."""
    try:
        return compiled(backend, schedule, weights, images, precision, taps)
    except NoKernel:
        reference = load_backend(REFERENCE)
        return compiled(reference, schedule, weights, images, precision, taps)


def decibels(signal: float, noise: float) -> float:
    """10·log₁₀ of the ratio of two sums of squares."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


__all__ = ["Changed", "Losses", "ValueLoss", "measure"]
