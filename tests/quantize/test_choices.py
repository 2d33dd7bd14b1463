"""Calibration's decisions, in parts: scales of weights, AdaRound's ends, progress, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r18.backend import Array, Kernel
from r18.calibration.adaround import (
    BETA,
    Settings,
    _batches,
    _Integers,
    _Layer,
    _targets,
    _Windows,
    _with_integers,
    beta_at,
)
from r18.calibration.calibrate import Method, calibrate
from r18.calibration.observe import Images, observe
from r18.calibration.observers import BINS, Histogram, scale_of
from r18.calibration.weights import CANDIDATES, least_error
from r18.graph.ops import Conv2d, Linear
from r18.graph.passes import fold_weights, fuse
from r18.graph.quantization import QuantizedWeight
from r18.graph.quantize import quantized, quantized_weights, rounded, scaled_values, value_scales
from r18.graph.quantized import Quantize
from r18.graph.resnet import tiny
from r18.graph.schedule import Step
from r18.quantize.run import Request
from r18.weights import load_weights
from r18_numpy import Backend as NumpyBackend

NUMPY = NumpyBackend()
FOLDED = fuse(tiny(), "all")
WEIGHTS = load_weights("synthetic", tiny())
COUNT = 11
"""Images for one batch of 8 and part of another."""


def given_images(count: int = COUNT) -> Images:
    rng = np.random.default_rng(2)
    pixels = rng.standard_normal((count, *FOLDED.input_shape)).astype(np.float32)
    return Images(pixels, "ab" * 32)


# -- images ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"), [(3, [(0, 3)]), (8, [(0, 8)]), (11, [(0, 8), (8, 8)])]
)
def test_batches_have_one_size(count: int, expected: list[tuple[int, int]]) -> None:
    images = given_images(count)
    found = list(images.batches())
    assert [(first, len(part)) for first, part in found] == expected
    joined = np.concatenate([part for _, part in found])
    np.testing.assert_array_equal(joined[:count], images.pixels)
    assert joined.dtype == np.float32
    assert not joined[count:].any()


# -- scales of weights -------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 2])
def test_the_scale_with_the_least_error_of_all_that_are_compared(bits: int) -> None:
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal((6, 5, 3, 3)) * rng.exponential(size=(6, 5, 3, 3))
    weight[0, 0, 0, 0] = 60  # one channel gives a large weight up, or the other way around
    limit = {4: 7, 2: 1}[bits]
    largest = rounded(weight, bits).scale
    found = least_error(weight, bits)
    assert found.integers.shape == weight.shape
    for channel in range(6):
        row = weight[channel].reshape(-1)
        errors = {}
        for part in range(CANDIDATES, CANDIDATES // 5 - 1, -1):
            scale = np.float32(np.float64(largest[channel]) * part / CANDIDATES)
            integers = np.clip(np.rint(row / np.float64(scale)), -limit, limit)
            errors[scale] = np.square(integers * np.float64(scale) - row).sum()
        least = min(errors.values())
        assert found.scale[channel] in errors
        assert errors[found.scale[channel]] <= least * (1 + 1e-12)
        exact = np.clip(np.rint(row / np.float64(found.scale[channel])), -limit, limit)
        np.testing.assert_array_equal(found.integers[channel].reshape(-1), exact)
    assert np.isin(found.scale, largest).sum() < 6
    assert CANDIDATES == 80


def test_two_histograms_count_apart() -> None:
    first, second = Histogram(), Histogram()
    first.add(np.ones(3, np.float32))
    assert (first.total, second.total) == (3, 0)
    second.add(np.array([0.25, 100.0], np.float32))  # widened by merging
    assert (first.total, second.total, second.counts.sum()) == (3, 2, 2)
    assert second.width == 128 / BINS
    assert second.middles[0] == second.width / 2


def test_of_equal_errors_the_larger_magnitude_is_taken() -> None:
    found = Histogram()
    found.add(np.zeros(4, np.float32))
    found.add(np.full(9, 1.0, np.float32))
    for method in ("mse", "minmax"):
        assert 0.9 / 127 < scale_of(found, "int8", method) <= 1 / 127


# -- AdaRound ----------------------------------------------------------------------------------


def test_beta_falls_from_one_end_to_the_other_behind_the_warm_up() -> None:
    steps = [beta_at(iteration, 100) for iteration in range(100)]
    assert steps[:20] == [None] * 20
    assert steps[20] == BETA[0] == 20
    numbers = [one for one in steps[20:] if one is not None]
    assert len(numbers) == 80
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(np.round(np.diff(numbers), 9))) == 1
    assert numbers[-1] == pytest.approx(BETA[1] + (BETA[0] - BETA[1]) / 80)
    assert BETA[1] == 2


def test_it_begins_at_the_nearest_integers() -> None:
    """AdaRound starts at the nearest integers: without iterations, h is the fractional part."""
    rng = np.random.default_rng(3)
    weight = rng.uniform(-6, 6, (4, 500, 1, 1)).astype(np.float32)
    step = Step("c", Conv2d(500, 4, (1, 1), bias=True), ("x",), "y", ("w", "b"))
    rows = rng.standard_normal((5, 500)).astype(np.float32)
    layer = _Layer(step, rows, np.ones((5, 4), np.float32), weight, np.zeros(4, np.float32))
    start = QuantizedWeight(np.zeros(weight.shape, np.int8), np.ones(4, np.float32))
    found = layer.rounded(start, 4, Settings(iterations=0))
    away = np.abs(np.abs(weight - np.floor(weight)) - 0.5)
    clear = away > 1e-3
    np.testing.assert_array_equal(found[clear], np.rint(weight)[clear])
    assert clear.mean() > 0.99
    assert found.dtype == np.int8


def test_a_layer_keeps_within_its_limits() -> None:
    rng = np.random.default_rng(4)
    weight = rng.uniform(-20, 20, (4, 30, 1, 1)).astype(np.float32)
    step = Step("c", Conv2d(30, 4, (1, 1), bias=True), ("x",), "y", ("w", "b"))
    rows = rng.standard_normal((50, 30)).astype(np.float32)
    layer = _Layer(step, rows, np.ones((50, 4), np.float32), weight, np.zeros(4, np.float32))
    start = QuantizedWeight(np.zeros(weight.shape, np.int8), np.ones(4, np.float32))
    found = layer.rounded(start, 4, Settings(iterations=3))
    assert (found.min(), found.max()) == (-7, 7)
    np.testing.assert_array_equal(found[weight > 8], 7)
    np.testing.assert_array_equal(found[weight < -8], -7)


def test_batches_cover_each_image_once() -> None:
    assert list(_batches(11)) == [slice(0, 8), slice(8, 11)]
    assert list(_batches(8)) == [slice(0, 8)]
    assert list(_batches(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_windows_are_those_of_a_seed_and_a_layer() -> None:
    step, settings = FOLDED.step("layer1.0.conv1"), Settings(windows=50)

    def places(**changes: Any) -> list[list[int]]:
        found = _Windows.of(FOLDED, step, 12, replace(settings, **changes), 3).places
        return [list(map(int, one)) for one in found]

    assert places() == sorted(places())
    assert places() == places()
    assert places() != places(seed=1)
    other = _Windows.of(FOLDED, step, 12, settings, 4).places
    assert places() != other.tolist()
    extents = FOLDED.problems(1)[step.name].output[2:]
    whole = _Windows.of(FOLDED, step, 2, Settings(windows=10**6), 0).places
    assert len(whole) == 2 * extents[0] * extents[1]
    assert whole.max(axis=0).tolist() == [1, extents[0] - 1, extents[1] - 1]


def test_targets_are_the_outputs_of_the_float_network() -> None:
    """Targets are each layer's float outputs of all images, before ReLU and residual, with bias."""
    images = given_images()
    read = fold_weights(FOLDED, WEIGHTS)
    layers = [step for step in FOLDED.steps if isinstance(step.op, Conv2d | Linear)]
    settings = Settings(windows=40)
    plans = {
        step.name: _Windows.of(FOLDED, step, COUNT, settings, place)
        for place, step in enumerate(layers)
    }
    found = _targets(NUMPY, FOLDED, WEIGHTS, read, images, plans)
    values = every_value(images)
    assert found.keys() == plans.keys()
    for step in layers:
        places = plans[step.name].places
        rows = plans[step.name].gathered(values[step.inputs[0]], places)
        weight = read[step.weights[0]]
        exact = rows.astype(np.float64) @ weight.reshape(len(weight), -1).T.astype(np.float64)
        exact += read[step.weights[1]]
        np.testing.assert_allclose(found[step.name], exact, rtol=1e-4, atol=1e-4)


