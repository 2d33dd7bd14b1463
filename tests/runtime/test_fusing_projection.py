"""A block's last convolution and its projection in one step: when a plan fuses them, and what it
then computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import r18_numpy
from commands import r18
from r18.backend import Apart, Backend, CompileOptions, Fastest, Kernel, Problem
from r18.errors import NoKernel, UnknownName, UsageError
from r18.graph.ops import Conv2d, ConvProjection
from r18.graph.passes import FUSION_LEVELS, fold_weights, fuse, fuse_projection
from r18.graph.quantize import quantized
from r18.graph.resnet import resnet, tiny
from r18.graph.scaling import scaled
from r18.graph.schedule import CANONICAL, Schedule, checkpoint_names
from r18.runtime.fusing import keeping_checkpoints, keeping_pools, schedule_for
from r18.runtime.plan import make_plan
from r18.weights import load_weights
from r18_oracle.dumps.dumps import read_dump, write_dump
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_images
from r18_oracle.network.images import seeded
from support import check_plan, images, random_weights, run_schedule

PLAIN = tiny()
BOTTLENECKS = resnet(blocks=(1, 1), width=8, classes=5, image_size=32, block="bottleneck")
BLOCKS = [f"layer{n}.0.conv2" for n in (2, 3, 4)]
SHORTCUT = ".downsample.0"
FUSED = ConvProjection.name


class Fusing(r18_numpy.Backend):
    """numpy, if it preferred pairs of ops."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return None


