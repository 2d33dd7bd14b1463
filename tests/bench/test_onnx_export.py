"""The network as an ONNX model: its content, its results in ONNX's evaluator, and refusals."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from r18.bench.baselines.onnx_export import onnx_model
from r18.errors import ScheduleError, UsageError, WeightsError
from r18.graph.ops import Conv2d, Layout, MaxPool2d, Relayout
from r18.graph.passes import fuse
from r18.graph.resnet import network, resnet18, resnet34, resnet50, tiny
from r18.graph.schedule import Checkpoint, Schedule, Step
from support import images, output_of, random_weights, run_schedule


def extents(value: Any) -> list[int]:
    return [extent.dim_value for extent in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize(
    "schedule",
    [tiny(), tiny(softmax=True), network("tiny_bottleneck"), network("tiny_resnext")],
    ids=["tiny", "softmax", "bottleneck", "resnext"],
)
def test_it_computes_the_network(schedule: Schedule) -> None:
    weights, x = random_weights(schedule), images(schedule, 3)
    model = onnx_model(schedule, weights, batch=3)
    (got,) = ReferenceEvaluator(model).run(None, {"image": x})
    expected = run_schedule(schedule, weights, x)[schedule.output]
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("make", "convolutions"), [(resnet18, 20), (resnet34, 36), (resnet50, 53), (tiny, 12)]
)
def test_a_node_is_a_step_by_name(make: Any, convolutions: int) -> None:
    schedule = make(image_size=64)
    weights = random_weights(schedule)
    graph = onnx_model(schedule, weights, batch=2).graph
    names = [node.name for node in graph.node if node.op_type != "GlobalAveragePool"]
    assert names == [step.name for step in schedule.steps]
    assert Counter(node.op_type for node in graph.node)["Conv"] == convolutions
    assert extents(graph.input[0]) == [2, 3, 64, 64]
    assert extents(graph.output[0]) == list(schedule.shapes(2)[schedule.output])
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert held.keys() == schedule.weight_specs.keys()
    assert all(np.array_equal(held[name], weights[name]) for name in held)


def test_what_a_model_says_of_its_version_is_old_enough_to_be_read() -> None:
    model = onnx_model(tiny(), random_weights(tiny()))
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)
    since = [onnx.defs.get_schema(node.op_type, 17).since_version for node in model.graph.node]
    assert max(since) <= 15


def test_a_convolution_and_a_pooling_of_different_extents_by_axis() -> None:
    """Pads and strides that differ by axis are exported in the right order; no ResNet has any."""
    schedule = Schedule(
        "uneven",
        (2, 11, 8),
        (
            Step(
                "conv", Conv2d(2, 3, (3, 5), (2, 1), (0, 2)), ("image",), "conv", ("conv.weight",)
            ),
            Step("pool", MaxPool2d((4, 2), (1, 2), (2, 0)), ("conv",), "pool"),
        ),
        (Checkpoint("pool", "pool"),),
    )
    weights, x = random_weights(schedule), images(schedule, 1)
    (got,) = ReferenceEvaluator(onnx_model(schedule, weights)).run(None, {"image": x})
    expected = run_schedule(schedule, weights, x)["pool"]
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_wider_weights_are_stored_as_float32() -> None:
    weights = random_weights(tiny(), dtype=np.float64)
    model = onnx_model(tiny(), weights)
    nbytes = sum(math.prod(tensor.dims) for tensor in model.graph.initializer) * 4
    assert nbytes == sum(weight.nbytes for weight in weights.values()) // 2
    assert nbytes < len(model.SerializeToString()) < 1.1 * nbytes


# -- what is refused ---------------------------------------------------------------------------


def test_refusals() -> None:
    weights = random_weights(tiny())
    with pytest.raises(UsageError, match="batch of at least 1, got 0"):
        onnx_model(tiny(), weights, batch=0)
    with pytest.raises(UsageError, match="of fusion level 'none', got 'all'"):
        onnx_model(fuse(tiny(), "all"), weights)
    with pytest.raises(WeightsError, match=r"needs the weight 'fc\.bias', which is not given"):
        onnx_model(tiny(), {name: w for name, w in weights.items() if name != "fc.bias"})
    moved = Schedule(
        "moved",
        (2, 4, 4),
        (Step("move", Relayout(Layout.NCHW, Layout.NHWC), ("image",), "move"),),
        (),
    )
    with pytest.raises(ScheduleError, match="step 'move': a network at level 'none' has no relay"):
        onnx_model(moved, {})


def test_a_missing_package_is_named_with_its_remedy() -> None:
    code = """
import sys
sys.modules["onnx"] = None  # importing it raises ImportError
from r18.errors import BackendUnavailable
from r18.bench.baselines.onnx_export import onnx_model
from r18.graph.resnet import tiny
try:
    onnx_model(tiny(), {})
except BackendUnavailable as error:
    print(error.cause.split(":")[0], "|", error.remedy)
"""
    assert output_of(code) == "it does not import | pip install 'r18[peers]'"
