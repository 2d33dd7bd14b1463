"""ResNets of basic and of bottleneck blocks, with torchvision's step names and shapes.

`NETWORKS` holds the named ones, and `network(name)` builds one by its name. `ResNet` is what tells
one from another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from r18.errors import ScheduleError, ShapeError, UsageError, show, unknown
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
    as_int,
    as_shape,
)
from r18.graph.schedule import IMAGE, Checkpoint, Schedule, Step

BLOCKS = {"basic": 1, "bottleneck": 4}
"""The kinds of blocks, and how many times wider than its stage the output of each is."""

GROUP_WIDTH = 64
"""The width of a group that leaves a bottleneck as wide as its stage."""


@dataclass(frozen=True)
class ResNet:
    """The parameters of a ResNet, in torchvision's terms; only the head is left open.

    block:  `basic`: two 3×3 convolutions. `bottleneck`: 1×1, 3×3, and 1×1 to four times the
            channels; a stage's stride is in the 3×3, as in torchvision and timm.
    blocks: the number of blocks in each stage; stage i is width·2^i wide.
    width:  channels of the stem.
    groups, group_width: of the 3×3 in a bottleneck, which has
            ⌊stage's width · group_width / 64⌋ · groups channels.
    dilate: for each stage after the first, whether dilation replaces its stride; all False where
            it is left out. Only bottlenecks dilate.

    Raises `ScheduleError` or `ShapeError` for parameters that make no network.
    """

    block: str = "basic"
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    groups: int = 1
    group_width: int = GROUP_WIDTH
    dilate: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise unknown("kind of block", self.block, BLOCKS, error=ScheduleError)
        blocks = as_shape(self.blocks, "blocks")
        if not blocks or min(blocks) < 1:
            raise ScheduleError(f"blocks must name at least one block a stage, got {self.blocks}")
        object.__setattr__(self, "blocks", blocks)
        for name in ("width", "groups", "group_width"):
            value = as_int(getattr(self, name), name)
            if value < 1:
                raise ShapeError(f"{name} must be at least 1, got {value}")
            object.__setattr__(self, name, value)
        if self._inner(self.width) < 1:
            raise ScheduleError(
                f"a group_width of {self.group_width} leaves no channels of a stage that is "
                f"{self.width} wide"
            )
        dilate = tuple(self.dilate) or (False,) * (len(blocks) - 1)
        if len(dilate) != len(blocks) - 1 or not all(isinstance(one, bool) for one in dilate):
            raise ScheduleError(
                f"dilate must be True or False for each of the {len(blocks) - 1} stages after the "
                f"first, got {show(self.dilate)}"
            )
        object.__setattr__(self, "dilate", dilate)
        if self.block == "basic" and (self.groups, self.group_width) != (1, GROUP_WIDTH):
            raise ScheduleError("basic blocks have one group, as wide as their stage")
        if self.block == "basic" and any(dilate):
            raise ScheduleError("basic blocks do not dilate; bottlenecks do")

    @property
    def text(self) -> str:
        """Its name, if it is one of `FAMILY`; else its parameters as JSON. See `resnet_of`."""
        names = [name for name, network in FAMILY.items() if network == self]
        return names[0] if names else json.dumps(asdict(self))

    def schedule(
        self, name: str, *, classes: int = 1000, image_size: int = 224, softmax: bool = False
    ) -> Schedule:
        """The network at fusion level `none`; see `resnet`."""
        # Anything else may be no key of a cache; the ops accept or reject it.
        plain = (type(classes), type(image_size), type(softmax)) == (int, int, bool)
        build = _schedule if plain else ResNet._build
        return build(self, name, classes, image_size, softmax)

    def _build(self, name: str, classes: int, image_size: int, softmax: bool) -> Schedule:
        build = _Builder()
        stem = Conv2d(3, self.width, (7, 7), (2, 2), (3, 3))
        value = build.conv_bn("conv1", "bn1", IMAGE, stem)
        value = build.add("relu", ReLU(), value)
        value = build.add("maxpool", MaxPool2d((3, 3), (2, 2), (1, 1)), value)
        checkpoints = [Checkpoint("stem_pool", value)]
        channels, dilation = self.width, 1
        for stage, count in enumerate(self.blocks, start=1):
            width = self.width * 2 ** (stage - 1)
            stride, before = 2 if stage > 1 else 1, dilation
            if stage > 1 and self.dilate[stage - 2]:
                stride, dilation = 1, dilation * stride
            for index in range(count):
                first = index == 0
                layers = self._layers(
                    channels, width, stride if first else 1, before if first else dilation
                )
                block = f"layer{stage}.{index}"
                value = build.block(block, value, layers, stride if first else 1)
                if f"{block}.downsample.1" in build.names:
                    checkpoints.append(Checkpoint(f"{block}.downsample", f"{block}.downsample.1"))
                checkpoints.append(Checkpoint(block, value))
                channels = layers[-1].out_channels
            checkpoints.append(Checkpoint(f"layer{stage}", value))
        value = build.add("avgpool", GlobalAvgPool(), value)
        checkpoints.append(Checkpoint("gap", value))
        value = build.add("fc", Linear(channels, classes), value)
        checkpoints.append(Checkpoint("logits", value))
        if softmax:
            build.add("softmax", Softmax(), value)
        return Schedule(name, (3, image_size, image_size), tuple(build.steps), tuple(checkpoints))

    def _inner(self, width: int) -> int:
        """Channels of the 3×3 in a bottleneck."""
        return int(width * (self.group_width / GROUP_WIDTH)) * self.groups

    def _layers(self, channels: int, width: int, stride: int, dilation: int) -> list[Conv2d]:
        """The convolutions of a block on its own path, in order."""
        if self.block == "basic":
            first = Conv2d(channels, width, (3, 3), (stride, stride), (1, 1))
            return [first, Conv2d(width, width, (3, 3), (1, 1), (1, 1))]
        inner = self._inner(width)
        around = (dilation, dilation)
        middle = Conv2d(inner, inner, (3, 3), (stride, stride), around)
        return [
            Conv2d(channels, inner, (1, 1)),
            replace(middle, groups=self.groups, dilation=around),
            Conv2d(inner, width * BLOCKS[self.block], (1, 1)),
        ]


@lru_cache(maxsize=64)  # a plan, a record's floors and a page ask for it many times
def _schedule(of: ResNet, name: str, classes: int, image_size: int, softmax: bool) -> Schedule:
    return of._build(name, classes, image_size, softmax)


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

    def block(self, name: str, value: str, layers: Sequence[Conv2d], stride: int) -> str:
        """A residual block; its n-th ReLU after the first is named `relu_n`."""
        inner = value
        for number, layer in enumerate(layers, start=1):
            if number > 1:
                calls = number - 2
                inner = self.add(f"{name}.relu{f'_{calls}' if calls else ''}", ReLU(), inner)
            inner = self.conv_bn(f"{name}.conv{number}", f"{name}.bn{number}", inner, layer)
        shortcut = value
        channels, out = layers[0].in_channels, layers[-1].out_channels
        if stride != 1 or channels != out:
            down = Conv2d(channels, out, (1, 1), (stride, stride))
            shortcut = self.conv_bn(f"{name}.downsample.0", f"{name}.downsample.1", value, down)
        total = self.add(f"{name}.add", Add(), inner, shortcut)
        return self.add(f"{name}.relu_{len(layers) - 1}", ReLU(), total)


def resnet(
    name: str = "resnet",
    *,
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    width: int = 64,
    classes: int = 1000,
    image_size: int = 224,
    softmax: bool = False,
    block: str = "basic",
    groups: int = 1,
    group_width: int = GROUP_WIDTH,
    dilate: tuple[bool, ...] = (),
) -> Schedule:
    """A ResNet at fusion level `none`.

    blocks, width, block, groups, group_width, dilate: see `ResNet`.
    image_size: height and width of the input, in pixels; 3 channels.
    softmax:    append a step `softmax` after the logits.

    Step names and shapes equal torchvision's for every network that it has (a test holds this).
    Raises `ScheduleError` or `ShapeError` for parameters that make no network.
    """
    found = ResNet(block, blocks, width, groups, group_width, dilate)
    return found.schedule(name, classes=classes, image_size=image_size, softmax=softmax)


FAMILY = {
    "resnet18": ResNet("basic", (2, 2, 2, 2)),
    "resnet34": ResNet("basic", (3, 4, 6, 3)),
    "resnet50": ResNet("bottleneck", (3, 4, 6, 3)),
    "resnet101": ResNet("bottleneck", (3, 4, 23, 3)),
    "resnet152": ResNet("bottleneck", (3, 8, 36, 3)),
    "wide_resnet50_2": ResNet("bottleneck", (3, 4, 6, 3), group_width=128),
    "wide_resnet101_2": ResNet("bottleneck", (3, 4, 23, 3), group_width=128),
    "resnext50_32x4d": ResNet("bottleneck", (3, 4, 6, 3), groups=32, group_width=4),
    "resnext101_32x8d": ResNet("bottleneck", (3, 4, 23, 3), groups=32, group_width=8),
}
"""The networks that torchvision and timm have under the same names."""

SMALL = {
    "tiny": ResNet("basic", (1, 1, 1, 1), width=8),
    "tiny_bottleneck": ResNet("bottleneck", (1, 2, 1, 1), width=8),
    "tiny_resnext": ResNet(
        "bottleneck", (1, 2, 1, 1), width=8, groups=4, group_width=32, dilate=(False, False, True)
    ),
}
"""The family in small, for tests, slow devices and simulators: 10 classes, images of 32 pixels."""


def resnet_of(text: str) -> ResNet:
    """The inverse of `ResNet.text`; for another text raises `UnknownName`, or as `ResNet` does."""
    if not text.startswith("{"):
        if text not in FAMILY:
            raise unknown("network", text, FAMILY)
        return FAMILY[text]
    try:
        return ResNet(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ScheduleError(f"{show(text)} tells no ResNet: {error}") from None


def resnet18(*, classes: int = 1000, image_size: int = 224, softmax: bool = False) -> Schedule:
    """ResNet-18 (He et al., arXiv:1512.03385, table 1): 11,689,512 parameters, 1.814 GMAC."""
    return network("resnet18", classes=classes, image_size=image_size, softmax=softmax)


def resnet34(*, classes: int = 1000, image_size: int = 224, softmax: bool = False) -> Schedule:
    """ResNet-34 (He et al., arXiv:1512.03385, table 1)."""
    return network("resnet34", classes=classes, image_size=image_size, softmax=softmax)


def resnet50(*, classes: int = 1000, image_size: int = 224, softmax: bool = False) -> Schedule:
    """ResNet-50 (He et al., arXiv:1512.03385, table 1), with the stride of each stage in its first
    3×3 convolution ("v1.5"): 25,557,032 parameters, 4.089 GMAC."""
    return network("resnet50", classes=classes, image_size=image_size, softmax=softmax)


def tiny(*, classes: int = 10, image_size: int = 32, softmax: bool = False) -> Schedule:
    """A ResNet-18 in small (width 8, one block a stage) for slow devices and simulators.

    It has every op, both kinds of shortcut and all four stages.
    """
    return network("tiny", classes=classes, image_size=image_size, softmax=softmax)


def _maker(name: str) -> Callable[..., Schedule]:
    """A function that builds a named network, with its own number of classes and size of images."""
    found = (FAMILY | SMALL)[name]
    usual = {"classes": 10, "image_size": 32} if name in SMALL else {}

    def make(**parameters: int) -> Schedule:
        return found.schedule(name, **(usual | parameters))  # type: ignore[arg-type]

    return make


NETWORKS = {name: _maker(name) for name in (*FAMILY, *SMALL)}


PARAMETERS = ("classes", "image_size")
"""The parameters that may follow a network's name, as in `resnet50:classes=10,image_size=288`."""
KEYWORDS = (*PARAMETERS, "softmax")
"""The parameters that `network` takes by themselves."""


