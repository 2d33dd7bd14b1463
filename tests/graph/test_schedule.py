"""The schedule is torchvision's network: names, shapes, weights, counts; and it is validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
import torchvision
from torchvision.models import get_model_weights
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from r18.errors import R18Error, ScheduleError, ShapeError, UnknownName
from r18.graph.ops import Add, BatchNorm, Conv2d, Linear, ReLU, Softmax
from r18.graph.passes import fuse
from r18.graph.resnet import FAMILY, NETWORKS, ResNet, network, resnet, resnet18, resnet50, tiny
from r18.graph.schedule import CANONICAL, Checkpoint, FoldedBatchNorm, Schedule, Step

DILATED = {
    "resnet50 dilated in layer4": ("resnet50", (False, False, True)),
    "resnext50_32x4d dilated in layer3 and layer4": ("resnext50_32x4d", (False, True, True)),
}
"""Dilated networks: torchvision's name and `replace_stride_with_dilation`."""

BUILD: dict[str, Callable[..., Schedule]] = {name: NETWORKS[name] for name in FAMILY} | {
    ours: partial(replace(FAMILY[name], dilate=dilate).schedule, ours)
    for ours, (name, dilate) in DILATED.items()
}
ALL = pytest.mark.parametrize("name", BUILD)


@cache
def theirs(name: str) -> torch.nn.Module:
    """torchvision's network with shapes only: its tensors hold no memory."""
    model, dilate = DILATED.get(name, (name, None))
    with torch.device("meta"):
        given = {} if dilate is None else {"replace_stride_with_dilation": list(dilate)}
        return torchvision.models.get_model(model, **given).eval()


@cache
def node_names(name: str) -> tuple[str, ...]:
    """torchvision's names of the nodes of its graph, in order, without the input."""
    _, evaluated = get_graph_node_names(theirs(name))
    assert evaluated[0] == "x"
    return tuple(evaluated[1:])


# -- torchvision -------------------------------------------------------------------------------


@cache
def extractor(name: str) -> torch.nn.Module:
    """torchvision's network with what each of its nodes computes."""
    return create_feature_extractor(theirs(name), [n for n in node_names(name) if n != "avgpool"])


@ALL
def test_step_names_are_torchvisions_node_names_in_order(name: str) -> None:
    """Steps are torchvision's nodes in order, except `flatten`, part of our average pool."""
    assert [s.name for s in BUILD[name]().steps] == [n for n in node_names(name) if n != "flatten"]


@ALL
@pytest.mark.parametrize("size", [224, 97, 32])
def test_every_intermediate_shape_is_torchvisions(name: str, size: int) -> None:
    with torch.no_grad():
        found = extractor(name)(torch.empty(3, 3, size, size, device="meta"))
    expected = {node: tuple(tensor.shape) for node, tensor in found.items()}
    expected["avgpool"] = expected.pop("flatten")
    schedule = BUILD[name](image_size=size)
    shapes = schedule.shapes(3)
    assert shapes.pop("image") == (3, 3, size, size)
    assert shapes == expected


