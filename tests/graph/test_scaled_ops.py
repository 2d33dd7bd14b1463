"""Scaled ops, the pass that makes them, and their weights."""

from __future__ import annotations

import numpy as np
import pytest

from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.errors import ShapeError, UsageError, WeightsError
from r18.graph.ops import Conv2d, Linear, MaxPool2d, Normalize, Problem, parts_of
from r18.graph.passes import fold_weights, from_pixels, fuse
from r18.graph.precision import E4M3, E4M3_LARGEST, FP8, PRECISIONS, as_stored, precision
from r18.graph.resnet import tiny
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18.graph.scaling import ranges_of, scaled, scaled_weights, value_scales
from r18.images.preprocess import Preprocess
from r18.weights import load_weights
from r18.weights.precisions import calibrated_schedule, in_precision, is_calibrated, is_scaled

FOLDED = fuse(tiny(), "all")
IN_FP8 = CompileOptions(precision="fp8")


def ranges(size: float = 3.0) -> dict[str, float]:
    names = [FOLDED.input, *(step.output for step in FOLDED.steps if isinstance(step.op, Conv2d))]
    return {name: size + place / 7 for place, name in enumerate(names)}


# -- formats and ops ---------------------------------------------------------------------------


def test_e4m3_saturates_where_arrays_are_made_of_it() -> None:
    found = as_stored(np.array([1.0, 1e9, -np.inf, np.nan, 2.0**-12]), E4M3).astype(np.float64)
    np.testing.assert_array_equal(found, [1.0, 448.0, -448.0, np.nan, 0.0])
    assert as_stored(np.array(3.0), E4M3).shape == ()
    assert np.isinf(as_stored(np.array([1e9]), np.dtype(np.float16))).all()
    assert PRECISIONS["fp8"] is FP8 is precision("fp8")
    with pytest.raises(Exception, match="did you mean 'fp8'"):
        precision("float8_e4m3fn")


def test_ops_check_what_they_are_made_of() -> None:
    with pytest.raises(ShapeError, match="sconv2d scales a Conv2d with a bias, got Conv2d"):
        ScaledConv2d(Conv2d(1, 1, (1, 1)))
    with pytest.raises(ShapeError, match="slinear scales a Linear"):
        ScaledLinear(Conv2d(1, 1, (1, 1)))  # type: ignore[arg-type]
    op = ScaledConv2d(Conv2d(3, 4, (3, 3), bias=True, residual=True, relu=True))
    assert [spec.role for spec in op.weights()] == [
        "weight", "bias", "multiplier", "residual_multiplier",
    ]  # fmt: skip
    assert [FP8.weight_dtype(spec).name for spec in op.weights()] == [
        "float8_e4m3fn", "float32", "float32", "float32",
    ]  # fmt: skip
    assert op.label == "sconv2d+bias+residual+relu"
    for factor in (0.0, -1.0, np.nan):
        with pytest.raises(WeightsError, match="every multiplier must be positive and finite"):
            FP8.stored(np.full(4, factor), op.weights()[2])


def test_pooling_of_e4m3_with_its_linear_layer_is_one_op_of_two() -> None:
    linear = ScaledLinear(Linear(3, 5))
    op = ScaledAvgPoolLinear(linear)
    problem = Problem(op, ((2, 3, 4, 7),))
    assert (op.label, op.input_storage, op.output_storage) == ("sgap+slinear", ("",), "float32")
    assert parts_of(problem) == (
        Problem(ScaledGlobalAvgPool(), ((2, 3, 4, 7),)),
        Problem(linear, ((2, 3),)),
    )
    assert (problem.output, problem.macs) == ((2, 5), 2 * 3 * 5)
    assert op.weights() == linear.weights()
    with pytest.raises(ShapeError, match="sgap_linear takes a ScaledLinear, got Linear"):
        ScaledAvgPoolLinear(linear.linear)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="expected 3 features"):
        op.infer((2, 4, 4, 7))
    with pytest.raises(ShapeError, match="gap takes 4-d inputs"):
        op.infer((2, 3))


# -- the pass ----------------------------------------------------------------------------------


def test_a_schedule_in_e4m3() -> None:
    found = scaled(FOLDED)
    assert [type(step.op) for step in found.steps[:1]] == [Scale]
    kinds = {type(step.op) for step in found.steps}
    assert kinds == {Scale, ScaledConv2d, MaxPool2d, ScaledGlobalAvgPool, ScaledLinear}
    assert found.taps.keys() == FOLDED.taps.keys() | {"image.e4m3"}
    assert found.storage[found.output] == found.storage[found.input] == "float32"
    with pytest.raises(UsageError, match="only one at level 'all' is scaled"):
        scaled(tiny())
    with pytest.raises(UsageError, match="of pixels: fp8 takes images"):
        scaled(from_pixels(FOLDED, Normalize((0.5,) * 3, (0.5,) * 3)))


