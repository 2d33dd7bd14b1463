"""Integers of float weights, number by number: scales, biases, multipliers, sums and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from quantised_weights import quantised_weights
from r18.errors import ShapeError, UnknownName, UsageError, WeightsError
from r18.graph.ops import Conv2d, GlobalAvgPool, Linear, MaxPool2d, Normalize, Problem
from r18.graph.passes import fold_weights, from_pixels, fuse
from r18.graph.quantization import (
    Calibration,
    Quantization,
    QuantizedWeight,
    packed,
    unpacked,
)
from r18.graph.quantize import (
    check_sums,
    has_integer_form,
    integer_weights,
    multipliers,
    quantization,
    quantized,
    rounded,
    scaled_values,
    value_scales,
)
from r18.graph.quantized import (
    MOST_DEPTH,
    QUANTIZED_OPS,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizePixels,
    check_factors,
)
from r18.graph.resnet import tiny
from r18.weights import load_weights
from r18.weights.precisions import quantization_of

FOLDED = fuse(tiny(), "all")
INTEGERS = quantized(FOLDED)
WEIGHTS = load_weights("synthetic", tiny())
FOUND = quantization_of(quantised_weights())
MOST = 2**31 - 1
WEIGHT = np.array([[3, -4], [5, -127]], np.int8)
ONE = Problem(QuantizedGlobalAvgPool(), ((1, 1, 1, MOST // 255),))


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to a positive number, by comparing its neighbours."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(end)) for end in (0, np.inf)]
    return min((near, *around), key=lambda one: abs(Fraction(float(one)) - exact))


# -- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_scale_is_the_nearest_of_the_largest_weight_over_the_limit(bits: int) -> None:
    limit = {8: 127, 4: 7, 2: 1}[bits]
    weight = np.random.default_rng(bits).standard_normal((64, 6)).astype(np.float32)
    found = rounded(weight, bits)
    for row, scale, integers in zip(weight, found.scale, found.integers, strict=True):
        assert scale == nearest(Fraction(float(np.abs(row).max())) / limit)
        exact = row.astype(np.float64) / np.float64(scale)
        assert integers.tolist() == np.clip(np.rint(exact), -limit, limit).tolist()


def test_ties_of_weights_are_even_and_zeros_have_the_scale_one() -> None:
    found = rounded(np.array([[127, 0.5, 1.5, -0.5, -2.5], [0, 0, 0, 0, 0]]), 8)
    assert found.scale.tolist() == [1, 1]
    assert found.integers.tolist() == [[127, 0, 2, 0, -2], [0] * 5]


def test_a_quantised_weight_has_a_scale_for_each_channel() -> None:
    integers, scale = np.ones((2, 3), np.int8), np.ones(2, np.float32)
    QuantizedWeight(integers, scale)
    for wrong in (scale[:1], np.ones(3, np.float32), scale.astype(np.float64), scale[:, None]):
        with pytest.raises(WeightsError, match="a float32 scale for each output channel, got int8"):
            QuantizedWeight(integers, wrong)


def test_the_first_wrong_factor_is_named() -> None:
    good = np.ones(4, np.float32)
    check_factors("it", "scale", good)
    for wrong in (0, -1, np.nan, np.inf):
        bad = good.copy()
        bad[2:] = wrong
        words = f"it: the scale of channel 2 must be positive and finite in float32, got {bad[2]}"
        with pytest.raises(WeightsError, match=words):
            check_factors("it", "scale", bad)


# -- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "largest"), [("uint8", 255), ("int8", 128)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_bias_that_a_sum_can_hold(stored: str, largest: int, sign: int) -> None:
    terms = largest * (5 + 127)
    bias = np.array([0, sign * (MOST - terms)], np.int64)
    check_sums("fc", stored, WEIGHT, bias)
    words = f"step 'fc': the bias of channel 1 is {sign * (MOST - terms + 1):.4g} times"
    with pytest.raises(WeightsError, match=words.replace("+", r"\+")):
        check_sums("fc", stored, WEIGHT, bias + np.array([0, sign]))
    with pytest.raises(WeightsError, match="the bias of channel 0 is nan times"):
        check_sums("fc", stored, WEIGHT, np.array([np.nan, 0.0]))


def test_how_deep_a_sum_may_be() -> None:
    assert 255 * 127 * MOST_DEPTH <= MOST < 255 * 127 * (MOST_DEPTH + 1)
    QuantizedLinear(Linear(MOST_DEPTH, 1))
    QuantizedConv2d(Conv2d(MOST_DEPTH, 1, (1, 1), bias=True), ("int8",))
    assert ONE.output == (1, 1)
    with pytest.raises(ShapeError, match="a sum of 8,421,505 bytes may leave int32"):
        replace(ONE, inputs=((1, 1, 1, MOST // 255 + 1),))


# -- what ops say ------------------------------------------------------------------------------


def test_backends_need_no_quantised_ops() -> None:
    assert all(op.optional for op in QUANTIZED_OPS)


def test_what_an_op_reads_and_makes() -> None:
    conv = Conv2d(3, 4, (3, 3), (2, 2), (1, 1), bias=True)
    plain = QuantizedConv2d(conv, ("int8",), 4)
    added = QuantizedConv2d(replace(conv, residual=True, relu=True), ("uint8", "int8"), 2)
    assert (plain.output_storage, added.output_storage) == ("int8", "uint8")
    assert [(s.role, s.shape, s.storage, s.limit) for s in added.weights()[:2]] == [
        ("weight", (4, 3, 3, 3), "int8", 1),
        ("bias", (4,), "int32", 0),
    ]
    assert [s.limit for s in plain.weights()[:1]] == [7]
    assert [(s.role, s.shape, s.positive) for s in added.weights()[2:]] == [
        ("multiplier", (4,), True),
        ("residual_multiplier", (1,), True),
    ]
    shape = (2, 3, 9, 7)
    assert plain.macs(shape) == conv.macs(shape) == 2 * 4 * 5 * 4 * 27
    assert plain.covered(shape) == conv.covered(shape)
    for stored in ("uint8", "int8"):
        pool = QuantizedMaxPool2d(MaxPool2d((2, 2), (2, 2)), stored)
        gap, linear = QuantizedGlobalAvgPool(stored), QuantizedLinear(Linear(5, 2), stored)
        assert pool.input_storage == gap.input_storage == linear.input_storage == (stored,)
        assert pool.output_storage == gap.output_storage == stored
        assert linear.output_storage == "float32"
    assert pool.covered((1, 2, 5, 4)) == pool.pool.covered((1, 2, 5, 4))
    assert linear.macs((3, 5)) == 30
    assert added.label == f"q{added.conv.label}"


def test_what_a_fused_stem_reads_and_makes() -> None:
    conv = QuantizedConv2d(Conv2d(2, 4, (3, 3), (2, 2), (1, 1), bias=True, relu=True), ("int8",))
    pool = MaxPool2d((3, 3), (2, 2), (1, 1))
    pixels = QuantizePixels(Normalize((0.5, 0.5), (0.25, 0.25)))
    plain, whole = QuantizedConvMaxPool(conv, pool), QuantizedConvMaxPool(conv, pool, pixels)
    after = QuantizedMaxPool2d(pool, "uint8")
    assert plain.parts == (conv, after)
    assert whole.parts == (pixels, conv, after)
    assert (plain.of_pixels, whole.of_pixels) == (False, True)
    assert (plain.input_storage, whole.input_storage) == (("int8",), ("uint8",))
    assert plain.output_storage == whole.output_storage == "uint8"
    assert [spec.role for spec in whole.weights()] == ["weight", "bias", "multiplier", "table"]
    assert plain.weights() == conv.weights() == whole.weights()[:3]
    assert plain.infer((5, 2, 17, 9)) == (5, 4, 5, 3)
    assert plain.macs((5, 2, 17, 9)) == 5 * 4 * 9 * 5 * 18
    assert plain.label == f"{conv.label}+{pool.label}"
    assert whole.label == f"{pixels.label}+{conv.label}+{pool.label}"
    with pytest.raises(ShapeError, match="image is a Quantize or a QuantizePixels"):
        QuantizedConvMaxPool(conv, pool, Normalize((0.5,), (0.25,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0173, 1 / 64, 0.5])
def test_a_table_of_pixels_number_by_number(scale: float) -> None:
    mean, std = (0.4, 0.25), (0.2, 0.31)
    table = QuantizePixels(Normalize(mean, std)).table(np.float32(scale))
    for channel in range(2):
        for value in range(256):
            exact = (value / 255 - mean[channel]) / std[channel] / float(np.float32(scale))
            assert table[channel, value] == min(max(round(exact), -128), 127)


# -- the pass ----------------------------------------------------------------------------------


def test_schedules_of_pixels_are_refused() -> None:
    pixels = from_pixels(FOLDED, Normalize((0.5,) * 3, (0.25,) * 3))
    assert pixels.of_pixels
    with pytest.raises(UsageError, match="is of pixels: quantise the one of images"):
        quantized(pixels)


def test_which_networks_have_an_integer_form() -> None:
    assert has_integer_form(FOLDED)
    assert not has_integer_form(tiny())
    assert not has_integer_form(fuse(tiny(softmax=True), "all"))


def test_values_and_their_scales() -> None:
    """Max-pooling keeps its input's scale, logits have none, and the image's is its integers'."""
    formats = scaled_values(INTEGERS)
    stored = {step.output for step in FOLDED.steps if not isinstance(step.op, MaxPool2d | Linear)}
    assert set(formats) == {"image", *stored}
    assert formats["image"] == "int8"
    scales = {name: 0.5 + place for place, name in enumerate(formats)}
    found = value_scales(INTEGERS, scales)
    pool = next(step for step in FOLDED.steps if isinstance(step.op, MaxPool2d))
    assert found == {
        "image.int8": scales["image"],
        **{name: scale for name, scale in scales.items() if name != "image"},
        pool.output: scales[pool.inputs[0]],
    }