@ALL
def test_weights_are_torchvisions_state_dict(name: str) -> None:
    """Weights have torchvision's names, order and shapes, without the counter of training steps."""
    expected = {
        key: tuple(tensor.shape)
        for key, tensor in theirs(name).state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    specs = BUILD[name]().weight_specs
    assert {key: spec.shape for key, spec in specs.items()} == expected
    assert all(key.endswith(f".{spec.role}") for key, spec in specs.items())


@ALL
def test_every_module_path_is_a_checkpoint_on_the_modules_output(name: str) -> None:
    """Each module path is a checkpoint: the output of its last node (a block's ReLU runs twice)."""
    schedule = BUILD[name]()
    paths = [path for path, _ in theirs(name).named_modules() if path]
    for path in paths:
        inside = [n for n in node_names(name) if n == path or n.startswith(f"{path}.")]
        assert schedule.value_of(path) == inside[-1]
    assert {"layer2.0.downsample", "layer4.1.bn2", "avgpool"} <= set(paths)


@ALL
def test_every_window_is_that_of_torchvisions_module(name: str) -> None:
    """Windows are torchvision's: shapes do not show strides, dilation and groups."""
    modules = dict(theirs(name).named_modules())
    for step in BUILD[name]().steps:
        if isinstance(step.op, Conv2d):
            module = modules[step.name]
            found = step.op.stride, step.op.padding, step.op.dilation, step.op.groups
            assert found == (module.stride, module.padding, module.dilation, module.groups)


def test_canonical_checkpoints_name_the_stages() -> None:
    schedule = resnet18()
    assert {name: schedule.value_of(name) for name in CANONICAL} == {
        "stem_pool": "maxpool",
        "layer1": "layer1.1.relu_1",
        "layer2": "layer2.1.relu_1",
        "layer3": "layer3.1.relu_1",
        "layer4": "layer4.1.relu_1",
        "gap": "avgpool",
        "logits": "fc",
    }
    order = [step.output for step in schedule.steps]
    positions = [order.index(schedule.value_of(name)) for name in CANONICAL]
    assert positions == sorted(positions)


def test_resnet18_counts() -> None:
    schedule = resnet18()
    assert schedule.parameters == 11_689_512
    assert schedule.macs == 1_814_073_344
    assert len(schedule.steps) == 68


@pytest.mark.parametrize("name", FAMILY)
def test_counts_are_those_that_torchvision_publishes(name: str) -> None:
    schedule, meta = BUILD[name](), get_model_weights(name).IMAGENET1K_V1.meta
    assert schedule.parameters == meta["num_params"]
    assert round(schedule.macs / 1e9, 3) == meta["_ops"]


def test_counts_do_not_depend_on_the_batch() -> None:
    schedule = tiny()
    one, five = schedule.problems(1), schedule.problems(5)
    assert all(five[name].macs == 5 * one[name].macs for name in one)
    assert schedule.macs == sum(p.macs for p in one.values())


# -- parameters --------------------------------------------------------------------------------


def test_tiny_has_every_op_and_both_kinds_of_shortcut() -> None:
    small, big = tiny(softmax=True), resnet18(softmax=True)
    assert {s.op.label for s in small.steps} == {s.op.label for s in big.steps}
    names = {s.name for s in small.steps}
    assert "layer2.0.downsample.0" in names
    assert "layer1.0.downsample.0" not in names
    assert {"layer1", "layer2", "layer3", "layer4"} <= {c.name for c in small.checkpoints}
    assert small.macs < big.macs / 1000


def test_softmax_comes_behind_the_logits() -> None:
    schedule = tiny(softmax=True)
    assert schedule.steps[-1] == Step("softmax", Softmax(), ("fc",), "softmax")
    assert schedule.output == "softmax"
    assert schedule.value_of("logits") == "fc"
    assert tiny().output == "fc"


def test_blocks_width_classes_and_size_are_parameters() -> None:
    schedule = resnet(blocks=(1, 3), width=5, classes=7, image_size=40)
    shapes = schedule.shapes(2)
    assert shapes["layer1.0.relu_1"] == (2, 5, 10, 10)
    assert shapes["layer2.2.relu_1"] == (2, 10, 5, 5)
    assert shapes["fc"] == (2, 7)
    assert {"layer1", "layer2"} <= {c.name for c in schedule.checkpoints}
    assert "layer3" not in schedule.taps


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"blocks": ()}, ScheduleError),
        ({"blocks": (2, 0)}, ScheduleError),
        ({"width": 0}, ShapeError),
        ({"classes": 0}, ShapeError),
        ({"image_size": 0}, ShapeError),
    ],
)
def test_parameters_that_make_no_network(
    parameters: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        resnet(**parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"block": "bottle"}, "unknown kind of block 'bottle', did you mean 'bottleneck'"),
        ({"groups": 2}, "basic blocks have one group"),
        ({"group_width": 4}, "basic blocks have one group"),
        ({"dilate": (False, False, True)}, "basic blocks do not dilate"),
        ({"block": "bottleneck", "dilate": (True,)}, "for each of the 3 stages after the first"),
        ({"block": "bottleneck", "dilate": (0, 1, 1)}, "dilate must be True or False"),
        ({"block": "bottleneck", "groups": 0}, "must be at least 1"),
        ({"block": "bottleneck", "width": 8, "group_width": 4}, "leaves no channels of a stage"),
    ],
)
def test_what_tells_no_resnet_is_refused_in_words(parameters: dict[str, object], said: str) -> None:
    with pytest.raises(R18Error, match=said):
        resnet(**parameters)  # type: ignore[arg-type]


def test_the_family_in_small_has_what_each_of_it_needs() -> None:
    """The small networks have bottlenecks with and without their own shortcut, groups, dilation."""
    plain, grouped = network("tiny_bottleneck"), network("tiny_resnext")
    assert {s.op.label for s in plain.steps} == {s.op.label for s in resnet50().steps}
    names = {step.name for step in plain.steps}
    assert "layer2.0.downsample.0" in names
    assert "layer2.1.downsample.0" not in names
    extras = [step.op.extras for step in grouped.steps]
    assert {"groups": "4"} in extras
    assert {"groups": "4", "dilation": "2×2"} in [
        step.op.extras
        for step in ResNet("bottleneck", (1, 1, 1, 2), 8, 4, 32, (False, False, True))
        .schedule("one block more")
        .steps
    ]


