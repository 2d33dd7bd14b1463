"""The NumPy backend: every op against PyTorch in float64, and the semantics of NaN and infinity."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController, threadpool_limits
from torch.nn import functional as F

import r18_numpy
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Shape,
    Softmax,
)
from r18.graph.quantized import QuantizedGlobalAvgPool
from r18.graph.scaled import Scale, ScaledGlobalAvgPool
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel
from r18_numpy import blocks, conv
from r18_numpy.threads import single_threaded_blas, thread_count
from support import Array, PoisonedMemory

SETTINGS = settings(derandomize=True, deadline=None, max_examples=100)
FEWER = settings(SETTINGS, max_examples=40)
ALGORITHMS = pytest.mark.parametrize("algorithm", ["direct", "im2col"])
# `block` makes im2col cut small images in rows and groups, as it does large ones.
BLOCKED = pytest.mark.parametrize(
    ("algorithm", "block"),
    [("direct", 0), *(("im2col", size) for size in (1, 600, 4000, blocks.BLOCK_NBYTES))],
)


@pytest.fixture(autouse=True)
def _numpy_warns_of_nothing() -> Iterator[None]:
    """NumPy warns of nothing: inputs with NaN and infinity are legitimate."""
    with np.errstate(all="raise", under="ignore"):
        yield


def run(op: Op, *arrays: Array, algorithm: str = "*", precision: str = "fp64") -> Array:
    """The output of a kernel of the backend for host arrays; all given memory begins as NaN."""
    backend = r18_numpy.Backend()
    backend.memory = PoisonedMemory()
    problem = Problem(op, tuple(a.shape for a in arrays[: op.arity]))
    pattern = f"numpy/{op.name}/{algorithm}/{precision}"
    kernel = choose_kernel(backend.kernels(), problem, precision, pattern=pattern)
    return run_kernel(backend, kernel, problem, *arrays)


def tensors(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(a, np.float64)) for a in arrays]


# -- convolution -------------------------------------------------------------------------------


def torch_conv(op: Conv2d, *arrays: Array) -> Array:
    """PyTorch's convolution, then the epilogue in the contract's order."""
    x, *rest = tensors(*arrays)
    residual = rest.pop(0) if op.residual else None
    y = F.conv2d(x, rest[0], rest[1] if op.bias else None, op.stride, op.padding)
    if residual is not None:
        y = y + residual
    return (F.relu(y) if op.relu else y).numpy()


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Conv2d, Shape]:
    """Any small problem: uneven extents, strides beyond the kernel, kernels beyond the image."""
    pair = st.tuples
    kernel = draw(pair(st.integers(1, 5), st.integers(1, 5)))
    padding = draw(pair(st.integers(0, 3), st.integers(0, 3)))
    stride = draw(pair(st.integers(1, 4), st.integers(1, 4)))
    h, w = (draw(st.integers(max(1, k - 2 * p), 9)) for k, p in zip(kernel, padding, strict=True))
    n, c, o = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    bias, residual, relu = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return Conv2d(c, o, kernel, stride, padding, bias, residual, relu), (n, c, h, w)


def conv_arrays(op: Conv2d, image: Shape, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=image)]
    if op.residual:
        arrays.append(rng.normal(size=replace(op, residual=False).infer(image)))
    return arrays + [rng.normal(size=spec.shape) for spec in op.weights()]


def assert_conv_is_pytorchs(op: Conv2d, image: Shape, algorithm: str, seed: int = 0) -> None:
    arrays = conv_arrays(op, image, seed)
    got, expected = run(op, *arrays, algorithm=algorithm), torch_conv(op, *arrays)
    # The sum of the magnitudes of all terms of each output: what rounding errors are relative to.
    terms = torch_conv(replace(op, relu=False), *(np.abs(a) for a in arrays))
    assert got.shape == expected.shape
    assert got.dtype == np.float64
    assert (np.abs(got - expected) <= 1e-12 * terms).all()


@BLOCKED
@settings(FEWER, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=convolutions(), seed=st.integers(0, 999))
def test_convolution_is_pytorchs(
    algorithm: str,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
    problem: tuple[Conv2d, Shape],
    seed: int,
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", block)
    assert_conv_is_pytorchs(*problem, algorithm, seed)


EDGES = {
    "one pixel in and out": (Conv2d(1, 1, (1, 1)), (1, 1, 1, 1)),
    "one pixel out": (Conv2d(3, 2, (5, 4)), (2, 3, 5, 4)),
    "kernel larger than the image": (Conv2d(2, 3, (5, 5), (1, 1), (2, 2)), (2, 2, 1, 2)),
    "stride beyond the kernel": (Conv2d(2, 3, (1, 2), (3, 4)), (2, 2, 8, 9)),
    "stride beyond the image": (Conv2d(2, 3, (3, 3), (7, 7), (1, 1)), (2, 2, 5, 5)),
    "windows of padding alone": (Conv2d(2, 3, (1, 1), (1, 1), (2, 3)), (1, 2, 3, 3)),
    "asymmetric everything": (Conv2d(2, 3, (1, 5), (2, 1), (0, 3)), (3, 2, 6, 4)),
    "one channel": (Conv2d(1, 4, (3, 3), (1, 1), (1, 1)), (2, 1, 6, 5)),
    "one column": (Conv2d(3, 4, (3, 1), (1, 1), (1, 0)), (2, 3, 7, 1)),
    "one row": (Conv2d(3, 4, (1, 3), (1, 1), (0, 1)), (2, 3, 1, 7)),
    "rows left over by the stride": (Conv2d(2, 2, (2, 2), (3, 3)), (1, 2, 9, 10)),
}


@ALGORITHMS
@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("fused", range(8), ids=lambda bits: f"{bits:03b}")
def test_convolution_at_the_edges_with_every_epilogue(
    algorithm: str, case: str, fused: int
) -> None:
    op, image = EDGES[case]
    bias, residual, relu = (bool(fused & bit) for bit in (1, 2, 4))
    op = replace(op, bias=bias, residual=residual, relu=relu)
    assert_conv_is_pytorchs(op, image, algorithm)


@pytest.mark.parametrize(
    ("op", "image"),
    [
        # Bands of rows, the last one shorter, at the size that blocks really have.
        (Conv2d(3, 8, (7, 7), (2, 2), (3, 3), bias=True, relu=True), (2, 3, 224, 224)),
        # Groups of images, the last one smaller.
        (Conv2d(256, 8, (3, 3), (1, 1), (1, 1), residual=True), (5, 256, 7, 7)),
        # A single row at a time.
        (Conv2d(512, 4, (3, 3), (1, 1), (1, 1), bias=True), (1, 512, 3, 40)),
    ],
    ids=["bands", "groups", "rows"],
)
def test_convolution_in_blocks_of_their_real_size(op: Conv2d, image: Shape) -> None:
    assert_conv_is_pytorchs(op, image, "im2col")


@pytest.mark.parametrize("extents", list(product((1, 2, 9), (1, 4, 9), (1, 3, 9))), ids=str)
def test_however_im2col_is_cut_it_computes_the_same(
    extents: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of any (images, channels, rows) give the same result, and only change the speed.
    Mutants of `block_extents` are judged equivalent on this ground."""
    monkeypatch.setattr(conv, "block_extents", lambda problem, itemsize, workers: extents)
    op = Conv2d(3, 6, (3, 2), (2, 1), (1, 1), bias=True, residual=True, relu=True)
    assert_conv_is_pytorchs(op, (5, 3, 13, 4), "im2col")