def every_value(images: Images) -> dict[str, Array]:
    import r18

    taps = tuple(step.output for step in FOLDED.steps)
    program = r18.compile(FOLDED, WEIGHTS, "numpy", batch=len(images), taps=taps)
    program(images.pixels)
    return {value: program.fetch(value) for value in taps} | {"image": images.pixels}


def test_a_layer_reads_what_a_program_in_integers_makes() -> None:
    """A layer reads an integer program's values, of all images in both batches."""
    import r18

    images = given_images()
    scales = {
        name: 0.02 + 0.001 * place for place, name in enumerate(scaled_values(quantized(FOLDED)))
    }
    schedule = quantized(FOLDED)
    found = {
        step.name: rounded(fold_weights(FOLDED, WEIGHTS)[step.weights[0]], 8)
        for step in FOLDED.steps
        if isinstance(step.op, Conv2d | Linear)
    }
    own = quantized_weights(FOLDED, WEIGHTS, scales, given=found)
    taps = tuple(step.output for step in schedule.steps)
    program = r18.compile(schedule, own, "numpy", precision="int8", batch=COUNT, taps=taps)
    program(images.pixels)
    run = _Integers(NUMPY, FOLDED, WEIGHTS, scales, 8, images)
    where = value_scales(schedule, scales)
    for step in FOLDED.steps:
        if step.name not in found:
            continue
        integers, scale = run.before(step, found)
        value = schedule.step(step.name).inputs[0]
        np.testing.assert_array_equal(integers, program.fetch(value))
        assert scale == where[value]