@pytest.mark.parametrize("bits", [8, 4])
def test_biases_are_rounded_in_units_of_their_products(bits: int) -> None:
    found = quantization_of(quantised_weights(bits))
    read = fold_weights(FOLDED, WEIGHTS)
    scales = value_scales(quantized(FOLDED, bits), found.scales) | {"image": found.scales["image"]}
    for step in FOLDED.steps:
        if step.name not in found.weights:
            continue
        unit = np.float32(scales[step.inputs[0]]) * found.weights[step.name].scale
        assert unit.dtype == np.float32
        exact = read[step.weights[1]].astype(np.float64) / unit.astype(np.float64)
        assert found.biases[step.name].dtype == np.int32
        np.testing.assert_array_equal(found.biases[step.name], np.rint(exact))


def test_multipliers_operation_by_operation() -> None:
    rng = np.random.default_rng(5)
    for _ in range(8):
        scales = {n: np.float32(rng.uniform(1e-3, 1)) for n in scaled_values(INTEGERS)}
        own = {
            name: rng.uniform(1e-4, 1, len(weight.scale)).astype(np.float32)
            for name, weight in FOUND.weights.items()
        }
        made = multipliers(FOLDED, 8, scales, own)
        of = {n: np.float32(s) for n, s in value_scales(INTEGERS, scales).items()}
        of["image"] = scales["image"]
        assert made["image.scale"].tolist() == [scales["image"]]
        expected = 1
        for step in FOLDED.steps:
            name = f"{step.name}.multiplier"
            if isinstance(step.op, GlobalAvgPool):
                _, _, height, width = FOLDED.shapes(1)[step.inputs[0]]
                source, target = (Fraction(float(of[v])) for v in (step.inputs[0], step.output))
                assert made[name].tolist() == [nearest(source / (height * width * target))]
            elif isinstance(step.op, Linear):
                np.testing.assert_array_equal(made[name], of[step.inputs[0]] * own[step.name])
            elif isinstance(step.op, Conv2d):
                products = of[step.inputs[0]] * own[step.name]
                np.testing.assert_array_equal(made[name], products / of[step.output])
                if step.op.residual:
                    ratio = of[step.inputs[1]] / of[step.output]
                    assert made[f"{step.name}.residual_multiplier"].tolist() == [ratio]
                    expected += 1
            else:
                continue
            assert made[name].dtype == np.float32
            expected += 1
        assert len(made) == expected


