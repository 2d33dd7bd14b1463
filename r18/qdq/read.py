"""A QDQ model of another tool as a quantisation: the same integers and scales, or a refusal.

The model is read from its output backwards, next to the schedule: each step finds its node, and
each value the QuantizeLinear in front of its reader. `onnxruntime.quantization.quantize_static`
and NNCF write such models, and `r18.qdq.model` does.

The quantised ops round a sum once, behind bias, residual and ReLU. A model with more roundings (of
a convolution before its residual is added, of logits) says something that they do not, and so does
one with int8 behind a ReLU, which saturates at 127. Such a model is refused, with all that differs,
unless `approximate` says to leave that out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r18.errors import WeightsError, plain, show
from r18.files import WEIGHTS_LIMIT, read_bytes
from r18.graph.ops import BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d
from r18.graph.passes import fuse
from r18.graph.quantization import Calibration, Quantization, QuantizedWeight, sha256_of
from r18.graph.quantize import LEVEL, check_sums, product_scales, quantized, scaled_values
from r18.graph.quantized import limit_of
from r18.graph.schedule import Schedule, Step
from r18.qdq.model import import_onnx
from r18.weights import Weights, weights_from

Array = npt.NDArray[Any]

MOVES = ("MaxPool", "Flatten", "Reshape", "Squeeze")
"""Operators that make no new numbers."""
MOST_SHOWN = 6
"""The most differences that a refusal lists."""


@dataclass(frozen=True)
class Converted:
    """Weights with the quantisation of a model. left_out: the model's statements that they lack."""

    weights: Weights
    left_out: tuple[str, ...]


def read_qdq(path: str | Path, schedule: Schedule, *, approximate: bool = False) -> Converted:
    """The weights that a QDQ model of the schedule (at level `none`) holds.

    The float weights are the numbers of the integers, with BatchNorm folded into them: each
    BatchNorm is the identity, with the convolution's bias.

    Raises `WeightsError` for a file that is no such model, with the node that does not fit, and
    for one whose arithmetic the quantised ops do not have, unless `approximate`;
    `BackendUnavailable` where `onnx` is missing.
    """
    onnx = import_onnx()
    try:
        model = onnx.load_model_from_string(read_bytes(Path(path), WEIGHTS_LIMIT))
    except (OSError, ValueError) as error:
        raise WeightsError(f"'{path}' cannot be read: {error}") from None
    except Exception as error:  # protobuf and ONNX's checker raise their own classes
        raise WeightsError(f"'{path}' is no ONNX model, or damaged: {plain(error)}") from None
    try:  # nodes have their inputs and attributes, and none reads what is made after it
        onnx.checker.check_model(model)
    except Exception as error:
        why = _undefined(model.graph) or f"ONNX refuses it: {plain(error)}"
        raise WeightsError(f"QDQ model '{path}': {why}") from None
    try:
        reader = _Reader(fuse(schedule, LEVEL), _Graph(model.graph, onnx))
        reader.read()
        if reader.left_out and not approximate:
            shown = "\n".join(f"  {one}" for one in reader.left_out[:MOST_SHOWN])
            more = len(reader.left_out) - MOST_SHOWN
            raise WeightsError(
                f"it computes what the quantised ops do not:\n{shown}\n"
                + (f"  and {more} more\n" if more > 0 else "")
                + "  --approximate leaves that out, and the result is another network"
            )
        found = reader.quantization(str(sha256_of(np.frombuffer(model.SerializeToString(), "u1"))))
    except WeightsError as error:
        raise WeightsError(f"QDQ model '{path}': {error}") from None
    floats = _floats(schedule, found, reader.folded)
    made = weights_from(floats, schedule, source=str(path))
    return Converted(
        Weights(made.tensors, made.source, made.preprocess, found), tuple(reader.left_out)
    )


def _undefined(graph: Any) -> str | None:
    """The first value that a node reads and nothing makes, in words; or None."""
    made = (name for node in graph.node for name in node.output)
    known = {"", *(one.name for one in (*graph.input, *graph.initializer)), *made}
    for node in graph.node:
        for name in node.input:
            if name not in known:
                what = "no input, no constant and no node's output"
                return f"node {show(node.name)} reads {show(name)}, which is {what}"
    return None


