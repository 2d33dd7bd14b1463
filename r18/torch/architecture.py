"""Whether a model is torchvision's ResNet-18 as the schedule has it, and where its weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from r18.errors import UsageError
from r18.graph.ops import BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d, Op, ReLU
from r18.graph.resnet import resnet18
from r18.graph.schedule import Schedule, Step

BLOCKS = (2, 2, 2, 2)
STAGES = tuple(f"layer{stage}" for stage in range(1, len(BLOCKS) + 1))


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of dictionaries, and what was there. Looking at them is on the way of every call."""

    dictionaries: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: list[Any]

    @property
    def stand(self) -> bool:
        return self.now() == self.values

    def now(self) -> list[Any]:
        return list(map(dict.get, self.dictionaries, self.names))


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model that was found to be ResNet-18.

    places:  every module in another.
    sizes:   the dictionaries of modules, and how many there were in each.
    weights: every tensor, in the order of the schedule's weights.
    norms:   the BatchNorms, in the order of the steps.
    windows: stride and padding of the convolutions, in the order of the steps.
    shortcuts: of each block, whether it convolves what it adds.
    settings: the attributes of layers that the schedule relies on.
    hooks:   where modules keep their hooks.
    """

    model: nn.Module
    places: Entries
    sizes: tuple[tuple[dict[str, nn.Module | None], ...], list[int]]
    weights: Entries
    norms: tuple[nn.BatchNorm2d, ...]
    windows: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    shortcuts: tuple[bool, ...]
    settings: Entries
    hooks: tuple[dict[int, Any], ...]

    @property
    def stands(self) -> bool:
        """Whether every module is in its place still, set as it was, in evaluation mode and
        without hooks."""
        found, sizes = self.sizes
        return not (
            self.model.training
            or any(self.hooks)
            or any(norm.training for norm in self.norms)
            or list(map(len, found)) != sizes
            or not self.settings.stand
            or not self.places.stand
        )

    def tensors(self) -> list[torch.Tensor]:
        """The weights as they are now."""
        return self.weights.now()


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def examine(model: nn.Module) -> Architecture:
    """The model's architecture.

    Raises `UsageError` unless the model is torchvision's ResNet-18 in evaluation mode, and for a
    model whose changes the fast module could not notice.
    """
    if not isinstance(model, ResNet):
        raise _wrong(f"is a {type(model).__name__}, no ResNet of torchvision")
    _check_forward(model, "", ResNet, ("forward", "_forward_impl"))
    counts = []
    for stage in STAGES:
        module = _child(model, stage)
        _check_forward(module, stage, nn.Sequential, ("forward",))
        counts.append(len(list(module.children())))
        for index, block in enumerate(module.children()):
            if not isinstance(block, BasicBlock):
                raise _wrong(f"has a {type(block).__name__} at {stage}.{index}, not a BasicBlock")
            _check_forward(block, f"{stage}.{index}", BasicBlock, ("forward",))
    if tuple(counts) != BLOCKS:
        raise _wrong(f"has stages of {_listed(counts)} blocks, not of {_listed(BLOCKS)}")
    schedule = resnet18(classes=_classes(model))
    modules = dict(_step_modules(model, schedule))
    for stage, index in ((stage, index) for stage in STAGES for index in range(2)):
        block = _child(model, f"{stage}.{index}")
        if f"{stage}.{index}.downsample.0" not in modules and block.downsample is not None:
            raise _wrong(f"has {stage}.{index}.downsample, which ResNet-18 has not")
    weights = tuple(_slots(schedule, modules))
    tensors = [(f"{step}.{name}", found[name]) for step, found, name in weights]
    _check_tensors(tensors)
    for name, module in model.named_modules():
        _check_module(name, module)
    parents = [module._modules for module in model.modules()]
    convs = [module for module in modules.values() if isinstance(module, nn.Conv2d)]
    return Architecture(
        model,
        _entries((found, name) for found in parents for name in found),
        (tuple(parents), list(map(len, parents))),
        _entries((found, name) for _, found, name in weights),
        tuple(module for module in modules.values() if isinstance(module, nn.BatchNorm2d)),
        tuple((_pair(conv.stride), _pair(conv.padding)) for conv in convs),
        tuple(
            block.downsample is not None
            for stage in STAGES
            for block in _child(model, stage).children()
        ),
        _entries(_settings(schedule, modules)),
        tuple(
            hooks
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ),
    )


def _entries(places: Iterable[tuple[dict[str, Any], str]]) -> Entries:
    dictionaries, names = zip(*places, strict=True)
    return Entries(dictionaries, names, list(map(dict.get, dictionaries, names)))


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"optimize_resnet18 takes torchvision's ResNet-18: this model {what}\n"
        "  make one with torchvision.models.resnet18(), with any number of classes"
    )


def _listed(counts: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, counts))


def _check_forward(module: nn.Module, name: str, known: type, methods: tuple[str, ...]) -> None:
    """Raise `UsageError` for a forward pass that is not torchvision's own."""
    for method in methods:
        if method in vars(module) or getattr(type(module), method, None) is not getattr(
            known, method
        ):
            where = f" at {name}" if name else ""
            raise _wrong(f"has a {method} of its own{where}")


