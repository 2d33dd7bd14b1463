"""A network and its weights as an ONNX model, for libraries that read one.

The model says what the schedule says, step by step and by the same names, and leaves folding and
fusing to whoever runs it. The package `onnx` is imported when it is needed: the core works without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from r18.backend import Array
from r18.errors import BackendUnavailable, ScheduleError, UsageError
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    ReLU,
    Softmax,
)
from r18.graph.passes import fold_weights
from r18.graph.schedule import Schedule, Step

if TYPE_CHECKING:
    import onnx

OPSET = 17
"""The operators are those of opset 15 and before: every library of the last years has them."""
IR_VERSION = 8
"""The file format that came with opset 17; a newer one is refused by libraries that are older."""


def onnx_model(
    schedule: Schedule, weights: Mapping[str, Array], *, batch: int = 1
) -> onnx.ModelProto:
    """A schedule at fusion level `none` as an ONNX model in float32, checked by ONNX's own checker.

    One input (N, C, H, W) of the fixed batch, one output, and initializers, all by the schedule's
    names; a node carries its step's name. The epsilon of a BatchNorm is rounded to float32, which
    is all that ONNX holds of it.

    Raises `BackendUnavailable` where `onnx` is missing, `UsageError` for a batch below 1 or a fused
    schedule, `WeightsError` for a missing or misshapen weight, `ScheduleError` for an op that no
    network holds.
    """
    try:
        from onnx import TensorProto, checker, helper, numpy_helper
    except ImportError as error:
        raise BackendUnavailable(
            "onnx", f"it does not import: {error}", "pip install 'r18[peers]'"
        ) from error
    if batch < 1:
        raise UsageError(f"an ONNX model needs a batch of at least 1, got {batch}")
    if schedule.level != "none":
        raise UsageError(
            f"an ONNX model is made of fusion level 'none', got '{schedule.level}'\n"
            "  give the network as it is; the library that runs it fuses for itself"
        )
    shapes = schedule.shapes(batch)

    def value(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name])

    graph = helper.make_graph(
        [
            helper.make_node(kind, ins, outs, name, **attributes)
            for step in schedule.steps
            for kind, name, ins, outs, attributes in _nodes(step)
        ],
        schedule.name,
        [value(schedule.input)],
        [value(schedule.output)],
        [
            numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name)
            for name, array in fold_weights(schedule, weights).items()
        ],
    )
    model = helper.make_model(
        graph,
        producer_name="r18",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    checker.check_model(model, full_check=True)  # infers every shape, and compares
    return model


Node = tuple[str, str, list[str], list[str], dict[str, Any]]
"""Operator, name, inputs, outputs, attributes."""


def _nodes(step: Step) -> list[Node]:
    """A step in ONNX's operators: one each, but for the average, which ONNX leaves 4-d."""

    def node(operator: str, **attributes: Any) -> list[Node]:
        ins = [*step.inputs, *step.weights]  # ONNX has each op's weights in our order
        return [(operator, step.name, ins, [step.output], attributes)]

    match step.op:
        case Conv2d() as op if not (op.bias or op.residual or op.relu):
            return node("Conv", kernel_shape=op.kernel_size, **_window(op))
        case BatchNorm() as op:
            return node("BatchNormalization", epsilon=op.eps)
        case ReLU():
            return node("Relu")
        case Add(relu=False):
            return node("Add")
        case MaxPool2d() as op:
            return node("MaxPool", kernel_shape=op.kernel_size, **_window(op))
        case GlobalAvgPool():
            pooled = f"{step.output}:pooled"
            return [
                ("GlobalAveragePool", pooled, [*step.inputs], [pooled], {}),
                ("Flatten", step.name, [pooled], [step.output], {"axis": 1}),
            ]
        case Linear():
            return node("Gemm", transB=1)
        case Softmax():
            return node("Softmax", axis=1)
        case op:
            raise ScheduleError(f"step '{step.name}': a network at level 'none' has no {op.label}")


def _window(op: Conv2d | MaxPool2d) -> dict[str, Any]:
    """ONNX pads at the beginning of each axis, then at the end of each.

    Groups and dilation are written where they are not 1.
    """
    found: dict[str, Any] = {"strides": op.stride, "pads": (*op.padding, *op.padding)}
    if isinstance(op, Conv2d):
        found |= {"group": op.groups} if "groups" in op.extras else {}
        found |= {"dilations": op.dilation} if "dilation" in op.extras else {}
    return found


__all__ = ["IR_VERSION", "OPSET", "onnx_model"]