class ApartAtTwo(Fusing):
    """It has measured that the two ops are faster apart at batch 2, but for one block."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        fused = isinstance(problem.op, ConvProjection) and problem.output[1] != 64
        return Apart() if fused and problem.batch == 2 else None


class Without(Fusing):
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(k for k in super().kernels() if k.op is not ConvProjection)


class Narrow(Fusing):
    """Its kernel takes 16 outputs alone."""

    def kernels(self) -> tuple[Kernel, ...]:
        def refuses(problem: Problem) -> str | None:
            return None if problem.output[1] == 16 else "takes 16 outputs alone"

        return tuple(
            replace(k, refuses=refuses) if k.op is ConvProjection else k  # type: ignore[type-var]
            for k in super().kernels()
        )


def fused_in(backend: Backend, schedule: Schedule = PLAIN, **options: object) -> list[str]:
    """The plan's steps of fused projections, none of which has its projection's step too."""
    asked = CompileOptions(**options)  # type: ignore[arg-type]
    steps = make_plan(backend, schedule, asked).steps
    found = [step.name for step in steps if step.problem.op.name == FUSED]
    fused = {name.rsplit(".", 1)[0] for name in found}
    apart = {s.name.removesuffix(SHORTCUT) for s in steps if s.name.endswith(SHORTCUT)}
    assert not fused & apart
    named = [step.name for step in schedule.steps if step.name.endswith(SHORTCUT)]
    assert fused | apart == {name.removesuffix(SHORTCUT) for name in named}
    return found


# -- when a plan does ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_plan_fuses_where_a_kernel_takes_it(precision: str) -> None:
    assert fused_in(Fusing(), precision=precision) == BLOCKS
    assert fused_in(Without(), precision=precision) == []
    assert fused_in(Narrow(), precision=precision) == BLOCKS[:1]
    assert fused_in(ApartAtTwo(), batch=3, precision=precision) == BLOCKS
    assert fused_in(ApartAtTwo(), batch=2, precision=precision) == BLOCKS[2:]
    assert fused_in(r18_numpy.Backend(), precision=precision) == []


def test_a_bottleneck_s_third_convolution_takes_its_projection() -> None:
    blocks = ["layer1.0.conv3", "layer2.0.conv3"]
    assert fused_in(Fusing(), BOTTLENECKS) == blocks
    assert fused_in(Without(), BOTTLENECKS) == []


@pytest.mark.parametrize("level", FUSION_LEVELS[:-1])
def test_lower_levels_do_not(level: str) -> None:
    assert fused_in(Fusing(), fusion=level) == []


def test_networks_of_bytes_do_not() -> None:
    """Their convolutions are other ops."""
    for precision, form in (("int8", quantized), ("fp8", scaled)):
        assert fused_in(Fusing(), form(fuse(PLAIN, "all")), precision=precision) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({FUSED: "*"}, BLOCKS),
        ({"layer3.0.conv2": f"*/{FUSED}/*"}, [BLOCKS[1]]),
        ({FUSED: "*", "layer3.0.conv2": "*/conv2d/*"}, [BLOCKS[0], BLOCKS[2]]),
        ({FUSED: "*", "layer3.0.downsample.0": "*"}, [BLOCKS[0], BLOCKS[2]]),
        ({FUSED: "*", "conv2d": "*/conv2d/direct/*"}, BLOCKS),  # of the other convolutions
        ({"conv2d": "*"}, []),
        ({"conv2d": "*/conv2d/direct/*"}, []),
    ],
    ids=str,
)
def test_overrides_are_obeyed(overrides: dict[str, str], expected: list[str]) -> None:
    """A backend that prefers pairs also fuses those without an override."""
    assert fused_in(r18_numpy.Backend(), kernels=overrides) == expected
    rest = [] if {FUSED, "conv2d"} & overrides.keys() else BLOCKS
    assert fused_in(Fusing(), kernels=overrides) == sorted({*expected, *rest})


@pytest.mark.parametrize("step", ["layer3.0.conv2", "layer3.0.downsample.0"])
def test_an_override_of_either_convolution_keeps_them_apart(step: str) -> None:
    apart = [BLOCKS[0], BLOCKS[2]]
    assert fused_in(Fusing(), kernels={step: "*/conv2d/im2col/*"}) == apart
    ids = make_plan(
        Fusing(), PLAIN, CompileOptions(kernels={step: "*/conv2d/direct/*"})
    ).kernel_ids()
    assert ids[step] == "numpy/conv2d/direct/fp32"


def test_a_glob_of_both_ops_asks_for_neither() -> None:
    """Of the convolution, whose name the fused step has."""
    kernels = {"layer3.0.conv2": "*"}
    assert fused_in(Fusing(), kernels=kernels) == BLOCKS
    assert fused_in(r18_numpy.Backend(), kernels=kernels) == []


def test_what_was_asked_for_and_cannot_be_is_an_error() -> None:
    with pytest.raises(NoKernel, match=r"numpy/conv2d_projection/im2col/fp32: takes 16 outputs"):
        fused_in(Narrow(), kernels={FUSED: "numpy/conv2d_projection/im2col/*"})
    with pytest.raises(NoKernel, match=r"numpy/conv2d_projection/im2col/fp32: takes 16 outputs"):
        fused_in(Narrow(), kernels={"layer3.0.conv2": "numpy/conv2d_projection/im2col/*"})
    with pytest.raises(UnknownName, match="unknown kernel"):
        fused_in(Without(), kernels={FUSED: "numpy/conv2d_projection/*"})
    with pytest.raises(UsageError, match="kernel override 'conv2d_projection'"):
        fused_in(Fusing(), kernels={FUSED: "*"}, fusion="conv_bn_relu")


# -- what a plan keeps --------------------------------------------------------------------------


@pytest.mark.parametrize("tap", ["layer3.0.downsample", "layer3.0.downsample.1"])
def test_a_tapped_shortcut_keeps_its_block_s_two_apart(tap: str) -> None:
    apart = [BLOCKS[0], BLOCKS[2]]
    assert fused_in(Fusing(), taps=(tap,)) == apart
    assert fused_in(Fusing(), taps=("layer3", "layer3.0", "layer2.0.relu")) == BLOCKS
    plan = make_plan(Fusing(), PLAIN, CompileOptions(taps=(tap,)))
    assert plan.schedule.value_of(tap) == "layer3.0.downsample.1"


def test_a_tap_comes_before_what_was_asked_for() -> None:
    tap = ("layer3.0.downsample",)
    assert fused_in(Fusing(), taps=tap, kernels={FUSED: "*"}) == [BLOCKS[0], BLOCKS[2]]


def test_a_plan_without_taps_has_no_shortcuts() -> None:
    fused = schedule_for(Fusing(), PLAIN, CompileOptions())
    assert not [name for name in fused.taps if "downsample" in name]
    assert not [name for name in checkpoint_names(fused) if "downsample" in name]
    with pytest.raises(UnknownName, match=r"unknown checkpoint 'layer3\.0\.downsample'"):
        fused.value_of("layer3.0.downsample")
    whole = schedule_for(Fusing(), PLAIN, keeping_checkpoints(PLAIN, CompileOptions()))
    assert tuple(checkpoint_names(whole)) == CANONICAL
    assert fused_in(Fusing(), taps=CANONICAL) == BLOCKS  # none of which is a shortcut
    assert fused_in(Fusing(), kernels=keeping_pools(PLAIN)) == BLOCKS


def test_a_dump_has_a_shortcut_where_it_is_named(tmp_path: Path) -> None:
    """All of a plan's checkpoints are those that it has: a fused shortcut is none of them."""
    weights = load_weights("synthetic", PLAIN)
    for backend in (Fusing(), r18_numpy.Backend()):
        fuses = isinstance(backend, Fusing)
        for checkpoints, has in (
            ("canonical", False),
            ("all", not fuses),
            (("layer3.0.downsample", "logits"), True),
        ):
            folder = tmp_path / f"{fuses}{has}{len(checkpoints)}"
            write_dump(folder, backend, PLAIN, weights, seeded(PLAIN), checkpoints=checkpoints)
            names = [file.name for file in read_dump(folder).checkpoints]
            assert "logits" in names
            assert ("layer3.0.downsample" in names) == has


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("schedule", [PLAIN, BOTTLENECKS], ids=lambda s: s.name)
def test_the_network_is_verified_with_and_without_taps(schedule: Schedule, precision: str) -> None:
    """A shortcut that is named stays apart; all that a plan has are those that it keeps."""
    weights = random_weights(schedule, dtype=np.float64)
    given = seeded_images(schedule, 2)
    report = compare_checkpoints(Fusing(), schedule, weights, given, precision=precision)
    assert not report.findings
    assert FUSED in {step.problem.op.name for step in report.steps}
    assert max(step.ratio for step in report.steps) <= 1
    taps = "layer2.0.downsample", "logits"
    tapped = compare_checkpoints(Fusing(), schedule, weights, given, precision=precision, taps=taps)
    assert not tapped.findings
    assert set(taps) <= {row.name for row in tapped.checkpoints}
    kept = {step.step for step in tapped.steps}
    assert "layer2.0.downsample.0" in kept
    every = compare_checkpoints(Fusing(), schedule, weights, given, precision=precision, taps="all")
    assert not every.findings
    assert "layer2.0.downsample" not in {row.name for row in every.checkpoints}


