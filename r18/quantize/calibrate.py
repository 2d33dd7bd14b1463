"""Calibration: a float network over images, and the scale of every value that becomes integers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Program
from r18.errors import ImageError, R18Error, UsageError
from r18.evaluate.decode import decoded
from r18.evaluate.sources import NO_LABELS, Item, find_images
from r18.graph.ops import MaxPool2d
from r18.graph.quantize import quantized, scaled_values
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.machine import cpus
from r18.quantize.observers import Histogram, scale_of

BATCH = 8
"""Images of a run, at most: every value of them is kept."""


@dataclass(frozen=True)
class Photographs:
    """Images that can be read, in order: file names, pixels (N, 3, H, W), and their digest.

    sha256: over a line `SHA256\\n` for each file, of its bytes.
    """

    files: tuple[str, ...]
    pixels: Array
    sha256: str

    def __len__(self) -> int:
        return len(self.files)

    def batches(self) -> Iterator[tuple[int, Array]]:
        """The first image's place and the pixels of each batch; zeros fill up the last one."""
        size = min(BATCH, len(self))
        for first in range(0, len(self), size):
            part = self.pixels[first : first + size]
            missing = size - len(part)
            if missing:
                part = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
            yield first, part


@dataclass(frozen=True)
class Chosen:
    """Images to calibrate with, and those on which losses are measured, if they are others."""

    calibration: tuple[str, ...]
    measured: tuple[str, ...]


def choose(folder: Path, calibration: int, measured: int) -> Chosen:
    """Images of a folder, spread evenly over its sorted files; labels do not count.

    At most as many as asked for. Losses are measured on images that calibration does not use, and
    on the same ones where there are no others. Raises as `find_images`.
    """
    items = find_images(folder, 1, NO_LABELS).items
    chosen = _spread(items, calibration)
    taken = {item.file for item in chosen}
    rest = [item for item in items if item.file not in taken]
    others = _spread(rest or chosen, measured)
    return Chosen(tuple(i.file for i in chosen), tuple(i.file for i in others))


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    if count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def photographs(
    folder: Path, files: Sequence[str], config: Preprocess, tell: Callable[[str], None]
) -> Photographs:
    """Decode images. One that cannot be read is left out, and `tell` is given a line about it.

    Raises `ImageError` where none can be read.
    """
    digest = hashlib.sha256()
    names, pixels = [], []
    batches: Iterable[Sequence[Item]] = ([Item(file)] for file in files)
    for (item,), (image,) in decoded(batches, folder, config, cpus(), ahead=4):
        if isinstance(image.pixels, ImageError):
            tell(f"left out: {item.file}: {image.pixels}")
            continue
        assert image.seen is not None
        digest.update(f"{image.seen.sha256}\n".encode())
        names.append(item.file)
        pixels.append(image.pixels)
    if not pixels:
        raise ImageError(f"none of {len(files)} images in '{folder}' can be read")
    return Photographs(tuple(names), np.stack(pixels), digest.hexdigest())


def observe(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Photographs,
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
    images: Photographs,
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
    apart = {step.name: "*" for step in schedule.steps if isinstance(step.op, MaxPool2d)}
    options = CompileOptions(
        batch=min(BATCH, len(images)), precision=precision, taps=tuple(taps), kernels=apart
    )
    return backend.compile(schedule, weights, options)


def scales(found: Mapping[str, Histogram], schedule: Schedule, method: str) -> dict[str, float]:
    """The scale of each value by a method; schedule: at level `all`."""
    formats = scaled_values(quantized(schedule))
    return {name: scale_of(found[name], storage, method) for name, storage in formats.items()}


__all__ = [
    "Chosen",
    "Photographs",
    "choose",
    "compiled",
    "observe",
    "photographs",
    "scales",
]