def test_network_by_name() -> None:
    assert network("tiny", image_size=64) == tiny(image_size=64)
    with pytest.raises(UnknownName) as caught:
        network("resnet-18")
    assert str(caught.value) == (
        "unknown network 'resnet-18', did you mean 'resnet18'?\n  known: "
        f"{', '.join(sorted(NETWORKS))}"
    )


# -- validation --------------------------------------------------------------------------------

CONV = Step("conv", Conv2d(3, 4, (3, 3)), ("image",), "conv", ("conv.weight",))
RELU = Step("relu", ReLU(), ("conv",), "relu")


def two_steps(*steps: Step, checkpoints: tuple[Checkpoint, ...] = ()) -> Schedule:
    return Schedule("two", (3, 8, 8), steps or (CONV, RELU), checkpoints)


def relu(name: str, reads: str, makes: str | None = None) -> Step:
    return Step(name, ReLU(), (reads,), makes or name)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ((CONV, relu("conv", "conv", "x")), ScheduleError, "step 'conv' appears twice"),
        ((CONV, relu("relu", "conv", "conv")), ScheduleError, "value 'conv' appears twice"),
        ((CONV, relu("relu", "conv", "image")), ScheduleError, "value 'image' appears twice"),
        (
            (CONV, relu("relu", "bn")),
            ScheduleError,
            "step 'relu' reads 'bn' before any step made it",
        ),
        (
            (relu("relu", "conv"), CONV),
            ScheduleError,
            "step 'relu' reads 'conv' before any step made it",
        ),
        (
            (relu("relu", "relu"),),
            ScheduleError,
            "step 'relu' reads 'relu' before any step made it",
        ),
        (
            (Step("conv", CONV.op, ("image",), "conv", ()),),
            ScheduleError,
            "step 'conv': conv2d reads 1 weights, 0 are named",
        ),
        (
            (CONV, Step("relu", ReLU(), ("conv",), "relu", ("relu.weight",))),
            ScheduleError,
            "step 'relu': relu reads 0 weights, 1 are named",
        ),
        (
            (CONV, Step("bn", BatchNorm(5), ("conv",), "bn", ("a", "b", "c", "d"))),
            ShapeError,
            "step 'bn': batchnorm: expected 5 channels",
        ),
        (
            (CONV, Step("add", Add(), ("conv",), "add")),
            ShapeError,
            r"step 'add': add takes 2 input\(s\), got 1",
        ),
    ],
)
def test_an_inconsistent_schedule_cannot_be_made(
    steps: tuple[Step, ...], error: type[Exception], message: str
) -> None:
    two_steps()
    with pytest.raises(error, match=message):
        two_steps(*steps)


def test_a_schedule_without_steps_cannot_be_made() -> None:
    with pytest.raises(ScheduleError, match="'empty' has no steps"):
        Schedule("empty", (3, 8, 8), (), ())


def test_checkpoints_are_unique_and_name_values() -> None:
    twice = (Checkpoint("a", "conv"), Checkpoint("a", "relu"))
    with pytest.raises(ScheduleError, match="checkpoint 'a' appears twice"):
        two_steps(checkpoints=twice)
    with pytest.raises(ScheduleError, match="'a' names the value 'bn', which no step makes"):
        two_steps(checkpoints=(Checkpoint("a", "bn"),))
    on_input = two_steps(checkpoints=(Checkpoint("pixels", "image"),))
    assert on_input.value_of("pixels") == "image"


def test_a_fold_that_serves_no_step_is_refused() -> None:
    fold = FoldedBatchNorm("conv", "conv.weight", ("a", "b", "c", "d"), 1e-5)
    with pytest.raises(ScheduleError, match="the BatchNorm folded into 'conv' serves no step"):
        Schedule("two", (3, 8, 8), (CONV, RELU), (), folds=(fold,))


def test_two_steps_may_share_a_weight_but_not_disagree_about_its_shape() -> None:
    """A weight shared by two steps must have one shape, or its name would mean two tensors."""
    second = Step("conv2", Conv2d(4, 4, (3, 3)), ("conv",), "conv2", ("conv.weight",))
    with pytest.raises(ScheduleError, match=r"conv\.weight"):
        two_steps(CONV, second)


def test_the_output_is_the_last_value_unless_another_is_stated() -> None:
    assert two_steps().output == "relu"
    assert Schedule("two", (3, 8, 8), (CONV, RELU), (), output="conv").output == "conv"
    with pytest.raises(ScheduleError, match="the output is 'bn', which no step makes"):
        Schedule("two", (3, 8, 8), (CONV, RELU), (), output="bn")


