"""Passes: what each level fuses, what it never fuses, and that the numbers stay the same."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r18_numpy
from r18.backend import CompileOptions
from r18.errors import UsageError, WeightsError
from r18.graph.ops import Add, BatchNorm, Conv2d, ConvMaxPool, ConvProjection, MaxPool2d, ReLU
from r18.graph.passes import (
    FUSION_LEVELS,
    fold_batchnorm,
    fold_weights,
    fuse,
    fuse_conv_relu,
    fuse_pool,
    fuse_projection,
    fuse_residual,
)
from r18.graph.resnet import network, resnet, resnet18, tiny
from r18.graph.schedule import CANONICAL, Checkpoint, Schedule, Step
from support import Array, images, random_weights, run_schedule

FUSED_LEVELS = FUSION_LEVELS[1:]


def ops_of(schedule: Schedule) -> Counter[str]:
    return Counter(step.op.label for step in schedule.steps)


# -- levels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "ops"),
    [
        (
            "none",
            {"conv2d": 20, "batchnorm": 20, "relu": 17, "add": 8},
        ),
        (
            "add_relu",
            {"conv2d": 20, "batchnorm": 20, "relu": 9, "add+relu": 8},
        ),
        (
            "conv_bn_relu",
            {"conv2d+bias+relu": 9, "conv2d+bias": 11, "add+relu": 8},
        ),
        (
            "all",
            {"conv2d+bias+relu": 9, "conv2d+bias": 3, "conv2d+bias+residual+relu": 8},
        ),
    ],
)
def test_what_each_level_leaves_of_resnet18(level: str, ops: dict[str, int]) -> None:
    fused = fuse(resnet18(), level)
    assert ops_of(fused) == {**ops, "maxpool2d": 1, "gap": 1, "linear": 1}
    assert fused.level == level


def test_step_counts_of_the_levels() -> None:
    counts = {level: len(fuse(resnet18(), level).steps) for level in FUSION_LEVELS}
    assert counts == {"none": 68, "add_relu": 60, "conv_bn_relu": 31, "all": 23}


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_canonical_checkpoints_exist_at_every_level_on_the_same_values(level: str) -> None:
    plain, fused = resnet18(), fuse(resnet18(), level)
    shapes, expected = fused.shapes(2), plain.shapes(2)
    for name in (*CANONICAL, "layer1.0", "layer2.0.downsample", "layer4.1"):
        assert fused.value_of(name) == plain.value_of(name)
        assert shapes[fused.value_of(name)] == expected[plain.value_of(name)]


def test_a_fused_step_keeps_the_first_name_and_makes_the_last_value() -> None:
    steps = {s.name: s for s in fuse(resnet18(), "all").steps}
    assert (steps["conv1"].inputs, steps["conv1"].output) == (("image",), "relu")
    second = steps["layer2.0.conv2"]
    assert second.inputs == ("layer2.0.relu", "layer2.0.downsample.1")
    assert second.output == "layer2.0.relu_1"
    assert second.weights == ("layer2.0.conv2.folded_weight", "layer2.0.conv2.folded_bias")
    assert steps["layer1.0.conv2"].inputs == ("layer1.0.relu", "maxpool")


def test_the_level_none_is_the_schedule_itself() -> None:
    assert fuse(tiny(), "none") == tiny()


def test_fusing_twice_is_an_error() -> None:
    fused = fuse(tiny(), "add_relu")
    for level in FUSION_LEVELS:
        with pytest.raises(UsageError, match="schedule 'tiny' is already at level 'add_relu'"):
            fuse(fused, level)


def test_an_unknown_level_comes_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        fuse(tiny(), "conv_bn")
    assert str(caught.value) == (
        "unknown fusion level 'conv_bn', did you mean 'conv_bn_relu'?\n"
        "  known: add_relu, all, conv_bn_relu, none"
    )


def test_checkpoints_on_values_that_are_gone_are_gone() -> None:
    schedule = Schedule(
        "two",
        (3, 8, 8),
        (conv("conv", "image", 3), relu("relu", "conv")),
        (Checkpoint("inner", "conv"), Checkpoint("outer", "relu")),
    )
    assert [c.name for c in fuse(schedule, "all").checkpoints] == ["outer"]


# -- what may not be fused ---------------------------------------------------------------------


def conv(name: str, reads: str, channels: int = 4, bias: bool = False) -> Step:
    op = Conv2d(channels, 4, (3, 3), padding=(1, 1), bias=bias)
    return Step(name, op, (reads,), name, tuple(f"{name}.{spec.role}" for spec in op.weights()))


def batchnorm(name: str, reads: str) -> Step:
    op = BatchNorm(4)
    return Step(name, op, (reads,), name, tuple(f"{name}.{spec.role}" for spec in op.weights()))


def relu(name: str, reads: str) -> Step:
    return Step(name, ReLU(), (reads,), name)


def add(name: str, *reads: str) -> Step:
    return Step(name, Add(), reads, name)


def maxpool(name: str, reads: str) -> Step:
    return Step(name, MaxPool2d((3, 3), (2, 2), (1, 1)), (reads,), name)


def network_of(*steps: Step, channels: int = 4) -> Schedule:
    return Schedule("custom", (channels, 5, 5), steps, ())


TWO_READERS = {
    "conv before batchnorm": (
        "c",
        (conv("c", "image"), batchnorm("b", "c"), add("end", "b", "c")),
    ),
    "batchnorm before relu": (
        "b",
        (conv("c", "image"), batchnorm("b", "c"), relu("r", "b"), add("end", "b", "r")),
    ),
    "conv before relu": ("c", (conv("c", "image"), relu("r", "c"), add("end", "c", "r"))),
    "add before relu": (
        "a",
        (relu("x", "image"), add("a", "x", "image"), relu("r", "a"), add("end", "r", "a")),
    ),
    "conv before add": (
        "c",
        (conv("c", "image"), add("a", "c", "image"), add("end", "a", "c")),
    ),
    "conv twice into one add": ("c", (conv("c", "image"), add("end", "c", "c"))),
}


@pytest.mark.parametrize("level", FUSED_LEVELS)
@pytest.mark.parametrize("case", TWO_READERS)
def test_a_value_with_two_readers_is_never_fused_away(case: str, level: str) -> None:
    value, steps = TWO_READERS[case]
    schedule = network_of(*steps)
    fused = fuse(schedule, level)
    assert value in fused.shapes(1)
    assert_same_numbers(schedule, fused)


def test_a_convolution_with_bias_is_not_folded() -> None:
    """Its bias would have to be folded too; none of the networks has one."""
    schedule = network_of(conv("c", "image", bias=True), batchnorm("b", "c"))
    fused = fuse(schedule, "all")
    assert [s.op.label for s in fused.steps] == ["conv2d+bias", "batchnorm"]
    assert fused.folds == ()


def test_a_relu_between_convolution_and_batchnorm_is_fused_and_the_batchnorm_is_not_folded() -> (
    None
):
    schedule = network_of(conv("c", "image"), relu("r", "c"), batchnorm("b", "r"))
    fused = fuse(schedule, "all")
    assert [s.op.label for s in fused.steps] == ["conv2d+relu", "batchnorm"]
    assert_same_numbers(schedule, fused)


def test_a_convolution_that_has_an_epilogue_is_not_folded() -> None:
    """The BatchNorm comes behind the ReLU or the sum: folding would put it before."""
    clamped = network_of(conv("c", "image"), relu("r", "c"), batchnorm("b", "r"))
    summed = network_of(conv("c", "image"), add("a", "c", "image"), batchnorm("b", "a"))
    for plain, fused in ((clamped, fuse_conv_relu(clamped)), (summed, fuse_residual(summed))):
        assert len(fused.steps) == 2
        assert fold_batchnorm(fused).steps == fused.steps
        assert_same_numbers(plain, fold_batchnorm(fused))


def test_a_convolution_with_relu_takes_no_residual() -> None:
    """ReLU(conv) + x is not ReLU(conv + x)."""
    schedule = network_of(conv("c", "image"), relu("r", "c"), add("a", "r", "image"))
    fused = fuse(schedule, "all")
    assert [s.op.label for s in fused.steps] == ["conv2d+relu", "add"]
    assert_same_numbers(schedule, fused)


def test_one_of_two_convolutions_into_a_sum_takes_the_other_as_its_residual() -> None:
    schedule = network_of(conv("c", "image"), conv("d", "image"), add("a", "c", "d"))
    fused = fuse(schedule, "all")
    assert sorted(s.op.label for s in fused.steps) == ["conv2d", "conv2d+residual"]
    assert_same_numbers(schedule, fused)


def test_a_convolution_moves_behind_what_its_residual_needs() -> None:
    """`c` is made first and is the one fused; its residual `late` is made after it."""
    schedule = network_of(
        conv("c", "image"), relu("early", "image"), relu("late", "early"), add("a", "c", "late")
    )
    fused = fuse(schedule, "all")
    assert [s.output for s in fused.steps] == ["early", "late", "a"]
    assert_same_numbers(schedule, fused)


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_the_output_stays_the_output_when_another_step_lies_in_between(level: str) -> None:
    """A step whose value nothing reads is allowed, and must not become the network's output."""
    schedule = network_of(conv("c", "image"), relu("side", "image"), relu("end", "c"))
    assert schedule.output == "end"
    assert fuse(schedule, level).output == "end"


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_the_output_is_never_fused_away(level: str) -> None:
    """A stated output has a reader outside the schedule, beside the one inside it."""
    steps = (conv("c", "image"), relu("r", "c"))
    schedule = Schedule("custom", (4, 5, 5), steps, (), output="c")
    fused = fuse(schedule, level)
    assert fused.output == "c"
    assert_same_numbers(schedule, fused)


