"""QDQ models in detail: their content, and equivalent models in other forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from quantised_weights import quantised_weights
from r18.errors import WeightsError
from r18.graph.ops import Conv2d, Linear
from r18.graph.passes import fold_weights, fuse
from r18.graph.quantization import Quantization
from r18.graph.quantize import quantized, scaled_values, value_scales
from r18.graph.resnet import tiny
from r18.qdq import qdq_model, write_qdq
from r18.qdq.read import MOST_SHOWN, read_qdq
from r18.weights.precisions import quantization_of

WEIGHTS = quantised_weights()
FOUND = quantization_of(WEIGHTS)
FOLDED = fuse(tiny(), "all")
INTEGERS = quantized(FOLDED)
SCALES = value_scales(INTEGERS, FOUND.scales)
NUMBERS = ":numbers"


def held(model: Any) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}


def made_by(model: Any) -> dict[str, Any]:
    return {node.output[0]: node for node in model.graph.node}


def attributes(node: Any) -> dict[str, Any]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


# -- written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "versions"), [(8, (8, 17)), (4, (10, 21)), (2, (8, 17))])
def test_versions(bits: int, versions: tuple[int, int]) -> None:
    model = qdq_model(tiny(), quantization_of(quantised_weights(bits)))
    assert (model.ir_version, model.opset_import[0].version) == versions
    assert (model.producer_name, model.graph.name) == ("r18", "tiny")
    if bits == 4:
        plain = qdq_model(tiny(), quantization_of(quantised_weights(4)), unpack=True)
        assert (plain.ir_version, plain.opset_import[0].version) == (8, 17)


def test_every_constant_and_every_window() -> None:
    model = qdq_model(tiny(), FOUND)
    constants, nodes = held(model), made_by(model)
    for step in INTEGERS.steps[1:]:
        conv = FOLDED.step(step.name).op
        if step.output != INTEGERS.output:
            assert constants[f"{step.output}.scale"] == np.float32(SCALES[step.output])
            assert constants[f"{step.output}.zero"].dtype == INTEGERS.storage[step.output]
            assert constants[f"{step.output}.zero"] == 0
        if not isinstance(conv, Conv2d | Linear):
            continue
        weight = FOUND.weights[step.name]
        np.testing.assert_array_equal(constants[f"{step.name}.weight"], weight.integers)
        np.testing.assert_array_equal(constants[f"{step.name}.weight.scale"], weight.scale)
        np.testing.assert_array_equal(constants[f"{step.name}.bias"], FOUND.biases[step.name])
        unit = np.float32(SCALES[step.inputs[0]]) * weight.scale
        np.testing.assert_array_equal(constants[f"{step.name}.bias.scale"], unit)
        for kind in ("weight", "bias"):
            assert attributes(nodes[f"{step.name}.{kind}{NUMBERS}"])["axis"] == 0
        if isinstance(conv, Conv2d):
            node = nodes[f"{step.name}:sum"]
            assert attributes(node) == {
                "kernel_shape": list(conv.kernel_size),
                "strides": list(conv.stride),
                "pads": [*conv.padding, *conv.padding],
            }
            assert node.input[0] == step.inputs[0] + NUMBERS
            if conv.residual:
                added = nodes[f"{step.name}:residual"]
                assert list(added.input) == [f"{step.name}:sum", step.inputs[1] + NUMBERS]


def test_a_model_may_end_at_a_value(tmp_path: Path) -> None:
    model = qdq_model(tiny(), FOUND, output="layer1.0.relu_1", batch=3)
    (end,) = model.graph.output
    assert (end.name, end.type.tensor_type.elem_type) == ("layer1.0.relu_1", onnx.TensorProto.UINT8)
    assert end.type.tensor_type.shape.dim[0].dim_value == 3
    last = made_by(model)
    assert "fc" not in last
    signed = qdq_model(tiny(), FOUND, output="layer2.0.downsample.1")
    (end,) = signed.graph.output
    assert end.name == f"layer2.0.downsample.1{NUMBERS}"
    assert end.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_a_quantisation_without_a_weight() -> None:
    fewer = {name: w for name, w in FOUND.weights.items() if name != "fc"}
    wrong = Quantization(8, FOUND.scales, fewer, FOUND.biases)
    with pytest.raises(WeightsError, match="the quantisation has no weight for step 'fc'"):
        qdq_model(tiny(), wrong)


def test_a_file_is_replaced_only_if_asked(tmp_path: Path) -> None:
    path = write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)
    write_qdq(path, tiny(), quantised_weights(4), overwrite=True)
    assert onnx.load(path).opset_import[0].version == 21
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    with pytest.raises(WeightsError, match="exists; --force replaces a file"):
        write_qdq(folder, tiny(), WEIGHTS, overwrite=True)
    with pytest.raises(WeightsError, match="cannot write"):
        write_qdq(path / "m.onnx", tiny(), WEIGHTS)


# -- the same in another way -------------------------------------------------------------------


def read(change: Callable[[Any], None], path: Path, approximate: bool = False) -> Any:
    write_qdq(path, tiny(), WEIGHTS)
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)
    return read_qdq(path, tiny(), approximate=approximate)


def same(found: Any) -> None:
    got = quantization_of(found.weights)
    assert dict(got.scales) == dict(FOUND.scales)
    for name, weight in FOUND.weights.items():
        np.testing.assert_array_equal(got.weights[name].integers, weight.integers)
        np.testing.assert_array_equal(got.weights[name].scale, weight.scale)
        np.testing.assert_array_equal(got.biases[name], FOUND.biases[name])


def constant_nodes(graph: Any) -> None:
    """Turn every initializer into a Constant node."""
    nodes = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in graph.initializer
    ]
    del graph.initializer[:]
    for node in reversed(nodes):
        graph.node.insert(0, node)


def swapped_sums(graph: Any) -> None:
    """Put the residual before the convolution."""
    for node in graph.node:
        if node.op_type == "Add":
            first, second = node.input
            node.input[0], node.input[1] = second, first


def no_zero_points(graph: Any) -> None:
    """Drop uint8 zero points: a QuantizeLinear without one makes uint8."""
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            (zero,) = (one for one in graph.initializer if one.name == node.input[2])
            if numpy_helper.to_array(zero).dtype == np.uint8:
                del node.input[2]


def plain_attributes(graph: Any) -> None:
    """Write attributes' defaults, and put other attributes in front."""
    for node in graph.node:
        if node.op_type == "Conv":
            node.attribute.insert(0, helper.make_attribute("group", 1))
            node.attribute.insert(0, helper.make_attribute("dilations", [1, 1]))


