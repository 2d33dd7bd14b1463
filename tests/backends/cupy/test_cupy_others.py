"""The CUDA kernels other than convolutions, without a GPU: what the host decides for them."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from r18.backend import CompileOptions, Kernel
from r18.graph.ops import (
    BatchNorm,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
    Relayout,
)
from r18.graph.passes import FUSION_LEVELS
from r18.graph.precision import FP16, FP32, PRECISIONS, Precision
from r18.graph.resnet import resnet18
from r18.images.preprocess import Preprocess
from r18.runtime.plan import make_plan
from r18_cupy import Backend
from r18_cupy.catalogue import other_kernels
from r18_cupy.conv.direct import Direct
from r18_cupy.ops.elementwise import BatchNormKernel
from r18_cupy.ops.gap import Gap
from r18_cupy.ops.linear import TiledLinear, WarpDot
from r18_cupy.ops.maxpool2d import POOL_SHAPE, MaxPool
from r18_cupy.ops.normalize import NormalizeKernel
from r18_cupy.ops.relayout import NARROW, NARROW_LENGTH, TILE, TRANSPOSE_SHAPE, Transpose, matrices

NCHW, NHWC = Layout.NCHW, Layout.NHWC


def test_batchnorm_folds_the_root_once_and_keeps_the_mean() -> None:
    weight = np.array([2.0, -1.0, 0.0], np.float32)
    bias = np.array([0.5, 0.0, 3.0], np.float32)
    mean = np.array([1e4, -1.0, 0.0], np.float32)
    var = np.array([0.25, 0.0, 1.0], np.float32)
    problem = Problem(BatchNorm(3, 1e-5), ((1, 3, 2, 2),))
    packed = BatchNormKernel(FP16).pack(problem, (weight, bias, mean, var))
    assert [a.dtype for a in packed] == [np.float32] * 3
    np.testing.assert_array_equal(packed[0], mean)
    exact = weight.astype(np.float64) / np.sqrt(var.astype(np.float64) + 1e-5)
    np.testing.assert_array_equal(packed[1], exact.astype(np.float32))
    np.testing.assert_array_equal(packed[2], bias)


@pytest.mark.parametrize(("layout", "run"), [(NCHW, 35), (NHWC, 1)])
def test_batchnorm_is_told_how_far_a_channel_runs(layout: Layout, run: int) -> None:
    (launch,) = BatchNormKernel(FP32, layout).launches(Problem(BatchNorm(3), ((2, 3, 5, 7),)))
    assert launch.arguments[-3:] == (210, 3, run)


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16x3", "fp16", "bf16"])
def test_a_thread_takes_16_bytes_and_the_tail_has_one_too(name: str) -> None:
    width = 16 // PRECISIONS[name].dtype.itemsize
    for kernel in other_kernels(PRECISIONS[name]):
        if not kernel.in_place:
            continue
        for features, blocks in ((1, 1), (256 * width, 1), (256 * width + 1, 2)):
            shape = (1, features, 1, 1)
            op = BatchNorm(features) if kernel.op is BatchNorm else kernel.op()
            (launch,) = kernel.launches(Problem(op, (shape,) * op.arity))
            assert launch.grid == (blocks, 1, 1), kernel.id


@pytest.mark.parametrize(
    ("layout", "channels", "threads"),
    [(NCHW, 64, 64 * 12), (NHWC, 64, 8 * 12), (NHWC, 63, 63 * 12), (NHWC, 4, 4 * 12)],
)
def test_maxpool_takes_whole_vectors_of_channels_only(
    layout: Layout, channels: int, threads: int
) -> None:
    """Max-pooling uses vectors only if they divide the channels; in float16 they hold eight."""
    problem = Problem(MaxPool2d((3, 3), (2, 2), (1, 1)), ((1, channels, 5, 8),))
    (launch,) = MaxPool(FP16, layout).launches(problem)
    assert launch.grid == (-(-threads // 256), 1, 1)
    shape = launch.arguments[-1]
    assert isinstance(shape, np.ndarray)
    fields = (1, channels, 5, 8, 3, 4, 3, 3, 2, 2, 1, 1)
    assert shape.view(POOL_SHAPE).tolist() == [fields]


def test_gap_has_a_warp_for_each_plane_or_a_lane_for_each_channel() -> None:
    problem = Problem(GlobalAvgPool(), ((3, 33, 7, 5),))
    (planes,) = Gap(FP32, NCHW).launches(problem)
    assert (planes.grid, planes.arguments[-2:]) == ((13, 1, 1), (99, 35))
    (columns,) = Gap(FP32, NHWC).launches(problem)
    assert (columns.grid, columns.arguments[-2:]) == ((6, 1, 1), (33, 35))


def test_a_large_batch_is_for_the_tiled_product() -> None:
    small, large = (Problem(Linear(512, 1000), ((n, 512),)) for n in (64, 65))
    dot, tiled = WarpDot(FP32), TiledLinear(FP32)
    assert dot.refusal(small) is None
    assert dot.refusal(large) == (
        "reads the weights once for every 4 samples, so it takes batches of at most 64, not 65"
    )
    assert dot.launches(small)[0].grid == (125, 16, 1)
    assert tiled.refusal(large) is None
    assert tiled.launches(large)[0].grid == (3 * 16, 1, 1)


SIDES = (1, 2, 3, NARROW, NARROW + 1, TILE - 1, TILE, TILE + 1, NARROW_LENGTH + 1)


@pytest.mark.parametrize(("source", "target"), list(product(Layout, Layout)))
def test_relayout_tiles_fit_their_memory_and_cover_each_matrix(
    source: Layout, target: Layout
) -> None:
    for n, c, h in product((1, 3), SIDES, SIDES):
        problem = Problem(Relayout(source, target), ((n, c, h, 1),))
        (launch,) = Transpose(FP32).launches(problem)
        argument = launch.arguments[-1]
        assert isinstance(argument, np.ndarray)
        count, rows, columns, height, width = argument.view(TRANSPOSE_SHAPE)[0].tolist()
        assert (count, rows, columns) == matrices(problem)
        assert count * rows * columns == n * c * h
        assert height * (width + 1) <= NARROW_LENGTH * (NARROW + 1)
        assert launch.grid == (count * -(-rows // height) * -(-columns // width), 1, 1)


def test_relayout_transposes_the_matrices_that_it_names() -> None:
    shape = (2, 3, 5, 7)
    x = np.arange(210).reshape(shape)
    for source, target in product(Layout, Layout):
        count, rows, columns = matrices(Problem(Relayout(source, target), (shape,)))
        before = x if source is NCHW else x.transpose(0, 2, 3, 1)
        after = x if target is NCHW else x.transpose(0, 2, 3, 1)
        moved = before.reshape(count, rows, columns).transpose(0, 2, 1)
        np.testing.assert_array_equal(moved.ravel(), after.ravel())


class Planned(Backend):
    """A backend whose direct convolution is NHWC: enough to plan with, nothing to run."""

    def kernels(self) -> tuple[Kernel, ...]:
        return (Direct(FP32, NHWC), *other_kernels(FP32))


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_between_nhwc_convolutions_everything_stays_in_nhwc(level: str) -> None:
    """With NHWC convolutions, every other op runs in NHWC, and only the image is relaid out."""
    plan = make_plan(Planned(), resnet18(), CompileOptions(2, "fp32", level))
    moved = [step.output for step in plan.steps if isinstance(step.problem.op, Relayout)]
    assert moved == ["image@nhwc"]
    of_images = [s for s in plan.steps if len(s.problem.output) == 4 and s.output not in moved]
    assert {step.kernel.layout for step in of_images} == {NHWC}


@pytest.mark.parametrize("precision", [FP32, FP16], ids=str)
def test_pixels_of_whole_vectors_are_taken_by_the_run(precision: Precision) -> None:
    """RGB planes of whole vectors are normalised by vectors, all other images by element."""
    kernel = NormalizeKernel(precision)
    run = {"float32": 4, "float16": 8}[precision.storage]
    op = Preprocess().normalize
    (launch,) = kernel.launches(Problem(op, ((5, 3, 8, 12),)))
    assert launch.entry.symbol == "normalize_rgb"
    assert launch.arguments[-2:] == (5 * 96 // run, 96 // run)
    assert launch.grid[0] * launch.block[0] >= 5 * 96 // run
    for shape in ((5, 3, 7, 9), (2, 3, 1, run // 2)):
        (launch,) = kernel.launches(Problem(op, (shape,)))
        assert launch.entry.symbol == "normalize_any"
        assert launch.arguments[-3:] == (math.prod(shape), math.prod(shape[2:]), 3)
    (launch,) = kernel.launches(Problem(Normalize((0.5,), (0.2,)), ((2, 1, 8, 8),)))
    assert launch.entry.symbol == "normalize_any"


def test_scale_and_shift_of_pixels_are_rounded_once() -> None:
    op = Preprocess().normalize
    scale, shift = NormalizeKernel(FP16).pack(Problem(op, ((1, 3, 2, 2),)), ())
    mean, std = np.array(op.mean), np.array(op.std)
    np.testing.assert_array_equal(scale, (1 / (255 * std)).astype(np.float32))
    np.testing.assert_array_equal(shift, (-mean / std).astype(np.float32))
    assert scale.dtype == shift.dtype == np.float32