# -- max-pooling -------------------------------------------------------------------------------


def test_the_stem_takes_its_pooling() -> None:
    plain = fuse(resnet18(), "all")
    fused = fuse_pool(plain)
    stem, *rest = fused.steps
    assert stem.op == ConvMaxPool(plain.steps[0].op, plain.steps[1].op)
    assert (stem.name, stem.inputs, stem.output) == ("conv1", ("image",), "maxpool")
    assert stem.weights == ("conv1.folded_weight", "conv1.folded_bias")
    assert tuple(rest) == plain.steps[2:]
    assert (fused.level, fused.folds, fused.macs) == ("all", plain.folds, plain.macs)
    assert fused.checkpoints == plain.checkpoints
    assert set(plain.taps) - set(fused.taps) == {"relu"}
    assert fuse_pool(fused) == fused


def test_whether_the_pooling_is_taken_is_asked() -> None:
    plain = fuse(resnet18(), "all")
    asked: list[tuple[Step, Step]] = []

    def never(fused: Step, pool: Step) -> bool:
        asked.append((fused, pool))
        return False

    assert fuse_pool(plain, never) == plain
    assert asked == [(fuse_pool(plain).steps[0], plain.step("maxpool"))]


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_a_fused_pooling_computes_the_same(level: str) -> None:
    """The network's own, and of each convolution alone behind which nothing else stands."""
    bare = network_of(conv("c", "image"), maxpool("p", "c"), relu("r", "p"))
    for plain in (tiny(), bare):
        fused = fuse_pool(fuse(plain, level))
        fits = plain is bare or level in ("conv_bn_relu", "all")
        assert any(isinstance(step.op, ConvMaxPool) for step in fused.steps) == fits
        assert_same_numbers(plain, fused)


