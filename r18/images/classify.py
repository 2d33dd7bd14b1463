"""Photographs in, class names and probabilities out, by a compiled program of any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from r18.backend import Array, Program
from r18.errors import R18Error, UsageError
from r18.graph.ops import Softmax
from r18.images.labels import class_name
from r18.images.preprocess import Preprocess, Source, iter_batches
from r18.stopwatch import part

Batch = tuple[list[Source], NDArray[np.float32]]
"""Sources, and their pixels."""
FIRST_RUN = "first run, with kernels loaded or compiled"


@dataclass(frozen=True)
class Guess:
    """One class of an image: its index, its name (None for classes not ImageNet's), and how sure.

    `probability` is the softmax of the logits, in float64.
    """

    index: int
    name: str | None
    probability: float


@dataclass(frozen=True)
class Classification:
    """An image, and its most probable classes, the first the most probable."""

    source: Source
    top: tuple[Guess, ...]


def even_batch(images: int, limit: int) -> int:
    """The batch size of at most `limit` that takes the fewest batches, and then the least padding.

    Raises `UsageError` for a count or limit below 1.
    """
    if images < 1 or limit < 1:
        raise UsageError(f"classify at least 1 image in batches of at least 1: {images}, {limit}")
    batches = -(-images // limit)
    return -(-images // batches)


def softmax(logits: Array) -> NDArray[np.float64]:
    """Probabilities over the last axis, in float64: exp(x − max) / Σ exp(x − max)."""
    wide = np.asarray(logits, np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)


def classify(
    program: Program,
    images: Sequence[Source],
    config: Preprocess,
    *,
    top: int = 5,
    threads: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[Classification]:
    """The `top` most probable classes of each image, in the order of `images`.

    Images are decoded in threads while the program runs. The last batch is padded with zeros, and
    the padding's results are dropped. A sample's result does not depend on its neighbours, so the
    classes do not depend on the batch size (probabilities may differ by rounding, for kernels that
    are not `batch_invariant`). Equal probabilities go to the lower index. `on_batch` is called with
    the number of images done.

    Raises `ImageError` naming the first image that cannot be read, with nothing returned for the
    others; `UsageError` for preprocessing of another size than the program's input, or a `top`
    that the network does not have; `R18Error` for logits that are not finite.
    """
    plan = program.plan
    batch, classes = plan.tensors[plan.schedule.output].shape
    if config.shape != plan.schedule.input_shape:
        raise UsageError(
            f"preprocessing gives {config.shape}, but '{plan.schedule.name}' takes "
            f"{plan.schedule.input_shape}; Preprocess.for_image_size makes one of its size"
        )
    if not 1 <= top <= classes:
        raise UsageError(f"top must be from 1 to the network's {classes} classes, got {top}")
    results: list[Classification] = []
    batches = iter_batches(images, batch, config, threads=threads)
    while (found := _next(batches)) is not None:
        sources, pixels = found
        if len(pixels) < batch:
            pixels = np.concatenate(
                [pixels, np.zeros((batch - len(pixels), *pixels.shape[1:]), pixels.dtype)]
            )
        with part("runs" if results else FIRST_RUN):
            output = program(pixels)[: len(sources)]
        _check_finite(output, len(results), plan.options.precision)
        softmaxed = isinstance(plan.schedule.steps[-1].op, Softmax)
        for source, row in zip(sources, output if softmaxed else softmax(output), strict=True):
            order = np.argsort(-row, kind="stable")[:top]
            guesses = (Guess(int(i), class_name(int(i), classes), float(row[i])) for i in order)
            results.append(Classification(source, tuple(guesses)))
        if on_batch is not None:
            on_batch(len(results))
    return results


def _next(batches: Iterator[Batch]) -> Batch | None:
    """The next batch, decoded; None after the last."""
    with part("waiting for images"):
        return next(batches, None)


def _check_finite(output: Array, done: int, precision: str) -> None:
    bad = np.flatnonzero(~np.isfinite(output).all(axis=1))
    if bad.size:
        row = int(bad[0])
        count = int((~np.isfinite(output[row])).sum())
        raise R18Error(
            f"images[{done + row}]: {count} of {output.shape[1]} logits are not finite in "
            f"{precision}; try --precision fp32, or find the first bad layer with r18 dump and "
            "r18 diff"
        )


__all__ = ["Classification", "Guess", "classify", "even_batch", "softmax"]
