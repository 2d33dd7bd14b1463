"""Changes of a model's forward pass are refused or followed: the answer is never wrong."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
import torchvision
from test_torch_dropin import CPU_BACKENDS, LEVELS, check_like, conv_sample, network, pixels
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrizations, prune
from torchvision.models.resnet import BasicBlock

from r18.errors import R18Error, ShapeError, UsageError
from r18.torch import optimize_resnet18
from r18.torch.operators import ops

IMAGES = pixels(1, (32, 32))

Undo = Callable[[], object] | None
Change = Callable[[Any], Undo]


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass in a wrapper, which scales its result."""
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.25


def wraps(path: str, method: str = "forward") -> Change:
    """Replace a method on the instance."""

    def change(model: Any) -> Undo:
        module = model.get_submodule(path)
        setattr(module, method, scaled(getattr(module, method)))
        return lambda: delattr(module, method)

    return change


def becomes(path: str, base: type[nn.Module], method: str = "forward") -> Change:
    """Replace the class by one with another method."""
    own = {method: lambda self, *args: getattr(base, method)(self, *args) * 1.25}
    other = type("Other", (base,), own)

    def change(model: Any) -> Undo:
        module = model.get_submodule(path)
        before = type(module)
        module.__class__ = other
        return lambda: setattr(module, "__class__", before)

    return change


def patches(owner: type[nn.Module], method: str) -> Change:
    """Replace a method of PyTorch's or torchvision's class."""

    def change(model: Any) -> Undo:
        original = vars(owner)[method]
        setattr(owner, method, lambda self, *args: original(self, *args) * 1.25)
        return lambda: setattr(owner, method, original)

    return change


def iterated_backwards(model: Any) -> Undo:
    class Backwards(nn.Sequential):
        def __iter__(self) -> Iterator[nn.Module]:
            return iter([*super().__iter__()][::-1])

    model.layer1.__class__ = Backwards
    return lambda: setattr(model.layer1, "__class__", nn.Sequential)


def global_hook(model: Any) -> Undo:
    hook = torch_modules.register_module_forward_hook(lambda module, args, out: out * 1.01)
    return hook.remove


def global_pre_hook(model: Any) -> Undo:
    return torch_modules.register_module_forward_pre_hook(
        lambda module, args: tuple(arg * 1.01 for arg in args)
    ).remove


def hook(model: Any) -> Undo:
    return model.layer3[1].bn2.register_forward_hook(lambda module, args, out: out * 1.25).remove


def hook_in_a_new_dictionary(model: Any) -> Undo:
    """Replace the dictionary of hooks, as code does that removes hooks without handles."""
    conv = model.layer2[1].conv1
    conv._forward_hooks = OrderedDict()
    return conv.register_forward_hook(lambda module, args, out: out * 1.25).remove


def pre_hook_in_a_new_dictionary(model: Any) -> Undo:
    conv = model.layer2[1].conv1
    conv._forward_pre_hooks = OrderedDict()
    return conv.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,)).remove


def a_shortcut_that_is_no_module(model: Any) -> Undo:
    block = model.layer1[1]
    block.downsample = lambda x: x * 1.25
    return lambda: setattr(block, "downsample", None)


def a_third_module_in_a_shortcut(model: Any) -> Undo:
    shortcut = model.layer2[0].downsample
    shortcut.append(nn.Tanh())
    return lambda: shortcut.pop(2)


def blocks_in_another_order(model: Any) -> Undo:
    blocks = model.layer1._modules
    blocks["0"] = blocks.pop("0")
    return lambda: blocks.update({"1": blocks.pop("1")})


def an_attribute_that_hides_a_module(model: Any) -> Undo:
    vars(model)["conv1"] = scaled(model.conv1)
    return lambda: vars(model).pop("conv1")


def an_attribute_that_hides_a_weight(model: Any) -> Undo:
    conv = model.layer1[0].conv1
    vars(conv)["weight"] = conv.weight.detach() * 1.25
    return lambda: vars(conv).pop("weight")


