"""Histograms of magnitudes and the scales that are computed from them."""

from __future__ import annotations

import numpy as np
import pytest

from r18.calibration.observers import BINS, LARGEST, METHODS, PERCENTILE, Histogram, scale_of
from r18.errors import R18Error, UnknownName, UsageError


def counted(*batches: np.ndarray) -> Histogram:
    found = Histogram()
    for batch in batches:
        found.add(batch)
    return found


def drawn(seed: int, count: int = 40_000) -> np.ndarray:
    """Values like a ReLU's: half zeros, and a long tail."""
    rng = np.random.default_rng(seed)
    return np.maximum(rng.standard_normal(count) * rng.exponential(size=count), 0).astype(
        np.float32
    )


def noise(values: np.ndarray, scale: float, limit: int) -> float:
    wide = values.astype(np.float64)
    return float(np.square(np.clip(np.rint(wide / scale), -limit, limit) * scale - wide).sum())


def test_counts_do_not_depend_on_the_order_or_the_batch() -> None:
    values = np.concatenate([drawn(0) * scale for scale in (0.1, 7, 0.01)])
    whole = counted(values)
    for parts in (
        np.array_split(values, 7),
        np.array_split(values[::-1], 3),
        [np.sort(values)[:5], np.sort(values)[5:]],
    ):
        found = counted(*parts)
        np.testing.assert_array_equal(found.counts, whole.counts)
        assert (found.zeros, found.largest, found.width) == (
            whole.zeros,
            whole.largest,
            whole.width,
        )
    assert whole.total == values.size
    assert whole.zeros == (values == 0).sum()


def test_every_magnitude_is_in_its_bin() -> None:
    values = np.array([-0.75, 0.5, 1.0, 3.999, 4.0, 0.0, 7.5], np.float32)
    found = counted(values[:2], values[2:])
    assert found.width == 8 / BINS
    for magnitude in (0.5, 0.75, 1.0, 3.999, 4.0, 7.5):
        assert found.counts[int(magnitude / found.width)] == 1
    assert found.counts.sum() == 6
    assert found.zeros == 1


def test_minmax_is_the_largest_magnitude() -> None:
    values = np.array([-3.0, 2.5, 0.0], np.float32)
    assert scale_of(counted(values), "int8", "minmax") == np.float32(3 / 127)
    assert scale_of(counted(-values), "uint8", "minmax") == np.float32(3 / 255)


def test_the_percentile_leaves_outliers_out() -> None:
    values = drawn(1, 400_000)
    found = counted(values, np.array([1e4], np.float32))
    largest = scale_of(found, "uint8", "percentile") * 255
    exact = np.quantile(np.append(np.abs(values), 1e4), PERCENTILE)
    assert abs(largest - exact) <= 2 * found.width
    plain = counted(np.full(9, 2.0, np.float32))
    assert scale_of(plain, "int8", "percentile") == np.float32(2 / 127)


@pytest.mark.parametrize("storage", LARGEST)
def test_mse_has_the_least_noise(storage: str) -> None:
    values = drawn(2)
    limit = LARGEST[storage]
    found = counted(values)
    best = scale_of(found, storage, "mse")
    least = noise(values, best, limit)
    assert least < noise(values, scale_of(found, storage, "minmax"), limit)
    others = [float(np.abs(values).max()) * part / limit for part in np.linspace(0.12, 1, 60)]
    assert least <= 1.02 * min(noise(values, other, limit) for other in others)


@pytest.mark.parametrize("method", METHODS)
def test_scales_are_positive_float32(method: str) -> None:
    for values in (drawn(3), drawn(3) * 1e-30, drawn(3) * np.float32(1e30), np.zeros(5)):
        scale = scale_of(counted(values), "uint8", method)
        assert scale > 0
        assert np.float32(scale) == scale
    assert scale_of(counted(np.zeros(5)), "uint8", method) == 1.0


def test_a_power_of_two_is_counted() -> None:
    """A power of two is counted: it is a bin's edge, and the first value beyond the last bin."""
    found = counted(np.array([1.0], np.float32), np.array([2.0], np.float32))
    assert found.width == 4 / BINS
    assert found.counts[BINS // 2] == found.counts[BINS // 4] == 1


def test_what_has_no_scale() -> None:
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(R18Error, match="not finite on a calibration image"):
            counted(np.array([1.0, value], np.float32))
    with pytest.raises(UsageError, match="at least one calibration image"):
        scale_of(Histogram(), "int8", "mse")
    with pytest.raises(UnknownName, match="did you mean 'minmax'"):
        scale_of(counted(np.ones(2)), "int8", "minimax")
