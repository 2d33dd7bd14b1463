"""int8 of a model: calibration images as PyTorch gives them, and the model's quantisation.

`Calibrating` is what the caller asked for. A `Quantizer` makes the quantisation of the model's
weights, and makes it again when they change: with the images that it keeps, or, of a quantisation
that was given, by looking whether it still is one of these weights.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from r18.backend import Array, Backend
from r18.calibration import Images, Method, calibrate
from r18.calibration.calibrate import IMAGES
from r18.calibration.fit import check_fit
from r18.errors import UsageError, WeightsError, show
from r18.graph.passes import fuse
from r18.graph.precision import FP8, INT8
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, integer_weights
from r18.graph.resnet import resnet18
from r18.graph.schedule import Schedule
from r18.torch.followed import Seen, Tensors
from r18.torch.storage import forbid_capture, host_array, shape_of
from r18.weights import Weights

Given = torch.Tensor | Iterable[object] | Quantization | Weights
"""The types of `calibration`."""

TAKES = "calibration takes float tensors of images (N, 3, H, W) as the model does"


@dataclass(frozen=True, eq=False)
class Calibrating:
    """Images and a method, or a quantisation that is there already, which needs none."""

    source: Images | Quantization
    how: Method = field(default_factory=Method)

    @property
    def bits(self) -> int:
        """The bits of weights."""
        return self.source.bits if isinstance(self.source, Quantization) else self.how.bits


def calibrating(
    precision: str | None,
    level: str,
    given: Given | None,
    method: str | None,
    bits: int | None,
) -> Calibrating | None:
    """The calibration that `optimize_resnet18` was asked for; None in precisions of floats.

    Raises `UsageError` as it says.
    """
    options = {"calibration": given, "method": method, "bits": bits}
    said = [name for name, value in options.items() if value is not None]
    if precision == FP8.name:
        raise UsageError(
            "a drop-in has no fp8, which only programs of r18 compute in\n"
            "  ask for another precision, or use r18.compile or the commands (docs/fp8.md)"
        )
    if precision != INT8.name:
        if said:
            asked = "the model's own precision" if precision is None else f"'{precision}'"
            raise UsageError(
                f"{said[0]} is for precision='int8', and {asked} was asked for\n"
                f"  ask for precision='int8', or leave out {', '.join(said)}"
            )
        return None
    if level != LEVEL:
        raise UsageError(
            f"int8 is computed with fuse='{LEVEL}', where a sum is requantised once; asked for "
            f"'{level}'"
        )
    if given is None:
        raise UsageError(
            "int8 needs a calibration\n"
            "  give images as the model takes them, calibration=LOADER, or weights that "
            "`r18 quantize` wrote, calibration=r18.load_weights(FOLDER, r18.resnet18())"
        )
    found = _quantization(given)
    if found is not None:
        if said != ["calibration"]:
            raise UsageError(
                f"{said[1]} is decided in the quantisation that is the calibration\n"
                f"  leave out {', '.join(said[1:])}, or give images as the calibration"
            )
        return Calibrating(found)
    defaults = Method()
    how = Method(
        defaults.method if method is None else method, defaults.bits if bits is None else bits
    )
    return Calibrating(images_of(given), how)


def _quantization(given: Given) -> Quantization | None:
    if isinstance(given, Quantization):
        return given
    if not isinstance(given, Weights):
        return None
    if given.quantization is None:
        raise UsageError(
            f"the weights '{given.source}' given as calibration hold no quantisation\n"
            f"  quantise them: r18 quantize --weights {given.source} --images FOLDER --out OUT, "
            "and then load OUT; or give images"
        )
    return given.quantization


# -- images ------------------------------------------------------------------------------------


def images_of(given: object) -> Images:
    """The first `IMAGES` of batches of tensors, or of pairs that begin with them; or of a tensor.

    Raises `UsageError` for anything else, for none, for images of unlike shapes, and for numbers
    that are not finite in float32.
    """
    if isinstance(given, str | os.PathLike):
        raise UsageError(
            f"{TAKES}, got the path {show(os.fspath(given))}\n"
            "  of a folder that `r18 quantize` wrote, give r18.load_weights(FOLDER, r18.resnet18())"
        )
    batches = [given] if isinstance(given, torch.Tensor) else given
    if not isinstance(batches, Iterable):
        raise UsageError(f"{TAKES}, got a {type(given).__name__}")
    parts: list[Array] = []
    count = 0
    for place, batch in enumerate(batches):
        part = _batch(batch, f"batch {place} of the calibration")
        if parts and part.shape[1:] != parts[0].shape[1:]:
            raise UsageError(
                f"batch {place} of the calibration has images of shape {part.shape[1:]}, those "
                f"before have {parts[0].shape[1:]}\n  resize or crop them to one size"
            )
        part = part[: IMAGES - count]
        if len(part):
            parts.append(part)
        count += len(part)
        if count == IMAGES:
            break
    if not parts:
        raise UsageError(f"the calibration holds no images\n  {TAKES}")
    pixels = np.concatenate(parts)
    return Images(pixels, _digest(pixels))


def _batch(given: object, where: str) -> Array:
    """A batch of images in float32, a copy."""
    tensor = given[0] if isinstance(given, tuple | list) and given else given
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{TAKES}, or pairs of them and labels; {where} is a {_kind(given)}")
    if not tensor.dtype.is_floating_point:
        raise UsageError(
            f"{TAKES}; {where} is {tensor.dtype}\n"
            "  normalise images as for the model: its transforms begin with a conversion to float"
        )
    if tensor.dim() != 4 or tensor.shape[1] != 3 or 0 in tensor.shape[2:]:
        raise UsageError(f"{TAKES}; {where} has shape {shape_of(tensor)}")
    array = np.array(host_array(tensor.float()), np.float32, order="C")
    if not np.isfinite(array).all():
        raise UsageError(f"{where} holds NaN or infinity")
    return array


def _kind(given: object) -> str:
    inner = f" of {type(given[0]).__name__}" if isinstance(given, tuple | list) and given else ""
    return f"{type(given).__name__}{inner}"


def _digest(pixels: Array) -> str:
    """sha256 over a line `SHA256\\n` for each image, of its float32 in (C, H, W)."""
    lines = (f"{hashlib.sha256(image.astype('<f4')).hexdigest()}\n" for image in pixels)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# -- the model's quantisation ------------------------------------------------------------------


class Quantizer:
    """The quantisation of a model's weights as they are; made again when they change."""

    def __init__(self, asked: Calibrating) -> None:
        self.asked = asked
        self._lock = threading.Lock()
        self._found: tuple[Schedule, Seen, Quantization] | None = None

    def quantization(self, backend: Backend, schedule: Schedule, tensors: Tensors) -> Quantization:
        """The quantisation of these weights, in the order of the schedule's.

        schedule: at level `none`, for images of any size: a scale does not depend on that. Raises
        what `calibrate` raises, and `UsageError` if the quantisation that was given is not one of
        these weights.
        """
        source = self.asked.source
        images = None if isinstance(source, Quantization) else source.pixels.shape[1:]
        schedule = replace(schedule, input_shape=images or resnet18().input_shape)
        with self._lock:
            if self._found is not None:
                asked, seen, found = self._found
                if asked == schedule and seen.same(tensors):
                    return found
            forbid_capture(tensors[0].device, "a calibration")
            seen = Seen(tensors)  # before reading them: a change during the read is seen next time
            found = self._made(backend, schedule, tensors)
            self._found = schedule, seen, found
            return found

    def forget(self) -> None:
        """Make it again at the next question, whether a change is seen or not."""
        with self._lock:
            self._found = None

    def _made(self, backend: Backend, schedule: Schedule, tensors: Tensors) -> Quantization:
        weights = dict(zip(schedule.weight_specs, map(host_array, tensors), strict=True))
        folded = fuse(schedule, LEVEL)
        source = self.asked.source
        if not isinstance(source, Quantization):
            return calibrate(backend, folded, weights, source, self.asked.how)
        try:
            check_fit(folded, weights, source)
            integer_weights(folded, source)  # raises for what no kernel takes
        except WeightsError as error:
            raise UsageError(
                f"the quantisation given as calibration does not fit the model: {error}\n"
                "  quantise the model as it is: give images as the calibration"
            ) from None
        return source


__all__ = ["Calibrating", "Given", "Quantizer", "calibrating", "images_of"]