# -- names -------------------------------------------------------------------------------------


def test_unknown_names_come_with_the_nearest_and_the_known_ones() -> None:
    schedule = two_steps(checkpoints=(Checkpoint("logits", "relu"),))
    with pytest.raises(UnknownName) as caught:
        schedule.value_of("Logit")
    assert str(caught.value) == (
        "unknown checkpoint 'Logit', did you mean 'logits'?\n  known: conv, image, logits, relu"
    )
    with pytest.raises(UnknownName) as caught:
        schedule.step("zzz")
    assert str(caught.value) == "unknown step 'zzz'\n  known: conv, relu"
    assert schedule.step("relu") is RELU


def test_a_name_inside_a_fused_step_says_at_which_level_it_exists() -> None:
    fused = fuse(tiny(), "all")
    with pytest.raises(UnknownName) as caught:
        fused.value_of("layer1.0.bn1")
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("unknown checkpoint 'layer1.0.bn1', did you mean 'layer1.0")
    assert last == (
        "  At fusion level 'all' values inside fused steps do not exist; level 'none' has every "
        "one."
    )


def test_taps_are_checkpoints_and_values() -> None:
    schedule = tiny()
    assert set(schedule.taps) == {c.name for c in schedule.checkpoints} | set(schedule.shapes(1))
    assert schedule.value_of("image") == "image"
    assert schedule.value_of("layer1.0") == "layer1.0.relu_1" == schedule.value_of("layer1")


# -- slices ------------------------------------------------------------------------------------


def test_between_takes_the_steps_from_one_checkpoint_to_another() -> None:
    schedule = resnet18()
    stage = schedule.between("layer1", "layer2")
    assert [s.name for s in stage.steps] == [
        s.name for s in schedule.steps if s.name.startswith("layer2.")
    ]
    assert (stage.input, stage.input_shape) == ("layer1.1.relu_1", (64, 56, 56))
    assert stage.output == schedule.value_of("layer2")
    assert stage.shapes(2)[stage.output] == (2, 128, 28, 28)
    assert {"layer1", "layer2", "layer2.0.downsample"} <= {c.name for c in stage.checkpoints}
    assert "layer3" not in stage.taps
    assert set(stage.weight_specs) == {w for w in schedule.weight_specs if w.startswith("layer2.")}


def test_consecutive_slices_make_up_the_network() -> None:
    schedule = resnet18()
    marks = ["image", *CANONICAL]
    slices = [schedule.between(a, b) for a, b in pairwise(marks)]
    assert sum((part.steps for part in slices), ()) == schedule.steps
    assert sum(part.macs for part in slices) == schedule.macs
    assert sum(part.parameters for part in slices) == schedule.parameters


def test_between_leaves_out_what_the_target_does_not_need() -> None:
    part = tiny().between("stem_pool", "layer2.0.conv1")
    assert [s.name for s in part.steps][-1] == "layer2.0.conv1"
    assert "layer2.0.downsample.0" not in {s.name for s in part.steps}


def test_a_slice_may_begin_behind_the_pool() -> None:
    head = tiny(softmax=True).between("gap", "softmax")
    assert [type(s.op) for s in head.steps] == [Linear, Softmax]
    assert head.input_shape == (64,)
    assert head.shapes(3)["softmax"] == (3, 10)


def test_a_slice_of_a_fused_schedule_keeps_its_own_folds() -> None:
    part = fuse(tiny(), "all").between("layer1", "layer2")
    assert {fold.conv for fold in part.folds} == {
        "layer2.0.conv1",
        "layer2.0.conv2",
        "layer2.0.downsample.0",
    }
    assert part.level == "all"


@pytest.mark.parametrize(
    ("first", "last", "error", "message"),
    [
        ("layer2", "layer2", ScheduleError, "there is no step between 'layer2' and 'layer2'"),
        (
            "layer2",
            "layer1",
            ScheduleError,
            "'layer1' cannot be computed from 'layer2' alone: it also needs 'image'",
        ),
        (
            "layer1.0.bn2",
            "layer1",
            ScheduleError,
            "'layer1' cannot be computed from 'layer1.0.bn2' alone: it also needs 'image'",
        ),
        ("stem_pol", "layer1", UnknownName, "did you mean 'stem_pool'"),
        ("layer1", "layer9", UnknownName, "unknown checkpoint 'layer9'"),
    ],
)
def test_slices_that_cannot_be(first: str, last: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny().between(first, last)
