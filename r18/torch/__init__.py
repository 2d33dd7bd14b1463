"""A torchvision ResNet whose blocks, layers or whole forward pass run on a backend's kernels.

    from r18.torch import optimize_resnet
    fast = optimize_resnet(model, fuse="all")

`optimize_resnet` takes any ResNet of torchvision's, `optimize_resnet18` only a ResNet-18.
`torch.compile(model, backend="r18")` takes any model (`dynamo`), and `explain` reports what
runs where.

How it works

- Kernels run on PyTorch's own memory. A backend's `Memory` that `adopts` (see `r18.backend`) makes
  a buffer from an address, so `Launch.enqueue` reads and writes tensors in place. Outputs,
  workspaces, arenas and packed weights come from PyTorch's allocator, and the work goes into
  PyTorch's current stream. `storage` does this.
- Custom operators (`operators`), which work on any device that a backend has: `r18::add_relu`,
  `r18::conv_bn_relu`, and `r18::resnet` or `r18::resnet18`. They are functions of the tensors they
  are given: the model's own parameters are arguments. Folded and packed weights are kept between
  calls in a `Followed` cache, whose handle is also an argument; without one they are derived again.
- The levels of `fuse` differ in what these operators replace. Kernels are chosen as in plans. At
  level `add_relu` they read tensors in their own layout, NCHW or channels-last. At `conv_bn_relu`
  the first convolution does, and the outputs of all convolutions have the layout of the backend's
  fast kernels (`choice`). At `all` the plan decides layouts, and on a GPU everything except the
  steps on the caller's tensors is a CUDA graph.
- In int8 a `Quantizer` (`integers`) makes the quantisation of the model's weights, which is derived
  like packed weights, and again when the weights change.
- An operator costs the host less than the modules that it replaces: whatever cannot change between
  calls is computed once, and a call only checks the rest (shapes, addresses, weights).
- The fast module owns nothing: its submodules and parameters are the model's own. A weight that
  is changed in place or replaced, a module that is replaced, and a model that is moved or cast are
  noticed at the next call; packed weights are rewritten in place, so that CUDA
  graphs that read them stay valid. Training mode, hooks, a replaced `forward` and an architecture
  that is no longer the same network's are errors (`watch`). `fast.to(...)`, `fast.train()` and
  `fast.load_state_dict(...)` would change the model and are errors: do that to the model.

`docs/drop-in.md` tells users. PyTorch is imported when one of the two is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from r18.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from r18.torch.dynamo import Explanation
    from r18.torch.integers import Given
    from r18.torch.module import FastResNet, FastResNet18

INSTALL = "pip install 'r18[torch]'"


def optimize_resnet(
    model: nn.Module,
    fuse: str = "all",
    precision: str | None = None,
    backend: str | None = None,
    calibration: Given | None = None,
    method: str | None = None,
    bits: int | None = None,
) -> FastResNet:
    """The model, for inference, with kernels of a backend in it; the model stays as it is.

    model:     a ResNet of torchvision's, in evaluation mode, on a CPU or a GPU: of any depth and
               width, with bottlenecks, groups, and dilation in place of strides; any number of
               classes, any image size.
    fuse:      `add_relu`: the residual sum and ReLU of each block; `conv_bn_relu`: and each
               convolution with its BatchNorm and ReLU; `all`: everything.
    precision: a name of `r18.graph.precision.PRECISIONS` that the backend computes in. None: the
               model's own (float32 is fp32). With each, images go in and logits come out in
               the model's dtype. At level `add_relu` the model computes, so it must be None.
               int8 is for level `all` and needs a `calibration`; docs/integers.md specifies it.
    backend:   as `r18.backend.registry.get_backend` takes it; it must compute where the model is.
               None: `R18_BACKEND`, else the first that can.
    calibration: with int8 only. Images as the model takes them: an iterable of tensors (N, 3, H, W)
               in a floating-point dtype, or of pairs of them and labels, as of a DataLoader; or one
               tensor. The first 256 are copied, and looked at again when the model's weights have
               changed. Or weights with a quantisation (`r18.load_weights` of the output of
               `r18 quantize`), or a `Quantization`, of the model's weights as they are.
    method:    with images, of scales of activations: `mse` (the default), `minmax` or `percentile`.
    bits:      with images, of weights: 8 (the default), 4 or 2; the last two are rounded by
               AdaRound, which takes minutes.

    Raises `UsageError` for a model or calibration that is not as described, `UnknownName` for a
    fusion level, precision, method or backend that does not exist, `BackendUnavailable` for one
    that cannot run or does not compute where the model is, `NoKernel` when it has no kernels in
    that precision, or for the groups or dilation of the model.
    """
    make = _module("optimize_resnet").FastResNet
    found: FastResNet = make(model, fuse, precision, backend, calibration, method, bits)
    return found


def optimize_resnet18(
    model: nn.Module,
    fuse: str = "all",
    precision: str | None = None,
    backend: str | None = None,
    calibration: Given | None = None,
    method: str | None = None,
    bits: int | None = None,
) -> FastResNet18:
    """`optimize_resnet` of a ResNet-18; raises `UsageError` for any other model too."""
    make = _module("optimize_resnet18").FastResNet18
    found: FastResNet18 = make(model, fuse, precision, backend, calibration, method, bits)
    return found


def explain(
    model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None
) -> Explanation:
    """Report what `torch.compile(model, backend="r18", options=options)` runs where, for these
    inputs.

    model:  any module or function; it is called once, without gradients.
    inputs: what it is called with, such as images (N, 3, H, W).

    Returns a report for each captured graph; `print` it. Raises `UsageError` without PyTorch or for
    wrong options, `BackendUnavailable` for a backend that was asked for and cannot compute there.
    """
    found: Explanation = _module("explain", "dynamo").explain(model, *inputs, options=options)
    return found


def _module(asked: str, name: str = "module") -> ModuleType:
    """A module of this folder; raises `UsageError` where PyTorch or torchvision is missing."""
    try:
        return import_module(f"r18.torch.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torchvision"):
            raise
        raise UsageError(f"{asked} needs PyTorch and torchvision: {error}\n  {INSTALL}") from error


__all__ = ["explain", "optimize_resnet", "optimize_resnet18"]