@ALGORITHMS
def test_convolution_in_float32_is_near(algorithm: str) -> None:
    op = Conv2d(16, 8, (3, 3), (2, 2), (1, 1), bias=True, residual=True, relu=True)
    arrays = [a.astype(np.float32) for a in conv_arrays(op, (2, 16, 9, 11))]
    got = run(op, *arrays, algorithm=algorithm, precision="fp32")
    assert got.dtype == np.float32
    terms = torch_conv(op, *(np.abs(a) for a in arrays))
    unit = 2.0**-24
    # γ_n of Higham, "Accuracy and stability of numerical algorithms", §3.1, n products and 2 sums.
    bound = (op.depth + 2) * unit / (1 - (op.depth + 2) * unit) * terms
    assert (np.abs(got - torch_conv(op, *arrays)) <= bound).all()


@BLOCKED
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_pixel_that_is_not_finite_reaches_the_outputs_that_read_it_and_no_other(
    algorithm: str, block: int, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", block)
    op = Conv2d(2, 3, (3, 2), (2, 1), (1, 1), bias=True)
    image = (3, 2, 7, 6)
    arrays = conv_arrays(op, image)
    for place in ((1, 0, 0, 0), (1, 1, 3, 3), (1, 0, 6, 5), (0, 1, 4, 0), (2, 1, 2, 5)):
        x, mark = arrays[0].copy(), np.zeros(image)
        x[place], mark[place] = 0, 1
        clean = run(op, x, *arrays[1:], algorithm=algorithm)
        x[place] = value
        got = run(op, x, *arrays[1:], algorithm=algorithm)
        reached = torch_conv(replace(op, bias=False), mark, np.ones_like(arrays[1])) > 0
        assert reached.any()
        np.testing.assert_array_equal(np.isfinite(got), ~reached)
        assert np.isnan(got[reached]).all() == np.isnan(value)
        np.testing.assert_array_equal(got[~reached], clean[~reached])


@ALGORITHMS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_zero_weight_times_what_is_not_finite_is_nan(algorithm: str, value: float) -> None:
    x = np.full((1, 2, 3, 3), value)
    got = run(Conv2d(2, 2, (3, 3)), x, np.zeros((2, 2, 3, 3)), algorithm=algorithm)
    assert np.isnan(got).all()


@ALGORITHMS
def test_padding_is_zero_times_the_weight(algorithm: str) -> None:
    """Padding counts as +0 times the weight, so an infinite weight on padding gives NaN."""
    w = np.ones((1, 1, 3, 3))
    w[0, 0, 0, 0] = np.inf
    got = run(Conv2d(1, 1, (3, 3), padding=(1, 1)), np.ones((1, 1, 3, 3)), w, algorithm=algorithm)
    expected = np.full((3, 3), np.inf)
    expected[0, :] = expected[:, 0] = np.nan
    np.testing.assert_array_equal(got[0, 0], expected)


@ALGORITHMS
def test_relu_in_the_epilogue_keeps_nan(algorithm: str) -> None:
    op = Conv2d(1, 3, (1, 1), residual=True, relu=True)
    residual = np.array([np.nan, -np.inf, np.inf]).reshape(1, 3, 1, 1)
    got = run(op, np.ones((1, 1, 1, 1)), residual, np.ones((3, 1, 1, 1)), algorithm=algorithm)
    np.testing.assert_array_equal(got.ravel(), [np.nan, 0, np.inf])


@ALGORITHMS
def test_the_epilogue_adds_before_it_clamps(algorithm: str) -> None:
    """ReLU comes after bias and residual: −3 + 1 + 5 is 3; clamped earlier it is more."""
    op = Conv2d(1, 1, (1, 1), bias=True, residual=True, relu=True)
    one = np.ones((1, 1, 1, 1))
    got = run(op, -3 * one, 5 * one, one, np.ones(1), algorithm=algorithm)
    assert got.item() == 3


def test_im2col_never_unfolds_the_whole_image() -> None:
    """im2col's workspace stays near a block per worker, far below the column matrix."""
    backend, workers = r18_numpy.Backend(), thread_count()
    images = 8 * workers
    problem = Problem(Conv2d(64, 64, (3, 3), (1, 1), (1, 1)), ((images, 64, 56, 56),))
    kernel = choose_kernel(backend.kernels(), problem, "fp32", pattern="numpy/conv2d/im2col/*")
    whole = images * 64 * 9 * 56 * 56 * 4
    padded_image = 64 * 58 * 58 * 4
    limit = workers * (padded_image + blocks.BLOCK_NBYTES)
    assert kernel.workspace(problem) <= limit < whole / 10


def test_products_have_one_blas_thread_whoever_calls() -> None:
    """Products have one BLAS thread in every calling thread, and the user's setting comes back."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    # SciPy, which an earlier test may have loaded, brings a library of its own.
    (library, *_) = [one for one in found if "numpy" in one.filepath] or found
    seen: list[int] = []

    def look() -> None:
        with single_threaded_blas():
            seen.append(library.get_num_threads())

    before = library.get_num_threads()
    look()
    other = Thread(target=look)
    other.start()
    other.join()
    assert seen == [1, 1]
    assert library.get_num_threads() == before
    with threadpool_limits(1, user_api="blas"):
        assert library.get_num_threads() == 1
    assert library.get_num_threads() == before


# -- the other ops against PyTorch -------------------------------------------------------------


def drawn(shape: Shape, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.integers(1, 7))
ROWS = st.tuples(st.integers(1, 4), st.integers(1, 9))
SEEDS = st.integers(0, 999)


@st.composite
def pools(draw: st.DrawFn) -> tuple[MaxPool2d, Shape]:
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    h, w = (draw(st.integers(max(1, k - 2 * p), 10)) for k, p in zip(kernel, padding, strict=True))
    n, c = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return MaxPool2d(kernel, stride, padding), (n, c, h, w)  # type: ignore[arg-type]


@settings(SETTINGS, max_examples=300)
@given(problem=pools(), seed=SEEDS, special=st.sampled_from([None, np.nan, np.inf, -np.inf]))
def test_maxpool_is_pytorchs(
    problem: tuple[MaxPool2d, Shape], seed: int, special: float | None
) -> None:
    """Max-pooling is PyTorch's to the bit, with a third of the pixels NaN or infinite."""
    op, shape = problem
    x = drawn(shape, seed)
    if special is not None:
        x[drawn(shape, seed + 1) > 0.4] = special
    expected = F.max_pool2d(*tensors(x), op.kernel_size, op.stride, op.padding)
    np.testing.assert_array_equal(run(op, x), expected.numpy())


def test_padding_never_wins_a_maximum() -> None:
    op = MaxPool2d((3, 3), (2, 2), (1, 1))
    np.testing.assert_array_equal(
        run(op, np.full((1, 1, 5, 5), -np.inf)), np.full((1, 1, 3, 3), -np.inf)
    )
    np.testing.assert_array_equal(run(op, np.full((1, 1, 5, 5), -7.0)), np.full((1, 1, 3, 3), -7.0))


def test_a_maximum_over_nan_is_nan_and_only_there() -> None:
    op = MaxPool2d((3, 3), (2, 2), (1, 1))
    x = np.zeros((1, 1, 8, 8))
    x[0, 0, 3, 4] = np.nan  # in the windows of rows 1, 2 and column 2
    x[0, 0, 3, 5] = np.inf  # which NaN wins over
    got = run(op, x)[0, 0]
    expected = np.zeros((4, 4))
    expected[1:3, 2], expected[1:3, 3] = np.nan, np.inf
    np.testing.assert_array_equal(got, expected)


@SETTINGS
@given(shape=SHAPES, seed=SEEDS, eps=st.sampled_from([1e-5, 1e-3, 2.0]))
def test_batchnorm_is_pytorchs(shape: Shape, seed: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, channels = rng.normal(size=shape), shape[1]
    weight, bias, mean = rng.normal(size=(3, channels))
    var = rng.choice([0.0, 1e-6, 0.3, 50.0], channels)
    got = run(BatchNorm(channels, eps), x, weight, bias, mean, var)
    tx, tw, tb, tm, tv = tensors(x, weight, bias, mean, var)
    expected = F.batch_norm(tx, tm, tv, tw, tb, training=False, eps=eps).numpy()
    scale = np.abs(weight) / np.sqrt(var + eps)
    terms = (np.abs(x) + np.abs(mean)[:, None, None]) * scale[:, None, None]
    assert (np.abs(got - expected) <= 1e-12 * (terms + np.abs(bias)[:, None, None])).all()


@SETTINGS
@given(shape=st.one_of(SHAPES, ROWS), seed=SEEDS, relu=st.booleans())
def test_add_and_relu_are_pytorchs(shape: Shape, seed: int, relu: bool) -> None:
    a, b = drawn(shape, seed), drawn(shape, seed + 1)
    np.testing.assert_array_equal(run(ReLU(), a), F.relu(*tensors(a)).numpy())
    total = torch.add(*tensors(a, b))
    expected = F.relu(total) if relu else total
    np.testing.assert_array_equal(run(Add(relu=relu), a, b), expected.numpy())


@SETTINGS
@given(shape=SHAPES, seed=SEEDS)
def test_global_average_is_pytorchs(shape: Shape, seed: int) -> None:
    x = drawn(shape, seed)
    expected = F.adaptive_avg_pool2d(*tensors(x), 1).numpy()[:, :, 0, 0]
    got = run(GlobalAvgPool(), x)
    assert (np.abs(got - expected) <= 1e-12 * np.abs(x).mean(axis=(2, 3))).all()


@SETTINGS
@given(shape=ROWS, out=st.integers(1, 7), seed=SEEDS)
def test_linear_is_pytorchs(shape: Shape, out: int, seed: int) -> None:
    x, w, b = drawn(shape, seed), drawn((out, shape[1]), seed + 1), drawn((out,), seed + 2)
    got = run(Linear(shape[1], out), x, w, b)
    terms = np.abs(x) @ np.abs(w).T + np.abs(b)
    assert (np.abs(got - F.linear(*tensors(x, w, b)).numpy()) <= 1e-12 * terms).all()


@SETTINGS
@given(shape=ROWS, seed=SEEDS, scale=st.sampled_from([1.0, 30.0, 1e4]))
def test_softmax_is_pytorchs(shape: Shape, seed: int, scale: float) -> None:
    """Softmax is PyTorch's even for logits that overflow unless the maximum is subtracted."""
    x = scale * drawn(shape, seed)
    got = run(Softmax(), x)
    np.testing.assert_allclose(got, F.softmax(*tensors(x), dim=1).numpy(), rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-12)


@pytest.mark.parametrize("source", Layout)
@pytest.mark.parametrize("target", Layout)
def test_relayout_moves_every_element(source: Layout, target: Layout) -> None:
    """Relayout only changes the order in memory: `run_kernel` reads the same logical array."""
    x = drawn((2, 3, 4, 5), 0)
    np.testing.assert_array_equal(run(Relayout(source, target), x), x)


# -- what is not finite ------------------------------------------------------------------------

SPECIAL = np.array([[np.nan, np.inf, -np.inf, -1.0, 0.0, 2.0]])


def test_relu_of_what_is_not_finite() -> None:
    np.testing.assert_array_equal(run(ReLU(), SPECIAL), [[np.nan, np.inf, 0, 0, 0, 2]])


def test_add_of_what_is_not_finite() -> None:
    other = np.array([[1.0, -np.inf, -np.inf, np.nan, np.inf, -5.0]])
    expected = np.array([[np.nan, np.nan, -np.inf, np.nan, np.inf, -3.0]])
    np.testing.assert_array_equal(run(Add(), SPECIAL, other), expected)
    expected = np.array([[np.nan, np.nan, 0, np.nan, np.inf, 0]])
    np.testing.assert_array_equal(run(Add(relu=True), SPECIAL, other), expected)


def test_softmax_rows_of_what_is_not_finite() -> None:
    rows = np.array(
        [
            [1.0, np.nan, 2.0],
            [1.0, np.inf, 2.0],
            [np.inf, np.inf, -np.inf],
            [1.0, -np.inf, 1.0],
            [-np.inf, -np.inf, 3.0],
            [-np.inf, -np.inf, -np.inf],
            [0.0, 0.0, 0.0],  # a row's neighbours do not touch it
        ]
    )
    nan, third = [np.nan] * 3, [1 / 3] * 3
    expected = [nan, nan, nan, [0.5, 0, 0.5], [0, 0, 1], nan, third]
    np.testing.assert_array_equal(run(Softmax(), rows), expected)


def test_global_average_of_what_is_not_finite_stays_in_its_channel() -> None:
    x = np.ones((2, 3, 4, 4))
    x[0, 1, 2, 2], x[1, 0, 0, 0], x[1, 2, 3, 3] = np.nan, np.inf, -np.inf
    x[1, 1, 0, 0], x[1, 1, 0, 1] = np.inf, -np.inf
    expected = [[1, np.nan, 1], [np.inf, np.nan, -np.inf]]
    np.testing.assert_array_equal(run(GlobalAvgPool(), x), expected)


def test_linear_of_what_is_not_finite_stays_in_its_row() -> None:
    x = np.ones((3, 2))
    x[1, 0] = np.nan
    w, b = np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([0.5, np.inf])
    expected = [[3.5, np.inf], [np.nan, np.nan], [3.5, np.inf]]
    np.testing.assert_array_equal(run(Linear(2, 2), x, w, b), expected)


def test_batchnorm_of_what_is_not_finite_stays_where_it_is() -> None:
    x = np.arange(12.0).reshape(1, 3, 2, 2)
    x[0, 0, 0, 0], x[0, 1, 0, 1], x[0, 2, 1, 1] = np.nan, np.inf, -np.inf
    weight = np.array([1.0, -2.0, 0.0])
    got = run(BatchNorm(3), x, weight, np.zeros(3), np.zeros(3), np.ones(3))
    assert np.isnan(got[0, 0, 0, 0])
    assert got[0, 1, 0, 1] == -np.inf
    assert np.isnan(got[0, 2, 1, 1])  # 0 · −Inf
    assert np.isfinite(got).sum() == 12 - 3


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_every_op_has_a_kernel_that_stores_its_precision(precision: str) -> None:
    x = drawn((2, 3, 6, 6), 0)
    vector = np.ones(3)
    for op, arrays in {
        Conv2d(3, 2, (3, 3)): [x, drawn((2, 3, 3, 3), 1)],
        BatchNorm(3): [x, vector, vector, vector, vector],
        ReLU(): [x],
        Add(): [x, x],
        MaxPool2d((2, 2), (2, 2)): [x],
        GlobalAvgPool(): [x],
        Linear(3, 4): [x[:, :, 0, 0], drawn((4, 3), 1), np.ones(4)],
        Softmax(): [x[:, :, 0, 0]],
        Relayout(Layout.NCHW, Layout.NHWC): [x],
        Preprocess().normalize: [np.full((2, 3, 6, 6), 200, np.uint8)],
    }.items():
        got = run(op, *arrays, precision=precision)
        assert got.dtype == {"fp32": np.float32, "fp64": np.float64}[precision]


def kernels_in_place() -> list[Any]:
    return [k for k in r18_numpy.Backend().kernels() if k.in_place]


@pytest.mark.parametrize("kernel", kernels_in_place(), ids=lambda k: k.id)
def test_kernels_that_declare_in_place_give_the_same_bits_in_place(kernel: Any) -> None:
    op = {BatchNorm: BatchNorm(3), ReLU: ReLU(), Add: Add(relu=True)}[kernel.op]
    shape = (2, 3, 5, 4)
    problem = Problem(op, (shape,) * op.arity)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for _ in problem.inputs]
    given_weights = tuple(rng.uniform(0.5, 1.5, spec.shape) for spec in op.weights())
    backend, dtype = r18_numpy.Backend(), kernel.precision.dtype
    expected = run_kernel(backend, kernel, problem, *arrays, *given_weights)
    buffers = [backend.memory.empty(array.size * dtype.itemsize) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        backend.memory.upload(array.astype(dtype), buffer)
    prepared = kernel.prepare(problem, given_weights)
    nothing = backend.memory.empty(kernel.workspace(problem))
    kernel.enqueue(problem, tuple(buffers), prepared, buffers[0], nothing, backend.stream())
    got = backend.memory.download(buffers[0], shape, dtype)
    np.testing.assert_array_equal(got, expected)


def test_a_kernel_that_claims_batch_invariance_keeps_it() -> None:
    """A sample alone has the same bits as in a batch, for kernels that claim it."""
    x = drawn((5, 3, 9, 9), 0)
    vector = drawn((3,), 1) ** 2 + 0.5
    cases: list[tuple[Op, list[Array]]] = [
        (BatchNorm(3), [vector] * 4),
        (ReLU(), []),
        (MaxPool2d((3, 3), (2, 2), (1, 1)), []),
        (GlobalAvgPool(), []),
        (Relayout(Layout.NCHW, Layout.NHWC), []),
    ]
    scaled: list[tuple[Op, list[Array]]] = [
        (Scale(), [np.array([0.01], np.float32)]),
        (ScaledGlobalAvgPool(), []),
    ]
    floats = [k for k in r18_numpy.Backend().kernels() if k.precision.name != "int8"]
    claimed = {k.op for k in floats if k.batch_invariant}
    assert {type(op) for op, _ in cases + scaled} | {Add, Softmax, Normalize} == claimed
    for op, given_weights in scaled:
        batch = run(op, x, *given_weights, precision="fp8")
        alone = [run(op, x[i : i + 1], *given_weights, precision="fp8") for i in range(5)]
        np.testing.assert_array_equal(np.concatenate(alone), batch)
    for precision in ("fp32", "fp64"):
        for op, given_weights in cases:
            batch = run(op, x, *given_weights, precision=precision)
            alone = [run(op, x[i : i + 1], *given_weights, precision=precision) for i in range(5)]
            np.testing.assert_array_equal(np.concatenate(alone), batch)
        rows = x[:, :, :3, :].reshape(5, -1)
        pixels, normalize = np.abs(x * 50).astype(np.uint8), Preprocess().normalize
        whole = run(normalize, pixels, precision=precision)
        parts = [run(normalize, image[None], precision=precision) for image in pixels]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        for op in (Softmax(), Add(relu=True)):
            batch = run(op, *[rows] * op.arity, precision=precision)
            alone = [run(op, *[row[None]] * op.arity, precision=precision) for row in rows]
            np.testing.assert_array_equal(np.concatenate(alone), batch)


def test_blas_has_its_threads_back_after_a_call() -> None:
    """BLAS has its threads back after a call, even if Linear is the first to set their number."""
    script = """
import numpy as np
from threadpoolctl import ThreadpoolController
import r18_numpy
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel
from r18.graph.ops import Linear, Problem

def counts():
    return [p["num_threads"] for p in ThreadpoolController().select(user_api="blas").info()]

before, backend = counts(), r18_numpy.Backend()
problem = Problem(Linear(3, 2), ((1, 3),))
kernel = choose_kernel(backend.kernels(), problem, "fp32")
run_kernel(backend, kernel, problem, np.ones((1, 3)), np.ones((2, 3)), np.ones(2))
assert counts() == before, (before, counts())
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


def test_a_sum_beyond_24_bits_is_rounded_to_nearest() -> None:
    """2²⁴ + 3 is rounded up; truncated, its product would be one half or less. No random image has
    a sum that is so large and so close."""
    op = QuantizedGlobalAvgPool("uint8")
    x = np.full((1, 1, 512, 512), 64, np.uint8)
    x[0, 0, 0, :3] += 1
    multiplier = np.array([2.0**-25 * (1 - 2.0**-23)], np.float32)
    assert run(op, x, multiplier, precision="int8").tolist() == [[1]]