def _floats(schedule: Schedule, found: Quantization, folded: Schedule) -> dict[str, Array]:
    """Tensors of level `none` whose folding gives the numbers of the integers."""
    tensors: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    makers = {step.output: step for step in schedule.steps}
    for step in folded.steps:
        if step.name not in found.weights:
            continue
        weight, source = found.weights[step.name], _scale_of(folded, found, step.inputs[0])
        across = (-1, *[1] * (weight.integers.ndim - 1))
        names = schedule.step(step.name).weights
        tensors[names[0]] = weight.integers.astype(np.float32) * weight.scale.reshape(across)
        biases[step.name] = found.biases[step.name] * product_scales(step, source, weight.scale)
        if len(names) > 1:
            tensors[names[1]] = biases[step.name].astype(np.float32)
    for step in schedule.steps:
        if isinstance(step.op, BatchNorm):
            bias = biases[makers[step.inputs[0]].name].astype(np.float32)
            one = np.ones_like(bias)
            values = (one, bias, one * 0, one - np.float32(step.op.eps))
            tensors |= dict(zip(step.weights, values, strict=True))
    return tensors


def _scale_of(schedule: Schedule, found: Quantization, value: str) -> np.float32:
    maker = {step.output: step for step in schedule.steps}.get(value)
    if maker is not None and isinstance(maker.op, MaxPool2d):
        return _scale_of(schedule, found, maker.inputs[0])
    return np.float32(found.scales[value])


@dataclass(frozen=True)
class _Rounding:
    """A QuantizeLinear: its scale and the storage format of its integers."""

    scale: np.float32
    dtype: str


class _Graph:
    """A model's nodes by their outputs, and its constants."""

    def __init__(self, graph: Any, onnx: Any) -> None:
        self._onnx = onnx
        self.output = graph.output[0].name if graph.output else ""
        self.inputs = {one.name for one in graph.input}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t

    def maker(self, name: str, *operators: str, what: str) -> Any:
        """The node that makes a value, which must be one of these operators."""
        node = self._makers.get(name)
        if node is None or node.op_type not in operators:
            found = f"{node.op_type} '{plain_name(node)}'" if node is not None else f"'{name}'"
            raise WeightsError(f"{what}: expected {' or '.join(operators)}, found {found}")
        return node

    def is_made_by(self, name: str, operator: str) -> bool:
        return name in self._makers and self._makers[name].op_type == operator

    def constant(self, name: str, what: str) -> Array:
        if name not in self._constants:
            raise WeightsError(f"{what}: '{name}' is no constant of the model")
        tensor = self._constants[name]
        if tensor.data_location == self._onnx.TensorProto.EXTERNAL:
            raise WeightsError(f"{what}: '{name}' is stored in another file, which is not read")
        try:
            found: Array = self._onnx.numpy_helper.to_array(tensor)
        except Exception as error:  # ValueError, TypeError, KeyError: by what is wrong with it
            why = plain(error)
            raise WeightsError(f"{what}: '{plain(name)}' is damaged: {why}") from None
        if found.dtype.kind == "O":
            raise WeightsError(f"{what}: '{plain(name)}' holds text")
        return found

    def zero_point(self, node: Any, what: str) -> Array | None:
        """The zero point of a node, which must be 0; None where it has none."""
        if len(node.input) < 3 or not node.input[2]:
            return None
        zero = self.constant(node.input[2], what)
        if np.any(zero.astype(np.int64) != 0):
            first = int(zero.astype(np.int64).reshape(-1)[np.flatnonzero(zero)[0]])
            raise WeightsError(
                f"{what}: the zero point of {node.op_type} '{plain_name(node)}' is {first}; "
                "kernels take 0 only: quantise symmetrically, with uint8 behind a ReLU from 0 on"
            )
        return zero

    def unrounded(self, name: str, what: str) -> tuple[str, list[_Rounding]]:
        """The value behind pairs of QuantizeLinear and DequantizeLinear, the last pair first."""
        roundings: list[_Rounding] = []
        while self.is_made_by(name, "DequantizeLinear"):
            outer = self._makers[name]
            if outer.input[0] in self._constants:
                break
            inner = self.maker(outer.input[0], "QuantizeLinear", what=what)
            ends = [self._rounding(node, what) for node in (outer, inner)]
            if ends[0] != ends[1]:
                raise WeightsError(f"{what}: it is quantised and dequantised by different scales")
            roundings.append(ends[1])
            name = inner.input[0]
        return name, roundings

    def carried(self, name: str, what: str) -> list[_Rounding]:
        """The rounding of a value that is only moved since: pooled by maxima, or flattened.

        Tools such as NNCF do not quantise what such nodes make a second time.
        """
        while name in self._makers and self._makers[name].op_type in MOVES:
            name, roundings = self.unrounded(self._makers[name].input[0], what)
            if roundings:
                return roundings[:1]
        return []

    def _rounding(self, node: Any, what: str) -> _Rounding:
        scale = self.constant(node.input[1], what)
        zero = self.zero_point(node, what)
        if scale.size != 1 or scale.dtype != np.float32:
            raise WeightsError(
                f"{what}: an activation has one scale in float32, "
                f"{node.op_type} '{plain_name(node)}' has {scale.dtype} of shape {scale.shape}"
            )
        dtype = "uint8" if zero is None else zero.dtype.name
        if dtype not in ("uint8", "int8"):
            raise WeightsError(f"{what}: activations are uint8 or int8, not {dtype}")
        return _Rounding(np.float32(scale.reshape(-1)[0]), dtype)