def network(name: str, **parameters: int) -> Schedule:
    """The schedule of a named network, with another head or for images of another size.

    name: of `NETWORKS`, alone or followed by a colon and some of `PARAMETERS`; those given here by
    themselves take precedence.

    Raises `UnknownName` with the known networks or parameters, `UsageError` for a parameter that is
    given here by itself and does not exist, `ScheduleError` for a value that is no integer, and
    `ShapeError` for one that makes no network.
    """
    plain, colon, settings = name.partition(":") if isinstance(name, str) else (name, "", "")
    try:
        build = NETWORKS[plain]
    except (KeyError, TypeError):  # a list is no key
        raise unknown("network", plain, NETWORKS) from None
    for what in parameters:
        if what not in KEYWORDS:
            kind = f"parameter of network {show(name)}"
            raise unknown(kind, what, KEYWORDS, error=UsageError)
    return build(**((_settings(name, settings) if colon else {}) | parameters))


MOST_DIGITS = 9
"""Of a network's parameter: far more than any network that fits a memory has."""


def _settings(name: str, text: str) -> dict[str, int]:
    """`classes=10,image_size=288` by name."""
    found: dict[str, int] = {}
    for part in text.split(","):
        what, _, value = part.partition("=")
        if what not in PARAMETERS:
            raise unknown(f"parameter of network {show(name)}", what, PARAMETERS)
        again = what in found
        if again or not re.fullmatch(rf"[0-9]{{1,{MOST_DIGITS}}}", value):
            integer = not again and re.fullmatch("-?[0-9]+", value)
            limits = f" of at most {MOST_DIGITS} digits, without a sign" if integer else ""
            raise ScheduleError(
                f"network {show(name)}: {what} is given once, as an integer{limits}: "
                f"{plain_of(name)}:{what}=10"
            )
        found[what] = int(value)
    return found


def name_of(schedule: Schedule) -> str:
    """The name from which `network` builds a whole network, with a head or size that is not its
    own.

    The plain name of one that `NETWORKS` lacks, of a slice, or for images that are not square.
    """
    _, height, width = schedule.input_shape if len(schedule.input_shape) == 3 else (0, 0, 1)
    if schedule.name not in NETWORKS or height != width:
        return schedule.name
    usual, classes = network(schedule.name), schedule.shapes(1)[schedule.output][-1]
    found = {
        "classes": (classes, usual.shapes(1)[usual.output][-1]),
        "image_size": (height, usual.input_shape[-1]),
    }
    other = [f"{what}={own}" for what, (own, theirs) in found.items() if own != theirs]
    return f"{schedule.name}:{','.join(other)}" if other else schedule.name


def plain_of(name: str) -> str:
    """A network's name without parameters."""
    return name.partition(":")[0]


__all__ = [
    "FAMILY",
    "NETWORKS",
    "ResNet",
    "name_of",
    "network",
    "resnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet_of",
    "tiny",
]