def test_weights_use_the_whole_range() -> None:
    weights = load_weights("synthetic", tiny())
    found = scaled_weights(FOLDED, weights, ranges())
    read = fold_weights(FOLDED, weights)
    scales = value_scales(FOLDED, ranges())
    for step, target in zip(FOLDED.steps, scaled(FOLDED).steps[1:], strict=True):
        if not isinstance(step.op, Conv2d | Linear):
            continue
        weight, bias, multiplier, *residual = (found[name] for name in target.weights)
        assert weight.dtype == E4M3
        wide = weight.astype(np.float64).reshape(len(weight), -1)
        assert (np.abs(wide).max(axis=1) == E4M3_LARGEST).all()
        source, made = scales[target.inputs[0]], scales[step.output]
        exact = np.asarray(read[step.weights[0]], np.float64).reshape(wide.shape)
        by_channel = multiplier[:, None] * made / source
        # Relative to 2⁻⁴, and half of the smallest subnormal.
        assert (
            np.abs(wide * by_channel - exact) <= 2.0**-4 * np.abs(exact) + by_channel / 512
        ).all()
        np.testing.assert_allclose(bias * made, read[step.weights[1]], rtol=1e-6)
        if residual:
            np.testing.assert_allclose(residual[0] * made, scales[target.inputs[1]], rtol=1e-6)
    assert found.keys() == scaled(FOLDED).weight_specs.keys()


def test_a_range_is_needed_for_every_value() -> None:
    weights = load_weights("synthetic", tiny())
    some = ranges()
    gone = some.popitem()[0]
    with pytest.raises(WeightsError, match=f"the calibration has no range for '{gone}'"):
        scaled_weights(FOLDED, weights, some)
    for wrong in (0.0, np.inf, np.nan, 1e-60):
        with pytest.raises(WeightsError, match=f"the range of '{gone}' must be positive"):
            scaled_weights(FOLDED, weights, some | {gone: wrong})


# -- from a calibration ------------------------------------------------------------------------


def test_fp8_takes_the_ranges_of_a_calibration_for_integers() -> None:
    weights = quantised_weights()
    assert weights.quantization is not None
    found = ranges_of(FOLDED, weights.quantization)
    scales = weights.quantization.scales
    assert found["image"] == float(scales["image"]) * 127
    assert found[FOLDED.steps[0].output] == float(scales[FOLDED.steps[0].output]) * 255
    schedule, read = in_precision(tiny(), weights, IN_FP8)
    assert schedule == scaled(FOLDED) == calibrated_schedule(tiny(), IN_FP8)
    assert is_scaled(schedule)
    assert is_calibrated(schedule)
    assert in_precision(schedule, read, IN_FP8) == (schedule, read)
    for bits in (4, 2):  # weights are those of floats
        again, _ = in_precision(tiny(), quantised_weights(bits), IN_FP8)
        assert again == schedule


def test_what_fp8_cannot_do_is_said() -> None:
    with pytest.raises(WeightsError, match="hold no quantisation, and fp8 takes its scales from"):
        in_precision(tiny(), load_weights("synthetic", tiny()), IN_FP8)
    with pytest.raises(UsageError, match="fp8 is computed at fusion level 'all'"):
        in_precision(tiny(), quantised_weights(), CompileOptions(precision="fp8", fusion="none"))
    pixels = CompileOptions(precision="fp8", pixels=Preprocess().normalize)
    with pytest.raises(UsageError, match="fp8 takes images, not pixels"):
        in_precision(tiny(), quantised_weights(), pixels)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_logits_are_near_those_of_floats(name: str) -> None:
    """fp8 logits are near float ones; random weights, whose sums cancel, lose more than trained."""
    weights, backend = load_weights("synthetic", tiny()), load_backend(name)
    images = np.random.default_rng(1).standard_normal((4, *tiny().input_shape)).astype(np.float32)
    values = tuple(ranges())
    plain = backend.compile(FOLDED, weights, CompileOptions(batch=4, taps=values[1:]))
    expected = plain(images)
    most = {value: float(np.abs(plain.fetch(value)).max()) for value in values[1:]}
    most["image"] = float(np.abs(images).max())
    read = scaled_weights(FOLDED, weights, most)
    found = backend.compile(scaled(FOLDED), read, CompileOptions(batch=4, precision="fp8"))(images)
    assert found.dtype == np.float32
    lost = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0.001 < lost < 0.5
