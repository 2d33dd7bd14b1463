"""Quantised ops, the pass that makes them, and a whole network in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import r18_numpy
from r18.backend import Array, CompileOptions, Kernel
from r18.backend.host import HostFunction, HostKernel
from r18.errors import NoKernel, R18Error, ScheduleError, ShapeError, UsageError, WeightsError
from r18.graph.ops import (
    Conv2d,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
    Relayout,
    parts_of,
)
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantization import QuantizedWeight
from r18.graph.quantize import quantized, quantized_weights, rounded
from r18.graph.quantized import (
    MOST_DEPTH,
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18.graph.resnet import resnet18, tiny
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18_oracle.findings import problem_from_json, problem_to_json
from r18_oracle.judge.reference import reference
from support import random_weights

NUMPY = r18_numpy.Backend()
KERNELS = {kernel.op: kernel for kernel in NUMPY.kernels() if kernel.precision is INT8}
POINT = Conv2d(1, 1, (1, 1), bias=True)
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))
OF_ONE = QuantizePixels(Normalize((0.5,), (0.25,)))


def run(op: Any, *arrays: Array) -> Array:
    """The output of an op on numpy, in its own formats; arrays are inputs, then weights."""
    problem = Problem(op, tuple(array.shape for array in arrays[: op.arity]))
    return run_kernel(NUMPY, KERNELS[type(op)], problem, *arrays)


def image(values: list[int], dtype: Any = np.uint8) -> Array:
    return np.array(values, dtype).reshape(1, 1, 1, -1)


def requantised(
    sums: list[int], multiplier: float, relu: bool = False, residual: list[int] | None = None
) -> list[int]:
    """The integers that sums become: each sum is the bias of a channel of a black image."""
    conv = Conv2d(1, len(sums), (1, 1), bias=True, residual=residual is not None, relu=relu)
    op = QuantizedConv2d(conv, ("uint8", "int8")[: conv.arity])
    channels = np.ones(len(sums), np.float32)
    images = [np.zeros((1, 1, 1, 1), np.uint8)]
    more = []
    if residual is not None:
        images.append(np.array(residual, np.int8).reshape(1, -1, 1, 1))
        more.append(np.ones(1, np.float32))
    weight, bias = np.ones((len(sums), 1, 1, 1), np.int8), np.array(sums, np.int32)
    y = run(op, *images, weight, bias, channels * np.float32(multiplier), *more)
    assert y.dtype == (np.uint8 if relu else np.int8)
    return y.reshape(-1).tolist()


# -- the specification, number by number -------------------------------------------------------


def test_pooling_of_integers_with_its_linear_layer_is_one_op_of_two() -> None:
    gap, linear = QuantizedGlobalAvgPool("int8"), QuantizedLinear(Linear(3, 5), "int8", 4)
    op = QuantizedAvgPoolLinear(gap, linear)
    problem = Problem(op, ((2, 3, 4, 7),))
    assert (op.label, op.input_storage, op.output_storage) == ("qgap+qlinear", ("int8",), "float32")
    assert parts_of(problem) == (
        Problem(gap, ((2, 3, 4, 7),)),
        Problem(linear, ((2, 3),)),
    )
    assert (problem.output, problem.macs) == ((2, 5), 2 * 3 * 5)
    *of_linear, of_mean = op.weights()
    assert tuple(of_linear) == linear.weights()
    assert (of_mean.role, of_mean.shape, of_mean.kind) == ("mean_multiplier", (1,), "multiplier")
    with pytest.raises(ShapeError, match="qgap makes int8, and the linear layer reads uint8"):
        QuantizedAvgPoolLinear(gap, QuantizedLinear(Linear(3, 5)))
    with pytest.raises(ShapeError, match="is made of a QuantizedGlobalAvgPool and a Quan"):
        QuantizedAvgPoolLinear(linear, gap)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="a sum of 9,000,000 bytes may leave int32"):
        op.infer((1, 3, 3000, 3000))


def test_ties_go_to_the_even_integer_and_both_ends_saturate() -> None:
    assert requantised([1, 3, 5, -1, -3, -5], 0.5) == [0, 2, 2, 0, -2, -2]
    assert requantised([126, 127, 128, 300, -128, -129, -300], 1.0) == [
        *(126, 127, 127, 127),
        *(-128, -128, -128),
    ]
    assert requantised([-3, 254, 255, 256, 10_000], 1.0, relu=True) == [0, 254, 255, 255, 255]


def test_the_sum_is_rounded_to_float32_before_it_is_scaled() -> None:
    """Sums round to float32 first: 2²⁵ + 2 ties to 2²⁵, so the product is a tie too, not above."""
    multiplier = np.float32(100.5 / 2**25)
    assert np.float32(2**25) * multiplier == 100.5
    assert requantised([2**25, 2**25 + 2, 2**25 + 3], float(multiplier)) == [100, 100, 101]


def test_the_residual_is_added_before_anything_is_rounded_to_an_integer() -> None:
    assert requantised([1, 1, 3], 0.5, residual=[0, 1, 1]) == [0, 2, 2]
    assert requantised([400, 400, -400], 1.0, residual=[-127, -128, 127]) == [127, 127, -128]
    assert requantised([-10, 300], 1.0, relu=True, residual=[20, -100]) == [10, 200]


def test_pooling_of_integers() -> None:
    pool = QuantizedMaxPool2d(MaxPool2d((1, 3), (1, 2), (0, 1)), "int8")
    assert run(pool, image([-5, -7, -9, -128], np.int8)).reshape(-1).tolist() == [-5, -7]
    gap = QuantizedGlobalAvgPool("uint8")
    assert run(gap, image([255] * 7), np.array([1 / 7], np.float32)).tolist() == [[255]]
    assert run(gap, image([1, 2, 0, 0]), np.array([0.5], np.float32)).tolist() == [[2]]


def test_logits_are_float32() -> None:
    op = QuantizedLinear(Linear(2, 1), "int8")
    x, w = np.array([[3, -4]], np.int8), np.array([[5, 6]], np.int8)
    y = run(op, x, w, np.array([1], np.int32), np.array([0.1], np.float32))
    assert y.dtype == np.float32
    assert y[0, 0] == np.float32(-8) * np.float32(0.1)


def test_numbers_and_pixels_become_integers() -> None:
    x = np.array([[0.5, 1.5, -0.5, 200.0, -200.0, np.inf]], np.float32)
    assert run(Quantize(), x, np.ones(1, np.float32)).tolist() == [[0, 2, 0, 127, -128, 127]]
    op = QuantizePixels(Normalize((0.5,), (0.25,)))
    table = op.table(np.float32(1 / 64))
    pixels = np.array([0, 127, 128, 255], np.uint8).reshape(1, 1, 1, 4)
    assert run(op, pixels, table).reshape(-1).tolist() == [-128, -1, 1, 127]
    assert table.dtype == np.int8
    assert table.shape == (1, 256)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QuantizedConv2d(replace(POINT, bias=False), ("uint8",)), "with a bias"),
        (lambda: QuantizedConv2d(POINT, ("float32",)), "uint8 or int8"),
        (lambda: QuantizedConv2d(POINT, ("uint8", "int8")), r"each of its 1 input\(s\)"),
        (lambda: QuantizedConv2d(POINT, ("uint8",), 3), "8, 4 or 2 bits, got 3"),
        (
            lambda: QuantizedConv2d(Conv2d(MOST_DEPTH + 1, 1, (1, 1), bias=True), ("uint8",)),
            "66,312 products in a sum may leave int32",
        ),
        (lambda: QuantizedLinear(Linear(70_000, 1)), "70,000 products in a sum may leave int32"),
        (lambda: QuantizedLinear(Linear(2, 1), bits=True), "bits must be an integer"),
        (
            lambda: Problem(QuantizedGlobalAvgPool(), ((1, 1, 4096, 4096),)),
            "a sum of 16,777,216 bytes may leave int32",
        ),
        (lambda: QuantizedMaxPool2d(GlobalAvgPool()), "quantises a MaxPool2d"),  # type: ignore[arg-type]
        (lambda: QuantizePixels(Quantize()), "takes a Normalize"),  # type: ignore[arg-type]
        (
            lambda: QuantizedConvMaxPool(POINT, POOL),  # type: ignore[arg-type]
            "made of a QuantizedConv2d and a MaxPool2d: Conv2d and MaxPool2d",
        ),
        (
            lambda: QuantizedConvMaxPool(
                QuantizedConv2d(replace(POINT, residual=True), ("int8", "int8")), POOL
            ),
            "takes no residual",
        ),
        (
            lambda: QuantizedConvMaxPool(QuantizedConv2d(POINT, ("uint8",)), POOL, OF_ONE),
            "quantize_pixels makes int8, and the convolution reads uint8",
        ),
        (
            lambda: QuantizedConvMaxPool(
                QuantizedConv2d(replace(POINT, in_channels=2), ("int8",)), POOL, OF_ONE
            ),
            "pixels of 1 channels, and the convolution reads 2",
        ),
        (
            lambda: QuantizedRelayout(Layout.NCHW, Layout.NHWC, "int32"),
            "stored as uint8, int8 or float32, got 'int32'",
        ),
    ],
)
def test_what_cannot_be_an_op(make: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        make()


def test_integers_are_not_cast() -> None:
    op = QuantizedLinear(Linear(1, 1))
    x, bias, multiplier = np.zeros((1, 1), np.uint8), np.zeros(1, np.int32), np.ones(1, np.float32)
    for weight in (np.array([[1.5]]), np.array([[200.0]]), np.array([[np.nan]])):
        with pytest.raises(WeightsError, match="int8 cannot represent: nothing is cast"):
            run(op, x, weight, bias, multiplier)
    for weight, factor, words in (
        (-128, 1.0, "the weight holds -128: its integers are −127 … 127"),
        (1, 0.0, "every multiplier must be positive and finite"),
        (1, np.nan, "every multiplier must be positive and finite"),
    ):
        with pytest.raises(WeightsError, match=words):
            run(op, x, np.array([[weight]], np.int8), bias, multiplier * np.float32(factor))
    with pytest.raises(WeightsError, match="must be a floating-point array"):
        run(op, x, np.ones((1, 1), np.int16), bias, multiplier)
    with pytest.raises(UsageError, match="reads uint8 values, got int8"):
        run(op, x.astype(np.int8), np.ones((1, 1), np.int8), bias, multiplier)


def test_a_value_is_read_as_it_is_stored() -> None:
    schedule = quantized(fuse(tiny(), "all"))
    first, second, *rest = schedule.steps
    wrong = replace(second, op=replace(second.op, stored=("uint8",)))  # type: ignore[call-arg]
    with pytest.raises(
        ScheduleError, match=r"reads 'image\.int8' as uint8, and it is stored as int8"
    ):
        replace(schedule, steps=(first, wrong, *rest))


def test_findings_hold_quantised_problems() -> None:
    for problem in quantized(fuse(resnet18(), "all"), 4).problems(2).values():
        assert problem_from_json(problem_to_json(problem)) == problem


# -- the pass ----------------------------------------------------------------------------------


def test_every_step_of_resnet18_has_an_integer_form() -> None:
    folded = fuse(resnet18(), "all")
    schedule = quantized(folded)
    assert [s.name for s in schedule.steps] == ["quantize", *(s.name for s in folded.steps)]
    assert [s.output for s in schedule.steps[1:]] == [s.output for s in folded.steps]
    assert schedule.checkpoints == folded.checkpoints
    assert schedule.macs == folded.macs
    stored = {s.output: s.op.output_storage for s in schedule.steps}
    assert stored[schedule.output] == "float32"
    assert {s for v, s in stored.items() if v.endswith("downsample.1")} == {"int8"}
    assert stored[schedule.value_of("layer4")] == stored[schedule.value_of("gap")] == "uint8"


def test_what_cannot_be_quantised() -> None:
    with pytest.raises(UsageError, match="only one at level 'all'"):
        quantized(tiny())
    with pytest.raises(UsageError, match=r"has no integer form"):
        quantized(replace(fuse(tiny(), "none"), level="all"))
    with pytest.raises(ShapeError, match="8, 4 or 2 bits, got 3"):
        quantized(fuse(tiny(), "all"), bits=3)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_weights_are_rounded_channel_by_channel(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 3, 2, 2)) * [
        [[[1e-3]]],
        [[[1]]],
        [[[9]]],
        [[[0]]],
        [[[1]]],
    ]
    found = rounded(weight, bits)
    limit = {8: 127, 4: 7, 2: 1}[bits]
    assert np.abs(found.integers).reshape(5, -1).max(axis=1).tolist() == [limit] * 3 + [0, limit]
    error = np.abs(found.integers * found.scale[:, None, None, None].astype(np.float64) - weight)
    assert (error.reshape(5, -1).max(axis=1) <= found.scale * 0.50001).all()


NETWORK = fuse(tiny(), "all")
WEIGHTS = random_weights(tiny())


def numbers_of(images: Array) -> dict[str, Array]:
    """Every value of the float network."""
    options = CompileOptions(batch=len(images), taps=tuple(s.output for s in NETWORK.steps))
    program = NUMPY.compile(NETWORK, WEIGHTS, options)
    program(images)
    return {"image": images, **{s.output: program.fetch(s.output) for s in NETWORK.steps}}


def scales_of(numbers: Mapping[str, Array], schedule: Schedule) -> dict[str, float]:
    """Each value's largest magnitude divided by the largest integer of its format."""
    stored = {s.output: s.op.output_storage for s in schedule.steps} | {"image": "int8"}
    return {
        value: float(np.abs(array).max()) / (255 if stored[value] == "uint8" else 127)
        for value, array in numbers.items()
    }