def turned(graph: Any) -> None:
    """Store the last weight as (in, out), multiplied from the other side."""
    (gemm,) = (node for node in graph.node if node.op_type == "Gemm")
    del gemm.attribute[:]
    (tensor,) = (one for one in graph.initializer if one.name == "fc.weight")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).T.copy(), "fc.weight"))
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == "fc.weight":
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("axis", 1))


@pytest.mark.parametrize(
    "change", [constant_nodes, swapped_sums, no_zero_points, plain_attributes, turned]
)
def test_a_model_that_says_the_same(change: Callable[[Any], None], tmp_path: Path) -> None:
    found = read(change, tmp_path / "m.onnx")
    assert found.left_out == ()
    same(found)


def test_floats_are_the_numbers_of_the_integers(tmp_path: Path) -> None:
    """Float weights are the integers' numbers, each rounded once, to float32."""
    found = read_qdq(write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS), tiny())
    numbers = fold_weights(FOLDED, found.weights)
    for step in FOLDED.steps:
        if step.name not in FOUND.weights:
            continue
        weight = FOUND.weights[step.name]
        exact = weight.integers.reshape(len(weight.scale), -1) * weight.scale[:, None]
        got = numbers[step.weights[0]].reshape(len(exact), -1)
        np.testing.assert_allclose(got, exact, rtol=1e-6)
        source = np.float32((SCALES | {"image": FOUND.scales["image"]})[step.inputs[0]])
        bias = FOUND.biases[step.name] * (source * weight.scale).astype(np.float64)
        if isinstance(step.op, Linear):
            np.testing.assert_array_equal(found.weights["fc.bias"], bias.astype(np.float32))
        else:
            name = {"conv1": "bn1"}.get(step.name, step.name.replace("conv", "bn"))
            name = name.replace("downsample.0", "downsample.1")
            np.testing.assert_array_equal(found.weights[f"{name}.bias"], bias.astype(np.float32))
    assert found.weights.source == str(tmp_path / "m.onnx")
    assert quantization_of(found.weights).calibration.method == "converted"


def float_bias(graph: Any) -> None:
    """Make the last bias float32, between two integers."""
    (gemm,) = (node for node in graph.node if node.op_type == "Gemm")
    unit = np.float32(SCALES["avgpool" if "avgpool" in SCALES else "flatten"])
    unit = unit * FOUND.weights["fc"].scale
    numbers = (FOUND.biases["fc"] + np.float64(0.75)) * unit.astype(np.float64)
    graph.initializer.append(numpy_helper.from_array(numbers.astype(np.float32), "float_bias"))
    gemm.input[2] = "float_bias"


def no_bias(graph: Any) -> None:
    (conv,) = (node for node in graph.node if node.output[0] == "conv1:sum")
    del conv.input[2]


def test_a_bias_in_numbers_is_rounded_to_nearest(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="step 'fc' has a bias in numbers; here it is rounded"):
        read(float_bias, tmp_path / "m.onnx")
    found = read(float_bias, tmp_path / "n.onnx", approximate=True)
    assert found.left_out == ("step 'fc' has a bias in numbers; here it is rounded to int32",)
    got = quantization_of(found.weights)
    np.testing.assert_array_equal(got.biases["fc"], FOUND.biases["fc"] + 1)


def test_a_convolution_without_a_bias_has_one_of_zeros(tmp_path: Path) -> None:
    found = read(no_bias, tmp_path / "m.onnx")
    got = quantization_of(found.weights)
    assert got.biases["conv1"].dtype == np.int32
    assert not got.biases["conv1"].any()
    np.testing.assert_array_equal(got.biases["fc"], FOUND.biases["fc"])


