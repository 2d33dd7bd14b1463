"""Global pooling and the classifier in one step: when a plan fuses them, and that no result
changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import r18_numpy
from commands import r18
from integer_networks import images_of, integer_weights
from quantised_weights import quantised_weights
from r18.backend import Apart, Backend, CompileOptions, Fastest, Kernel, Problem
from r18.errors import NoKernel, UsageError
from r18.graph.ops import AvgPoolLinear
from r18.graph.passes import (
    FUSION_LEVELS,
    fuse,
    fuse_classifier,
    fuse_ops,
    fuse_pairs,
    fuse_pool,
    fuse_projection,
)
from r18.graph.quantize import quantized
from r18.graph.quantized import QuantizedAvgPoolLinear
from r18.graph.resnet import resnet, tiny
from r18.graph.scaled import ScaledAvgPoolLinear
from r18.graph.scaling import scaled
from r18.graph.schedule import CANONICAL, checkpoint_names
from r18.runtime.fusing import keeping_checkpoints, keeping_pools, schedule_for
from r18.runtime.plan import make_plan
from r18.weights import load_weights
from r18.weights.precisions import in_precision
from r18_oracle.dumps.dumps import read_dump, write_dump
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_images
from r18_oracle.network.images import seeded
from support import images, random_weights

PLAIN = tiny()
FLOATS = fuse(PLAIN, "all")
SCHEDULES = {"fp32": FLOATS, "int8": quantized(FLOATS), "fp8": scaled(FLOATS)}
KINDS = pytest.mark.parametrize("precision", SCHEDULES)
OPS = {"fp32": AvgPoolLinear, "int8": QuantizedAvgPoolLinear, "fp8": ScaledAvgPoolLinear}
FUSED = {precision: op.name for precision, op in OPS.items()}
LAYER = {"fp32": "linear", "int8": "qlinear", "fp8": "slinear"}
POOL = {"fp32": "gap", "int8": "qgap", "fp8": "sgap"}


class Fusing(r18_numpy.Backend):
    """numpy, if it preferred fused poolings."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return None


class ApartAtTwo(Fusing):
    """It has measured that the two ops are faster apart at batch 2."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        fused = type(problem.op) in OPS.values()
        return Apart() if fused and problem.batch == 2 else None


class Without(Fusing):
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(k for k in super().kernels() if k.op not in OPS.values())


def last_ops(backend: Backend, precision: str, **options: object) -> list[str]:
    """The plan's ops that pool globally, or are the classifier."""
    schedule = SCHEDULES[precision]
    if options.get("fusion", "all") != "all":
        schedule = PLAIN
    asked = CompileOptions(precision=precision, **options)  # type: ignore[arg-type]
    steps = make_plan(backend, schedule, asked).steps
    names = [step.problem.op.name for step in steps]
    return [name for name in names if "gap" in name or "linear" in name]


# -- when a plan does ---------------------------------------------------------------------------


@KINDS
def test_a_plan_fuses_where_a_kernel_takes_it(precision: str) -> None:
    apart = [POOL[precision], LAYER[precision]]
    assert last_ops(Fusing(), precision) == [FUSED[precision]]
    assert last_ops(Without(), precision) == apart
    assert last_ops(ApartAtTwo(), precision, batch=2) == apart
    assert last_ops(ApartAtTwo(), precision, batch=3) == [FUSED[precision]]
    assert last_ops(r18_numpy.Backend(), precision) == apart


@pytest.mark.parametrize("level", FUSION_LEVELS[:-1])
def test_lower_levels_do_not(level: str) -> None:
    assert last_ops(Fusing(), "fp32", fusion=level) == ["gap", "linear"]


@KINDS
@pytest.mark.parametrize(
    ("overrides", "fuses"),
    [
        ({"FUSED": "*"}, True),
        ({"fc": "*/FUSED/*"}, True),
        ({"fc": "*/LAYER/*"}, False),
        ({"avgpool": "*"}, False),
        ({"POOL": "*"}, False),
        ({"LAYER": "*"}, False),
    ],
    ids=str,
)
def test_overrides_are_obeyed(overrides: dict[str, str], fuses: bool, precision: str) -> None:
    def named(text: str) -> str:
        for word, names in (("FUSED", FUSED), ("LAYER", LAYER), ("POOL", POOL)):
            text = text.replace(word, names[precision])
        return text

    kernels = {named(name): named(glob) for name, glob in overrides.items()}
    expected = [FUSED[precision]] if fuses else [POOL[precision], LAYER[precision]]
    for backend in (Fusing(), r18_numpy.Backend()):
        assert last_ops(backend, precision, kernels=kernels) == expected


@KINDS
def test_a_glob_of_both_ops_asks_for_neither(precision: str) -> None:
    apart = [POOL[precision], LAYER[precision]]
    assert last_ops(Fusing(), precision, kernels={"fc": "*"}) == [FUSED[precision]]
    assert last_ops(r18_numpy.Backend(), precision, kernels={"fc": "*"}) == apart


@KINDS
def test_what_was_asked_for_and_cannot_be_is_an_error(precision: str) -> None:
    with pytest.raises(NoKernel, match=f"no kernel takes {POOL[precision]}"):
        last_ops(Without(), precision, kernels={FUSED[precision]: "*"})
    with pytest.raises(UsageError, match="kernel override 'gap_linear'"):
        last_ops(Fusing(), "fp32", kernels={"gap_linear": "*"}, fusion="conv_bn_relu")


# -- what a plan keeps --------------------------------------------------------------------------


