"""A float network over images: the magnitudes, and the scale, of every value that is quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Program
from r18.calibration.observers import Histogram, scale_of
from r18.errors import R18Error, UsageError
from r18.graph.quantize import quantized, scaled_values
from r18.graph.schedule import Schedule
from r18.runtime.fusing import keeping_pools

BATCH = 8
"""Images of a run, at most: every value of them is kept."""


REFERENCE = "numpy"
"""Where a backend has no kernels of a precision, these are used: plain, and for every precision."""


@dataclass(frozen=True)
class Images:
    """A network's input images, in order: float32 (N, 3, H, W), normalised, and a digest over
    them."""

    pixels: Array
    sha256: str

    def __len__(self) -> int:
        return len(self.pixels)

    def batches(self) -> Iterator[tuple[int, Array]]:
        """The first image's place and the pixels of each batch; zeros fill up the last one."""
        size = min(BATCH, len(self))
        for first in range(0, len(self), size):
            part = self.pixels[first : first + size]
            missing = size - len(part)
            if missing:
                part = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
            yield first, part


def observe(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Histogram]:
    """The magnitudes of every value that becomes integers, in float32.

    schedule: at level `all`. weights: of level `none`. progress: called with the number of images
    done. Raises what compiling raises, `UsageError` for images of another size, and `R18Error` for
    values that are not finite.
    """
    names = list(scaled_values(quantized(schedule)))
    found = {name: Histogram() for name in names}
    program = compiled(backend, schedule, weights, images, "fp32", names)
    try:
        for first, pixels in images.batches():
            program(pixels)
            count = min(len(pixels), len(images) - first)
            for name, histogram in found.items():
                try:
                    histogram.add(program.fetch(name)[:count])
                except R18Error as error:
                    raise R18Error(f"'{name}': {error}; check the weights") from None
            progress(first + count)
    finally:
        program.close()
    return found


def compiled(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    precision: str,
    taps: Iterable[str],
) -> Program:
    """A program for the images' batches that keeps values, with max-pooling in a step of its own.

    Raises `UsageError` for images of another size than the schedule's.
    """
    if images.pixels.shape[1:] != schedule.input_shape:
        raise UsageError(
            f"the images have shape {images.pixels.shape[1:]}, '{schedule.name}' takes "
            f"{schedule.input_shape}"
        )
    options = CompileOptions(
        batch=min(BATCH, len(images)),
        precision=precision,
        taps=tuple(taps),
        kernels=keeping_pools(schedule),
    )
    return backend.compile(schedule, weights, options)


def scales(found: Mapping[str, Histogram], schedule: Schedule, method: str) -> dict[str, float]:
    """The scale of each value by a method; schedule: at level `all`."""
    formats = scaled_values(quantized(schedule))
    return {name: scale_of(found[name], storage, method) for name, storage in formats.items()}


__all__ = ["REFERENCE", "Images", "compiled", "observe", "scales"]
