"""QDQ models of `onnxruntime.quantization` and of ours as weights, and models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from commands import r18
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.bench.baselines.onnx_export import onnx_model
from r18.bench.baselines.onnxruntime import made_session
from r18.errors import WeightsError
from r18.graph.passes import fold_weights, fuse
from r18.graph.resnet import network, tiny
from r18.qdq import write_qdq
from r18.qdq.read import read_qdq
from r18.weights import load_weights
from r18.weights.precisions import in_precision, quantization_of
from r18.weights.synthetic import synthetic_weights
from support import images

WEIGHTS = quantised_weights()
SYMMETRIC = {"activation_type": QuantType.QInt8, "extra_options": {"ActivationSymmetric": True}}


class Images(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._left = iter([{"image": images(tiny(), 1, seed=seed)} for seed in range(4)])

    def get_next(self) -> Any:
        return next(self._left, None)


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float network, exported with BatchNorm folded by ONNX Runtime."""
    folder = tmp_path_factory.mktemp("folded")
    (folder / "float.onnx").write_bytes(
        onnx_model(tiny(), synthetic_weights(tiny())).SerializeToString()
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    onnxruntime.InferenceSession(
        str(folder / "float.onnx"), options, providers=["CPUExecutionProvider"]
    )
    return folder / "folded.onnx"


def static(folded: Path, path: Path, **options: Any) -> Path:
    given = {"per_channel": True, "weight_type": QuantType.QInt8} | options
    quantize_static(folded, path, Images(), quant_format=QuantFormat.QDQ, **given)
    return path


# -- read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits"), [("tiny", 8), ("tiny", 4), ("tiny_bottleneck", 8), ("tiny_resnext", 8)]
)
def test_our_own_model_reads_back(name: str, bits: int, tmp_path: Path) -> None:
    schedule = network(name)
    weights = quantised_weights(bits, schedule=schedule)
    path = write_qdq(tmp_path / "m.onnx", schedule, weights)
    found = read_qdq(path, schedule)
    assert found.left_out == ()
    got, expected = quantization_of(found.weights), quantization_of(weights)
    assert got.bits == bits
    assert dict(got.scales) == dict(expected.scales)
    for name, weight in expected.weights.items():
        np.testing.assert_array_equal(got.weights[name].integers, weight.integers)
        np.testing.assert_array_equal(got.weights[name].scale, weight.scale)
        np.testing.assert_array_equal(got.biases[name], expected.biases[name])
    # The float weights are the numbers of the integers.
    numbers = fold_weights(fuse(schedule, "all"), found.weights)
    step = "layer2.0.conv2"
    exact = expected.weights[step].integers * expected.weights[step].scale[:, None, None, None]
    np.testing.assert_allclose(numbers[f"{step}.folded_weight"], exact, rtol=1e-6)


def test_a_static_quantisation_is_refused_with_what_differs(folded: Path, tmp_path: Path) -> None:
    path = static(folded, tmp_path / "q.onnx", **SYMMETRIC)
    with pytest.raises(WeightsError, match="computes what the quantised ops do not") as caught:
        read_qdq(path, tiny())
    text = str(caught.value)
    assert "the logits are rounded to integers; here they are float32" in text
    assert "'layer4.0.relu_1' is int8 and saturates at 127; here it is uint8, up to 255" in text
    assert "is rounded to integers before its residual is added; here it is not" in text
    assert "--approximate leaves that out" in text


def test_a_static_quantisation_approximately(folded: Path, tmp_path: Path) -> None:
    path = static(folded, tmp_path / "q.onnx", **SYMMETRIC)
    common = ("export", "--network", "tiny", "--out", tmp_path / "w", "--weights")
    done = r18(*common, path, "--approximate")
    assert done.code == 0, done.err
    assert "left out: step 'layer1.0.conv2' is rounded to integers before its residual" in done.err
    weights = load_weights(str(tmp_path / "w"), tiny())
    x = images(tiny(), 1, seed=9)
    options = CompileOptions(precision="int8")
    ours = load_backend("numpy").compile(*in_precision(tiny(), weights, options), options)(x)
    (theirs,) = made_session(path.read_bytes()).run(None, {"image": x})
    (exact,) = made_session(onnx_model(tiny(), synthetic_weights(tiny())).SerializeToString()).run(
        None, {"image": x}
    )
    assert np.square(ours - exact).sum() < np.square(theirs - exact).sum() * 1.5
    held = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    name = "layer3.0.downsample.0"
    np.testing.assert_array_equal(
        quantization_of(weights).weights[name].integers,
        held[f"ConvBnFusion_W_{name}.weight_quantized"],
    )


