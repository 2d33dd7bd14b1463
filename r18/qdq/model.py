"""A quantised network as an ONNX model of QuantizeLinear and DequantizeLinear nodes.

The model says what the quantised schedule says, and every integer tensor has the name of its value
there. A convolution stands between the DequantizeLinear of its inputs and one QuantizeLinear: bias,
residual and ReLU come before it, because a sum is requantised once. A runtime either
recognises this pattern and computes in integers (fused), or computes it as it stands, in float32
(simulated).

The input is the float image, and the first QuantizeLinear makes int8 of it, not the table of
pixels: the table rounds in one place, and a library that normalises pixels itself would round in
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from r18.atomic import check_replaceable, output_file
from r18.errors import BackendUnavailable, ScheduleError, UsageError, WeightsError
from r18.files import WEIGHTS_LIMIT
from r18.graph.ops import Conv2d, MaxPool2d
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization, packed
from r18.graph.quantize import LEVEL, product_scales, quantized, value_scales
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
)
from r18.graph.schedule import Schedule, Step
from r18.weights.precisions import quantization_of

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]

OPSET, IR_VERSION = 17, 8
"""QuantizeLinear has scales by channel since opset 13; every library of the last years has 17."""
INT4_OPSET, INT4_IR_VERSION = 21, 10
"""The first ones with int4."""
NUMBERS = ":numbers"
"""The suffix of a value's name for its DequantizeLinear: q · scale in float32."""


def import_onnx() -> Any:
    """The package `onnx`. Raises `BackendUnavailable` where it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise BackendUnavailable(
            "onnx", f"it does not import: {error}", "pip install 'r18[peers]'"
        ) from error
    return onnx


def qdq_model(
    schedule: Schedule,
    quantization: Quantization,
    *,
    batch: int = 1,
    output: str = "",
    taps: tuple[str, ...] = (),
    unpack: bool = False,
) -> onnx.ModelProto:
    """A schedule (at level `none`) in integers as an ONNX model, checked by ONNX's own checker.

    batch:  of the input, (N, C, H, W) in float32; the output is float32 logits.
    output: the value at which the model ends; the logits if empty. One in int8 is put out as
            numbers, under its name with `NUMBERS`: ONNX Runtime computes int8 in uint8 with a zero
            point, unless the integers themselves are asked for.
    taps:   values that are outputs too, behind the first, as integers.
    unpack: store weights of 4 bits in int8, for libraries that have no int4. Weights of 2 bits
            always are: ONNX has none of them below opset 25.

    Raises `BackendUnavailable` where `onnx` is missing, `UsageError` for a batch below 1,
    `WeightsError` for a quantisation of another network, and what `quantized` raises.
    """
    onnx = import_onnx()
    if batch < 1:
        raise UsageError(f"an ONNX model needs a batch of at least 1, got {batch}")
    folded = fuse(schedule, LEVEL)
    integers = quantized(folded, quantization.bits)
    missing = [s.name for s in folded.steps if s.weights and s.name not in quantization.weights]
    if missing:
        raise WeightsError(f"the quantisation has no weight for step '{missing[0]}'")
    if output:
        integers = integers.between(integers.input, output)
    int4 = quantization.bits == 4 and not unpack
    build = _Builder(integers, quantization, onnx, int4)
    for step in integers.steps:
        build.step(step)
    helper, shapes = onnx.helper, integers.shapes(batch)

    def value(name: str, storage: str, value: str) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(storage))
        return helper.make_tensor_value_info(name, kind, shapes[value])

    end = integers.output
    if integers.storage[end] == "int8":
        ends = [value(build.numbers(end), "float32", end)]
    else:
        ends = [value(end, integers.storage[end], end)]
    graph = helper.make_graph(
        build.nodes,
        schedule.name,
        [value(integers.input, "float32", integers.input)],
        ends + [value(name, integers.storage[name], name) for name in taps],
        build.constants,
    )
    opset, version = (INT4_OPSET, INT4_IR_VERSION) if int4 else (OPSET, IR_VERSION)
    model = helper.make_model(
        graph,
        producer_name="r18",
        ir_version=version,
        opset_imports=[helper.make_opsetid("", opset)],
    )
    onnx.checker.check_model(model, full_check=True)  # infers every shape, and compares
    return model  # type: ignore[no-any-return]


def write_qdq(
    path: str | Path,
    schedule: Schedule,
    weights: Mapping[str, Any],
    *,
    batch: int = 1,
    unpack: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the `qdq_model` of weights with a quantisation to a file, whole or not at all.

    Raises `WeightsError` for weights without one, and for a file that exists or cannot be written
    and, even with `overwrite`, for a file that is no ONNX model; and as `qdq_model`.
    """
    path = Path(path)
    quantization = quantization_of(weights)
    if path.exists() and (not overwrite or not path.is_file()):
        raise WeightsError(f"'{path}' exists; --force replaces a file")
    check_replaceable(path, "ONNX model", _is_model, error=WeightsError)
    data = qdq_model(schedule, quantization, batch=batch, unpack=unpack).SerializeToString()
    try:
        with output_file(path) as draft:
            draft.write_bytes(data)
    except OSError as error:
        raise WeightsError(f"cannot write '{path}': {error}") from error
    return path


