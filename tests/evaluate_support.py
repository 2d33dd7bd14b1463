"""Folders of small photographs, a small network's evaluation, its journal, and wrong backends.

Subprocesses and workers reach the backends as `evaluate_support:NAME`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import r18_numpy
from r18.backend import Array
from r18.evaluate.journal import open_journal
from r18.evaluate.request import Request
from r18.evaluate.rows import OK, BatchRows, Row, Times
from r18.evaluate.run import Evaluation, Here, evaluate
from r18.evaluate.sources import ImageSet, find_images
from r18.graph.resnet import tiny
from r18.weights import Weights, load_weights

CLASSES = 10
KILL_AT = "R18_TEST_KILL_AT"
"""The variable with the run, counted from 1, in which `Killed` kills its process; unset: never."""


@cache
def pixels(seed: int) -> Array:
    """(40, 48, 3) uint8 of coarse coloured noise, which a network tells apart."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8), "RGB")
    return np.asarray(coarse.resize((48, 40), Image.Resampling.BICUBIC))


def photographs(folder: Path, names: Sequence[str]) -> Path:
    """Writes a photograph for each name, all different."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(seed), "RGB").save(path)
    return folder


def numbered(count: int) -> list[str]:
    return [f"image{index:03d}.png" for index in range(count)]


@cache
def weights() -> Weights:
    return load_weights("synthetic", tiny())


def request(**changes: Any) -> Request:
    """NumPy in float32 against itself in float64, in batches of 3."""
    plain = {"against": "numpy", "against_precision": "fp64", "batch": 3}
    return Request.of("tiny", weights(), **{"backend": "numpy"} | plain | changes)


def image_set(folder: Path, labels: str | Path | None = None) -> ImageSet:
    return find_images(folder, CLASSES, labels)


def here(asked: Request, images: ImageSet) -> Here:
    return Here(asked, asked.load(), images.folder, threads=2)


def run(folder: Path, out: Path, asked: Request | None = None, **options: Any) -> Evaluation:
    """An evaluation in this process, in batches of three unless asked otherwise."""
    asked = asked or request()
    images = image_set(folder)
    engine = here(asked, images)
    try:
        return evaluate(engine, images, asked, asked.load(), out, **options)
    finally:
        engine.close()


# -- journals ------------------------------------------------------------------------------------

IDENTITY = {"weights_sha256": "a" * 64, "backend": "numpy"}


def facts() -> dict[str, Any]:
    return {"bound": 0.5}


def rows(first: int, count: int) -> BatchRows:
    """A batch of images that are named by their number."""
    made = (Row(f"{first + i}.png", 1, OK, (1, 2), (1, 2), 0.25) for i in range(count))
    return BatchRows(tuple(made), Times(1.5, 3.0))


def fill(path: Path, batches: Iterable[BatchRows]) -> None:
    """Append batches to a journal."""
    with open_journal(path, IDENTITY, facts) as journal:
        for batch in batches:
            journal.append(batch)


def cut_journal(path: Path, images: int, share: float) -> bytes:
    """Write a journal, cut it to a share of its bytes, and return these."""
    fill(path, (rows(first, 10) for first in range(0, images, 10)))
    cut = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(cut)
    return cut


# -- backends ------------------------------------------------------------------------------------


class _Program:
    """A program whose output is altered as it is fetched."""

    def __init__(self, program: Any, backend: Altered) -> None:
        self._program, self._backend = program, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(self, images: Array) -> Array:
        self._program.load(images)
        self._program.launch()
        return self.fetch()

    def fetch(self, name: str | None = None) -> Array:
        return self._backend.alter(self._program.fetch(name))


class Altered(r18_numpy.Backend):
    """NumPy's, with every output altered."""

    def alter(self, logits: Array) -> Array:
        raise NotImplementedError

    def compile(self, *arguments: Any, **named: Any) -> Any:
        return _Program(super().compile(*arguments, **named), self)


class Rolled(Altered):
    """A backend that gives every image the class after its own."""

    def alter(self, logits: Array) -> Array:
        return np.roll(logits, 1, axis=1)


class Spoiled(Altered):
    """A backend that makes one logit of each batch's first image NaN."""

    def alter(self, logits: Array) -> Array:
        logits[0, 3] = np.nan
        return logits


class Swapped(Altered):
    """A backend that exchanges the two best logits of every image."""

    def alter(self, logits: Array) -> Array:
        for row in logits:
            second, best = np.argsort(row)[-2:]
            row[[best, second]] = row[[second, best]]
        return logits


class Killed(Altered):
    """Kills its own process in one run; see `KILL_AT`. A program's first run counts too."""

    runs = 0

    def alter(self, logits: Array) -> Array:
        Killed.runs += 1
        if Killed.runs == int(os.environ.get(KILL_AT, "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return logits


def twins(gap: float) -> Weights:
    """Weights under which classes 0 and 1 are best for every image, 0 ahead of 1 by `gap`."""
    made = dict(weights())
    for name in ("fc.weight", "fc.bias"):
        made[name] = made[name].copy()
        made[name][1] = made[name][0]
    made["fc.bias"] += np.array([30, 30, *[0] * (CLASSES - 2)], np.float32)
    made["fc.bias"][1] -= np.float32(gap)
    return Weights(made, "twins", weights().preprocess)