class OnlyQuantize(NumpyBackend):
    """A backend that has only the first step of an int8 network."""

    name = "only_quantize"

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(k for k in super().kernels() if k.precision.name != "int8" or k.op is Quantize)


def test_a_backend_with_some_integers_uses_numpys() -> None:
    schedule = quantized(FOLDED)
    assert _with_integers(NUMPY, schedule) is NUMPY
    other = OnlyQuantize()
    assert _with_integers(other, schedule) is not other
    assert _with_integers(other, schedule).name == "numpy"


# -- the whole of it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "rounding", "chosen"),
    [
        (8, None, "nearest"),
        (4, None, "adaround"),
        (2, None, "adaround"),
        (4, "nearest", "nearest"),
        (8, "adaround", "adaround"),
    ],
)
def test_the_rounding_of_each_number_of_bits(bits: int, rounding: Any, chosen: str) -> None:
    assert Method(bits=bits, rounding=rounding).chosen_rounding == chosen
    request = Request(Path("a"), Path("b"), bits=bits, rounding=rounding)
    assert request.chosen_rounding == chosen
    words = {
        (4, None): "rounding by AdaRound, the default of 4 bits",
        (2, None): "rounding by AdaRound, the default of 2 bits",
        (4, "nearest"): "rounding to nearest: with 4 bits much is lost",
    }.get((bits, rounding), "")
    assert request.why.startswith(words)
    assert bool(request.why) == bool(words)


def test_progress_of_each_part_is_told() -> None:
    seen: list[tuple[str, int, int]] = []
    how = Method("minmax", 4, adaround=Settings(iterations=1, windows=8))
    made = calibrate(NUMPY, FOLDED, WEIGHTS, given_images(), how, lambda *one: seen.append(one))
    layers = [step.name for step in FOLDED.steps if isinstance(step.op, Conv2d | Linear)]
    assert seen == [
        *(("calibrating", done, COUNT) for done in (8, COUNT)),
        *((f"rounding {name}", place, len(layers)) for place, name in enumerate(layers)),
        ("rounding ", len(layers), len(layers)),
    ]
    calibration = made.calibration
    assert (calibration.method, calibration.rounding) == ("minmax", "adaround")
    assert (calibration.images, calibration.sha256) == (COUNT, "ab" * 32)
    assert made.bits == 4


def test_every_layer_is_rounded_and_no_scale_moves() -> None:
    how = Method("minmax", 4, adaround=Settings(iterations=60, windows=64))
    nearest = calibrate(NUMPY, FOLDED, WEIGHTS, given_images(), replace(how, rounding="nearest"))
    found = calibrate(NUMPY, FOLDED, WEIGHTS, given_images(), how)
    assert found.scales == nearest.scales
    moved = []
    for name, weight in nearest.weights.items():
        np.testing.assert_array_equal(found.weights[name].scale, weight.scale)
        moved.append(bool((found.weights[name].integers != weight.integers).any()))
    assert sum(moved) > len(moved) / 2
    assert moved[0]
    assert moved[-1]


def test_what_is_seen_is_every_value_of_every_image() -> None:
    images = given_images()
    counts: list[int] = []
    found = observe(NUMPY, FOLDED, WEIGHTS, images, counts.append)
    assert counts == [8, COUNT]
    values = every_value(images)
    for name, histogram in found.items():
        assert histogram.total == values[name].size
        assert histogram.largest == pytest.approx(np.abs(values[name]).max(), rel=1e-5)