def test_a_convolution_that_is_read_twice_keeps_its_pooling_apart() -> None:
    schedule = network_of(
        conv("c", "image"), maxpool("p", "c"), maxpool("q", "c"), add("a", "p", "q")
    )
    assert fuse_pool(schedule) == schedule
    stated = Schedule("custom", (4, 5, 5), schedule.steps[:2], (), output="c")
    assert fuse_pool(stated) == stated


def test_a_convolution_with_residual_keeps_its_pooling_apart() -> None:
    """The op has no second input."""
    schedule = network_of(conv("c", "image"), add("a", "c", "image"), maxpool("p", "a"))
    summed = fuse_residual(schedule)
    assert [s.op.label for s in summed.steps] == ["conv2d+residual", "maxpool2d"]
    assert fuse_pool(summed) == summed


def test_a_slice_of_the_network_with_its_pooling_fused_is_a_slice() -> None:
    part = fuse_pool(fuse(resnet18(), "all")).between("image", "layer1")
    assert part == fuse_pool(fuse(resnet18().between("image", "layer1"), "all"))
    assert part.folds[0].conv == "conv1"


def test_a_slice_of_the_network_fuses_like_the_network() -> None:
    whole = fuse(resnet18(), "all").between("layer1", "layer2")
    part = fuse(resnet18().between("layer1", "layer2"), "all")
    assert part.steps == whole.steps
    assert part.folds == whole.folds


