"""The photographs of a folder that calibrate, and those on which losses are measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from r18.calibration import Images
from r18.errors import ImageError
from r18.evaluate.decode import decoded
from r18.evaluate.sources import NO_LABELS, Item, find_images
from r18.images.preprocess import Preprocess
from r18.machine import cpus


@dataclass(frozen=True)
class Photographs(Images):
    """Images that can be read, and their file names.

    sha256: over a line `SHA256\\n` for each file, of its bytes.
    """

    files: tuple[str, ...]


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
    return Photographs(np.stack(pixels), digest.hexdigest(), tuple(names))


__all__ = ["Chosen", "Photographs", "choose", "photographs"]
