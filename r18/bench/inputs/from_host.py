"""How fast from host memory: pixels in, copied, normalised and computed, and the output fetched.

The two arrays that a program is fed from hold random pixels, so reading and decoding images are not
measured. `r18.runtime.pipeline` is timed in its steady state, in stretches of many batches. Between
them the copies are timed by themselves: the copy time is a lower bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from r18.backend import Array
from r18.runtime.pipeline import Fed, pipeline

STRETCHES = 5
"""Stretches of each contender; they take turns, as timed runs do."""
SECONDS = 0.25
"""About how long a stretch is."""
FEWEST, MOST = 4, 2000
"""Batches in a stretch."""
LEAD, TRAIL = 4, 1
"""Batches before the clock is read first (for one-time setup), and after the last."""


class Feeding(Fed, Protocol):
    """The parts of a `Program` that are measured."""

    def input_arrays(self) -> tuple[Array, Array]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class FromHost:
    """Times with images fed from host memory: milliseconds of a batch, one of each stretch.

    nbytes:  of a batch's pixels. batches: in a stretch.
    runs_ms: from one output to the next. copies_ms: from one copy to the next, with nothing else:
             what the way to the device takes, or the host to start a copy, where that is longer.
    """

    nbytes: int
    batches: int
    runs_ms: tuple[float, ...]
    copies_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)

    @property
    def copy_ms(self) -> float:
        return statistics.median(self.copies_ms)

    def to_json(self, batch: int, device_ms: float) -> dict[str, Any]:
        """Every field, and what follows of a batch whose run on the device takes so long.

        `share` is how much of the device's own pace is left, `copy_bytes_per_second` what the way
        to the device carries.
        """
        return asdict(self) | {
            "median_ms": self.median_ms,
            "copy_ms": self.copy_ms,
            "images_per_second": 1e3 * batch / self.median_ms,
            "share": device_ms / self.median_ms,
            "copy_bytes_per_second": 1e3 * self.nbytes / self.copy_ms,
        }


class Feed:
    """A program with pixels to feed it. `device_ms`: of one run, to tell how long a stretch is."""

    def __init__(
        self, program: Feeding, device_ms: float, seed: int, clock: Callable[[], float]
    ) -> None:
        self._program, self._clock = program, clock
        self._arrays = program.input_arrays()
        rng = np.random.default_rng(seed)
        for array in self._arrays:
            array[...] = rng.integers(0, 256, array.shape, np.uint8)
        self._batches = min(MOST, max(FEWEST, round(SECONDS * 1e3 / device_ms)))
        self._runs_ms: list[float] = []
        self._copies_ms: list[float] = []

    def stretch(self) -> None:
        """Measure once more."""
        self._copies_ms.append(self._copies())
        self._runs_ms.append(self._runs())

    def result(self) -> FromHost:
        nbytes = self._arrays[0].nbytes
        return FromHost(nbytes, self._batches, tuple(self._runs_ms), tuple(self._copies_ms))

    def close(self) -> None:
        self._program.close()

    def _runs(self) -> float:
        given = islice(cycle(self._arrays), LEAD + self._batches + TRAIL)
        seen = [self._clock() for _ in pipeline(self._program, given)]
        return (seen[LEAD + self._batches - 1] - seen[LEAD - 1]) / self._batches * 1e3

    def _copies(self) -> float:
        """Each load of one array ends when the copy of the other has."""
        given: list[Array] = list(islice(cycle(self._arrays), LEAD + self._batches))
        seen = []
        for array in given:
            self._program.load(array)
            seen.append(self._clock())
        return (seen[-1] - seen[LEAD - 1]) / self._batches * 1e3


__all__ = ["STRETCHES", "Feed", "Feeding", "FromHost"]