def plain_name(node: Any) -> str:
    """A node's name, or else its first output's."""
    return show(node.name or node.output[0])[1:-1]


@dataclass
class _Reader:
    """Reads a graph next to a folded schedule, from the output backwards."""

    schedule: Schedule
    graph: _Graph
    left_out: list[str] = field(default_factory=list)
    _scales: dict[str, _Rounding] = field(default_factory=dict)
    _weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    _biases: dict[str, Array] = field(default_factory=dict)
    _bits: set[int] = field(default_factory=set)

    @property
    def folded(self) -> Schedule:
        return self.schedule

    def read(self) -> None:
        integers = quantized(self.schedule)
        formats = scaled_values(integers)
        tensors: dict[str, str] = {}
        value, roundings = self.graph.unrounded(self.graph.output, "the output")
        if roundings:
            self.left_out.append("the logits are rounded to integers; here they are float32")
        tensors[self.schedule.output] = value
        biases: list[tuple[Step, str]] = []
        for step in reversed(self.schedule.steps):
            if step.output not in tensors:
                raise WeightsError(f"step '{step.name}': nothing in the model reads what it makes")
            for source, name, bias in self._inputs(step, tensors[step.output]):
                self._reads(step, source, name, tensors, formats)
                if bias is not None:
                    biases.append((step, bias))
        image = tensors[self.schedule.input]
        if image not in self.graph.inputs:
            raise WeightsError(f"the first convolution reads '{image}', which is no input")
        for step in reversed(self.schedule.steps):  # now that every scale is known
            if isinstance(step.op, MaxPool2d):
                self._same_scale(step)
        for step, bias in biases:
            self._bias(step, bias)

    def quantization(self, sha256: str) -> Quantization:
        """The quantisation that was read. sha256: of the model, which takes the place of the
        images'."""
        if len(self._bits) > 1:
            raise WeightsError("some weights have 4 bits and others 8: all have the same")
        integers = quantized(self.schedule)
        for step, target in zip(self.schedule.steps, integers.steps[1:], strict=True):
            if step.name in self._weights:
                storage = target.op.input_storage[0]
                weight = self._weights[step.name].integers
                check_sums(step.name, storage, weight, self._biases[step.name])
        scales = {name: self._scales[name].scale for name in scaled_values(integers)}
        how = Calibration("converted", "converted", 0, sha256)
        return Quantization(self._bits.pop(), scales, self._weights, self._biases, how)

    # -- values --------------------------------------------------------------------------------

    def _reads(
        self, step: Step, value: str, name: str, tensors: dict[str, str], formats: dict[str, str]
    ) -> None:
        """Note the rounding of a value that a step reads, and where it is made."""
        what = f"step '{step.name}'"
        made, roundings = self.graph.unrounded(name, what)
        if not roundings:
            roundings = self.graph.carried(made, what)
        if not roundings:
            raise WeightsError(f"{what} reads '{value}' in numbers: the model does not quantise it")
        last, *earlier = roundings
        known = self._scales.setdefault(value, last)
        if known != last or tensors.setdefault(value, made) != made:
            raise WeightsError(f"'{value}' is quantised in two ways")
        if any(one != last for one in earlier):
            self._leave_out(f"'{value}' is rounded to integers twice; here once")
        wanted = formats.get(value)
        if wanted == "int8" and last.dtype == "uint8":
            raise WeightsError(
                f"'{value}' is uint8 with zero point 0, which cuts off what is negative in it; "
                "here it is int8"
            )
        if wanted == "uint8" and last.dtype == "int8":
            self._leave_out(f"'{value}' is int8 and saturates at 127; here it is uint8, up to 255")

    def _leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def _same_scale(self, step: Step) -> None:
        made, read = self._scales[step.output], self._scales[step.inputs[0]]
        if made != read:
            raise WeightsError(
                f"step '{step.name}': its output has the scale {made.scale} and its input "
                f"{read.scale}; max-pooling keeps its input's"
            )

    # -- steps ---------------------------------------------------------------------------------

    def _inputs(self, step: Step, name: str) -> Iterator[tuple[str, str, str | None]]:
        """Each value that a step reads, its name in the model, and with the first the bias's."""
        what = f"step '{step.name}'"
        match step.op:
            case Conv2d() as conv:
                yield from self._conv(step, conv, name)
            case MaxPool2d() as pool:
                node = self.graph.maker(name, "MaxPool", what=what)
                self._check_window(node, pool, what)
                yield step.inputs[0], node.input[0], None
            case GlobalAvgPool():
                node = self.graph.maker(name, "Flatten", "Reshape", "Squeeze", what=what)
                inner, roundings = self.graph.unrounded(node.input[0], what)
                last = self._scales[step.output]
                if any(one != last for one in roundings):
                    self._leave_out(f"'{step.output}' is rounded to integers twice; here once")
                node = self.graph.maker(inner, "GlobalAveragePool", what=what)
                yield step.inputs[0], node.input[0], None
            case Linear():
                node = self.graph.maker(name, "Gemm", what=what)
                self._weight(step, node, transposed=not _attribute(node, "transB", 0))
                if len(node.input) < 3:
                    raise WeightsError(f"{what}: Gemm '{plain_name(node)}' has no bias")
                yield step.inputs[0], node.input[0], node.input[2]
            case op:
                raise WeightsError(f"{what}: {op.label} is in no QDQ model")

    def _conv(self, step: Step, conv: Conv2d, name: str) -> Iterator[tuple[str, str, str | None]]:
        what = f"step '{step.name}'"
        if conv.relu:
            if self.graph.is_made_by(name, "Relu"):
                node = self.graph.maker(name, "Relu", what=what)
                name = self._without_rounding(node.input[0], step, "before its ReLU")
            elif self._scales[step.output].dtype != "uint8":
                raise WeightsError(f"{what}: expected Relu, found none, and int8 behind it")
        shortcut = ""
        if conv.residual:
            node = self.graph.maker(name, "Add", what=what)
            sides = list(node.input)
            inner = [self.graph.unrounded(side, what)[0] for side in sides]
            main = [index for index in (0, 1) if self._is_conv(inner[index], step)]
            if len(main) == 2:  # as in ResNet-50's first block, where the shortcut has its shape
                main = [index for index in main if self._reads_its_input(inner[index], step)]
            if len(main) != 1:
                raise WeightsError(f"{what}: '{plain_name(node)}' does not add its convolution")
            shortcut = sides[1 - main[0]]
            name = self._without_rounding(sides[main[0]], step, "before its residual is added")
        node = self.graph.maker(name, "Conv", what=what)
        self._check_window(node, conv, what)
        groups = _attribute(node, "group", 1)
        if groups != conv.groups:
            raise WeightsError(
                f"{what}: Conv '{plain_name(node)}' has {groups} group(s), here {conv.groups}"
            )
        self._weight(step, node)
        yield step.inputs[0], node.input[0], node.input[2] if len(node.input) > 2 else ""
        if conv.residual:
            yield step.inputs[1], shortcut, None

    def _without_rounding(self, name: str, step: Step, where: str) -> str:
        inner, roundings = self.graph.unrounded(name, f"step '{step.name}'")
        if roundings:
            self._leave_out(f"step '{step.name}' is rounded to integers {where}; here it is not")
        return inner

    def _is_conv(self, name: str, step: Step) -> bool:
        if not self.graph.is_made_by(name, "Conv"):
            return False
        node = self.graph.maker(name, "Conv", what="")
        source = self.graph.maker(node.input[1], "DequantizeLinear", what=f"step '{step.name}'")
        shape = self.graph.constant(source.input[0], f"step '{step.name}'").shape
        return shape == step.op.weights()[0].shape

    def _reads_its_input(self, name: str, step: Step) -> bool:
        """Whether a Conv reads what the step does, as far as the shape of the one before tells."""
        before = next((s for s in self.schedule.steps if s.output == step.inputs[0]), None)
        if before is None or not isinstance(before.op, Conv2d):
            return False
        what = f"step '{step.name}'"
        source, _ = self.graph.unrounded(self.graph.maker(name, "Conv", what=what).input[0], what)
        if self.graph.is_made_by(source, "Relu"):
            behind = self.graph.maker(source, "Relu", what=what).input[0]
            source, _ = self.graph.unrounded(behind, what)
        return self._is_conv(source, before)

    def _check_window(self, node: Any, op: Conv2d | MaxPool2d, what: str) -> None:
        wanted = {
            "strides": list(op.stride),
            "pads": [*op.padding, *op.padding],
            "dilations": list(op.dilation) if isinstance(op, Conv2d) else [1, 1],
            "kernel_shape": list(op.kernel_size),
        }
        default = {"strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1]}
        for key, value in wanted.items():
            found = list(_attribute(node, key, default.get(key, value)))
            if found != value:
                raise WeightsError(
                    f"{what}: {key} of {node.op_type} '{plain_name(node)}' is {found}, here {value}"
                )

    # -- weights -------------------------------------------------------------------------------

    def _weight(self, step: Step, node: Any, transposed: bool = False) -> None:
        what = f"step '{step.name}'"
        source = self.graph.maker(node.input[1], "DequantizeLinear", what=f"{what}, its weight")
        stored = self.graph.constant(source.input[0], what)
        kind = stored.dtype.name
        if kind not in ("int8", "int4"):
            raise WeightsError(f"{what}: its weight is {kind}, and kernels take int8 or int4")
        bits = 8 if kind == "int8" else 4
        integers = np.ascontiguousarray((stored.T if transposed else stored).astype(np.int8))
        shape = step.op.weights()[0].shape
        if integers.shape != shape:
            raise WeightsError(f"{what}: its weight has shape {integers.shape}, not {shape}")
        self.graph.zero_point(source, what)
        scale = self.graph.constant(source.input[1], what).astype(np.float32)
        axis = _attribute(source, "axis", 1) % stored.ndim
        if scale.size != 1 and (scale.shape != shape[:1] or axis != int(transposed)):
            raise WeightsError(f"{what}: its weight has no scale for each output channel")
        limit = limit_of(bits)
        if integers.size and int(integers.min()) < -limit:
            raise WeightsError(
                f"{what}: its weight goes down to {integers.min()}, and kernels take −{limit} … "
                f"{limit}: quantise weights symmetrically"
            )
        self._bits.add(bits)
        each = np.broadcast_to(scale.reshape(-1), shape[:1]).copy()
        self._weights[step.name] = QuantizedWeight(integers, each)

    def _bias(self, step: Step, name: str) -> None:
        """Read a bias: integers in units of the product's scale, or numbers, which are rounded to
        them."""
        what = f"step '{step.name}'"
        weight = self._weights[step.name]
        source = self._scales[step.inputs[0]].scale
        products = product_scales(step, source, weight.scale)
        if not name:
            self._biases[step.name] = np.zeros(len(products), np.int32)
            return
        if not self.graph.is_made_by(name, "DequantizeLinear"):
            numbers = self.graph.constant(name, what).astype(np.float64)
            self._leave_out(
                f"step '{step.name}' has a bias in numbers; here it is rounded to int32"
            )
            self._biases[step.name] = np.rint(numbers / products).astype(np.int32)
            return
        node = self.graph.maker(name, "DequantizeLinear", what=what)
        integers = self.graph.constant(node.input[0], what)
        scale = self.graph.constant(node.input[1], what)
        self.graph.zero_point(node, what)
        if integers.dtype != np.int32 or integers.shape != products.shape:
            raise WeightsError(f"{what}: its bias is {integers.dtype} of shape {integers.shape}")
        if not np.array_equal(np.broadcast_to(scale, products.shape), products):
            raise WeightsError(
                f"{what}: the scale of its bias is not its input's times its weight's, and a sum "
                "has one scale"
            )
        self._biases[step.name] = integers


def _attribute(node: Any, name: str, default: Any) -> Any:
    for one in node.attribute:
        if one.name == name:
            return one.i if one.type == one.INT else list(one.ints)
    return default


__all__ = ["Converted", "read_qdq"]