def _is_model(file: BufferedReader) -> bool:
    """Whether a file holds an ONNX model: nearly any short text is a protobuf of nothing."""
    onnx = import_onnx()
    try:
        model = onnx.load_model_from_string(file.read(WEIGHTS_LIMIT))
    except Exception:  # protobuf raises its own classes
        return False
    return bool(model.ir_version and model.graph.node)


@dataclass
class _Builder:
    """Nodes and constants of a model, as they are appended step by step."""

    schedule: Schedule
    quantization: Quantization
    onnx: Any
    int4: bool
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    scales: dict[str, float] = field(init=False)
    dequantized: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scales = value_scales(self.schedule, self.quantization.scales)

    def step(self, step: Step) -> None:
        """Append a step: from the numbers of its inputs to the integers of its output."""
        match step.op:
            case Quantize():
                self.quantize(step.inputs[0], step)
            case QuantizedConv2d() as op:
                self.quantize(self._conv(step, op), step)
            case QuantizedMaxPool2d() as op:
                attributes = {"kernel_shape": op.pool.kernel_size, **_window(op.pool)}
                x = self.numbers(step.inputs[0])
                self.quantize(self.node("MaxPool", [x], f"{step.name}:max", **attributes), step)
            case QuantizedGlobalAvgPool():
                x = self.numbers(step.inputs[0])
                mean = self.node("GlobalAveragePool", [x], f"{step.name}:mean")
                self.quantize(self.node("Flatten", [mean], f"{step.name}:flat", axis=1), step)
            case QuantizedLinear():
                x = self.numbers(step.inputs[0])
                self.node("Gemm", [x, *self._weights(step)], step.output, transB=1)
            case op:
                raise ScheduleError(f"step '{step.name}': a QDQ model has no {op.label}")

    def _conv(self, step: Step, op: QuantizedConv2d) -> str:
        conv = op.conv
        x = self.numbers(step.inputs[0])
        attributes = {"kernel_shape": conv.kernel_size, **_window(conv)}
        value = self.node("Conv", [x, *self._weights(step)], f"{step.name}:sum", **attributes)
        if conv.residual:
            residual = self.numbers(step.inputs[1])
            value = self.node("Add", [value, residual], f"{step.name}:residual")
        return self.node("Relu", [value], f"{step.name}:relu") if conv.relu else value

    def _weights(self, step: Step) -> list[str]:
        """The numbers of a step's weight and bias, by output channel."""
        weight, bias = self.quantization.weights[step.name], self.quantization.biases[step.name]
        scale = np.float32(self.scales[step.inputs[0]])
        return [
            self._by_channel(f"{step.name}.weight", weight.integers, weight.scale),
            self._by_channel(f"{step.name}.bias", bias, product_scales(step, scale, weight.scale)),
        ]

    def _by_channel(self, name: str, integers: Array, scale: Array) -> str:
        if self.int4 and integers.dtype == np.int8:
            tensor = self._int4(name, integers)
        else:
            tensor = self.onnx.numpy_helper.from_array(np.ascontiguousarray(integers), name)
        self.constants.append(tensor)
        self.constant(f"{name}.scale", np.ascontiguousarray(scale, np.float32))
        # Without a zero point it is 0, of the integers' own type.
        inputs = [name, f"{name}.scale"]
        return self.node("DequantizeLinear", inputs, f"{name}{NUMBERS}", axis=0)

    def _int4(self, name: str, integers: Array) -> Any:
        """ONNX packs a tensor as one row: the lowest bits of a byte first."""
        kind = self.onnx.TensorProto.INT4
        row = packed(integers.reshape(1, -1), 4)
        return self.onnx.helper.make_tensor(name, kind, integers.shape, row.tobytes(), raw=True)

    def constant(self, name: str, array: Array) -> str:
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def quantize(self, numbers: str, step: Step) -> None:
        """QuantizeLinear into the step's output; max-pooling has a scale of its own, and equal."""
        name = step.output
        zero = np.zeros((), step.op.output_storage)
        scale = self.constant(f"{name}.scale", np.array(self.scales[name], np.float32))
        self.node("QuantizeLinear", [numbers, scale, self.constant(f"{name}.zero", zero)], name)

    def numbers(self, value: str) -> str:
        """DequantizeLinear of a value; made once."""
        if value not in self.dequantized:
            inputs = [value, f"{value}.scale", f"{value}.zero"]
            self.dequantized[value] = self.node("DequantizeLinear", inputs, f"{value}{NUMBERS}")
        return self.dequantized[value]

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Append a node of its output's name."""
        make = self.onnx.helper.make_node
        self.nodes.append(make(operator, inputs, [output], output, **attributes))
        return output


def _window(op: Conv2d | MaxPool2d) -> dict[str, Any]:
    """ONNX pads at the beginning of each axis, then at the end of each.

    Groups and dilation are written where they are not 1.
    """
    found: dict[str, Any] = {"strides": op.stride, "pads": (*op.padding, *op.padding)}
    if isinstance(op, Conv2d):
        found |= {"group": op.groups} if "groups" in op.extras else {}
        found |= {"dilations": op.dilation} if "dilation" in op.extras else {}
    return found


__all__ = ["INT4_OPSET", "NUMBERS", "OPSET", "import_onnx", "qdq_model", "write_qdq"]