def an_attribute_in_the_place_of_another(model: Any) -> Undo:
    """Exchange an attribute for `forward`, so that there are as many as before."""
    conv = model.layer4[0].conv2
    assert "output_padding" in vars(conv)
    found = vars(conv).pop("output_padding")
    conv.forward = scaled(conv.forward)
    return lambda: (delattr(conv, "forward"), setattr(conv, "output_padding", found))


def pruned(model: Any) -> Undo:
    conv, weight = model.layer1[0].conv1, model.layer1[0].conv1.weight.detach().clone()
    prune.l1_unstructured(conv, "weight", amount=0.5)

    def undo() -> None:
        prune.remove(conv, "weight")
        with torch.no_grad():
            conv.weight.copy_(weight)

    return undo


def parametrised(model: Any) -> Undo:
    parametrizations.weight_norm(model.layer1[0].conv1)
    with torch.no_grad():
        model.layer1[0].conv1.parametrizations.weight.original0.mul_(1.25)
    return None


def a_weight_of_another_class(model: Any) -> Undo:
    """A weight whose class changes its meaning, as quantised weights do."""

    class Scaled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Scaled) else a for a in args]
            if func is nn.functional.linear:
                plain[1] = plain[1] * 1.25
            return func(*plain, **(kwargs or {}))

    before = model.fc.weight
    model.fc._parameters["weight"] = before.detach().as_subclass(Scaled)
    return lambda: setattr(model.fc, "weight", before)


OTHERS: dict[str, tuple[Change, str]] = {
    **{
        f"forward of {path or 'the model'}": (wraps(path), "has a forward of its own")
        for path in (
            *("", "conv1", "bn1", "relu", "maxpool", "avgpool", "fc", "layer1", "layer2.1"),
            *("layer1.0.conv1", "layer1.0.bn2", "layer3.0.relu", "layer4.1.conv2"),
            *("layer2.0.downsample", "layer2.0.downsample.0", "layer2.0.downsample.1"),
        )
    },
    "_conv_forward": (wraps("layer3.0.conv1", "_conv_forward"), "has a _conv_forward of its own"),
    "_forward_impl": (wraps("", "_forward_impl"), "has a _forward_impl of its own"),
    "_call_impl": (wraps("layer1.1.bn1", "_call_impl"), "has a _call_impl of its own"),
    "class of a convolution": (becomes("layer1.0.conv1", nn.Conv2d), "has a Other at layer1"),
    "class of a block": (becomes("layer1.0", BasicBlock), r"has a forward of its own at layer1\.0"),
    "class of a stage": (becomes("layer1", nn.Sequential), "has a Other at layer1, not a Seq"),
    "class of the model": (becomes("", torchvision.models.ResNet), "has a forward of its own"),
    "class of a call": (becomes("layer4.0", BasicBlock, "_call_impl"), "has a .*call_impl of its"),
    "iterated backwards": (iterated_backwards, "has a Backwards at layer1, not a Sequential"),
    "Conv2d.forward": (patches(nn.Conv2d, "forward"), "has a forward of its own at conv1"),
    "Conv2d._conv_forward": (patches(nn.Conv2d, "_conv_forward"), "has a _conv_forward of its"),
    "BatchNorm.forward": (
        patches(nn.modules.batchnorm._BatchNorm, "forward"),
        "has a forward of its own at",
    ),
    "BasicBlock.forward": (patches(BasicBlock, "forward"), r"forward of its own at layer1\.0"),
    "Module._call_impl": (patches(nn.Module, "_call_impl"), "has a _call_impl of its own"),
    "global hook": (global_hook, "PyTorch has hooks for all modules"),
    "global pre-hook": (global_pre_hook, "PyTorch has hooks for all modules"),
    "hook": (hook, r"module 'layer3\.1\.bn2' has hooks"),
    "new hooks": (hook_in_a_new_dictionary, r"module 'layer2\.1\.conv1' has hooks"),
    "new pre-hooks": (pre_hook_in_a_new_dictionary, r"module 'layer2\.1\.conv1' has hooks"),
    "shortcut": (a_shortcut_that_is_no_module, r"has layer1\.1\.downsample, which ResNet-18 has"),
    "longer shortcut": (a_third_module_in_a_shortcut, r"has 3 modules in layer2\.0\.downsample"),
    "order": (blocks_in_another_order, "has layer1 with modules in the order 1, 0"),
    "hidden module": (an_attribute_that_hides_a_module, "has an attribute that hides conv1"),
    "hidden weight": (an_attribute_that_hides_a_weight, r"hides layer1\.0\.conv1\.weight"),
    "swap": (an_attribute_in_the_place_of_another, r"forward of its own at layer4\.0\.conv2"),
    "pruned": (pruned, r"(?s)'layer1\.0\.conv1' is pruned \(weight\).*utils\.prune\.remove"),
    "parametrised": (parametrised, r"(?s)parametrised \(weight\).*remove_parametrizations"),
    "weight's class": (a_weight_of_another_class, "no plain dense tensor"),
}


