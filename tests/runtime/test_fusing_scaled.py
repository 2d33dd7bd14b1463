"""A network's stem in e4m3 in one step: when a plan fuses it, and that no number changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import r18_numpy
from quantised_weights import quantised_weights
from r18.backend import Apart, Backend, CompileOptions, Fastest, Kernel, Problem
from r18.backend.host import HostKernel
from r18.errors import ShapeError, UnknownName
from r18.graph.ops import Conv2d, MaxPool2d, parts_of
from r18.graph.passes import fuse, fuse_image, fuse_pool
from r18.graph.resnet import resnet18, tiny
from r18.graph.scaled import Scale, ScaledConv2d, ScaledConvMaxPool
from r18.graph.scaling import scaled
from r18.graph.schedule import checkpoint_names
from r18.runtime.fusing import keeping_pools
from r18.runtime.plan import make_plan
from r18.weights.precisions import in_precision, is_scaled
from r18_oracle.findings import problem_from_json, problem_to_json

SCHEDULE = scaled(fuse(tiny(), "all"))
FUSED = ScaledConvMaxPool.name
FP8 = CompileOptions(precision="fp8")
APART = ["scale", "sconv2d", "maxpool2d"]
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))


class Fusing(r18_numpy.Backend):
    """numpy, if it preferred the fused stem."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return None


class OfNumbers(Fusing):
    """Its fused kernel takes e4m3 only."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            replace(k, refuses=lambda p: "takes e4m3" if p.op.image else None)
            if isinstance(k, HostKernel) and k.op is ScaledConvMaxPool
            else k
            for k in super().kernels()
        )


class ImagesApart(Fusing):
    """It has measured that an image is better scaled in a step of its own."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return Apart() if getattr(problem.op, "image", None) else None


def first_ops(backend: Backend, options: CompileOptions = FP8) -> list[str]:
    """The ops of the plan's first steps, to the pooling's value."""
    plan = make_plan(backend, SCHEDULE, options)
    last = next(i for i, step in enumerate(plan.steps) if step.output == "maxpool")
    return [step.problem.op.name for step in plan.steps[: last + 1]]


def test_a_plan_fuses_where_a_kernel_takes_it() -> None:
    assert first_ops(Fusing()) == [FUSED]
    assert first_ops(OfNumbers()) == first_ops(ImagesApart()) == ["scale", FUSED]
    assert first_ops(r18_numpy.Backend()) == APART


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({FUSED: "*"}, [FUSED]),
        ({FUSED: "*", "scale": "*"}, ["scale", FUSED]),
        ({"conv1": f"*/{FUSED}/*"}, [FUSED]),
        ({"conv1": "*/sconv2d/*"}, APART),
        ({"maxpool": "*"}, APART),
        ({"maxpool2d": "*"}, APART),
        ({"sconv2d": "*"}, APART),
    ],
    ids=str,
)
def test_overrides_are_obeyed(overrides: dict[str, str], expected: list[str]) -> None:
    for backend in (r18_numpy.Backend(), Fusing()):
        assert first_ops(backend, replace(FP8, kernels=overrides)) == expected


def test_the_passes_keep_names_weights_and_work() -> None:
    pooled = fuse_pool(SCHEDULE)
    first, stem = pooled.steps[:2]
    plain = SCHEDULE.step("conv1")
    assert (first, stem.name, stem.output) == (SCHEDULE.steps[0], "conv1", "maxpool")
    assert (stem.inputs, stem.weights) == (plain.inputs, plain.weights)
    whole = fuse_image(pooled)
    stem = whole.steps[0]
    assert (stem.name, stem.inputs, stem.output) == ("conv1", ("image",), "maxpool")
    assert stem.weights == (*plain.weights, "image.scale")
    assert whole.macs == pooled.macs == SCHEDULE.macs
    assert whole.checkpoints == pooled.checkpoints
    assert is_scaled(whole)
    assert fuse_image(whole) == whole
    assert fuse_pool(SCHEDULE, lambda fused, pool: False) == SCHEDULE
    problem = whole.problems(2)["conv1"]
    assert [type(part.op) for part in parts_of(problem)] == [Scale, ScaledConv2d, MaxPool2d]
    assert parts_of(problem)[-1].output == problem.output
    assert problem.op.input_storage == ("float32",)
    assert problem.op.label == "scale+sconv2d+bias+relu+maxpool2d"
    assert problem_from_json(problem_to_json(problem)) == problem


def test_the_op_checks_what_it_is_made_of() -> None:
    conv = ScaledConv2d(Conv2d(3, 4, (3, 3), bias=True))
    added = ScaledConv2d(replace(conv.conv, residual=True))
    with pytest.raises(ShapeError, match="is made of a ScaledConv2d and a MaxPool2d: Conv2d"):
        ScaledConvMaxPool(conv.conv, POOL)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="the convolution takes no residual"):
        ScaledConvMaxPool(added, POOL)
    with pytest.raises(ShapeError, match="image is a Scale"):
        ScaledConvMaxPool(conv, POOL, conv)  # type: ignore[arg-type]


def test_no_number_of_a_network_changes() -> None:
    """NumPy's fused kernel is its ops one after the other, a few images at a time."""
    options = replace(FP8, batch=3)
    schedule, weights = in_precision(tiny(), quantised_weights(), options)
    assert schedule == SCHEDULE
    x = np.random.default_rng(0).standard_normal(SCHEDULE.shapes(3)[SCHEDULE.input])
    fused = make_plan(Fusing(), SCHEDULE, options).schedule
    names = tuple(checkpoint_names(fused, "all"))
    options = replace(options, taps=names)
    expected = r18_numpy.Backend().compile(SCHEDULE, weights, options)
    found = Fusing().compile(SCHEDULE, weights, options)
    np.testing.assert_array_equal(found(x), expected(x))
    for name in names:
        theirs = np.asarray(expected.fetch(name), np.float64)
        assert np.unique(theirs).size > 1, f"{name} is constant: nothing is compared"
        np.testing.assert_array_equal(np.asarray(found.fetch(name), np.float64), theirs, name)


def test_every_value_is_kept_where_that_is_asked() -> None:
    value = SCHEDULE.step("conv1").output
    with pytest.raises(UnknownName, match="values inside fused steps do not exist"):
        make_plan(Fusing(), SCHEDULE, replace(FP8, taps=(value,)))
    kept = replace(FP8, taps=(value,), kernels=keeping_pools(SCHEDULE))
    assert value in make_plan(Fusing(), SCHEDULE, kept).tensors


def test_the_stem_of_resnet18_is_one_problem() -> None:
    schedule = fuse_image(fuse_pool(scaled(fuse(resnet18(), "all"))))
    assert schedule.problems(1)["conv1"].output == (1, 64, 56, 56)