# -- projections -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "last", "blocks"),
    [
        ("resnet18", "conv2", (2, 3, 4)),
        ("resnet50", "conv3", (1, 2, 3, 4)),
        ("tiny", "conv2", (2, 3, 4)),
    ],
)
def test_the_last_convolution_of_a_block_takes_its_projection(
    name: str, last: str, blocks: tuple[int, ...]
) -> None:
    """A basic block's second, and a bottleneck's third; the first block of a stage has one."""
    plain = fuse(network(name), "all")
    fused = fuse_projection(plain)
    steps = [step for step in fused.steps if isinstance(step.op, ConvProjection)]
    assert [step.name for step in steps] == [f"layer{n}.0.{last}" for n in blocks]
    for step in steps:
        shortcut = plain.step(step.name.replace(last, "downsample.0"))
        conv = plain.step(step.name)
        assert step.op == ConvProjection(conv.op, shortcut.op)  # type: ignore[arg-type]
        assert step.inputs == (conv.inputs[0], *shortcut.inputs)
        assert step.weights == (*conv.weights, *shortcut.weights)
        assert len(step.weights) == len(step.op.weights())
        assert step.output == conv.output
    rest = [step for step in fused.steps if step not in steps]
    projections = {step.name.replace(last, "downsample.0") for step in steps}
    assert rest == [
        step
        for step in plain.steps
        if step.name not in projections and step.name not in {s.name for s in steps}
    ]
    assert (fused.level, fused.folds, fused.macs) == ("all", plain.folds, plain.macs)
    assert fused.shapes(3)[fused.output] == plain.shapes(3)[plain.output]
    gone = [c.name for c in plain.checkpoints if c not in fused.checkpoints]
    assert gone == [f"layer{n}.0.downsample" for n in blocks]
    values = {f"layer{n}.0.downsample.1" for n in blocks}
    assert set(plain.taps) - set(fused.taps) == {*gone, *values}
    assert fuse_projection(fused) == fused


def test_whether_the_projection_is_taken_is_asked() -> None:
    plain = fuse(resnet18(), "all")
    asked: list[tuple[Step, Step]] = []

    def third(fused: Step, projection: Step) -> bool:
        asked.append((fused, projection))
        return fused.name == "layer3.0.conv2"

    fused = fuse_projection(plain, third)
    assert [p.name for _, p in asked] == [f"layer{n}.0.downsample.0" for n in (2, 3, 4)]
    assert asked[0] == (
        fuse_projection(plain).step("layer2.0.conv2"),
        plain.step("layer2.0.downsample.0"),
    )
    assert [s.name for s in fused.steps if isinstance(s.op, ConvProjection)] == ["layer3.0.conv2"]
    assert fuse_projection(plain, lambda fused, projection: False) == plain


