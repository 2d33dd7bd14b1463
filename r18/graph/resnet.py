"""ResNets of basic blocks, with torchvision's step names and shapes.

`resnet18`, `resnet34` and `tiny` are entries of `NETWORKS`; `network(name)` builds one by its name.
"""

from __future__ import annotations

from r18.errors import ScheduleError, unknown
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    ReLU,
    Softmax,
    as_shape,
)
from r18.graph.schedule import IMAGE, Checkpoint, Schedule, Step


def resnet(
    name: str = "resnet",
    *,
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    width: int = 64,
    classes: int = 1000,
    image_size: int = 224,
    softmax: bool = False,
) -> Schedule:
    """A ResNet of basic blocks, at fusion level `none`.

    blocks:     basic blocks in each stage; stage i has width·2^i channels.
    width:      channels of the stem and of the first stage.
    image_size: height and width of the input, in pixels; 3 channels.
    softmax:    append a step `softmax` after the logits.

    Step names and shapes equal torchvision's for resnet18 and resnet34 (a test holds this).
    Raises `ScheduleError` or `ShapeError` for parameters that make no network.
    """
    if not as_shape(blocks, "blocks") or min(blocks) < 1:
        raise ScheduleError(f"blocks must name at least one block a stage, got {blocks}")
    build = _Builder()
    value = build.conv_bn("conv1", "bn1", IMAGE, Conv2d(3, width, (7, 7), (2, 2), (3, 3)))
    value = build.add("relu", ReLU(), value)
    value = build.add("maxpool", MaxPool2d((3, 3), (2, 2), (1, 1)), value)
    checkpoints = [Checkpoint("stem_pool", value)]
    channels = width
    for stage, count in enumerate(blocks, start=1):
        out = width * 2 ** (stage - 1)
        for index in range(count):
            stride = 2 if stage > 1 and index == 0 else 1
            block = f"layer{stage}.{index}"
            value = build.basic_block(block, value, channels, out, stride)
            if f"{block}.downsample.1" in build.names:
                checkpoints.append(Checkpoint(f"{block}.downsample", f"{block}.downsample.1"))
            checkpoints.append(Checkpoint(block, value))
            channels = out
        checkpoints.append(Checkpoint(f"layer{stage}", value))
    value = build.add("avgpool", GlobalAvgPool(), value)
    checkpoints.append(Checkpoint("gap", value))
    value = build.add("fc", Linear(channels, classes), value)
    checkpoints.append(Checkpoint("logits", value))
    if softmax:
        build.add("softmax", Softmax(), value)
    return Schedule(name, (3, image_size, image_size), tuple(build.steps), tuple(checkpoints))


class _Builder:
    """Appends steps; weight names are `{step}.{role}`, as in torchvision's state_dict."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @property
    def names(self) -> set[str]:
        return {step.name for step in self.steps}

    def add(self, name: str, op: Op, *inputs: str) -> str:
        weights = tuple(f"{name}.{spec.role}" for spec in op.weights())
        self.steps.append(Step(name, op, inputs, name, weights))
        return name

    def conv_bn(self, conv: str, bn: str, value: str, op: Conv2d) -> str:
        return self.add(bn, BatchNorm(op.out_channels), self.add(conv, op, value))

    def basic_block(self, name: str, value: str, channels: int, out: int, stride: int) -> str:
        first = Conv2d(channels, out, (3, 3), (stride, stride), (1, 1))
        second = Conv2d(out, out, (3, 3), (1, 1), (1, 1))
        inner = self.conv_bn(f"{name}.conv1", f"{name}.bn1", value, first)
        inner = self.add(f"{name}.relu", ReLU(), inner)
        inner = self.conv_bn(f"{name}.conv2", f"{name}.bn2", inner, second)
        shortcut = value
        if stride != 1 or channels != out:
            down = Conv2d(channels, out, (1, 1), (stride, stride))
            shortcut = self.conv_bn(f"{name}.downsample.0", f"{name}.downsample.1", value, down)
        total = self.add(f"{name}.add", Add(), inner, shortcut)
        return self.add(f"{name}.relu_1", ReLU(), total)


def resnet18(*, classes: int = 1000, image_size: int = 224, softmax: bool = False) -> Schedule:
    """ResNet-18 (He et al., arXiv:1512.03385, table 1): 11,689,512 parameters, 1.814 GMAC."""
    return resnet("resnet18", classes=classes, image_size=image_size, softmax=softmax)


def resnet34(*, classes: int = 1000, image_size: int = 224, softmax: bool = False) -> Schedule:
    """ResNet-34 (He et al., arXiv:1512.03385, table 1)."""
    return resnet(
        "resnet34",
        blocks=(3, 4, 6, 3),
        classes=classes,
        image_size=image_size,
        softmax=softmax,
    )


def tiny(*, classes: int = 10, image_size: int = 32, softmax: bool = False) -> Schedule:
    """A ResNet-18 in small (width 8, one block a stage) for slow devices and simulators.

    It has every op, both kinds of shortcut and all four stages.
    """
    return resnet(
        "tiny",
        blocks=(1, 1, 1, 1),
        width=8,
        classes=classes,
        image_size=image_size,
        softmax=softmax,
    )


NETWORKS = {"resnet18": resnet18, "resnet34": resnet34, "tiny": tiny}


def network(name: str, **parameters: int) -> Schedule:
    """The schedule of a named network; raises `UnknownName` with the known ones."""
    try:
        build = NETWORKS[name]
    except (KeyError, TypeError):  # a list is no key
        raise unknown("network", name, NETWORKS) from None
    return build(**parameters)  # type: ignore[arg-type]


__all__ = ["NETWORKS", "network", "resnet", "resnet18", "resnet34", "tiny"]
