"""Scales of activations, from the magnitudes that calibration images bring.

| method | the largest magnitude that does not saturate |
|---|---|
| `minmax` | the largest that was seen |
| `percentile` | the one below which `PERCENTILE` of all are |
| `mse` | the one with the least mean squared error over the magnitudes seen |

A scale is that magnitude over the largest integer: 255 in uint8, 127 in int8.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from r18.backend import Array
from r18.errors import R18Error, UsageError, unknown

METHODS = ("minmax", "percentile", "mse")
PERCENTILE = 0.99999
BINS = 8192
CANDIDATES = 200
"""Magnitudes that `mse` compares: equal parts of the largest one, from a tenth on."""
LARGEST = {"uint8": 255, "int8": 127}
"""The largest integer of a storage format of activations."""


class Histogram:
    """Magnitudes of one value, counted in equal bins from 0 to a power of two.

    The result does not depend on the order of images or on the batch: when a magnitude is beyond
    the last bin, bins are merged in pairs. Zeros have a counter of their own: a ReLU makes many.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.zeros = 0
        self.largest = 0.0
        self._edge = 0.0

    @property
    def total(self) -> int:
        return int(self.counts.sum()) + self.zeros

    @property
    def width(self) -> float:
        return self._edge / BINS

    @property
    def middles(self) -> NDArray[np.float64]:
        """The magnitude in the middle of each bin."""
        return np.asarray((np.arange(BINS) + 0.5) * self.width, np.float64)

    def add(self, values: Array) -> None:
        """Count the values of a batch. Raises `R18Error` for one that is not finite."""
        magnitudes = np.abs(values.reshape(-1)).astype(np.float64)
        largest = float(magnitudes.max(initial=0.0))
        if not math.isfinite(largest):
            raise R18Error("not finite on a calibration image")
        self._widen(largest)
        self.largest = max(self.largest, largest)
        nonzero = magnitudes[magnitudes > 0]
        self.zeros += magnitudes.size - nonzero.size
        if nonzero.size:
            places = (nonzero / self.width).astype(np.int64)
            self.counts += np.bincount(places, minlength=BINS)

    def _widen(self, largest: float) -> None:
        if largest == 0.0:
            return
        if self._edge == 0.0:
            self._edge = 2.0 ** math.frexp(largest)[1]
        while largest >= self._edge:
            self._edge *= 2
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([merged, np.zeros(BINS // 2, np.int64)])


def scale_of(found: Histogram, storage: str, method: str) -> float:
    """The scale of a value by a method; float32, as float.

    storage: uint8 or int8. A value that is always 0 has the scale 1. Raises `UnknownName` for
    another method, `UsageError` for an empty histogram.
    """
    if method not in METHODS:
        raise unknown("calibration method", method, METHODS)
    if not found.total:
        raise UsageError("a scale needs at least one calibration image")
    if found.largest == 0:
        return 1.0
    limit = LARGEST[storage]
    match method:
        case "minmax":
            largest = found.largest
        case "percentile":
            largest = _percentile(found)
        case _:
            largest = _least_error(found, limit)
    return float(np.float32(largest / limit))


def _percentile(found: Histogram) -> float:
    """The upper edge of the bin in which the percentile is."""
    below = np.cumsum(found.counts) + found.zeros
    place = int(np.searchsorted(below, PERCENTILE * found.total))
    return min((place + 1) * found.width, found.largest)


def _least_error(found: Histogram, limit: int) -> float:
    """The largest magnitude with the least mean squared error; the larger of equals."""
    numbers, counts = found.middles, found.counts
    used = counts > 0
    numbers, counts = numbers[used], counts[used]
    best, least = found.largest, math.inf
    for part in range(CANDIDATES, CANDIDATES // 10 - 1, -1):
        largest = found.largest * part / CANDIDATES
        scale = largest / limit
        errors = np.minimum(np.rint(numbers / scale), limit) * scale - numbers
        error = float(np.square(errors) @ counts)
        if error < least:
            best, least = largest, error
    return best


__all__ = ["LARGEST", "METHODS", "Histogram", "scale_of"]