def test_integer_weights_are_all_that_a_schedule_reads() -> None:
    made = integer_weights(FOLDED, FOUND)
    assert made.keys() == INTEGERS.weight_specs.keys()
    for name, weight in FOUND.weights.items():
        np.testing.assert_array_equal(made[f"{name}.int_weight"], weight.integers)
        np.testing.assert_array_equal(made[f"{name}.int_bias"], FOUND.biases[name])
    fewer = {name: w for name, w in FOUND.weights.items() if name != "fc"}
    with pytest.raises(WeightsError, match="the quantisation has no weight for step 'fc'"):
        integer_weights(FOLDED, replace(FOUND, weights=fewer))


def test_every_given_weight_is_looked_at() -> None:
    scales = {name: float(scale) for name, scale in FOUND.scales.items()}
    given = {"fc": FOUND.weights["fc"]}
    made = quantization(FOLDED, WEIGHTS, scales, given=given)
    assert made.weights["fc"] is given["fc"]
    assert made.calibration.images == 0
    with pytest.raises(UnknownName, match="did you mean 'fc'"):
        quantization(FOLDED, WEIGHTS, scales, given=given | {"fcc": given["fc"]})
    narrow = QuantizedWeight(np.full_like(given["fc"].integers, 8), given["fc"].scale)
    with pytest.raises(WeightsError, match="weights of 4 bits are −7 … 7, got 8 … 8"):
        quantization(FOLDED, WEIGHTS, scales, 4, given={"fc": narrow})
    quantization(FOLDED, WEIGHTS, scales, 4, given={"fc": replace(narrow, integers=-given_seven())})


