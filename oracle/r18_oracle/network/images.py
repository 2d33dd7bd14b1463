"""Inputs of programs: seeded images, photographs, or raw values from a file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from r18.errors import ShapeError, UsageError, counted, show
from r18.files import open_file, read_all
from r18.graph.ops import Shape
from r18.graph.schedule import IMAGE, Schedule
from r18.images.preprocess import Preprocess, preprocess_batch
from r18.weights.synthetic import normal

RAW_LIMIT = 4 << 30
"""The most bytes of a file of raw values: 7,000 images of 224×224 pixels."""
LEVEL = 2.0
"""Standard deviation of the channels' levels after a ReLU."""


@dataclass(frozen=True, eq=False)
class Images:
    """A batch, (N, …), of finite float32 values or uint8 pixels, and a description of its source.

    Raises `UsageError` for values that are not finite, and for an empty batch.
    """

    values: NDArray[Any]
    source: str

    def __post_init__(self) -> None:
        if self.values.size == 0:
            raise UsageError(f"the input '{self.source}' is empty: {self.values.shape}")
        bad = int((~np.isfinite(self.values)).sum())
        if bad:
            raise UsageError(
                f"the input '{self.source}' holds {bad} values that are NaN or infinite; "
                "its checkpoints would show nothing"
            )

    @property
    def batch(self) -> int:
        return len(self.values)

    def check(self, schedule: Schedule) -> None:
        """Raise `ShapeError` unless these are inputs of the schedule."""
        if self.values.shape[1:] != schedule.input_shape:
            raise ShapeError(
                f"the input '{self.source}' has samples of {self.values.shape[1:]}, "
                f"'{schedule.name}' takes {schedule.input_shape}"
            )


def seeded(schedule: Schedule, batch: int = 1, seed: int = 0) -> Images:
    """Seeded samples, with the same bits on every machine and in every batch.

    For a whole network they are standard normal. The input of a slice that begins after a ReLU has
    that ReLU's distribution: each channel of a sample has its own level, and negative values become
    0. Without levels all global averages would be alike, and so would the classes.

    Raises `UsageError` for a batch below 1 or a negative seed.
    """
    if batch < 1 or seed < 0:
        raise UsageError(f"batch must be at least 1 and seed at least 0, got {batch} and {seed}")
    shape = schedule.input_shape
    # Twice in float64, and once in float32.
    if (needed := batch * math.prod(shape) * 20) > (there := psutil.virtual_memory().total):
        raise UsageError(
            f"a batch of {show(batch)} takes {needed / 2**30:,.0f} GiB, this machine has "
            f"{there / 2**30:,.0f}; ask for fewer images"
        )
    values = np.stack([normal(seed, f"sample {index}", shape, 1.0) for index in range(batch)])
    if schedule.input != IMAGE:
        channels = (shape[0], *(1 for _ in shape[1:]))
        values += np.stack([normal(seed, f"level {i}", channels, LEVEL) for i in range(batch)])
        values = np.maximum(values, 0)
    return Images(values.astype(np.float32), f"seed {seed}")


def photographs(files: Sequence[str | Path], preprocess: Preprocess) -> Images:
    """Preprocessed image files, in order. Raises `ImageError`."""
    return Images(preprocess_batch(files, preprocess), ", ".join(Path(f).name for f in files))


def raw_file(path: str | Path, sample: Shape) -> Images:
    """Little-endian float32 samples of that shape from a file; their number is the batch.

    Raises `UsageError` if the file cannot be read or does not hold a whole number of samples.
    """
    path = Path(path)
    nbytes = math.prod(sample) * 4
    try:
        with open_file(path, RAW_LIMIT) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0 or size % nbytes:
                raise UsageError(
                    f"the input '{path}' has {size} bytes, expected a multiple of {nbytes}: "
                    f"samples of {sample} in float32"
                )
            values = np.frombuffer(read_all(stream), "<f4").astype(np.float32)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"the input '{path}' cannot be read: {why}") from None
    return Images(values.reshape(-1, *sample), path.name)


def chosen(
    schedule: Schedule,
    preprocess: Preprocess,
    *,
    files: Sequence[str | Path] = (),
    raw: str | Path | None = None,
    batch: int | None = None,
    seed: int | None = None,
) -> Images:
    """The photographs in `files`, the raw file, or else seeded samples (1 by default, of seed 0).

    Raises `UsageError` if both are given, if either is given with a seed or with another `batch`
    than its number of samples, and what the three functions raise.
    """
    if files and raw is not None:
        raise UsageError("--image and --input are two sources of one input: give one of them")
    if not files and raw is None:
        return seeded(schedule, 1 if batch is None else batch, seed or 0)
    if seed is not None:
        option = "--image" if raw is None else "--input"
        raise UsageError(f"--seed {seed} is for seeded images, not for {option}; leave one out")
    images = photographs(files, preprocess) if raw is None else raw_file(raw, schedule.input_shape)
    if batch not in (None, images.batch):
        raise UsageError(
            f"--batch {batch} does not fit the {counted(images.batch, 'sample')} of "
            f"'{images.source}'; leave --batch out"
        )
    return images


__all__ = ["Images", "chosen", "photographs", "raw_file", "seeded"]
