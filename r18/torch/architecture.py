"""Find which ResNet of torchvision's a model is, whether it is as the schedule has it, and where
its weights are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.resnet import ResNet as Torchvision

from r18.errors import R18Error, UsageError
from r18.graph.ops import BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d, Op, ReLU
from r18.graph.resnet import FAMILY, GROUP_WIDTH, ResNet
from r18.graph.schedule import Schedule, Step
from r18.torch.watch import (
    Entries,
    Watch,
    global_hooks,
    hidden_member,
    hidden_method,
    hooked,
    other_method,
)

STAGES = ("layer1", "layer2", "layer3", "layer4")
"""The stages of every ResNet of torchvision's."""

KINDS: dict[str, type[nn.Module]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
"""torchvision's classes of the kinds of blocks."""

DEPTH = {"basic": 2, "bottleneck": 3}
"""The convolutions on a block's own path."""

ONLY = FAMILY["resnet18"]
"""The network that `optimize_resnet18` takes."""

Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]
"""Stride, padding, dilation and groups."""


class _Unfit(Exception):
    """A deviation of a model from its schedule; `examine` says which models are accepted where."""


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model that was found to be a ResNet.

    network: which one.
    watch:   everything else that its forward pass depends on.
    weights: every tensor, in the order of the schedule's weights.
    norms:   the BatchNorms, in the order of the steps.
    windows: of the convolutions, in the order of the steps.
    shortcuts: of each block, whether its shortcut has a convolution.
    """

    model: nn.Module
    network: ResNet
    watch: Watch
    weights: Entries
    norms: tuple[nn.BatchNorm2d, ...]
    windows: tuple[Window, ...]
    shortcuts: tuple[bool, ...]

    @property
    def depth(self) -> int:
        """The convolutions on a block's own path."""
        return DEPTH[self.network.block]

    @property
    def stands(self) -> bool:
        """Whether every module is in its place still, set as it was, in evaluation mode and
        without hooks."""
        return not (
            self.model.training
            or any(norm.training for norm in self.norms)
            or not self.watch.stands
            # torch.compile guards the tensors that it has traced.
            or not (torch.compiler.is_compiling() or self.weights.stand)
        )

    def tensors(self) -> list[torch.Tensor]:
        """The weights as they are now."""
        return self.weights.now()


def examine(model: nn.Module, wanted: ResNet | None, asked: str) -> Architecture:
    """The model's architecture.

    wanted: the network that it must be; None for any of torchvision's. asked: the function of
    `r18.torch` that the caller called.

    Raises `UsageError` unless the model is that ResNet in evaluation mode, and for a model whose
    changes the fast module could not notice.
    """
    check_resnet(model, asked)
    if global_hooks():
        raise UsageError(
            "PyTorch has hooks for all modules (register_module_forward_hook or _pre_hook), which "
            "fused layers would not call\n  remove them, or keep the model as it is"
        )
    try:
        for name, module in model.named_modules():
            _check_module(name, module, asked)
        return _examined(model, wanted)
    except _Unfit as error:
        raise _wrong(asked, str(error)) from None


def check_resnet(model: object, asked: str) -> None:
    """Raise `UsageError` unless the model is a ResNet of torchvision, of any depth."""
    if not isinstance(model, Torchvision):
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise _wrong(asked, f"is {kind}, no ResNet of torchvision")


def _wrong(asked: str, what: str) -> UsageError:
    if asked == "optimize_resnet18":
        kind, example = "ResNet-18", "resnet18"
    else:
        kind, example = "ResNets", "resnet50"
    return UsageError(
        f"{asked} takes torchvision's {kind}: this model {what}\n"
        f"  make one with torchvision.models.{example}(), with any number of classes"
    )