def test_a_zero_point_is_refused_by_name(folded: Path, tmp_path: Path) -> None:
    path = static(folded, tmp_path / "q.onnx", activation_type=QuantType.QUInt8)
    with pytest.raises(WeightsError, match=r"the zero point of .* is \d+; kernels take 0 only"):
        read_qdq(path, tiny(), approximate=True)


def _as_nncf_writes(graph: Any) -> None:
    """Write as NNCF does: no rounding after max-pooling, and global pooling's before Flatten."""
    nodes = {node.output[0]: node for node in graph.node}
    for name in ("maxpool", "maxpool:numbers"):
        graph.node.remove(nodes[name])
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == "maxpool:numbers":
                node.input[place] = "maxpool:max"
    nodes["avgpool"].input[0] = "avgpool:mean"
    nodes["avgpool:flat"].input[0] = "avgpool:numbers"
    nodes["fc"].input[0] = "avgpool:flat"
    flat = nodes["avgpool:flat"]
    graph.node.remove(flat)
    graph.node.insert(list(graph.node).index(nodes["avgpool:numbers"]) + 1, flat)


def test_a_rounding_counts_for_what_is_only_moved_behind_it(tmp_path: Path) -> None:
    path = write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)
    model = onnx.load(path)
    _as_nncf_writes(model.graph)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    found = read_qdq(path, tiny())
    assert found.left_out == ()
    got, expected = quantization_of(found.weights), quantization_of(WEIGHTS)
    assert dict(got.scales) == dict(expected.scales)
    for name, weight in expected.weights.items():
        np.testing.assert_array_equal(got.weights[name].integers, weight.integers)
        np.testing.assert_array_equal(got.biases[name], expected.biases[name])


def test_a_model_of_nncf_approximately(folded: Path, tmp_path: Path) -> None:
    if find_spec("nncf") is None:
        pytest.skip("no nncf: pip install nncf")
    nncf = import_module("nncf")
    x = [images(tiny(), 1, seed=seed) for seed in range(8)]
    data = nncf.Dataset(x, lambda image: {"image": image})
    made = nncf.quantize(onnx.load(folded), data, subset_size=8)
    path = tmp_path / "nncf.onnx"
    onnx.save(made, path)
    with pytest.raises(WeightsError, match="is rounded to integers before its residual is added"):
        read_qdq(path, tiny())
    weights = read_qdq(path, tiny(), approximate=True).weights
    options = CompileOptions(precision="int8")
    program = load_backend("numpy").compile(*in_precision(tiny(), weights, options), options)
    (theirs,) = made_session(path.read_bytes()).run(None, {"image": x[0]})
    error = np.square(program(x[0]) - theirs).sum() / np.square(theirs).sum()
    assert error < 0.01


def test_approximate_is_for_models(tmp_path: Path) -> None:
    done = r18("export", "--weights", "synthetic", "--out", tmp_path / "w", "--approximate")
    assert (done.code, "is for weights of a QDQ model" in done.err) == (2, True)


# -- damage ------------------------------------------------------------------------------------


