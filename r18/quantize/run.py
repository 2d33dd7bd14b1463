"""From weights and a folder of images to quantised weights: what `r18 quantize` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from r18.backend import Backend
from r18.calibration.adaround import Settings
from r18.calibration.calibrate import IMAGES, Method, Progress, calibrate
from r18.errors import UsageError, counted
from r18.graph.passes import fuse
from r18.graph.quantize import LEVEL
from r18.graph.resnet import network
from r18.quantize.losses import Losses, measure
from r18.quantize.photographs import choose, photographs
from r18.weights import Weights, load_weights
from r18.weights.manifest import check_target, write_manifest

SHOWN = 10
"""The most images with another class that are named."""


@dataclass(frozen=True)
class Request:
    """The network to quantise, and how.

    images:     a folder of photographs; labels do not count.
    out:        the folder to write. overwrite: replace an export that is there.
    method:     of activations: one of `METHODS`.
    bits:       of weights. rounding: of weights; None for the default of the bits.
    calibrate:  the most images to calibrate with. measure: those on which losses are measured.
    adaround:   how long AdaRound optimises.

    Raises `UsageError` and `UnknownName` for values that make no sense.
    """

    images: Path
    out: Path
    weights: str = "imagenet"
    network: str = "resnet18"
    method: str = "mse"
    bits: int = 8
    rounding: str | None = None
    calibrate: int = IMAGES
    measure: int = IMAGES
    overwrite: bool = False
    adaround: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        _ = self.how  # checks method, bits and rounding
        if self.calibrate < 1 or self.measure < 1:
            raise UsageError(
                "calibrate with at least 1 image, and measure on at least 1: got --calibrate "
                f"{self.calibrate} and --measure {self.measure}"
            )

    @property
    def how(self) -> Method:
        return Method(self.method, self.bits, self.rounding, self.adaround)

    @property
    def chosen_rounding(self) -> str:
        """The rounding that was asked for, or the default of the bits."""
        return self.how.chosen_rounding

    @property
    def why(self) -> str:
        """The reason of a default rounding that takes long, or a warning of one that loses much."""
        if self.bits == 8 or self.rounding == "adaround":
            return ""
        if self.rounding == "nearest":
            return (
                f"rounding to nearest: with {self.bits} bits much is lost (18 points of top-1 are "
                "published for 4); --rounding adaround loses less"
            )
        return (
            f"rounding by AdaRound, the default of {self.bits} bits: to nearest, 18 points of "
            "top-1 are published to be lost with 4 bits, by AdaRound 0.7; --rounding nearest is "
            "faster"
        )


@dataclass(frozen=True)
class Result:
    """Quantised weights, and what they lose.

    calibrated: images. same: losses are measured on the images of the calibration.
    """

    request: Request
    weights: Weights
    losses: Losses
    calibrated: int
    same: bool

    def to_json(self) -> dict[str, Any]:
        found = self.weights.quantization
        assert found is not None
        return {
            "out": str(self.request.out),
            "weights": {"source": self.weights.source, "sha256": self.weights.sha256},
            "quantization_sha256": found.sha256,
            "bits": found.bits,
            "method": found.calibration.method,
            "rounding": found.calibration.rounding,
            "calibrated": self.calibrated,
            "measured_on_calibration": self.same,
        } | self.losses.to_json()

    def text(self) -> str:
        """The text of a run: what was made, the error of each layer, and what was lost."""
        request, losses = self.request, self.losses
        other = "of the calibration" if self.same else "that the calibration did not use"
        rows = [
            (
                value.value,
                value.storage,
                "" if value.scale is None else f"{value.scale:.6g}",
                f"{value.decibels:.1f}",
            )
            for value in losses.values
        ]
        heads = ("value", "format", "scale", "signal to noise, dB")
        shown = tabulate(
            rows, heads, disable_numparse=True, colalign=("left", "left", "right", "right")
        )
        share = losses.agree / losses.images
        parts = [
            f"int{request.bits} weights, {request.chosen_rounding}; activations by "
            f"{request.method} of {counted(self.calibrated, 'image')}",
            f"\n{shown}\n",
            f"measured on {counted(losses.images, 'image')} {other}",
            f"agree_top1 = {losses.agree} ({share:.2%}) with float64",
            f"logits = {losses.decibels:.1f} dB signal to noise",
            *(
                f"changed: {one.file}: class {one.got}, float64 has {one.exact} by a margin of "
                f"{one.margin:.3g}"
                for one in losses.changed[:SHOWN]
            ),
        ]
        if len(losses.changed) > SHOWN:
            parts.append(f"and {len(losses.changed) - SHOWN} more")
        return "\n".join(parts)


def quantize(
    request: Request,
    backend: Backend,
    tell: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Calibrate, round, measure what is lost, and write the weights: whole, or not at all.

    backend: computes; where it has no kernels of a precision, numpy's are used. tell: called with
    lines about what is done and what was left out.

    Raises `ManifestError` for a folder that may not be written, before anything is computed; what
    `load_weights`, `find_images` and compiling raise; `ImageError` where no image can be read.
    """
    check_target(request.out, request.overwrite)
    request.how.check()
    if request.why:
        tell(request.why)
    schedule = network(request.network)
    weights = load_weights(request.weights, schedule)
    folded = fuse(schedule, LEVEL)
    chosen = choose(request.images, request.calibrate, request.measure)
    same = set(chosen.calibration) >= set(chosen.measured)
    images = photographs(request.images, chosen.calibration, weights.preprocess, tell)
    # Both are decoded before the calibration, which takes long: the counts are of images that can
    # be read, and a folder with none to measure on is refused at once.
    measured = images
    if not same:
        measured = photographs(request.images, chosen.measured, weights.preprocess, tell)
    tell(f"images: {len(images)} to calibrate with, {len(measured)} to measure on")

    quantised = calibrate(backend, folded, weights, images, request.how, progress)
    losses = measure(
        backend,
        folded,
        weights,
        quantised,
        measured,
        lambda done: progress("measuring", done, len(measured)),
    )
    made = replace(weights, quantization=quantised)
    write_manifest(request.out, made, schedule, overwrite=request.overwrite)
    return Result(request, made, losses, quantised.calibration.images, same)


__all__ = ["Request", "Result", "quantize"]