@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_a_fused_projection_computes_the_same(level: str) -> None:
    """At the highest level alone convolutions add residuals."""
    bottlenecks = resnet(blocks=(1, 1), width=8, classes=5, image_size=32, block="bottleneck")
    for plain in (tiny(), bottlenecks):
        fused = fuse_projection(fuse(plain, level))
        found = any(isinstance(step.op, ConvProjection) for step in fused.steps)
        assert found == (level == "all")
        assert_same_numbers(plain, fused)


def shortcut(*more: Step) -> Schedule:
    """A convolution that adds what another, `p`, makes of the image; and steps behind it."""
    return network_of(conv("c", "image"), conv("p", "image"), add("a", "c", "p"), *more)


def test_either_side_of_a_sum_of_two_convolutions_may_be_the_projection() -> None:
    summed = fuse_residual(shortcut(relu("end", "a")))
    assert [s.op.label for s in summed.steps] == ["conv2d", "conv2d+residual", "relu"]
    fused = fuse_projection(summed)
    assert [s.op.label for s in fused.steps] == ["conv2d+residual+conv2d", "relu"]
    assert_same_numbers(shortcut(relu("end", "a")), fused)


def test_a_projection_with_another_reader_stays() -> None:
    for more in ((add("end", "a", "c"),), (add("end", "a", "p"),)):
        summed = fuse_residual(shortcut(*more))
        assert fuse_projection(summed) == summed
    plain = fuse_residual(shortcut())
    first = plain.steps[0].output
    stated = Schedule("custom", (4, 5, 5), plain.steps, (), output=first)
    assert fuse_projection(stated) == stated


def test_a_residual_that_is_no_bare_convolution_s_stays() -> None:
    """One with a ReLU, one with a residual of its own, and one that nothing made."""
    with_relu = network_of(
        conv("c", "image"), conv("p", "image"), relu("r", "p"), add("a", "c", "r")
    )
    summed = fuse_residual(fuse_conv_relu(with_relu))
    assert [s.op.label for s in summed.steps] == ["conv2d+relu", "conv2d+residual"]
    assert fuse_projection(summed) == summed
    twice = network_of(
        conv("q", "image"), add("s", "q", "image"), conv("c", "image"), add("a", "c", "s")
    )
    summed = fuse_residual(twice)
    assert [s.op.label for s in summed.steps] == ["conv2d+residual"] * 2
    assert fuse_projection(summed) == summed


def test_a_convolution_that_only_reads_another_is_no_sum_of_both() -> None:
    """Its first input is what the other makes, and its residual the image."""
    chain = network_of(conv("p", "image"), conv("c", "p"), add("a", "c", "image"))
    summed = fuse_residual(chain)
    assert [s.op.label for s in summed.steps] == ["conv2d", "conv2d+residual"]
    assert fuse_projection(summed) == summed


def test_a_slice_of_the_network_with_its_projections_fused_is_a_slice() -> None:
    """Both BatchNorms of a fused step are folded in it."""
    part = fuse_projection(fuse(resnet18(), "all")).between("layer1", "layer2")
    assert part == fuse_projection(fuse(resnet18().between("layer1", "layer2"), "all"))
    assert any(isinstance(step.op, ConvProjection) for step in part.steps)
    assert [fold.conv for fold in part.folds][1:3] == ["layer2.0.conv2", "layer2.0.downsample.0"]
    assert {f"{fold.conv}.folded_weight" for fold in part.folds} == {
        name for name in part.weight_specs if name.endswith(".folded_weight")
    }


# -- folding -----------------------------------------------------------------------------------


def folded_parts(seed: int = 0) -> tuple[Schedule, Schedule, dict[str, Array]]:
    plain = network_of(conv("c", "image"), batchnorm("b", "c"))
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {
        "c.weight": rng.normal(size=(4, 4, 3, 3)),
        "b.weight": rng.normal(size=4),  # negative scales too
        "b.bias": rng.normal(size=4),
        "b.running_mean": rng.normal(size=4),
        "b.running_var": np.array([0.0, 1e-6, 0.5, 40.0]),  # where eps matters, and where not
    }
    return plain, fold_batchnorm(plain), weights


