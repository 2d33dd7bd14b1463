"""A quantised network's stem in one step: when a plan fuses it, and that no integer changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import r18_numpy
from commands import r18
from integer_networks import images_of, integer_weights
from r18.backend import Apart, Backend, CompileOptions, Fastest, Kernel, Problem
from r18.backend.host import HostKernel
from r18.errors import NoKernel, UnknownName
from r18.graph.ops import parts_of
from r18.graph.passes import fold_weights, from_pixels, fuse, fuse_image, fuse_pool
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    QUANTIZED_OPS,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedMaxPool2d,
    QuantizePixels,
)
from r18.graph.resnet import resnet18, tiny
from r18.graph.schedule import checkpoint_names
from r18.images.preprocess import Preprocess
from r18.runtime.fusing import keeping_pools
from r18.runtime.plan import make_plan
from r18.weights.precisions import is_quantized

FLOATS = fuse(tiny(), "all")
SCHEDULE = quantized(FLOATS)
NORMALIZE = Preprocess().normalize
FUSED = QuantizedConvMaxPool.name
INT8 = CompileOptions(precision="int8")
PIXELS = replace(INT8, pixels=NORMALIZE)


class Fusing(r18_numpy.Backend):
    """numpy, if it preferred the fused stem."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return None


class OfIntegers(Fusing):
    """Its fused kernel makes no integers."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            replace(k, refuses=lambda p: "takes int8" if makes_integers(p) else None)
            if isinstance(k, HostKernel) and k.op is QuantizedConvMaxPool
            else k
            for k in super().kernels()
        )


class ImagesApart(Fusing):
    """It has measured that an image's integers are better made in a step of their own."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return Apart() if makes_integers(problem) else None


def makes_integers(problem: Problem) -> bool:
    return getattr(problem.op, "image", None) is not None


def first_ops(backend: Backend, options: CompileOptions) -> list[str]:
    """The ops of the plan's first steps, to the pooling's value."""
    plan = make_plan(backend, SCHEDULE, options)
    last = next(i for i, step in enumerate(plan.steps) if step.output == "maxpool")
    return [step.problem.op.name for step in plan.steps[: last + 1]]


APART = ["quantize", "qconv2d", "qmaxpool2d"]
MAKERS = pytest.mark.parametrize(
    ("options", "maker"),
    [(INT8, "quantize"), (PIXELS, "quantize_pixels")],
    ids=["floats", "pixels"],
)


@MAKERS
def test_a_plan_fuses_where_a_kernel_takes_it(options: CompileOptions, maker: str) -> None:
    assert first_ops(Fusing(), options) == [FUSED]
    assert first_ops(OfIntegers(), options) == [maker, FUSED]
    assert first_ops(ImagesApart(), options) == [maker, FUSED]
    assert first_ops(r18_numpy.Backend(), options) == [maker, *APART[1:]]


@MAKERS
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"qconv2d_maxpool2d": "*"}, [FUSED]),
        ({"qconv2d_maxpool2d": "*", "MAKER": "*"}, ["MAKER", FUSED]),
        ({"qconv2d_maxpool2d": "*", "quantize": "*"}, ["MAKER", FUSED]),
        ({"conv1": f"*/{FUSED}/*"}, [FUSED]),
        ({"conv1": "*/qconv2d/*"}, ["MAKER", "qconv2d", "qmaxpool2d"]),
        ({"maxpool": "*"}, ["MAKER", "qconv2d", "qmaxpool2d"]),
        ({"qmaxpool2d": "*"}, ["MAKER", "qconv2d", "qmaxpool2d"]),
        ({"qconv2d": "*"}, ["MAKER", "qconv2d", "qmaxpool2d"]),
    ],
    ids=str,
)
def test_overrides_are_obeyed(
    overrides: dict[str, str], expected: list[str], options: CompileOptions, maker: str
) -> None:
    """MAKER: the op that makes the image's integers. `quantize` is also the name of its step."""
    overrides = {name.replace("MAKER", maker): glob for name, glob in overrides.items()}
    for backend in (r18_numpy.Backend(), Fusing()):
        found = first_ops(backend, replace(options, kernels=overrides))
        assert found == [name.replace("MAKER", maker) for name in expected]