@KINDS
def test_a_tap_of_the_means_keeps_the_two_apart(precision: str) -> None:
    apart = [POOL[precision], LAYER[precision]]
    for taps in (("gap",), ("avgpool",), CANONICAL):
        assert last_ops(Fusing(), precision, taps=taps) == apart
    assert last_ops(Fusing(), precision, taps=("layer4", "logits")) == [FUSED[precision]]
    kept = keeping_pools(FLOATS)
    assert last_ops(Fusing(), precision, kernels=kept) == [FUSED[precision]]
    assert last_ops(Fusing(), precision, kernels=kept, taps=("avgpool",)) == apart


def test_a_plan_without_taps_has_no_means() -> None:
    fused = schedule_for(Fusing(), PLAIN, CompileOptions())
    assert "gap" not in checkpoint_names(fused)
    assert "avgpool" not in fused.taps
    whole = schedule_for(Fusing(), PLAIN, keeping_checkpoints(PLAIN, CompileOptions()))
    assert tuple(checkpoint_names(whole)) == CANONICAL


@pytest.mark.parametrize("checkpoints", ["canonical", "all"])
def test_a_dump_has_the_means(checkpoints: str, tmp_path: Path) -> None:
    weights = load_weights("synthetic", PLAIN)
    for backend in (Fusing(), r18_numpy.Backend()):
        folder = tmp_path / type(backend).__module__
        write_dump(folder, backend, PLAIN, weights, seeded(PLAIN), checkpoints=checkpoints)
        names = [file.name for file in read_dump(folder).checkpoints]
        assert "gap" in names
        assert "logits" in names


@KINDS
def test_the_network_is_verified_with_and_without_taps(precision: str) -> None:
    """Tapped, the plan has the means; untapped it is the one that users run."""
    weights = random_weights(PLAIN, dtype=np.float64)
    report = compare_checkpoints(
        Fusing(), PLAIN, weights, seeded_images(PLAIN, 2), precision=precision
    )
    assert not report.findings
    assert {row.name for row in report.checkpoints} >= {"gap", "logits"}
    every = compare_checkpoints(
        Fusing(), PLAIN, weights, seeded_images(PLAIN, 1), precision=precision, taps="all"
    )
    assert "gap" in {row.name for row in every.checkpoints}


# -- what it gives ------------------------------------------------------------------------------


def test_the_passes_keep_names_weights_and_work() -> None:
    for plain in SCHEDULES.values():
        fused = fuse_classifier(plain)
        step, pool, layer = fused.step("fc"), plain.step("avgpool"), plain.step("fc")
        assert (step.inputs, step.output) == (pool.inputs, layer.output)
        assert step.weights == (*layer.weights, *pool.weights)
        assert len(step.weights) == len(step.op.weights())
        assert fused.macs == plain.macs
        assert [c.name for c in plain.checkpoints if c not in fused.checkpoints] == ["gap"]
        assert fuse_classifier(fused) == fused
        assert fuse_classifier(plain, lambda step, pool: False) == plain
        assert fuse_pairs(plain) == fuse_classifier(fuse_projection(fuse_pool(plain)))
        assert fuse_ops(plain, {step.op.name}) == fused
        assert fuse_ops(plain, ()) == plain


def test_the_passes_ask_with_the_other_step() -> None:
    asked: list[tuple[str, str]] = []

    def wanted(fused: object, other: object) -> bool:
        asked.append((fused.name, other.name))  # type: ignore[attr-defined]
        return False

    fuse_pairs(FLOATS, wanted)
    blocks = [(f"layer{n}.0.conv2", f"layer{n}.0.downsample.0") for n in (2, 3, 4)]
    assert asked == [("conv1", "maxpool"), *blocks, ("fc", "avgpool")]


def test_means_that_are_read_twice_stay() -> None:
    plain = resnet(blocks=(1,), width=8, classes=8, image_size=32)
    linear = plain.step("fc")
    more = replace(linear, name="again", output="again", inputs=("avgpool",))
    twice = replace(plain, steps=(*plain.steps, more), output="again")
    assert fuse_classifier(twice) == twice


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_no_integer_changes(bits: int) -> None:
    schedule = quantized(FLOATS, bits)
    given = images_of(schedule, 3)
    weights = integer_weights(PLAIN, given, bits)
    options = CompileOptions(batch=3, precision="int8")
    apart = r18_numpy.Backend().compile(schedule, weights, options)
    fused = r18_numpy.Backend().compile(
        schedule, weights, replace(options, kernels={"qgap_linear": "*"})
    )
    assert len(apart.plan.steps) - len(fused.plan.steps) == 1
    expected = apart(given)
    assert np.unique(expected).size > 1
    np.testing.assert_array_equal(fused(given), expected)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "fp8"])
def test_the_results_are_those_of_two_steps(precision: str) -> None:
    x, options = images(PLAIN, 2), CompileOptions(batch=2, precision=precision)
    schedule, weights = PLAIN, random_weights(PLAIN)
    if precision == "fp8":
        schedule, weights = in_precision(PLAIN, quantised_weights(), options)
    fused = FUSED.get(precision, "gap_linear")
    found = [
        r18_numpy.Backend()
        .compile(schedule, weights, replace(options, kernels=kernels))(x)
        .tobytes()
        for kernels in ({}, {fused: "*"})
    ]
    assert found[0] == found[1]


def test_verification_runs_the_fused_kernels(tmp_path: Path) -> None:
    done = r18(
        *("verify", "--backend", "numpy", "--network", "tiny", "--kernels", "numpy/*gap_linear/*"),
        *("--json", "--findings", tmp_path),
    )
    assert done.code == 0, done.err + done.out
    (result,) = json.loads(done.out)["backends"]
    assert {kernel["verdict"] for kernel in result["kernels"]} == {"ok"}
    assert [kernel["network_problems"] > 0 for kernel in result["kernels"]] == [True] * 4