def _examined(model: nn.Module, wanted: ResNet | None) -> Architecture:
    """The architecture; raises `_Unfit` for a deviation from the schedule."""
    _check_forward(model, "", Torchvision)
    stages = [_sequence(model, stage) for stage in STAGES]
    blocks = [block for stage in stages for block in stage]
    block = "bottleneck" if wanted is None and _begins_with(stages, Bottleneck) else "basic"
    block = block if wanted is None else wanted.block
    kind = KINDS[block]
    for name, module in blocks:
        if not isinstance(module, kind):
            raise _Unfit(f"has a {type(module).__name__} at {name}, not a {kind.__name__}")
        _check_forward(module, name, kind)
    counts = tuple(map(len, stages))
    if wanted is not None and counts != wanted.blocks:
        raise _Unfit(f"has stages of {_listed(counts)} blocks, not of {_listed(wanted.blocks)}")
    network = _network_of(model, block, counts) if wanted is None else wanted
    schedule = network.schedule("the model", classes=_classes(model))
    modules = dict(_step_modules(model, schedule))
    for name, module in blocks:
        if f"{name}.downsample.0" in modules:
            if (count := len(_sequence(model, f"{name}.downsample"))) != 2:
                raise _Unfit(f"has {count} modules in {name}.downsample, not 2")
        elif module.downsample is not None:
            raise _Unfit(f"has {name}.downsample, which {_named(network)} has not")
    for name, module in modules.items():
        _check_forward(module, name, type(module))
    weights = tuple(_slots(schedule, modules))
    _check_tensors([(f"{step}.{name}", found[name]) for step, found, name in weights])
    convs = [module for module in modules.values() if isinstance(module, nn.Conv2d)]
    return Architecture(
        model,
        network,
        Watch.of(model, _settings(schedule, modules)),
        Entries.of((found, name) for _, found, name in weights),
        tuple(module for module in modules.values() if isinstance(module, nn.BatchNorm2d)),
        tuple(
            (_pair(conv.stride), _pair(conv.padding), _pair(conv.dilation), conv.groups)
            for conv in convs
        ),
        tuple(module.downsample is not None for _, module in blocks),
    )


def _begins_with(stages: list[list[tuple[str, Any]]], kind: type[nn.Module]) -> bool:
    return bool(stages[0]) and isinstance(stages[0][0][1], kind)


def _named(network: ResNet) -> str:
    """A network's name for a message."""
    return "ResNet-18" if network == ONLY else "its network"


def _network_of(model: nn.Module, block: str, counts: tuple[int, ...]) -> ResNet:
    """The ResNet that a model may be, by a few of its modules; `_step_modules` compares them all.

    Raises `_Unfit` for modules that tell none.
    """
    stem = _child(model, "conv1")
    width = getattr(stem, "out_channels", 0)
    groups, group_width, dilate = 1, GROUP_WIDTH, [False] * (len(STAGES) - 1)
    if block == "bottleneck":
        middle = _child(model, "layer1.0.conv2")
        groups = getattr(middle, "groups", 1)
        group_width = getattr(middle, "out_channels", 0) * GROUP_WIDTH // max(1, groups * width)
        dilate = [
            _pair(getattr(_child(model, f"{stage}.0.conv2"), "stride", 2)) == (1, 1)
            for stage in STAGES[1:]
        ]
    try:
        return ResNet(block, counts, width, groups, group_width, tuple(dilate))
    except R18Error as error:
        raise _Unfit(f"is none that is known here: {error}") from None


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def _check_forward(module: nn.Module, name: str, known: type[nn.Module]) -> None:
    """Raise `_Unfit` for a forward pass that is not the known class's."""
    if (method := other_method(type(module), known)) is not None:
        where = f" at {name}" if name else ""
        raise _Unfit(f"has a {method} of its own{where}")


def _sequence(model: nn.Module, path: str) -> list[tuple[str, Any]]:
    """The paths and modules of a Sequential, in the order in which it runs them."""
    sequence = _child(model, path)
    if type(sequence) is not nn.Sequential:
        raise _Unfit(f"has a {type(sequence).__name__} at {path}, not a Sequential")
    _check_forward(sequence, path, nn.Sequential)
    names = list(sequence._modules)
    if names != list(map(str, range(len(names)))):
        raise _Unfit(f"has {path} with modules in the order {_listed(names)}")
    return [(f"{path}.{name}", module) for name, module in sequence._modules.items()]