def images() -> Array:
    shape = (3, *NETWORK.input_shape)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_network_in_integers_is_its_steps_one_after_the_other(bits: int) -> None:
    """Every value equals the reference's, which is computed from the value before it;
    with eight bits, and barely with four, the logits are near the float network's."""
    schedule = quantized(NETWORK, bits)
    numbers = numbers_of(images())
    weights = quantized_weights(NETWORK, WEIGHTS, scales_of(numbers, schedule), bits)
    values = tuple(step.output for step in schedule.steps)
    options = CompileOptions(precision="int8", batch=3, taps=values)
    program = NUMPY.compile(schedule, weights, options)
    logits = program(images())
    expected = {"image": images().astype(np.float64)}
    for step, problem in zip(schedule.steps, schedule.problems(3).values(), strict=True):
        read = tuple(expected[value] for value in step.inputs)
        own = tuple(weights[name].astype(np.float64) for name in step.weights)
        expected[step.output] = reference(problem, read, own)
        np.testing.assert_array_equal(program.fetch(step.output), expected[step.output])
    wanted = numbers[NETWORK.output].astype(np.float64)
    ratio = np.square(wanted).sum() / np.square(wanted - logits).sum()
    if bits > 2:
        assert ratio > {8: 10**2.5, 4: 10**0.3}[bits]