def test_the_passes_keep_names_weights_and_work() -> None:
    pooled = fuse_pool(SCHEDULE)
    first, stem = pooled.steps[:2]
    plain = SCHEDULE.step("conv1")
    assert (first, stem.name, stem.output) == (SCHEDULE.steps[0], "conv1", "maxpool")
    assert (stem.inputs, stem.weights) == (plain.inputs, plain.weights)
    assert [c.name for c in pooled.checkpoints] == [
        c.name for c in SCHEDULE.checkpoints if c.value != plain.output
    ]
    assert "stem_pool" in checkpoint_names(pooled)
    assert pooled.macs == SCHEDULE.macs
    whole = fuse_image(from_pixels(pooled, NORMALIZE))
    assert fuse_image(fuse_pool(from_pixels(SCHEDULE, NORMALIZE))) == whole
    stem = whole.steps[0]
    assert (stem.name, stem.inputs, stem.output) == ("conv1", ("pixels",), "maxpool")
    assert stem.weights == (*plain.weights, "image.table")
    assert whole.of_pixels
    assert is_quantized(whole)
    assert whole.checkpoints == pooled.checkpoints
    assert fuse_pool(SCHEDULE, lambda fused, pool: False) == SCHEDULE
    problem = whole.problems(2)["conv1"]
    kinds = [type(part.op) for part in parts_of(problem)]
    assert kinds == [QuantizePixels, QuantizedConv2d, QuantizedMaxPool2d]
    assert parts_of(problem)[-1].output == problem.output
    stem = fuse_image(pooled).steps[0]
    assert (stem.name, stem.inputs, stem.output) == ("conv1", ("image",), "maxpool")
    assert stem.weights == (*plain.weights, *SCHEDULE.steps[0].weights)
    assert fuse_image(pooled).checkpoints == pooled.checkpoints
    assert fuse_image(fuse_image(pooled)) == fuse_image(pooled)


def test_the_table_of_a_fused_step_is_the_same() -> None:
    weights = integer_weights(tiny(), images_of(SCHEDULE, 1), 8)
    apart = fold_weights(from_pixels(SCHEDULE, NORMALIZE), weights)
    fused = fuse_image(from_pixels(fuse_pool(SCHEDULE), NORMALIZE))
    assert fused.weight_specs.keys() == apart.keys()
    for name, value in fold_weights(fused, weights).items():
        np.testing.assert_array_equal(value, apart[name])


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_no_integer_of_a_network_changes(pixels: bool, bits: int) -> None:
    schedule, batch = quantized(FLOATS, bits), 3
    images = images_of(schedule, batch)
    weights = integer_weights(tiny(), images, bits)
    options = replace(PIXELS if pixels else INT8, batch=batch)
    given = images
    if pixels:
        given = np.random.default_rng(3).integers(0, 256, images.shape).astype(np.uint8)
    apart = make_plan(r18_numpy.Backend(), schedule, options).schedule
    fused = make_plan(Fusing(), schedule, options).schedule
    assert len(apart.steps) - len(fused.steps) == 3  # the stem is one step, and the classifier
    names = [name for name in checkpoint_names(fused, "all") if name in apart.taps]
    assert names == checkpoint_names(fused, "all")
    options = replace(options, taps=tuple(names))
    expected = r18_numpy.Backend().compile(schedule, weights, options)
    found = Fusing().compile(schedule, weights, options)
    np.testing.assert_array_equal(found(given), expected(given))
    for name in names:
        theirs = expected.fetch(name)
        assert np.unique(theirs).size > 1, f"{name} is constant: nothing is compared"
        np.testing.assert_array_equal(found.fetch(name), theirs, name)


def test_every_value_is_kept_where_that_is_asked() -> None:
    value = SCHEDULE.step("conv1").output
    with pytest.raises(UnknownName, match="values inside fused steps do not exist"):
        make_plan(Fusing(), SCHEDULE, replace(INT8, taps=(value,)))
    kept = replace(INT8, taps=(value,), kernels=keeping_pools(SCHEDULE))
    assert value in make_plan(Fusing(), SCHEDULE, kept).tensors


def test_what_was_asked_for_and_cannot_be_is_an_error() -> None:
    class Without(r18_numpy.Backend):
        def kernels(self) -> tuple[Kernel, ...]:
            return tuple(k for k in super().kernels() if k.op is not QuantizedConvMaxPool)

    assert first_ops(Without(), INT8) == APART
    with pytest.raises(NoKernel, match="no kernel takes qconv2d"):
        first_ops(Without(), replace(INT8, kernels={FUSED: "*"}))
    assert QuantizedConvMaxPool in QUANTIZED_OPS


def test_verification_runs_the_fused_kernel(tmp_path: Path) -> None:
    done = r18(
        *("verify", "--backend", "numpy", "--network", "tiny", "--kernels", f"numpy/{FUSED}/*"),
        *("--json", "--findings", tmp_path),
    )
    assert done.code == 0, done.err + done.out
    (result,) = json.loads(done.out)["backends"]
    (kernel,) = result["kernels"]
    assert kernel["verdict"] == "ok"
    assert kernel["network_problems"] == 3  # of nine that differ in bits and images
    assert kernel["problems"] > 15


def test_the_stem_of_resnet18_is_one_problem() -> None:
    problem = fuse_image(from_pixels(fuse_pool(quantized(fuse(resnet18(), "all"))), NORMALIZE))
    assert problem.problems(1)["conv1"].output == (1, 64, 56, 56)
