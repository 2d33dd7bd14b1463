"""A convolution and its residual's projection as one sum on `wgmma`: what the host prepares."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_cupy_mma import On
from test_cupy_wgmma import copied, factors_of, windows_of

from r18.backend import Apart, CompileOptions
from r18.graph.ops import Conv2d, ConvProjection, Layout, Problem, parts_of
from r18.graph.passes import fuse, fuse_projection
from r18.graph.precision import FP16, FP16X3, FP32, TF32, Precision
from r18.graph.resnet import resnet18, resnet50
from r18.runtime.plan import make_plan
from r18_cupy.catalogue import kernels_for
from r18_cupy.conv.base import conv_shape
from r18_cupy.cuda.launch import OUT, Pointer, Role, X
from r18_cupy.cuda.tensor_map import Im2colMap, MatrixMap
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.hopper.projection_wgmma import ProjectionWgmma, projection_wgmma_kernels
from r18_cupy.hopper.wgmma import chunk_of, packed_channels
from r18_oracle.judge.reference import reference

PRECISIONS = pytest.mark.parametrize(
    "precision", [kernel.precision for kernel in projection_wgmma_kernels()], ids=str
)
BASIC = ConvProjection(
    Conv2d(64, 8, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True),
    Conv2d(40, 8, (1, 1), (2, 2), bias=True),
)


def problem_of(
    op: ConvProjection, n: int, image: tuple[int, int], second: tuple[int, int]
) -> Problem:
    of = op.conv.in_channels, op.projection.in_channels
    return Problem(op, ((n, of[0], *image), (n, of[1], *second)))


@PRECISIONS
@pytest.mark.parametrize(
    ("op", "image", "second"),
    [
        (BASIC, (7, 5), (14, 9)),
        (
            ConvProjection(
                Conv2d(8, 16, (1, 1), residual=True, relu=True),
                Conv2d(16, 16, (3, 2), (2, 1), (1, 0), bias=True),
            ),
            (4, 6),
            (7, 7),
        ),
        (
            ConvProjection(
                Conv2d(8, 8, (2, 5), (3, 1), (0, 2), bias=True, residual=True),
                Conv2d(8, 8, (1, 1)),
            ),
            (7, 9),
            (2, 9),
        ),
    ],
    ids=["basic", "bottleneck", "windows"],
)
def test_copied_pixels_times_packed_weights_are_the_sum(
    precision: Precision, op: ConvProjection, image: tuple[int, int], second: tuple[int, int]
) -> None:
    """Small integers: every product and sum is exact, so the results are equal."""
    rng = np.random.default_rng(1)
    kernel, problem = ProjectionWgmma(precision), problem_of(op, 2, image, second)
    inputs = tuple(rng.integers(-4, 5, shape).astype(np.float64) for shape in problem.inputs)
    weights = tuple(rng.integers(-4, 5, w.shape).astype(np.float64) for w in op.weights())
    matrix, *biases = kernel.pack(problem, weights)
    arguments = kernel.launches(problem)[0].arguments
    columns = []
    for pixels, conv, x in zip(arguments[:2], (op.conv, op.projection), inputs, strict=True):
        channels = packed_channels(conv, precision)
        corners = windows_of(cast(Im2colMap, pixels))
        columns.append(np.array([copied(x, conv, channels, *corner) for corner in corners]))
    n, o, oh, ow = problem.output
    assert {len(part) for part in columns} == {n * oh * ow}
    found = np.concatenate(columns, axis=1) @ factors_of(matrix, precision).T
    found = found.reshape(n, oh, ow, o).transpose(0, 3, 1, 2)
    found = found + (biases[0][:, None, None] if biases else 0)
    expected = reference(problem, inputs, weights)
    np.testing.assert_array_equal(np.maximum(found, 0) if op.relu else found, expected)


def test_the_bias_is_the_sum_of_both_rounded_once() -> None:
    problem = problem_of(BASIC, 1, (3, 3), (5, 5))
    weights = [np.zeros(spec.shape) for spec in BASIC.weights()]
    weights[1][:], weights[3][:] = 1.0, 2.0**-24 + 2.0**-40
    _, bias = ProjectionWgmma(FP16).pack(problem, tuple(weights))
    assert bias.dtype == np.float32
    assert bias.tolist() == [1 + 2.0**-23] * 8, "and not of two that were rounded before"
    for weight in weights[::2]:
        weight[...] = 1
    alone = replace(BASIC, conv=replace(BASIC.conv, bias=False))
    given = weights[0], weights[2], weights[3]
    _, bias = ProjectionWgmma(FP16).pack(Problem(alone, problem.inputs), given)
    assert bias.tolist() == weights[3].astype(np.float32).tolist()


@PRECISIONS
def test_a_launch(precision: Precision) -> None:
    op = ConvProjection(
        Conv2d(64, 72, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True),
        Conv2d(32, 72, (1, 1), (2, 2), bias=True),
    )
    problem = problem_of(op, 3, (10, 11), (20, 21))
    kernel = ProjectionWgmma(precision)
    tile = kernel.tile_for(problem)
    (launch,) = kernel.launches(problem)
    n, o, oh, ow = problem.output
    assert launch.grid == (math.ceil(n * oh * ow / tile.n) * math.ceil(o / tile.m), tile.parts, 1)
    assert launch.block == (kernel.product.threads(tile), 1, 1)
    assert launch.overlaps
    x, z, weight, written, bias, out, p, q, k_tiles, own_tiles = launch.arguments
    assert x == Im2colMap(X, precision.storage, (3, 64, 10, 11), (3, 3), (1, 1), (1, 1), tile.n)
    second = Pointer(Role.INPUT, 1)
    assert z == Im2colMap(
        second, precision.storage, (3, 32, 20, 21), (1, 1), (2, 2), (0, 0), tile.n
    )
    own = 9 * packed_channels(op.conv, precision)
    depth = own + packed_channels(op.projection, precision)
    kind = "int32" if precision == FP16X3 else precision.storage
    assert weight == MatrixMap(Pointer(Role.WEIGHT), kind, 72, depth, tile.m)
    assert written == MatrixMap(OUT, precision.storage, n * oh * ow, o, tile.n)
    assert (bias, out) == (Pointer(Role.WEIGHT, 1), OUT)
    assert (k_tiles, own_tiles) == (depth // tile.k, own // tile.k)
    for shape, part in zip((q, p), parts_of(problem), strict=True):
        assert cast(Any, shape).tobytes() == conv_shape(part).tobytes()


@PRECISIONS
def test_its_functions_are_the_convolution_s_with_another_producer(precision: Precision) -> None:
    kernel = ProjectionWgmma(precision)
    for entry, plain in zip(kernel.entries(), ImplicitGemmWgmma(precision).entries(), strict=True):
        assert replace(entry, symbol=plain.symbol, defines=plain.defines) == plain
        assert entry.symbol == "conv2d_projection_implicit_gemm_wgmma"
        assert entry.defines == (*plain.defines, ("PROJECTION", 1))
    assert kernel.contract == ImplicitGemmWgmma(precision).contract
    assert kernel.layout is Layout.NHWC


@PRECISIONS
def test_the_choice_is_that_of_a_product_with_as_many_terms(precision: Precision) -> None:
    kernel = ProjectionWgmma(precision)
    for batch in (1, 64):
        for name, problem in fuse_projection(fuse(resnet18(), "all")).problems(batch).items():
            if isinstance(problem.op, ConvProjection):
                assert name.endswith(".0.conv2")
                assert kernel.refusal(problem) is None
                whole = kernel.as_convolution(problem)
                assert whole.output == problem.output
                assert whole.macs == problem.macs
                assert kernel.tile_for(problem) == kernel.product.tile_for(whole)
    deep = fuse_projection(fuse(resnet18(), "all")).problems(1)["layer4.0.conv2"]
    assert kernel.tile_for(deep).parts > 1


@PRECISIONS
def test_refusals(precision: Precision) -> None:
    kernel, chunk = ProjectionWgmma(precision), chunk_of(precision)

    def refused(conv: Conv2d, projection: Conv2d) -> str:
        _, _, *made = conv.infer((1, conv.in_channels, 9, 9), (1, conv.out_channels, 9, 9))
        sides = [
            (out - 1) * s + k - 2 * p
            for out, s, k, p in zip(
                made, projection.stride, projection.kernel_size, projection.padding, strict=True
            )
        ]
        op = ConvProjection(conv, projection)
        return kernel.refusal(problem_of(op, 1, (9, 9), (sides[0], sides[1]))) or ""

    conv = Conv2d(chunk, chunk, (3, 3), (1, 1), (1, 1), residual=True)
    projection = Conv2d(chunk, chunk, (1, 1), (2, 2))
    assert refused(conv, projection) == ""
    outputs = {"out_channels": chunk + 1}
    assert "writes" in refused(replace(conv, **outputs), replace(projection, **outputs))
    assert "copies" in refused(replace(conv, in_channels=chunk + 1), projection)
    assert "copies" in refused(conv, replace(projection, in_channels=chunk + 1))
    assert "strides" in refused(conv, replace(projection, stride=(9, 1)))
    assert "groups" in refused(conv, replace(projection, in_channels=4 * chunk, groups=chunk))
    assert "dilation" in refused(replace(conv, padding=(2, 2), dilation=(2, 2)), projection)
    vast = Conv2d(2**15, 2**16 - 64, (1, 1), residual=True)
    assert "32 bits" in refused(vast, Conv2d(64, 2**16 - 64, (1, 1)))


def test_only_hopper_runs_them() -> None:
    ids = {kernel.id for kernel in projection_wgmma_kernels()}
    assert len(ids) == 4
    for device, runs in (((8, 0), False), ((9, 0), True), ((10, 0), False)):
        listed = {kernel.id for kernel in kernels_for(device)}
        assert (ids <= listed) is runs
        assert bool(ids & listed) is runs


def test_plans_keep_them_apart_where_no_table_has_measured_them() -> None:
    for precision in (FP16, TF32, FP32):
        options = CompileOptions(precision=precision.name, fusion="all")
        problem = fuse_projection(fuse(resnet50(), "all")).problems(1)["layer1.0.conv3"]
        assert isinstance(On((9, 0)).fastest(problem, precision.name), Apart)
        ops = {step.problem.op.name for step in make_plan(On((9, 0)), resnet18(), options).steps}
        assert "conv2d_projection" not in ops
    asked = CompileOptions(precision="fp16", fusion="all", kernels={"conv2d_projection": "*"})
    steps = make_plan(On((9, 0)), resnet18(), asked).steps
    fused = [step.name for step in steps if isinstance(step.problem.op, ConvProjection)]
    assert fused == [f"layer{layer}.0.conv2" for layer in (2, 3, 4)]
    assert not any("downsample" in step.name for step in steps)


def test_the_packed_product_is_the_op_s_in_float64() -> None:
    """With the weights of a network's block, to the last bits of float16."""
    problem = fuse_projection(fuse(resnet18(), "all")).problems(1)["layer4.0.conv2"]
    generator = torch.Generator().manual_seed(0)
    weights = tuple(
        torch.randn(spec.shape, generator=generator).numpy() for spec in problem.op.weights()
    )
    matrix, bias = ProjectionWgmma(FP16).pack(problem, weights)
    projection, conv = parts_of(problem)
    depth = 9 * 512 + 256
    assert matrix.shape == (512, depth)
    own = matrix[:, : 9 * 512].reshape(512, 3, 3, 512).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(own, weights[0].astype(np.float16))
    np.testing.assert_array_equal(matrix[:, 9 * 512 :], weights[2][:, :, 0, 0].astype(np.float16))
    assert bias.shape == (512,)
    assert conv.macs + projection.macs == problem.macs
