"""PyTorch's integers against ours: equal at every value. `r18 verify` has the corners."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import r18_torch
from integer_networks import assert_equals_numpy
from r18.backend import Array, Kernel, Problem
from r18.graph.ops import Conv2d, Linear
from r18.graph.precision import FP32, INT8
from r18.graph.quantized import (
    MOST_DEPTH,
    QUANTIZED_OPS,
    STORAGES,
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedLinear,
)
from r18.graph.resnet import resnet18, tiny
from r18.runtime.launch import run_kernel
from r18_torch.kernels import _library_modes

BACKEND = r18_torch.cpu()
KERNELS = {kernel.op: kernel for kernel in BACKEND.kernels() if kernel.precision is INT8}


def run(problem: Problem, *arrays: Array) -> Array:
    kernel: Kernel = KERNELS[problem.op.__class__]
    return run_kernel(BACKEND, kernel, problem, *arrays)


def test_every_quantised_op_has_a_kernel_on_either_device() -> None:
    assert set(KERNELS) == set(QUANTIZED_OPS) - {QuantizedConvMaxPool, QuantizedAvgPoolLinear}
    on_cuda = [k.id for k in r18_torch.Backend("cuda").kernels() if k.precision is INT8]
    assert on_cuda == [kernel.id for kernel in KERNELS.values()]


@pytest.mark.parametrize("pixels", [False, True], ids=["images", "pixels"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_network_in_integers_equals_numpys_at_every_value(bits: int, pixels: bool) -> None:
    schedule = resnet18(image_size=64)
    assert_equals_numpy(BACKEND, schedule, bits, batch=2, pixels=pixels)
    assert_equals_numpy(BACKEND, tiny(), bits, batch=3, pixels=pixels)


@pytest.mark.parametrize("stored", STORAGES)
def test_the_longest_sums_of_the_largest_products_are_exact(stored: str) -> None:
    """The longest sums of the largest products are exact; float32 would round them wrong."""
    largest = 255 if stored == "uint8" else 127
    exact = largest * 127 * MOST_DEPTH
    near = np.array([3, -3, 0, 100], np.int64)
    signs = np.array([1, -1, 1, -1])
    weight = (signs[:, None] * np.full((4, MOST_DEPTH), 127)).astype(np.int8)
    bias, ones = (near - signs * exact).astype(np.int32), np.ones(4, np.float32)
    x = np.full((2, MOST_DEPTH), largest, stored)

    linear = QuantizedLinear(Linear(MOST_DEPTH, 4), stored)
    logits = run(Problem(linear, (x.shape,)), x, weight, bias, ones)
    np.testing.assert_array_equal(logits, np.broadcast_to(near, (2, 4)))

    conv = QuantizedConv2d(Conv2d(MOST_DEPTH, 4, (1, 1), bias=True), (stored,))
    image, filters = x.reshape(2, -1, 1, 1), weight.reshape(4, -1, 1, 1)
    y = run(Problem(conv, (image.shape,)), image, filters, bias, ones)
    np.testing.assert_array_equal(y.reshape(2, 4), np.broadcast_to(near, (2, 4)))


def test_a_residual_is_added_to_a_rounded_product() -> None:
    """The product is rounded before the residual is added; `addcmul` may round only once."""
    rng = np.random.default_rng(0)
    count, factor = 4096, np.array([0.3], np.float32)
    sums = rng.integers(-(2**20), 2**20, count).astype(np.int32)
    residual = rng.integers(-128, 128, (1, count, 1, 1)).astype(np.int8)
    # Multipliers that put each result within a few float32 units of a tie.
    near = rng.integers(-100, 100, count) + 0.5 - factor.astype(np.float64) * residual.ravel()
    multiplier = np.abs(near / sums).astype(np.float32)
    sums = np.where(near < 0, -np.abs(sums), np.abs(sums)).astype(np.int32)
    conv = Conv2d(1, count, (1, 1), bias=True)
    op = QuantizedConv2d(replace(conv, residual=True), ("uint8", "int8"))
    problem = Problem(op, ((1, 1, 1, 1), residual.shape))
    arrays = (np.zeros((1, 1, 1, 1), np.uint8), residual, np.zeros((count, 1, 1, 1), np.int8), sums)
    found = run(problem, *arrays, multiplier, factor).ravel()

    products = sums.astype(np.float32) * multiplier
    added = residual.ravel().astype(np.float32) * factor
    apart = np.clip(np.rint(products + added), -128, 127)
    np.testing.assert_array_equal(found, apart)
    exact = residual.ravel().astype(np.float64) * factor.astype(np.float64)
    fused = (products.astype(np.float64) + exact).astype(np.float32)
    assert (np.clip(np.rint(fused), -128, 127) != apart).any()


def test_ties_are_to_even_and_both_ends_saturate() -> None:
    numbers = [[-200, -129, -128.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5, 127.5, np.inf]]
    x = np.array(numbers, np.float32)
    y = run(Problem(Quantize(), (x.shape,)), x, np.ones(1, np.float32))
    assert y.tolist() == [[-128, -128, -128, -2, -2, 0, 0, 2, 2, 126, 127, 127]]


def test_numbers_are_divided_by_the_scale() -> None:
    """Numbers are divided by the scale; by its reciprocal, some would round otherwise."""
    scale = np.array([0.3], np.float32)
    x = ((np.arange(-127, 127) + 0.5) * scale.astype(np.float64)).astype(np.float32)[None]
    expected = np.rint(x / scale)
    np.testing.assert_array_equal(run(Problem(Quantize(), (x.shape,)), x, scale), expected)
    assert (np.rint(x * (np.float32(1) / scale)) != expected).any()


def test_cudnn_is_off_in_int8() -> None:
    """cuDNN is off in int8, since its transforms are not exact in any format."""
    seen = []
    for precision in (INT8, FP32):
        with _library_modes(precision):
            seen.append(torch.backends.cudnn.enabled)
    assert seen == [False, True]