def _child(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise _wrong(f"has no {path}") from None


def _classes(model: nn.Module) -> int:
    head = _child(model, "fc")
    if type(head) is not nn.Linear:
        raise _wrong(f"has a {type(head).__name__} at fc, not a Linear")
    return head.out_features


# -- layers ------------------------------------------------------------------------------------


def _step_modules(model: nn.Module, schedule: Schedule) -> Iterator[tuple[str, nn.Module]]:
    """The module behind each step that has one, compared with it."""
    for step in schedule.steps:
        if type(step.op) not in _LAYERS:
            continue  # the residual sum is no module
        path = step.name.removesuffix("_1")  # a block's ReLU runs twice
        module = _child(model, path)
        kind, settings = _LAYERS[type(step.op)]
        if type(module) is not kind:
            raise _wrong(f"has a {type(module).__name__} at {path}, not a {kind.__name__}")
        for what, wanted in settings(step.op).items():
            found = getattr(module, what)
            found = found is not None if what == "bias" else found
            if found != wanted and _pair(found) != _pair(wanted):
                raise _wrong(f"has {path} with {what}={getattr(module, what)}, not {wanted}")
        yield step.name, module


def _settings(
    schedule: Schedule, modules: dict[str, nn.Module]
) -> Iterator[tuple[dict[str, Any], str]]:
    """The attributes that `_step_modules` compared; a missing bias is found as a missing tensor."""
    for step in schedule.steps:
        if step.name in modules:
            attributes = vars(modules[step.name])
            _, settings = _LAYERS[type(step.op)]
            for name in settings(step.op).keys() - {"bias"}:
                yield attributes, name


def _pair(value: Any) -> Any:
    """PyTorch takes one number for two."""
    return (value, value) if isinstance(value, int) else value


def _conv(op: Any) -> dict[str, object]:
    return {
        "in_channels": op.in_channels,
        "out_channels": op.out_channels,
        "kernel_size": op.kernel_size,
        "stride": op.stride,
        "padding": op.padding,
        "dilation": (1, 1),
        "groups": 1,
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
                raise _wrong(f"has no {step.name}.{spec.role}")
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


def _check_module(name: str, module: nn.Module) -> None:
    where = f"module '{name}'" if name else "the model"
    if module.training and (not name or isinstance(module, nn.BatchNorm2d)):
        raise UsageError(
            f"{where} is in training mode, and optimize_resnet18 is for inference\n"
            "  call model.eval() first"
        )
    if _hooked(module):
        raise UsageError(
            f"{where} has hooks, which fused layers would not call\n"
            "  remove them, or keep the model as it is"
        )