class ChannelsLast(r18_numpy.Backend):
    """A backend whose first step and convolutions are NHWC, and everything else NCHW."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            replace(k, layout=Layout.NHWC, run=in_nhwc(k.run))
            if isinstance(k, HostKernel) and k.op in (Quantize, QuantizedConv2d)
            else k
            for k in super().kernels()
        )


def in_nhwc(run: HostFunction) -> HostFunction:
    def moved(op: Any, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
        there = tuple(np.ascontiguousarray(x.transpose(0, 3, 1, 2)) for x in inputs)
        made = np.empty(out.transpose(0, 3, 1, 2).shape, out.dtype)
        run(op, there, weights, made, workspace)
        out[...] = made.transpose(0, 2, 3, 1)

    return moved


def test_a_relayout_moves_values_as_they_are_stored() -> None:
    schedule = quantized(NETWORK)
    weights = quantized_weights(NETWORK, WEIGHTS, scales_of(numbers_of(images()), schedule))
    options = CompileOptions(precision="int8", batch=3)
    program = ChannelsLast().compile(schedule, weights, options)
    moved = {
        step.inputs[0]: step.problem.op
        for step in program.plan.steps
        if isinstance(step.problem.op, Relayout)
    }
    assert {op.output_storage for op in moved.values()} == {"float32", "uint8"}
    assert all(type(op) is QuantizedRelayout for op in moved.values())
    for key, op in moved.items():
        dtype = program.plan.tensors[key].dtype
        assert INT8.output_dtype(op) == dtype == INT8.input_dtypes(op)[0]
    expected = NUMPY.compile(schedule, weights, options)(images())
    np.testing.assert_array_equal(program(images()), expected)


def test_pixels_become_the_integers_that_normalised_images_become() -> None:
    """Pixels give the integers of normalised images, except at ties and by double rounding."""
    schedule = quantized(NETWORK)
    numbers = numbers_of(images())
    weights = quantized_weights(NETWORK, WEIGHTS, scales_of(numbers, schedule))
    normalize = Preprocess().normalize
    pixels = np.random.default_rng(3).integers(0, 256, (2, *NETWORK.input_shape)).astype(np.uint8)
    options = CompileOptions(precision="int8", batch=2, pixels=normalize, taps=("image.int8",))
    program = NUMPY.compile(schedule, weights, options)
    program(pixels)
    scale = np.float64(weights["image.scale"][0])
    mean, std = (np.array(v)[:, None, None] for v in (normalize.mean, normalize.std))
    exact = (pixels / 255 - mean) / std / scale
    found = program.fetch("image.int8")
    assert (np.abs(found - exact.clip(-128, 127)) <= 0.5 + 1e-9).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e40, None])
def test_wrong_scales(scale: float | None) -> None:
    schedule = quantized(NETWORK)
    scales = scales_of(numbers_of(images()), schedule)
    value = NETWORK.steps[0].output
    if scale is None:
        del scales[value]
    else:
        scales[value] = scale
    with pytest.raises(WeightsError, match=f"'{value}'"):
        quantized_weights(NETWORK, WEIGHTS, scales)


def test_weights_that_cannot_be_quantised() -> None:
    scales = scales_of(numbers_of(images()), quantized(NETWORK))
    name = next(step.weights[0] for step in tiny().steps if isinstance(step.op, Linear))
    step = next(step.name for step in NETWORK.steps if isinstance(step.op, Linear))
    shape = WEIGHTS[name].shape
    for value in (np.nan, np.inf, 1e-44):
        weights = WEIGHTS | {name: np.full(shape, value, np.float32)}
        with pytest.raises(WeightsError, match=f"step '{step}'.*scale of .* must be positive"):
            quantized_weights(NETWORK, weights, scales)
    whole, scale = np.full(shape, -128, np.int8), np.ones(shape[0], np.float32)
    for given, words in (
        ({step: QuantizedWeight(whole, scale)}, "weights of 8 bits are −127 … 127, got -128"),
        ({step: QuantizedWeight(whole[:, :1], scale)}, "has shape"),
        ({"fcc": QuantizedWeight(whole, scale)}, "did you mean 'fc'"),
    ):
        with pytest.raises(R18Error, match=words):
            quantized_weights(NETWORK, WEIGHTS, scales, given=given)
    for wrong in (whole.astype(np.int16), whole.astype(np.float32)):
        with pytest.raises(WeightsError, match="a quantised weight is int8"):
            QuantizedWeight(wrong, scale)
    with pytest.raises(WeightsError, match="scale of channel 0 must be positive and finite"):
        QuantizedWeight(whole, scale * 0)
    with pytest.raises(ShapeError, match="8, 4 or 2 bits, got 3"):
        rounded(WEIGHTS[name], 3)


def test_global_pooling_is_scaled_by_one_rounding() -> None:
    scales = scales_of(numbers_of(images()), quantized(NETWORK))
    pool = next(step for step in NETWORK.steps if isinstance(step.op, GlobalAvgPool))
    _, _, height, width = NETWORK.shapes(1)[pool.inputs[0]]
    found = quantized_weights(NETWORK, WEIGHTS, scales)[f"{pool.name}.multiplier"]
    source, target = (Fraction(float(np.float32(scales[v]))) for v in (pool.inputs[0], pool.output))
    exact = source / (height * width * target)
    assert found.dtype == np.float32
    near = [np.nextafter(found[0], np.float32(end)) for end in (0, np.inf)]
    error = abs(Fraction(float(found[0])) - exact)
    assert all(error <= abs(Fraction(float(other)) - exact) for other in near)


def test_a_bias_that_leaves_int32() -> None:
    scales = scales_of(numbers_of(images()), quantized(NETWORK))
    weights = dict(WEIGHTS)
    name = next(name for name in weights if name.endswith("fc.bias"))
    weights[name] = np.full_like(weights[name], 1e30)
    with pytest.raises(WeightsError, match="may leave int32"):
        quantized_weights(NETWORK, weights, scales)


def test_float_precisions_have_no_kernel_of_it() -> None:
    with pytest.raises(NoKernel, match="precisions with kernels for quantize: int8"):
        NUMPY.compile(quantized(NETWORK), {}, CompileOptions(precision="fp32"))
    with pytest.raises(NoKernel, match="no kernel takes"):
        NUMPY.compile(NETWORK, {}, CompileOptions(precision="int8"))
