"""Bottlenecks, groups and dilation, on every backend that computes them, against float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from r18.backend import CompileOptions
from r18.backend.registry import get_backend, load_backend
from r18.graph.resnet import FAMILY, network, resnet
from r18.graph.schedule import CANONICAL
from r18.runtime.plan import make_plan
from r18.weights import Weights, load_weights
from r18_oracle.network.checkpoints import UNTAPPED, compare_checkpoints, seeded_images, text

SMALL = ("tiny_bottleneck", "tiny_resnext")
FLOATS = [
    ("numpy", "fp32"),
    ("numpy", "fp64"),
    ("torch", "fp32"),
    ("torch", "fp16"),
    ("torch", "bf16"),
    ("numba-cpu", "fp32"),
]


@cache
def weights_of(name: str) -> Weights:
    return load_weights("synthetic", network(name))


def compare(backend: str, name: str, **options: Any) -> Any:
    schedule = network(name)
    images = seeded_images(schedule, 2, seed=5)
    return compare_checkpoints(get_backend(backend), schedule, weights_of(name), images, **options)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("backend", "precision"), FLOATS)
def test_every_module_path_is_right_at_level_none(backend: str, precision: str, name: str) -> None:
    report = compare(backend, name, precision=precision, fusion="none", taps="all")
    assert report.ok, text(report)
    assert {row.name for row in report.checkpoints} >= {"layer2.1.relu_2", "layer1.0.downsample"}
    assert max(step.ratio for step in report.steps) <= 1


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("backend", "precision"), [*FLOATS, ("numba-cpu", "bf16")])
def test_a_fused_network_is_right_at_every_checkpoint(
    backend: str, precision: str, name: str
) -> None:
    report = compare(backend, name, precision=precision, fusion="all")
    assert report.ok, text(report)
    assert [row.name for row in report.checkpoints] == [*CANONICAL, UNTAPPED]
    for row in report.checkpoints:
        assert 0.005 < row.loss.ratio < 0.7, row  # neither near the limit nor idle
        assert row.loss.cosine > (0.99 if precision == "bf16" else 0.999)


@pytest.mark.parametrize("backend", ["numpy", "torch", "numba-cpu"])
@pytest.mark.parametrize("name", SMALL)
def test_every_integer_is_the_specified_one(backend: str, name: str) -> None:
    report = compare(backend, name, precision="int8", taps="all")
    assert report.ok, text(report)
    assert {row.loss.max_abs for row in report.checkpoints} == {0.0}
    assert {step.ratio for step in report.steps} == {0.0}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("backend", ["cupy", "numba"])
def test_a_gpu_plans_it(backend: str, name: str) -> None:
    """GPU backends plan the family, without a device."""
    options = CompileOptions(batch=8, precision="fp32", fusion="all")
    plan = make_plan(load_backend(backend), network(name), options)
    assert {step.name for step in plan.steps} >= {"conv1", "layer4.0.downsample.0"}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_simulator_computes_a_bottleneck(precision: str, groups: int) -> None:
    """The simulator computes a small bottleneck, in seconds."""
    backend = get_backend("numba")
    if not backend.probe().simulated:
        pytest.skip("a GPU computes here")
    schedule = resnet(
        "small", block="bottleneck", blocks=(1,), width=4, groups=groups, classes=3, image_size=16
    )
    weights = load_weights("synthetic", schedule)
    images = seeded_images(schedule, 1)
    report = compare_checkpoints(backend, schedule, weights, images, precision=precision)
    assert report.ok, text(report)