def given_seven() -> Any:
    return np.full_like(FOUND.weights["fc"].integers, 7)


# -- what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_row_whose_unused_bits_are_not_0_is_named(bits: int, row: int) -> None:
    rows = packed(np.zeros((3, 5), np.int8), bits)
    unpacked(rows, 5, bits)
    rows[row, -1] |= 0x80
    with pytest.raises(WeightsError, match=f"the unused bits at the end of row {row} are not 0"):
        unpacked(rows, 5, bits)


def test_a_quantisation_equals_only_quantisations() -> None:
    again = quantization_of(quantised_weights())
    assert again is not FOUND
    assert again == FOUND
    assert hash(again) == hash(FOUND)
    assert quantization_of(quantised_weights(4)) != FOUND
    assert FOUND.sha256 != FOUND


def test_what_is_kept_does_not_change() -> None:
    scales = dict(FOUND.scales)
    made = Quantization(8, scales, dict(FOUND.weights), dict(FOUND.biases))
    before = made.sha256
    scales.clear()
    assert len(made.scales) == len(FOUND.scales)
    for kept in (made.scales, made.weights, made.biases):
        with pytest.raises(TypeError):
            kept["image"] = 1  # type: ignore[index]
    assert made.sha256 == before
    with pytest.raises(ShapeError, match="8, 4 or 2 bits, got 5"):
        replace(made, bits=5)


def by_hand(found: Quantization) -> str:
    """The digest, computed as the docstring of `digest` says."""
    how = found.calibration
    text = hashlib.sha256()
    full = 1 if found.full_range else 0
    head = (found.bits, full, how.method, how.rounding, how.images, how.sha256)
    text.update((" ".join(map(str, head)) + "\n").encode())
    for name in sorted(found.scales):
        text.update(name.encode() + b"\n" + np.float32(found.scales[name]).tobytes())
    for name in sorted(found.weights):
        weight = found.weights[name]
        shape = "x".join(str(extent) for extent in weight.integers.shape)
        data = packed(weight.integers, found.bits).tobytes()
        stored = hashlib.sha256(data).hexdigest()
        bias = hashlib.sha256(found.biases[name].astype("<i4").tobytes()).hexdigest()
        text.update(f"{name} {shape} {stored} {bias}\n".encode())
        text.update(weight.scale.astype("<f4").tobytes())
    return text.hexdigest()


CHANGES: dict[str, Callable[[Quantization], Quantization]] = {
    "nothing": lambda q: q,
    "bits": lambda q: replace(q, bits=4),
    "full range": lambda q: replace(q, full_range=True),
    "calibration": lambda q: replace(q, calibration=Calibration("mse", "adaround", 7, "cd" * 32)),
    "scale": lambda q: replace(q, scales=dict(q.scales) | {"image": np.float32(3)}),
    "name of a scale": lambda q: replace(q, scales={f"{n}x": s for n, s in q.scales.items()}),
    "name of a weight": lambda q: replace(
        q,
        weights={f"{n}x": w for n, w in q.weights.items()},
        biases={f"{n}x": b for n, b in q.biases.items()},
    ),
    "order": lambda q: replace(q, weights=dict(reversed(list(q.weights.items())))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_digest_is_what_it_says(name: str) -> None:
    small = replace(
        FOUND,
        weights={n: QuantizedWeight(w.integers // 32, w.scale) for n, w in FOUND.weights.items()},
    )
    changed = CHANGES[name](small)
    assert changed.sha256 == by_hand(changed)
    assert (changed.sha256 == small.sha256) == (name in ("nothing", "order"))