# -- what it gives ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [PLAIN, BOTTLENECKS], ids=lambda s: s.name)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_results_are_those_of_two_steps(precision: str, schedule: Schedule) -> None:
    """To the bit: NumPy's kernel stores the projection in the format that it sums in."""
    x, weights = images(schedule, 2), random_weights(schedule)
    found = []
    for kernels in ({}, {FUSED: "*"}):
        options = CompileOptions(batch=2, precision=precision, kernels=kernels)
        program = r18_numpy.Backend().compile(schedule, weights, options)
        found.append(program(x))
        fuses = any(step.problem.op.name == FUSED for step in program.plan.steps)
        assert fuses == bool(kernels)
    assert found[0].tobytes() == found[1].tobytes()
    assert np.unique(found[0]).size > 1


def test_the_results_are_near_the_level_none() -> None:
    weights, x = random_weights(PLAIN, dtype=np.float64), images(PLAIN, 2)
    program = Fusing().compile(PLAIN, weights, CompileOptions(batch=2, taps=CANONICAL))
    program(x)
    expected = run_schedule(PLAIN, fold_weights(PLAIN, weights), x.astype(np.float64))
    for name in CANONICAL:
        value = expected[PLAIN.value_of(name)]
        atol = 1e-4 * float(np.abs(value).max())
        np.testing.assert_allclose(program.fetch(name), value, atol=atol)


def test_a_slice_runs_alone() -> None:
    """With the weights of both folds."""
    weights, part = random_weights(PLAIN), fuse(PLAIN, "all").between("layer1", "layer2")
    fused = fuse_projection(fuse(PLAIN, "all")).between("layer1", "layer2")
    x = images(part, 2)
    results = [r18_numpy.Backend().compile(s, weights, CompileOptions(2))(x) for s in (part, fused)]
    assert results[0].tobytes() == results[1].tobytes()


def test_the_plan_is_sound_and_smaller() -> None:
    plans = [make_plan(one, PLAIN, CompileOptions(batch=2)) for one in (Fusing(), Without())]
    fused, apart = plans
    check_plan(fused, Fusing().memory.alignment)
    assert len(fused.steps) == len(apart.steps) - len(BLOCKS)
    assert not [key for key in fused.tensors if "downsample" in key]
    assert fused.arena_nbytes <= apart.arena_nbytes
    again = make_plan(Fusing(), fused.schedule, CompileOptions(batch=2))
    assert again.schedule == fused.schedule


def test_a_step_reads_both_images_and_both_weights() -> None:
    plan = make_plan(Fusing(), PLAIN, CompileOptions())
    step = next(step for step in plan.steps if step.name == "layer2.0.conv2")
    assert step.inputs == ("layer2.0.relu", "layer1.0.relu_1")
    assert isinstance(step.problem.op, ConvProjection)
    assert isinstance(step.problem.op.projection, Conv2d)
    assert plan.schedule.step("layer2.0.conv2").weights == (
        *("layer2.0.conv2.folded_weight", "layer2.0.conv2.folded_bias"),
        *("layer2.0.downsample.0.folded_weight", "layer2.0.downsample.0.folded_bias"),
    )


def test_verification_runs_the_fused_kernels(tmp_path: Path) -> None:
    done = r18(
        *("verify", "--backend", "numpy", "--network", "tiny", "--kernels", f"numpy/{FUSED}/*"),
        *("--json", "--findings", tmp_path),
    )
    assert done.code == 0, done.err + done.out
    (result,) = json.loads(done.out)["backends"]
    assert {kernel["verdict"] for kernel in result["kernels"]} == {"ok"}
    assert [kernel["network_problems"] for kernel in result["kernels"]] == [3, 3]