def test_folded_weights_are_batchnorm_after_convolution() -> None:
    plain, folded, weights = folded_parts()
    x = np.random.default_rng(1).normal(size=(3, 4, 5, 5))
    expected = run_schedule(plain, weights, x)["b"]
    given_weights = fold_weights(folded, weights)
    assert list(given_weights) == ["c.folded_weight", "c.folded_bias"]
    got = run_schedule(folded, given_weights, x)["b"]
    # Relative to the size of the terms: a channel with tiny variance has large ones.
    scale = np.abs(expected).max(axis=(0, 2, 3), keepdims=True)
    assert np.abs((got - expected) / scale).max() < 1e-12


def test_folding_is_done_in_float64_from_float32_weights() -> None:
    """So that rounding to storage is the only rounding that a folded kernel's weights see."""
    _, folded, weights = folded_parts()
    single = {name: array.astype(np.float32) for name, array in weights.items()}
    double = {name: array.astype(np.float64) for name, array in single.items()}
    for name, array in fold_weights(folded, single).items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, fold_weights(folded, double)[name])


def test_folding_leaves_its_arguments_alone_and_passes_on_what_it_does_not_fold() -> None:
    schedule = fuse(tiny(), "all")
    weights = random_weights(tiny())
    before = {name: array.copy() for name, array in weights.items()}
    folded = fold_weights(schedule, weights)
    assert list(folded) == list(schedule.weight_specs)
    assert folded["fc.weight"] is weights["fc.weight"]
    for name, array in before.items():
        np.testing.assert_array_equal(weights[name], array)


@pytest.mark.parametrize(
    "missing", ["c.weight", "b.weight", "b.bias", "b.running_mean", "b.running_var"]
)
def test_a_missing_weight_is_named(missing: str) -> None:
    _, folded, weights = folded_parts()
    del weights[missing]
    with pytest.raises(WeightsError, match=f"'custom' needs the weight '{missing}', which is not"):
        fold_weights(folded, weights)


def test_a_missing_weight_that_is_not_folded_is_named() -> None:
    weights = random_weights(tiny())
    del weights["fc.bias"]
    with pytest.raises(WeightsError, match=r"'tiny' needs the weight 'fc\.bias'"):
        fold_weights(tiny(), weights)


def test_folding_follows_the_names_that_the_steps_give_their_weights() -> None:
    """A step may name its weights as it likes; only torchvision's are `{step}.{role}`."""
    plain, _, weights = folded_parts()
    renamed = network_of(
        *(
            Step(s.name, s.op, s.inputs, s.output, tuple(f"backbone.{w}" for w in s.weights))
            for s in plain.steps
        )
    )
    theirs = {f"backbone.{name}": array for name, array in weights.items()}
    x = np.random.default_rng(1).normal(size=(1, 4, 5, 5))
    folded = fold_batchnorm(renamed)
    got = run_schedule(folded, fold_weights(folded, theirs), x)["b"]
    np.testing.assert_allclose(got, run_schedule(plain, weights, x)["b"], rtol=1e-9, atol=1e-9)


# -- numbers -----------------------------------------------------------------------------------


def assert_same_numbers(plain: Schedule, fused: Schedule, seed: int = 0) -> None:
    """Every value that both have is the same, in float64 to 1e-12 of its largest element."""
    weights = random_weights(plain, seed, np.float64)
    x = np.random.default_rng(seed).normal(size=(2, *plain.input_shape))
    expected = run_schedule(plain, weights, x)
    got = run_schedule(fused, fold_weights(fused, weights), x)
    assert plain.output in got
    for value, array in got.items():
        np.testing.assert_allclose(
            array, expected[value], rtol=0, atol=1e-12 * (np.abs(expected[value]).max() + 1)
        )