def _replace(graph: Any, name: str, array: Any) -> None:
    (tensor,) = (one for one in graph.initializer if one.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def _held(graph: Any, name: str) -> Any:
    (tensor,) = (one for one in graph.initializer if one.name == name)
    return numpy_helper.to_array(tensor).copy()


def _zero(graph: Any) -> None:
    _replace(graph, "layer1.0.relu.zero", np.uint8(3))


def _unsigned_weight(graph: Any) -> None:
    name = "layer1.0.conv1.weight"
    _replace(graph, name, _held(graph, name).astype(np.uint8))


def _full_range(graph: Any) -> None:
    values = _held(graph, "conv1.weight")
    values.reshape(-1)[0] = -128
    _replace(graph, "conv1.weight", values)


def _bias_scale(graph: Any) -> None:
    _replace(graph, "fc.bias.scale", _held(graph, "fc.bias.scale") * np.float32(2))


def _pool_scale(graph: Any) -> None:
    _replace(graph, "maxpool.scale", np.float32(0.5))


def _no_relu(graph: Any) -> None:
    (node,) = (one for one in graph.node if one.output[0] == "layer2.0.conv1:relu")
    node.op_type = "Sigmoid"


def _cut_off(graph: Any) -> None:
    _replace(graph, "layer2.0.downsample.1.zero", np.uint8(0))


def _stride(graph: Any) -> None:
    (node,) = (one for one in graph.node if one.output[0] == "conv1:sum")
    (strides,) = (one for one in node.attribute if one.name == "strides")
    strides.ints[0] = 1


def _groups(graph: Any) -> None:
    (node,) = (one for one in graph.node if one.output[0] == "layer2.0.conv1:sum")
    node.attribute.append(onnx.helper.make_attribute("group", 2))


def _dilation(graph: Any) -> None:
    (node,) = (one for one in graph.node if one.output[0] == "layer2.0.conv1:sum")
    node.attribute.append(onnx.helper.make_attribute("dilations", [1, 2]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_zero, r"the zero point of .*'layer1\.0\.relu.*' is 3"),
        (_unsigned_weight, r"step 'layer1\.0\.conv1': its weight is uint8"),
        (_full_range, "goes down to -128, and kernels take −127"),
        (_bias_scale, "step 'fc': the scale of its bias is not its input's times its weight's"),
        (_pool_scale, "max-pooling keeps its input's"),
        (_no_relu, r"step 'layer2\.0\.conv1': expected"),
        (_cut_off, "uint8 with zero point 0, which cuts off what is negative"),
        (_stride, r"strides of Conv .* is \[1, 2\], here \[2, 2\]"),
        (_groups, r"Conv '.*' has 2 group\(s\), here 1"),
        (_dilation, r"dilations of Conv .* is \[1, 2\], here \[1, 1\]"),
    ],
)
def test_what_is_refused(damage: Callable[[Any], None], words: str, tmp_path: Path) -> None:
    path = write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)
    model = onnx.load(path)
    damage(model.graph)
    onnx.save(model, path)
    with pytest.raises(WeightsError, match=words):
        read_qdq(path, tiny(), approximate=True)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model at all")
    with pytest.raises(WeightsError):
        read_qdq(tmp_path / "m.onnx", tiny())
    with pytest.raises(WeightsError):
        read_qdq(tmp_path / "none.onnx", tiny())
    (tmp_path / "float.onnx").write_bytes(
        onnx_model(tiny(), synthetic_weights(tiny())).SerializeToString()
    )
    with pytest.raises(WeightsError, match="expected DequantizeLinear"):
        read_qdq(tmp_path / "float.onnx", tiny())


def loop(model: Any) -> None:
    """Have a QuantizeLinear and a DequantizeLinear read each other."""
    (pair,) = [node for node in model.graph.node if node.output[0] == model.graph.output[0].name]
    pair.input[0] = pair.output[0]


def cut(model: Any) -> None:
    """Cut the last byte of each constant, so that it is shorter than its shape."""
    for tensor in model.graph.initializer:
        tensor.raw_data = tensor.raw_data[:-1]


def of_no_type(model: Any) -> None:
    for tensor in model.graph.initializer:
        tensor.data_type = 0


def without_inputs(model: Any) -> None:
    for node in model.graph.node:
        del node.input[1:]


@pytest.mark.parametrize("damage", [loop, cut, of_no_type, without_inputs])
def test_what_onnx_refuses_is_refused_in_words(
    tmp_path: Path, damage: Callable[[Any], None]
) -> None:
    path = write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)
    model = onnx.load(path)
    damage(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match=r"m\.onnx': ONNX refuses it: "):
        read_qdq(path, tiny())
