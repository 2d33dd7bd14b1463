"""The drop-in of every ResNet in torchvision, and of some that it can only build."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import r18_numpy
from r18.backend import Kernel
from r18.backend.registry import get_backend, installed
from r18.errors import NoKernel, ScheduleError, ShapeError, UnknownName, UsageError
from r18.evaluate.margins import multiple
from r18.graph.precision import FP32
from r18.graph.resnet import FAMILY, SMALL, resnet_of
from r18.graph.resnet import ResNet as Described
from r18.torch import optimize_resnet, optimize_resnet18
from r18.torch.followed import Followed
from r18.torch.operators import ops
from support import random_weights

LEVELS = ("add_relu", "conv_bn_relu", "all")
DILATED = {"replace_stride_with_dilation": [False, True, True]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILY} | {
    "resnet50 dilated": ("resnet50", DILATED),
    "resnext50_32x4d dilated": ("resnext50_32x4d", DILATED),
}
LARGE = ("resnet101", "resnet152", "wide_resnet101_2", "resnext101_32x8d")
"""Networks tested at one fusion level only."""
BACKENDS = ["numpy", *(name for name in ("numba-cpu",) if name in installed())]
CLASSES = 7


def seeded(model: nn.Module, network: Described) -> Any:
    """The model in evaluation mode, with weights under which every layer counts."""
    weights = random_weights(network.schedule("the model", classes=CLASSES), 0)
    values = {n: torch.from_numpy(a) for n, a in weights.items()}
    missing, _ = model.load_state_dict(values, strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return model.eval()


@contextmanager
def undrawn() -> Iterator[None]:
    """Have models skip drawing random weights, which is slow: `seeded` sets others."""
    with (
        patch("torch.nn.init.kaiming_uniform_", lambda tensor, **_: tensor),
        patch("torch.nn.init.kaiming_normal_", lambda tensor, **_: tensor),
    ):
        yield


@lru_cache(maxsize=1)  # its levels follow each other
def model_of(name: str) -> Any:
    theirs, options = MODELS[name]
    dilate = tuple(options.get("replace_stride_with_dilation", ()))
    with undrawn():
        model = torchvision.models.get_model(theirs, num_classes=CLASSES, **options)
    known = FAMILY[theirs]
    network = Described(
        known.block, known.blocks, known.width, known.groups, known.group_width, dilate
    )
    return seeded(model, network)


def small(block: Any = Bottleneck, layers: tuple[int, ...] = (1, 2, 1, 1), **options: Any) -> Any:
    kind = "bottleneck" if block is Bottleneck else "basic"
    groups, width = options.get("groups", 1), options.get("width_per_group", 64)
    model = ResNet(block, list(layers), num_classes=CLASSES, **options)
    return seeded(model, Described(kind, layers, groups=groups, group_width=width))


def pixels(size: tuple[int, int] = (40, 33), batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


Answers = tuple[torch.Tensor, torch.Tensor]
"""A model's logits as PyTorch computes them, and in float64."""


def answers(model: Any, images: torch.Tensor) -> Answers:
    with torch.no_grad():
        return model(images), copy.deepcopy(model).double()(images.double())


@lru_cache(maxsize=1)  # its levels follow each other
def answers_of(name: str) -> Answers:
    return answers(model_of(name), pixels())


def check_like(model: Any, images: torch.Tensor, logits: torch.Tensor, backend: str) -> None:
    """Check logits as test_torch_dropin does, with the multiple of this backend's algorithms."""
    check_close(answers(model, images), logits, backend)


def check_close(found: Answers, logits: torch.Tensor, backend: str) -> None:
    own, exact = found
    floor = exact.pow(2).mean().sqrt() * torch.finfo(own.dtype).eps / 2
    loss = max((own - exact).pow(2).mean().sqrt(), floor)
    lost = (logits - exact).pow(2).mean().sqrt()
    assert exact.abs().max() > 0.1
    used = {kernel.contract.algorithm for kernel in get_backend(backend).kernels()}
    assert lost <= multiple(used, FP32) * loss


@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for name in MODELS for level in (LEVELS[2:] if name in LARGE else LEVELS)],
)
def test_logits_are_the_models(name: str, level: str) -> None:
    fast = optimize_resnet(model_of(name), level, backend="numpy")
    check_close(answers_of(name), fast(pixels()), "numpy")


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d dilated"])
def test_logits_are_the_models_on_compiled_kernels(name: str, level: str) -> None:
    if "numba-cpu" not in BACKENDS:
        pytest.skip("Numba is not installed")
    fast = optimize_resnet(model_of(name), level, backend="numba-cpu")
    check_close(answers_of(name), fast(pixels()), "numpy")


@pytest.mark.parametrize("level", LEVELS)
def test_any_number_of_blocks_groups_and_widths(level: str) -> None:
    for model in (
        small(BasicBlock, (1, 1, 2, 1)),
        small(),
        small(groups=4, width_per_group=24),
        small(width_per_group=96),
    ):
        images = pixels((33, 48))
        check_like(model, images, optimize_resnet(model, level, backend="numpy")(images), "numpy")


def test_resnet18_has_a_function_of_its_own() -> None:
    model = model_of("resnet18")
    images = pixels()
    both = optimize_resnet(model, backend="numpy"), optimize_resnet18(model, backend="numpy")
    assert torch.equal(both[0](images), both[1](images))
    with pytest.raises(UsageError, match="optimize_resnet18 takes torchvision's ResNet-18"):
        optimize_resnet18(model_of("resnet50"), backend="numpy")


