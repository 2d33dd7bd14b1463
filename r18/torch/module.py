"""The fast module: what `optimize_resnet` returns. See `r18.torch` for how it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from r18.errors import ShapeError, UsageError, unknown
from r18.graph.ops import Layout
from r18.graph.precision import precision as precision_named
from r18.graph.quantization import Quantization
from r18.graph.resnet import ResNet, resnet18
from r18.torch.architecture import ONLY, check_resnet, examine
from r18.torch.choice import LEVELS, Choice, choose
from r18.torch.convolution import WEIGHTS
from r18.torch.followed import Followed
from r18.torch.integers import Given, Quantizer, calibrating
from r18.torch.network import network_schedule
from r18.torch.operators import QUANTIZERS, backend_named, ops
from r18.torch.storage import below_autograd, precision_of, shape_of, storage_dtype

CONV_WEIGHTS = len(WEIGHTS)

OWN = "do that to the model that was given to be optimized: this one follows it"


class FastResNet(nn.Module):
    """A model's forward pass with a backend's kernels in it, and the model's own parameters.

    Called as the model is: images (N, 3, H, W) in its dtype on its device, to logits. Inference
    only. Raises `UsageError` when the model is in training mode, has hooks, or is not the ResNet
    any more that it was, and for images of another dtype or device; `ShapeError` for another shape.
    """

    _model: nn.Module
    _network: ResNet | None = None
    """The network that the model must be; None until the first look, for any."""
    _asked = "optimize_resnet"

    def __init__(
        self,
        model: nn.Module,
        fuse: str,
        precision: str | None,
        backend: str | None,
        calibration: Given | None = None,
        method: str | None = None,
        bits: int | None = None,
    ) -> None:
        super().__init__()
        if fuse not in LEVELS:
            raise unknown("fusion level of a drop-in", fuse, LEVELS, error=UsageError)
        check_resnet(model, self._asked)
        if precision is not None:
            precision_named(precision)
        self._calibrating = calibrating(precision, fuse, calibration, method, bits)
        self.fuse = fuse
        self._asked_precision = precision
        self._asked_backend = backend
        self.training = False
        # The model is no submodule, its submodules are: names are those of the model, and what is
        # replaced in the one is replaced in the other.
        self.__dict__["_model"] = model
        self.__dict__["_modules"] = model._modules
        self._begin()
        _ = self.quantization  # which may fail, and takes long

    def _begin(self) -> None:
        self._architecture = examine(self._model, self._network, self._asked)
        self._network = self._architecture.network
        self._choices: dict[tuple[str, torch.dtype], Choice] = {}
        self._text = self._network.text
        self._whole = Followed()
        self._convs = [Followed() for _ in self._architecture.norms]
        self._quantizer = None
        if self._calibrating is not None:
            self._quantizer = QUANTIZERS[self._whole.handle] = Quantizer(self._calibrating)
        self._choice()

    def _follow(self) -> None:
        """Look at the model again, if it is not as it was."""
        if not self._architecture.stands:
            self._examine()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _examine(self) -> None:
        """NOTE: not for torch.compile to trace; with fullgraph=True, call the module once itself
        after a module of the model was replaced."""
        self._architecture = examine(self._model, self._network, self._asked)

    def _choice(self, weight: torch.Tensor | None = None) -> Choice:
        """The backend's choice for the model as it is now; `weight` is one of its own."""
        weight = self._architecture.tensors()[0] if weight is None else weight
        key = (weight.device.type, weight.dtype)
        if key not in self._choices:
            self._choose(*key)
        return self._choices[key]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose(self, kind: str, dtype: torch.dtype) -> None:
        precision = self._precision_in(dtype)
        bits = 8 if self._calibrating is None else self._calibrating.bits
        self._choices[kind, dtype] = choose(
            self._asked_backend, kind, self.fuse, precision, bits, self._architecture.network
        )

    def _precision_in(self, dtype: torch.dtype) -> str:
        own = precision_of(dtype)
        asked = self._asked_precision or own
        if self.fuse == "add_relu" and asked != own:
            raise UsageError(
                f"at level add_relu the model computes in its own {dtype}, {asked} was asked for\n"
                "  cast the model, or take level conv_bn_relu or all"
            )
        return asked

    @property
    def precision(self) -> str:
        """The precision that the backend computes in."""
        return self._choice().precision

    @property
    def backend(self) -> str:
        """The backend that computes where the model is now."""
        return self._choice().backend

    @property
    def quantization(self) -> Quantization | None:
        """In int8, the quantisation of the model's weights as they are now: what it computes with.

        None in other precisions. Raises what `optimize_resnet` raises for a calibration.
        """
        if self._quantizer is None:
            return None
        self._follow()
        backend = backend_named(self._choice().backend)
        weights = self._architecture.tensors()
        height, width = resnet18().input_shape[1:]  # any: scales do not depend on it
        eps = tuple(norm.eps for norm in self._architecture.norms)
        network = self._architecture.network
        schedule = network_schedule(len(weights[-1]), height, width, eps, network)
        return self._quantizer.quantization(backend, schedule, weights)

    # -- running -------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as torchvision names it: images (N, 3, H, W) to logits (N, classes)."""
        self._follow()
        weights = self._architecture.tensors()
        self._check_images(x, weights[0])
        choice = self._choice(weights[0])
        with torch.no_grad(), below_autograd():
            if self.fuse == "add_relu":
                return self._forward_add_relu(x, weights, choice)
            if self.fuse == "conv_bn_relu":
                return self._forward_conv_bn_relu(x, weights, choice)
            eps = [norm.eps for norm in self._architecture.norms]
            how = self._whole.handle, choice.backend, choice.precision
            logits: torch.Tensor
            if self._text == "resnet18":
                logits = ops.resnet18.default(x, weights, eps, *how)
            else:
                logits = ops.resnet.default(x, weights, eps, self._text, *how)
            return logits

    def _check_images(self, images: torch.Tensor, weight: torch.Tensor) -> None:
        given: object = images
        if not isinstance(given, torch.Tensor):
            raise UsageError(f"the model takes a tensor (N, 3, H, W), got a {type(given).__name__}")
        if images.dim() != 4 or images.shape[1] != 3:
            raise ShapeError(f"the model takes images (N, 3, H, W), got {shape_of(images)}")
        if (images.dtype, images.device) != (weight.dtype, weight.device):
            raise UsageError(
                f"images are {images.dtype} on {images.device}, "
                f"the model is {weight.dtype} on {weight.device}"
            )
        if images.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                "the fast module is for inference and has no gradient\n"
                "  call it under torch.no_grad(), or the model itself"
            )

    def _forward_add_relu(
        self, images: torch.Tensor, weights: list[torch.Tensor], choice: Choice
    ) -> torch.Tensor:
        """torchvision's forward pass, with another sum.

        It calls PyTorch's functions as the model's layers do, and spares the host the layers.
        """
        model: Any = self._model
        cudnn = torch.backends.cudnn.enabled
        # `conv2d` does nothing but call `convolution`, which not every device's autocast knows.
        autocast = torch.is_autocast_enabled(images.device.type)

        def normed(number: int, x: torch.Tensor) -> torch.Tensor:
            """The convolution of that number with its BatchNorm."""
            weight, scale, bias, mean, var = self._of(number, weights)
            stride, padding, dilation, groups = self._architecture.windows[number]
            if autocast:
                y = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
            else:
                around = stride, padding, dilation, False, (0, 0), groups
                y = torch.convolution(x, weight, None, *around)
            eps = self._architecture.norms[number].eps
            return torch.batch_norm(y, scale, bias, mean, var, False, 0.0, eps, cudnn)

        x = model.maxpool(torch.relu_(normed(0, images)))
        count, depth = 1, self._architecture.depth
        for shortcut in self._architecture.shortcuts:
            y = normed(count, x)
            for number in range(count + 1, count + depth):
                y = normed(number, torch.relu_(y))
            count += depth
            if shortcut:
                x = normed(count, x)
                count += 1
            ops.add_relu_.default(y, x, choice.backend)  # no other reference to y
            x = y
        return self._classify(x)

    def _forward_conv_bn_relu(
        self, images: torch.Tensor, weights: list[torch.Tensor], choice: Choice
    ) -> torch.Tensor:
        """torchvision's forward pass, with a convolution and its BatchNorm and ReLU as one.

        The first convolution reads the images as they lie, and all leave their output in the
        layout of the choice, which pooling keeps.
        """
        model: Any = self._model
        nhwc = choice.layout is Layout.NHWC

        def fused(number: int, x: torch.Tensor, relu: bool) -> torch.Tensor:
            """The convolution of that number with its BatchNorm, and ReLU."""
            stride, padding, dilation, groups = self._architecture.windows[number]
            y: torch.Tensor = ops.conv_bn_relu.default(
                x,
                *self._of(number, weights),
                self._architecture.norms[number].eps,
                stride,
                padding,
                relu,
                self._convs[number].handle,
                choice.backend,
                choice.precision,
                nhwc,
                dilation,
                groups,
            )
            return y

        x = model.maxpool(fused(0, images.to(storage_dtype(choice.precision)), True))
        count, depth = 1, self._architecture.depth
        for shortcut in self._architecture.shortcuts:
            y = x
            for number in range(count, count + depth):
                y = fused(number, y, number < count + depth - 1)
            count += depth
            if shortcut:
                x = fused(count, x, False)
                count += 1
            ops.add_relu_.default(y, x, choice.backend)  # no other reference to y
            x = y
        return self._classify(x.to(images.dtype))

    def _of(self, number: int, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weights of the convolution of that number in the order of the steps, and those of
        its BatchNorm."""
        return weights[CONV_WEIGHTS * number : CONV_WEIGHTS * (number + 1)]

    def _classify(self, x: torch.Tensor) -> torch.Tensor:
        model: Any = self._model
        logits: torch.Tensor = model.fc(torch.flatten(model.avgpool(x), 1))
        return logits

    def refresh(self) -> None:
        """Read the model's weights again, for changes that PyTorch does not count.

        These are writes through `.data`, and any change at all if the caller replays a CUDA graph:
        packed weights are rewritten where they are, and the graph reads them there.
        """
        self._follow()
        tensors = self._architecture.tensors()
        if self._quantizer is not None:
            self._quantizer.forget()
        self._whole.refresh(tensors)
        for number, conv in enumerate(self._convs):
            conv.refresh(self._of(number, tensors))

    # -- what belongs to the model -------------------------------------------------------------

    def train(self, mode: bool = True) -> FastResNet:
        if mode:
            raise UsageError(f"the fast module is for inference: train the model\n  {OWN}")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> FastResNet:
        """Behind `to`, `cuda`, `half` and the like: an error, unless it changes nothing."""
        for tensor in self._architecture.tensors():
            probe = _small(tensor)
            made = fn(probe)
            same = (made.dtype, made.device) == (tensor.dtype, tensor.device)
            if not same or made.stride() != probe.stride():
                raise UsageError(
                    "the fast module does not move, cast or reorder weights: it reads the model's\n"
                    f"  call .to(...) of the model itself: {OWN}"
                )
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> NoReturn:
        raise UsageError(f"the fast module owns no weights to load into\n  {OWN}")

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        raise UsageError(f"the fast module owns no weights\n  {OWN}")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, torch.Tensor)):
            raise UsageError(f"'{name}' cannot be set on the fast module\n  {OWN}")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """The state without derived data; a copy or a loaded module derives it again."""
        state = self.__dict__.copy()
        for name in ("_architecture", "_choices", "_whole", "_convs", "_quantizer"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()

    def extra_repr(self) -> str:
        return f"fuse={self.fuse}, precision={self.precision}, backend={self.backend}"


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype, device and memory format, which a conversion would change."""
    extent, how = 1, torch.contiguous_format
    if tensor.dim() == 4:
        last = tensor.is_contiguous(memory_format=torch.channels_last)
        if last != tensor.is_contiguous():  # both of a 1×1 window: one format is the other
            extent, how = 2, torch.channels_last if last else how
    shape = (extent,) * tensor.dim()
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=how)


class FastResNet18(FastResNet):
    """`FastResNet` of a ResNet-18 only: what `optimize_resnet18` returns."""

    _network = ONLY
    _asked = "optimize_resnet18"


__all__ = ["FastResNet", "FastResNet18"]