def eager(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IMAGES)
    return found


LAST = "parametrised"
"""The change that cannot be undone."""


@cache
def fast_model(level: str) -> tuple[Any, torch.Tensor, Any, torch.Tensor]:
    """A model, its logits, the fast module and its logits; for tests that undo their changes."""
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    return model, eager(model), fast, fast(IMAGES)


@pytest.mark.parametrize("name", OTHERS)
def test_another_forward_pass_is_refused(name: str) -> None:
    """Another forward pass is refused at once and later; with the change undone it works again."""
    change, message = OTHERS[name]
    place = list(OTHERS).index(name)  # the look at the model is the same at every level
    level = "add_relu" if place % 8 else LEVELS[place // 8 % len(LEVELS)]
    model, own, fast, expected = (
        fast_model.__wrapped__(level) if name == LAST else fast_model(level)
    )
    with ExitStack() as changed:
        undo = change(model)
        if undo is not None:
            changed.callback(undo)
        assert not torch.allclose(eager(model), own), "the change makes no difference"
        with pytest.raises(UsageError, match=message):
            optimize_resnet18(model, level, backend="numpy")
        with pytest.raises(UsageError, match=message):
            fast(IMAGES)
    if undo is not None:
        torch.testing.assert_close(eager(model), own)
        assert torch.equal(fast(IMAGES), expected)


def _note(model: Any) -> None:
    model.note = model.layer1[0].conv1.note = "mine"


def _restored_forward(model: Any) -> None:
    """Set the class's own method on the instance, as removing a wrapper does."""
    for module in (model, model.layer1[0], model.layer2[0].conv1):
        module.forward = types.MethodType(type(module).forward, module)


def _new_containers(model: Any) -> None:
    conv, norm = model.layer1[0].conv1, model.layer1[0].bn1
    conv._parameters = dict(conv._parameters)
    norm._buffers = dict(norm._buffers)


def _weight_in_the_new_container(model: Any) -> None:
    model.layer1[0].conv1._parameters["weight"] = nn.Parameter(-model.layer1[0].conv1.weight)


def _buffer_in_the_new_container(model: Any) -> None:
    norm = model.layer1[0].bn1
    norm._buffers["running_var"] = norm.running_var * 3


def _pruned_for_good(model: Any) -> None:
    prune.l1_unstructured(model.layer1[0].conv1, "weight", amount=0.5)
    prune.remove(model.layer1[0].conv1, "weight")


def _compiled_in_place(model: Any) -> None:
    """Compile a layer in place; nothing is compiled before a call, and a fused layer has none."""
    model.layer3[0].conv1.compile(backend="eager")


@pytest.mark.parametrize("level", ["add_relu", "all"])
def test_what_leaves_the_forward_pass_alone_is_followed(level: str) -> None:
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    for change in (
        *(_note, _restored_forward, _new_containers, _weight_in_the_new_container),
        *(_buffer_in_the_new_container, _pruned_for_good),
    ):
        change(model)
        got = fast(IMAGES)
        expected = eager(model)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert torch.equal(optimize_resnet18(model, level, backend="numpy")(IMAGES), got)
    before = fast(IMAGES)
    _compiled_in_place(model)
    assert torch.equal(fast(IMAGES), before)
    model.layer2[0].conv1.forward = scaled(model.layer2[0].conv1.forward)
    with pytest.raises(UsageError, match=r"forward of its own at layer2\.0\.conv1"):
        fast(IMAGES)


def test_another_call_than_the_compiled_one_is_refused() -> None:
    model = network()
    model.layer3[0].conv1._compiled_call_impl = scaled(model.layer3[0].conv1._call_impl)
    with pytest.raises(UsageError, match=r"_compiled_call_impl of its own at layer3\.0\.conv1"):
        optimize_resnet18(model, backend="numpy")


def test_a_compiled_module_looks_at_what_it_was_compiled_with() -> None:
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(optimize_resnet18(model, backend="numpy"), backend="eager")
    compiled(IMAGES)
    for name in ("forward of layer1.0.conv1", "class of a convolution", "global hook", "order"):
        change, message = OTHERS[name]
        undo = change(model)
        assert undo is not None
        with pytest.raises(UsageError, match=message):
            compiled(IMAGES)
        undo()
    check_like(model, IMAGES, compiled(IMAGES), "numpy")
    torch._dynamo.reset()


# -- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "this model is None, no ResNet of torchvision"),
        (torchvision.models.resnet18, "this model is a function, no ResNet of torchvision"),
        ("resnet18", "this model is a str, no ResNet of torchvision"),
    ],
)
def test_what_is_no_model_is_refused_in_words(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize_resnet18(model, backend="numpy")


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    for arguments in ({"fuse": None}, {"fuse": ["all"]}, {"precision": 32}, {"backend": 5}):
        with pytest.raises(R18Error, match=r"got (None|\['all'\]|32|5)"):
            optimize_resnet18(network(), **{"backend": "numpy", **arguments})


def test_a_message_names_a_bias_and_not_its_values() -> None:
    model = network()
    model.conv1 = nn.Conv2d(3, 64, 7, 2, 3)
    with pytest.raises(UsageError) as caught:
        optimize_resnet18(model.eval(), backend="numpy")
    first = str(caught.value).splitlines()[0]
    assert first.endswith("this model has conv1 with bias=True, not False")


# -- images without elements -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size", "padding", "stride"),
    [
        ((0, 3, 9, 6), 3, 1, 2),
        ((0, 3, 9, 6), 1, 0, 1),
        ((2, 3, 0, 6), 3, 1, 1),
        ((2, 3, 6, 0), 3, 1, 1),
        ((2, 3, 0, 6), 1, 1, 1),
        ((2, 3, 0, 6), 3, 2, 1),
        ((2, 3, 0, 0), 3, 3, 1),
        ((0, 3, 1, 1), 3, 0, 1),
        ((0, 2, 9, 6), 3, 1, 1),
        ((0, 3, 0, 6), 3, 1, 1),
    ],
)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_an_image_without_elements_is_as_in_pytorch(
    backend: str, shape: tuple[int, ...], size: int, padding: int, stride: int
) -> None:
    """An image without elements is as in PyTorch: padding alone would give unwritten memory."""
    _, weight, *norm, eps, _, _, _ = conv_sample(size=size)
    x = torch.empty(shape)
    windows = [stride] * 2, [padding] * 2
    try:
        expected = nn.functional.conv2d(x, weight, None, *windows)
    except RuntimeError:
        with pytest.raises(ShapeError):
            ops.conv_bn_relu.default(
                x, weight, *norm, eps, *windows, True, 0, backend, "fp32", None
            )
        return
    got = ops.conv_bn_relu.default(x, weight, *norm, eps, *windows, True, 0, backend, "fp32", None)
    assert got.shape == expected.shape
    assert not got.numel()


@pytest.mark.parametrize("shape", [(0, 3, 64, 64), (0, 3, 1, 1), (0, 3, 0, 5), (2, 3, 0, 64)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_without_elements_is_as_in_the_model(level: str, shape: tuple[int, ...]) -> None:
    model = network()
    fast = optimize_resnet18(copy.deepcopy(model), level, backend="numpy")
    images = torch.empty(shape)
    try:
        with torch.no_grad():
            expected = model(images)
    except RuntimeError:
        with pytest.raises((ShapeError, RuntimeError)):
            fast(images)
        return
    assert fast(images).shape == expected.shape