def test_a_change_of_weights_is_followed_and_one_of_the_network_refused() -> None:
    model = small()
    fast = optimize_resnet(model, backend="numpy")
    images = pixels((33, 33))
    fast(images)
    with torch.no_grad():
        model.layer2[1].conv3.weight.mul_(1.5)
    check_like(model, images, fast(images), "numpy")
    again = pickle.loads(pickle.dumps(fast))
    assert torch.equal(again(images), fast(images))
    model.layer2.append(copy.deepcopy(model.layer2[1]))
    with pytest.raises(UsageError, match=r"has stages of 1, 3, 1, 1 blocks, not of 1, 2, 1, 1"):
        fast(images)


def _moved_stride(model: Any) -> None:
    """Move the stride into the 1×1, as in the first ResNets."""
    model.layer2[0].conv1.stride, model.layer2[0].conv2.stride = (2, 2), (1, 1)


def _other_groups(model: Any) -> None:
    model.layer3[0].conv2 = nn.Conv2d(256, 256, 3, 2, 1, groups=2, bias=False)


def _other_dilation(model: Any) -> None:
    model.layer4[0].conv2.dilation = (2, 2)


def _mixed_blocks(model: Any) -> None:
    model.layer1[0] = BasicBlock(64, 64)


def _narrow(model: Any) -> None:
    model.layer1[0].conv2 = nn.Identity()


WRONG = {
    _moved_stride: r"has layer2\.0\.conv1 with stride=\(2, 2\), not \(1, 1\)",
    _other_groups: r"has layer3\.0\.conv2 with groups=2, not 1",
    _other_dilation: r"has layer4\.0\.conv2 with dilation=\(2, 2\), not \(1, 1\)",
    _mixed_blocks: r"has a Bottleneck at layer2\.0, not a BasicBlock",
    _narrow: "is none that is known here: ",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_what_is_no_resnet_is_refused_by_name(change: Any) -> None:
    model = small()
    change(model)
    model.eval()
    with pytest.raises(UsageError, match=WRONG[change]) as caught:
        optimize_resnet(model, backend="numpy")
    assert "optimize_resnet takes torchvision's ResNets: this model" in str(caught.value)


class WithoutGroups(r18_numpy.Backend):
    """NumPy's backend as if no kernel computed groups."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(replace(kernel, extras=frozenset()) for kernel in super().kernels())


def test_groups_that_a_backend_lacks_are_refused_by_name() -> None:
    model = small(groups=4, width_per_group=24)
    with pytest.raises(NoKernel, match="computes no conv2d with groups=4"):
        optimize_resnet(model, backend=f"{__name__}:WithoutGroups")


def test_a_network_as_an_operator() -> None:
    model = small(groups=4, width_per_group=24)
    network = Described("bottleneck", (1, 2, 1, 1), groups=4, group_width=24)
    names = network.schedule("the model", classes=CLASSES).weight_specs
    weights = [model.state_dict()[name] for name in names]
    eps = [m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    images = pixels((33, 48))
    kept = Followed()
    arguments = (images, weights, eps, network.text, kept.handle, "numpy", "fp32")
    check_like(model, images, ops.resnet.default(*arguments), "numpy")
    torch.library.opcheck(ops.resnet.default, arguments)
    with pytest.raises(UnknownName, match="resnet50"):
        ops.resnet.default(images, weights, eps, "resnet51", 0, "numpy", "fp32")


def test_a_dilated_and_grouped_convolution_as_an_operator() -> None:
    x = torch.randn(2, 8, 9, 7, generator=torch.Generator().manual_seed(0))
    conv = nn.Conv2d(8, 12, 3, (2, 1), (2, 1), (2, 1), 4, bias=False)
    norm = nn.BatchNorm2d(12).eval()
    weights = (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    arguments = (
        *(x, *(w.detach() for w in weights if w is not None), norm.eps, conv.stride, conv.padding),
        *(True, 0, "numpy", "fp32", None, conv.dilation, 4),
    )
    with torch.no_grad():
        expected = torch.relu(norm(conv(x)))
    got = ops.conv_bn_relu.default(*arguments)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    torch.library.opcheck(ops.conv_bn_relu.default, arguments)


def test_int8_of_a_bottleneck_is_the_programs() -> None:
    """int8 of a bottleneck computes as the program does, and its logits stay near the model's."""
    model = small()
    images = pixels((32, 32), 8)
    fast = optimize_resnet(model, precision="int8", backend="numpy", calibration=images)
    with torch.no_grad():
        expected = model(images)
    got = fast(images)
    correlation = torch.corrcoef(torch.stack([got.flatten(), expected.flatten()]))[0, 1]
    assert correlation > 0.98
    assert fast.quantization is not None
    assert "layer2.1.conv3" in fast.quantization.weights


def test_a_network_s_text_tells_it() -> None:
    for name, network in FAMILY.items():
        assert network.text == name
        assert resnet_of(name) == network
    for network in SMALL.values():
        assert resnet_of(network.text) == network
    with pytest.raises(UnknownName, match="did you mean 'resnet50'"):
        resnet_of("resnet5O")
    for wrong in ("{", '{"blocks": 3}', '{"colour": 1}', '{"block": "round"}'):
        with pytest.raises((ScheduleError, ShapeError, UnknownName)):
            resnet_of(wrong)