@pytest.mark.parametrize("level", FUSED_LEVELS)
def test_every_level_computes_what_level_none_computes(level: str) -> None:
    """The whole way, on a backend: each checkpoint that the level has, in float64."""
    schedule, backend = tiny(softmax=True), r18_numpy.Backend()
    weights = random_weights(schedule)
    x = images(schedule, 3).astype(np.float64)

    def outputs(at: str) -> dict[str, Array]:
        taps = tuple(fuse(schedule, at).taps)
        options = CompileOptions(batch=3, precision="fp64", fusion=at, taps=taps)
        program = backend.compile(schedule, weights, options)
        program(x)
        return {tap: program.fetch(tap) for tap in taps}

    expected, got = outputs("none"), outputs(level)
    assert {*CANONICAL, "softmax"} <= got.keys() <= expected.keys()
    for name, array in got.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12 * scale)


RESNETS = st.builds(
    resnet,
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    width=st.integers(1, 8),
    classes=st.integers(1, 12),
    image_size=st.integers(32, 80),
    softmax=st.booleans(),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(schedule=RESNETS)
def test_every_resnet_fuses_into_a_valid_schedule(schedule: Schedule) -> None:
    """Making a `Schedule` validates it: order, shapes, weights, folds, checkpoints."""
    readers = Counter(value for step in schedule.steps for value in step.inputs)
    shapes = schedule.shapes(2)
    blocks = sum(s.name.endswith(".add") for s in schedule.steps)
    convs = sum(isinstance(s.op, Conv2d) for s in schedule.steps)
    counts = []
    for level in FUSION_LEVELS:
        fused = fuse(schedule, level)
        counts.append(len(fused.steps))
        assert fused.macs == schedule.macs
        assert (fused.input, fused.output) == (schedule.input, schedule.output)
        left = fused.shapes(2)
        assert left.items() <= shapes.items()
        assert {value for value, count in readers.items() if count > 1} <= left.keys()
        known = {c.name: c.value for c in fused.checkpoints}
        assert {c.name: c.value for c in schedule.checkpoints} == known
    assert [before - after for before, after in pairwise(counts)] == [
        blocks,
        convs + 1 + blocks,  # every BatchNorm, and the ReLUs that are not behind a sum
        blocks,
    ]


@st.composite
def graphs(draw: st.DrawFn) -> Schedule:
    """Any graph of convolutions, BatchNorms, ReLUs and sums in which every step is needed."""
    values, steps = ["image"], []
    for index in range(draw(st.integers(1, 12))):
        name = f"s{index}"
        # Near values mostly, so that chains come up that can be fused.
        reads = st.sampled_from(values[-3:] if draw(st.booleans()) else values)
        kind = draw(st.sampled_from([conv, batchnorm, relu, add]))
        steps.append(
            add(name, draw(reads), draw(reads)) if kind is add else kind(name, draw(reads))
        )
        values.append(name)
    schedule = network_of(*steps)
    return schedule.between("image", schedule.output)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedule=graphs(), seed=st.integers(0, 99))
def test_any_graph_computes_the_same_at_every_level(schedule: Schedule, seed: int) -> None:
    readers: Counter[Any] = Counter(value for step in schedule.steps for value in step.inputs)
    for level in FUSED_LEVELS:
        fused = fuse(schedule, level)
        assert fused.output == schedule.output
        assert {value for value, count in readers.items() if count > 1} <= fused.shapes(1).keys()
        assert_same_numbers(schedule, fused, seed)


def test_support_computes_what_the_backend_computes() -> None:
    """The plain NumPy that these tests judge by is held to the backend's direct convolution."""
    schedule = tiny(softmax=True)
    weights = random_weights(schedule, dtype=np.float64)
    x = images(schedule, 2).astype(np.float64)
    options = CompileOptions(
        batch=2, precision="fp64", fusion="none", kernels={"conv2d": "numpy/conv2d/direct/fp64"}
    )
    program = r18_numpy.Backend().compile(schedule, weights, options)
    expected = run_schedule(schedule, weights, x)[schedule.output]
    np.testing.assert_allclose(program(x), expected, rtol=1e-10)
