"""AdaRound: windows, the integers that it chooses, and its gain on a network."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r18.calibration.adaround import Settings, _Layer, _Windows
from r18.calibration.weights import least_error
from r18.errors import R18Error, UsageError
from r18.graph.ops import Conv2d, Linear
from r18.graph.passes import fuse
from r18.graph.quantization import QuantizedWeight
from r18.graph.quantize import rounded
from r18.graph.resnet import tiny
from r18.graph.schedule import Step
from r18.quantize import Request, quantize
from r18.weights import load_weights
from r18_numpy import Backend as NumpyBackend

NUMPY = NumpyBackend()
QUICK = Settings(iterations=150, windows=1024)


@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(3, 5, (7, 7), (2, 2), (3, 3), bias=True),
        Conv2d(4, 2, (3, 3), (1, 1), (1, 1), bias=True),
        Conv2d(4, 6, (1, 1), (2, 2), bias=True),
        Conv2d(2, 3, (3, 2), (2, 1), (0, 1), bias=True),
    ],
    ids=str,
)
def test_a_convolution_is_a_product_over_its_windows(conv: Conv2d) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, conv.in_channels, 11, 9)).astype(np.float32)
    w = rng.standard_normal((conv.out_channels, conv.in_channels, *conv.kernel_size))
    y = torch.nn.functional.conv2d(
        torch.from_numpy(x),
        torch.from_numpy(w.astype(np.float32)),
        stride=conv.stride,
        padding=conv.padding,
    ).numpy()
    places = np.stack(np.meshgrid(*map(range, (3, *y.shape[2:])), indexing="ij")).reshape(3, -1).T
    windows = _Windows(conv, places)
    made = windows.gathered(x, places) @ w.reshape(len(w), -1).T
    np.testing.assert_allclose(made, y[places[:, 0], :, places[:, 1], places[:, 2]], atol=1e-4)
    where, inside = windows.of_batch(1, 2)
    np.testing.assert_array_equal(
        windows.gathered(x[1:3], inside), windows.gathered(x, places)[where]
    )


def layer(relu: bool, seed: int = 0) -> tuple[_Layer, QuantizedWeight]:
    """A layer with correlated inputs, so that errors of weights add up or cancel."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((6, 40))
    rows = np.abs(rng.standard_normal((2000, 6))) @ mix + 0.1 * rng.standard_normal((2000, 40))
    rows = rows.astype(np.float32)
    weight = rng.standard_normal((8, 40, 1, 1)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32)
    target = rows @ weight.reshape(8, 40).T + bias
    op = Conv2d(40, 8, (1, 1), bias=True, relu=relu)
    step = Step("c", op, ("x",), "y", ("w", "b"))
    return _Layer(step, rows, target, weight, bias), least_error(weight, 4)


def error(one: _Layer, found: QuantizedWeight, relu: bool) -> float:
    wide = found.integers.reshape(8, 40) * found.scale[:, None]
    made, right = one.rows @ wide.T + one.bias, one.target
    if relu:
        made, right = np.maximum(made, 0), np.maximum(right, 0)
    return float(np.square(made - right).sum())


@pytest.mark.parametrize("relu", [False, True])
def test_a_layer_is_nearer_than_to_nearest(relu: bool) -> None:
    one, nearest = layer(relu)
    found = QuantizedWeight(one.rounded(nearest, 4, Settings(iterations=600)), nearest.scale)
    assert error(one, found, relu) < 0.5 * error(one, nearest, relu)
    exact = one.weight / nearest.scale[:, None, None, None]
    free = np.abs(exact) < 6
    assert (np.abs(found.integers - exact)[free] < 1).all(), "up or down, and no further"
    assert np.abs(found.integers).max() <= 7
    assert (found.integers != nearest.integers).any()


def test_a_layer_is_rounded_the_same_way_every_time() -> None:
    one, nearest = layer(relu=True)
    first, second = (one.rounded(nearest, 4, QUICK) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (one.rounded(nearest, 4, replace(QUICK, iterations=1)) == nearest.integers).mean() > 0.9


def test_exact_weights_stay() -> None:
    one, _ = layer(relu=False)
    integers = np.random.default_rng(1).integers(-7, 8, (8, 40, 1, 1)).astype(np.int8)
    integers[:, 0] = 7
    scale = np.full(8, 0.5, np.float32)
    weight = (integers * 0.5).astype(np.float32)
    target = one.rows @ weight.reshape(8, 40).T + one.bias
    exact = replace(one, weight=weight, target=target)
    nearest = rounded(weight, 4)
    np.testing.assert_array_equal(nearest.integers, integers)
    np.testing.assert_array_equal(nearest.scale, scale)
    np.testing.assert_array_equal(exact.rounded(nearest, 4, Settings(iterations=400)), integers)


def test_windows_are_spread_over_the_images_and_seeded() -> None:
    folded = fuse(tiny(), "all")
    step = folded.step("layer1.0.conv1")
    settings = Settings(windows=100)
    first, second = (_Windows.of(folded, step, 12, settings, 3) for _ in range(2))
    np.testing.assert_array_equal(first.places, second.places)
    assert len(first.places) == 100
    assert len(np.unique(first.places, axis=0)) == 100
    assert len(np.unique(first.places[:, 0])) > 8
    last = _Windows.of(folded, folded.step("fc"), 12, settings, 5)
    assert isinstance(last.op, Linear)
    assert last.places[:, 0].tolist() == list(range(12))


@pytest.mark.parametrize("bits", [4, 2])
def test_a_network_loses_less_than_to_nearest(bits: int, folder: Path, tmp_path: Path) -> None:
    """AdaRound loses less than to nearest; it is the default here, and the command says why."""
    lines: list[str] = []

    def made(out: str, **options: Any) -> Any:
        request = Request(
            folder, tmp_path / out, "synthetic", "tiny", bits=bits, adaround=QUICK, **options
        )
        return quantize(request, NUMPY, lines.append)

    nearest = made("nearest", rounding="nearest")
    lines.clear()
    found = made("adaround")
    assert f"rounding by AdaRound, the default of {bits} bits: to nearest, 18 points" in lines[0]
    assert found.losses.decibels > nearest.losses.decibels + 1
    stored = load_weights(str(tmp_path / "adaround"), tiny()).quantization
    assert stored is not None
    assert stored.calibration.rounding == "adaround"
    for name, weight in nearest.weights.quantization.weights.items():
        np.testing.assert_array_equal(stored.weights[name].scale, weight.scale)


def test_groups_are_refused_with_the_way_out(folder: Path, tmp_path: Path) -> None:
    how = folder, tmp_path / "q", "synthetic", "tiny_resnext"
    with pytest.raises(UsageError, match=r"several groups.*\n.*or with --rounding nearest"):
        quantize(Request(*how, bits=4), NUMPY)
    quantize(Request(*how, bits=4, rounding="nearest"), NUMPY)
    with pytest.raises(UsageError, match="got --calibrate 8 and --measure 0"):
        Request(*how, calibrate=8, measure=0)


def test_without_pytorch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch, AdaRound fails before computing anything, and rounding to nearest works."""
    request = Request(folder, tmp_path / "q", "synthetic", "tiny", bits=4)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(R18Error, match=r"AdaRound needs PyTorch.*\n.*--rounding nearest"):
            quantize(request, NUMPY)
        assert list(tmp_path.iterdir()) == []
        quantize(replace(request, rounding="nearest"), NUMPY)
    assert (tmp_path / "q").is_dir()