# -- refused -----------------------------------------------------------------------------------


def node_of(graph: Any, output: str) -> Any:
    (node,) = (one for one in graph.node if one.output[0] == output)
    return node


def with_attribute(output: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        node = node_of(graph, output)
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def with_constant(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Any], None]:
    def changed(graph: Any) -> None:
        (tensor,) = (one for one in graph.initializer if one.name == name)
        array = np.asarray(change(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return changed


def with_input(output: str, place: int, name: str) -> Callable[[Any], None]:
    return lambda graph: node_of(graph, output).input.__setitem__(place, name)


def without_input(output: str, place: int) -> Callable[[Any], None]:
    return lambda graph: node_of(graph, output).input.__delitem__(place)


def half(array: np.ndarray) -> np.ndarray:
    return array[: len(array) // 2].copy()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "pads": (
        with_attribute("layer1.0.conv1:sum", "pads", [1, 1, 1, 0]),
        r"pads of Conv .* is \[1, 1, 1, 0\], here \[1, 1, 1, 1\]",
    ),
    "dilations": (
        with_attribute("layer1.0.conv1:sum", "dilations", [1, 2]),
        r"dilations of Conv .* is \[1, 2\], here \[1, 1\]",
    ),
    "kernel": (
        with_attribute("maxpool:max", "kernel_shape", [2, 3]),
        r"step 'maxpool': kernel_shape of MaxPool .* is \[2, 3\], here \[3, 3\]",
    ),
    "not turned": (with_attribute("fc", "transB", 0), "step 'fc': its weight has shape"),
    "groups": (
        with_attribute("layer1.0.conv1:sum", "group", 8),
        "step 'layer1.0.conv1': Conv 'layer1.0.conv1:sum' has 8 group",
    ),
    "axis": (
        with_attribute("layer1.0.conv1.weight:numbers", "axis", 1),
        "its weight has no scale for each output channel",
    ),
    "fewer scales": (
        with_constant("layer1.0.conv1.weight.scale", half),
        "its weight has no scale for each output channel",
    ),
    "no bias": (without_input("fc", 2), "step 'fc': Gemm 'fc' has no bias"),
    "short bias": (with_constant("fc.bias", half), r"its bias is int32 of shape \(5,\)"),
    "wide bias": (
        with_constant("fc.bias", lambda a: a.astype(np.int8)),
        r"its bias is int8 of shape \(10,\)",
    ),
    "large bias": (
        with_constant("fc.bias", lambda a: np.full_like(a, 2**31 - 1)),
        "step 'fc': the bias of channel 0 is 2.147e.09 times .*a sum may leave int32",
    ),
    "two scales": (
        with_input("layer1.0.relu:numbers", 1, "relu.scale"),
        "it is quantised and dequantised by different scales",
    ),
    "in numbers": (
        with_input("layer1.0.conv2:sum", 0, "layer1.0.conv1:relu"),
        "step 'layer1.0.conv2' reads 'layer1.0.relu' in numbers: the model does not quantise it",
    ),
    "scale by channel": (
        with_constant("relu.scale", lambda a: np.full(8, a)),
        r"an activation has one scale in float32, .* has float32 of shape \(8,\)",
    ),
    "scale in float64": (
        with_constant("relu.scale", lambda a: a.astype(np.float64)),
        "an activation has one scale in float32, .* has float64 of shape",
    ),
    "format": (
        with_constant("relu.zero", lambda a: a.astype(np.int16)),
        "activations are uint8 or int8, not int16",
    ),
    "other input": (with_input("image.int8", 0, "picture"), "reads 'picture', which is no input"),
    "no constant": (
        with_input("relu", 1, "elsewhere"),
        "reads 'elsewhere', which is no input, no constant",
    ),
    "adds itself": (
        with_input("layer1.0.conv2:residual", 1, "layer1.0.conv2:sum"),
        "'layer1.0.conv2:residual' does not add its convolution",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str, tmp_path: Path) -> None:
    change, words = REFUSED[kind]
    with pytest.raises(WeightsError, match=words) as caught:
        read(change, tmp_path / "m.onnx", approximate=True)
    assert str(caught.value).startswith(f"QDQ model '{tmp_path / 'm.onnx'}': ")


def signed(graph: Any) -> None:
    """Make every zero point int8, where values after a ReLU saturate at 127."""
    for tensor in graph.initializer:
        if tensor.name.endswith(".zero"):
            tensor.CopyFrom(numpy_helper.from_array(np.int8(0), tensor.name))


def test_a_refusal_lists_the_first_differences_and_counts_the_others(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        read(signed, tmp_path / "m.onnx")
    text = str(caught.value)
    wanted = sum(storage == "uint8" for storage in scaled_values(INTEGERS).values())
    said = "is int8 and saturates at 127; here it is uint8, up to 255"
    assert (MOST_SHOWN, text.count(said)) == (6, 6)
    assert f"\n  and {wanted - 6} more\n" in text
    found = read(signed, tmp_path / "n.onnx", approximate=True)
    assert len(found.left_out) == wanted
    assert len(set(found.left_out)) == len(found.left_out)