def _child(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise _Unfit(f"has no {path}") from None


def _classes(model: nn.Module) -> int:
    head = _child(model, "fc")
    if type(head) is not nn.Linear:
        raise _Unfit(f"has a {type(head).__name__} at fc, not a Linear")
    return head.out_features


# -- layers ------------------------------------------------------------------------------------


def _step_modules(model: nn.Module, schedule: Schedule) -> Iterator[tuple[str, nn.Module]]:
    """The module behind each step that has one, compared with it."""
    for step in schedule.steps:
        if type(step.op) not in _LAYERS:
            continue  # the residual sum is no module
        path = re.sub(r"relu_\d$", "relu", step.name)  # a block's ReLU runs several times
        module = _child(model, path)
        kind, settings = _LAYERS[type(step.op)]
        if type(module) is not kind:
            raise _Unfit(f"has a {type(module).__name__} at {path}, not a {kind.__name__}")
        for what, wanted in settings(step.op).items():
            found = getattr(module, what)
            found = found is not None if what == "bias" else found
            if found != wanted and _pair(found) != _pair(wanted):
                raise _Unfit(f"has {path} with {what}={found}, not {wanted}")
        yield step.name, module


_FREE = {
    *("bias", "in_channels", "out_channels", "num_features", "in_features", "out_features"),
    "affine",
}
"""Settings that only describe the weights, which are looked at themselves."""


def _settings(
    schedule: Schedule, modules: dict[str, nn.Module]
) -> Iterator[tuple[dict[str, Any], str]]:
    """The attributes that `_step_modules` compared, where a forward pass reads them."""
    for step in schedule.steps:
        if step.name in modules:
            _, settings = _LAYERS[type(step.op)]
            for name in settings(step.op).keys() - _FREE:
                yield vars(modules[step.name]), name


def _pair(value: Any) -> Any:
    """A setting as a pair: PyTorch takes one number for two."""
    return (value, value) if isinstance(value, int) else value


def _conv(op: Any) -> dict[str, object]:
    return {
        "in_channels": op.in_channels,
        "out_channels": op.out_channels,
        "kernel_size": op.kernel_size,
        "stride": op.stride,
        "padding": op.padding,
        "dilation": op.dilation,
        "groups": op.groups,
        "padding_mode": "zeros",
        "bias": False,
    }


def _norm(op: Any) -> dict[str, object]:
    return {"num_features": op.channels, "affine": True, "track_running_stats": True}


def _pool(op: Any) -> dict[str, object]:
    return {
        "kernel_size": op.kernel_size,
        "stride": op.stride,
        "padding": op.padding,
        "dilation": (1, 1),
        "ceil_mode": False,
        "return_indices": False,
    }


def _linear(op: Any) -> dict[str, object]:
    return {"in_features": op.in_features, "out_features": op.out_features, "bias": True}


_LAYERS: dict[type[Op], tuple[type[nn.Module], Callable[[Any], dict[str, object]]]] = {
    Conv2d: (nn.Conv2d, _conv),
    BatchNorm: (nn.BatchNorm2d, _norm),
    ReLU: (nn.ReLU, lambda op: {}),
    MaxPool2d: (nn.MaxPool2d, _pool),
    GlobalAvgPool: (nn.AdaptiveAvgPool2d, lambda op: {"output_size": (1, 1)}),
    Linear: (nn.Linear, _linear),
}
"""The module of each op, and the settings that it must have."""


# -- weights -----------------------------------------------------------------------------------


def _slots(
    schedule: Schedule, modules: dict[str, nn.Module]
) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    """Step name, dictionary and role of every weight."""
    step: Step
    for step in schedule.steps:
        for spec in step.op.weights():
            module = modules[step.name]
            found: Any = module._buffers if spec.kind == "bn_buffer" else module._parameters
            if found.get(spec.role) is None:
                raise _Unfit(f"has no {step.name}.{spec.role}")
            yield step.name, found, spec.role


def _check_tensors(tensors: list[tuple[str, torch.Tensor | None]]) -> None:
    """Raise `UsageError` unless the weights are of one dtype on one device, and can be followed."""
    kinds: dict[str, str] = {}
    for name, tensor in tensors:
        assert tensor is not None
        if tensor.is_inference():
            raise UsageError(
                f"{name} was made in inference mode, where PyTorch does not count changes\n"
                "  make or load the model outside of torch.inference_mode()"
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            raise UsageError(f"{name} is a {type(tensor).__name__}, no plain dense tensor")
        kinds.setdefault(f"{tensor.dtype} on {tensor.device}", name)
    if len(kinds) > 1:
        found = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise UsageError(f"the weights must be of one dtype on one device, got {found}")


def _check_module(name: str, module: nn.Module, asked: str) -> None:
    where = f"module '{name}'" if name else "the model"
    if module.training and (not name or isinstance(module, nn.BatchNorm2d)):
        raise UsageError(
            f"{where} is in training mode, and {asked} is for inference\n  call model.eval() first"
        )
    if is_parametrized(module):
        names = _listed(dict(_child(module, "parametrizations").named_children()))
        raise UsageError(
            f"{where} is parametrised ({names}): its weights are computed at each call\n"
            "  torch.nn.utils.parametrize.remove_parametrizations(module, name) makes them plain"
        )
    pruned = [
        hook._tensor_name
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    ]
    if pruned:
        raise UsageError(
            f"{where} is pruned ({_listed(pruned)}): a hook computes the weight before each call\n"
            "  torch.nn.utils.prune.remove(module, name) makes the pruned weight plain"
        )
    if hooked(module):
        raise UsageError(
            f"{where} has hooks, which fused layers would not call\n"
            "  remove them, or keep the model as it is"
        )
    what = f" at {name}" if name else ""
    if (method := hidden_method(module)) is not None:
        raise _Unfit(f"has a {method} of its own{what}")
    if (member := hidden_member(module)) is not None:
        raise _Unfit(f"has an attribute that hides {name + '.' if name else ''}{member}")
