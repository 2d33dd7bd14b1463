"""The custom operators: kernels of a backend as functions of PyTorch's tensors.

`r18::add_relu(a, b, backend)`
    ReLU(a + b) of tensors of one shape and dtype; the result has the memory format of `a`.
`r18::add_relu_(a, b, backend)`
    The same, in place of `a`.
`r18::conv_bn_relu(x, weight, bn_weight, bn_bias, running_mean, running_var, eps, stride, padding,
relu, cache, backend, precision, channels_last, dilation, groups)`
    Convolution without bias, BatchNorm with running statistics, and ReLU if `relu`. `x` is in the
    precision's storage dtype, (N, C, H, W); the result is dense, in channels-last memory if
    `channels_last`, otherwise in the memory format of `x`. No image gives an empty result; images
    without pixels raise `ShapeError`.
`r18::resnet(images, weights, eps, network, cache, backend, precision)`
    Logits of images (N, 3, H, W). `weights` are the tensors of torchvision's `state_dict` in the
    order of `network_schedule(...).weight_specs`, `eps` the BatchNorms' in the order of the steps.
    `network` is the `text` of an `r18.graph.resnet.ResNet`, such as `resnet50`.
`r18::resnet18(images, weights, eps, cache, backend, precision)`
    The same of ResNet-18.

`backend` is a name of the registry. `cache` is the handle of a `Followed`, which keeps what is
derived from the weights; 0 for none. In int8 a quantisation is derived from them too, and the cache
is one of `QUANTIZERS`. All are for inference: a backward pass through one is an
error. Importing this module registers them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from r18.backend import Backend
from r18.backend.registry import get_backend
from r18.errors import ShapeError, UsageError
from r18.graph.ops import Conv2d, Layout, Shape
from r18.graph.precision import INT8
from r18.graph.resnet import resnet_of
from r18.graph.schedule import Schedule
from r18.torch.convolution import Convolution, make_sum
from r18.torch.followed import followed
from r18.torch.integers import Quantizer
from r18.torch.network import Network, network_schedule
from r18.torch.storage import (
    Run,
    check_adopts,
    check_alike,
    empty,
    layout_of,
    precision_of,
    shape_of,
    storage_dtype,
)

DEVICES = ("cpu", "cuda")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

LAYOUTS = {False: Layout.NCHW, True: Layout.NHWC}
"""The layout for each value of `channels_last`."""

SCHEMAS = {
    "r18::add_relu": "(Tensor a, Tensor b, str backend) -> Tensor",
    "r18::add_relu_": "(Tensor(a!) a, Tensor b, str backend) -> ()",
    "r18::conv_bn_relu": (
        "(Tensor x, Tensor weight, Tensor bn_weight, Tensor bn_bias, Tensor running_mean, "
        "Tensor running_var, float eps, int[2] stride, int[2] padding, bool relu, int cache, "
        "str backend, str precision, bool? channels_last=None, int[2] dilation=1, int groups=1) "
        "-> Tensor"
    ),
    "r18::resnet": (
        "(Tensor images, Tensor[] weights, float[] eps, str network, int cache, str backend, "
        "str precision) -> Tensor"
    ),
    "r18::resnet18": (
        "(Tensor images, Tensor[] weights, float[] eps, int cache, str backend, str precision) "
        "-> Tensor"
    ),
}


@cache
def backend_named(name: str) -> Backend:
    """The backend of that name, probed once; raises as `get_backend` and `check_adopts` do."""
    backend = get_backend(name)
    check_adopts(backend)
    return backend


# -- add, ReLU ---------------------------------------------------------------------------------


def add_relu(a: torch.Tensor, b: torch.Tensor, backend: str) -> torch.Tensor:
    run = _run_of(a, b, backend)
    return empty(a.shape, layout_of(a), a.dtype, a.device) if run is None else run(a, b)


def add_relu_(a: torch.Tensor, b: torch.Tensor, backend: str) -> None:
    run = _run_of(a, b, backend)
    if run is not None and (made := run(a, b, over=True)) is not a:
        a.copy_(made)


def _run_of(a: torch.Tensor, b: torch.Tensor, backend: str) -> Run | None:
    nhwc = layout_of(a) is Layout.NHWC
    return _sum(backend, nhwc, a.shape, b.shape, a.dtype, b.dtype, a.device, b.device)


@lru_cache(maxsize=1024)
def _sum(
    backend: str,
    nhwc: bool,
    shape: Shape,
    other: Shape,
    dtype: torch.dtype,
    others_dtype: torch.dtype,
    device: torch.device,
    others_device: torch.device,
) -> Run | None:
    """A function that computes the sum of two such tensors, None for empty ones; raises where
    nothing may.

    The checks are in here, so that the cache covers them: its key has all that they depend on.
    """
    check_alike("r18::add_relu", (dtype, device), (others_dtype, others_device))
    if shape != other:
        raise ShapeError(
            f"r18::add_relu: shapes differ, {tuple(shape)} and {tuple(other)}; "
            "it broadcasts nothing"
        )
    if not math.prod(shape):
        return None
    precision = precision_of(dtype)
    return make_sum(backend_named(backend), tuple(shape), LAYOUTS[nhwc], precision, device)


def _add_relu_fake(a: torch.Tensor, b: torch.Tensor, backend: str) -> torch.Tensor:
    _check_shapes(a, b)
    return empty(a.shape, layout_of(a), a.dtype, a.device)


def _add_relu_over_fake(a: torch.Tensor, b: torch.Tensor, backend: str) -> None:
    _check_shapes(a, b)


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    torch._check(a.shape == b.shape, lambda: f"r18::add_relu: {a.shape} and {b.shape} differ")


def _add_relu_over_autograd(
    keys: torch._C.DispatchKeySet, a: torch.Tensor, b: torch.Tensor, backend: str
) -> None:
    """Autograd's layer: it has no gradient, and what would need one is refused at once."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        _no_gradient(None)
    with torch._C._AutoDispatchBelowAutograd():
        ops.add_relu_.default.redispatch(keys & torch._C._after_autograd_keyset, a, b, backend)


def _add_relu_over_counted(
    keys: torch._C.DispatchKeySet, a: torch.Tensor, b: torch.Tensor, backend: str
) -> None:
    """The layer that counts changes: who kept `a` for a gradient learns that it is another."""
    torch.autograd.graph.increment_version(a)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        keys = keys & torch._C._after_ADInplaceOrView_keyset
        ops.add_relu_.default.redispatch(keys, a, b, backend)


# -- convolution, BatchNorm, ReLU --------------------------------------------------------------


def conv_bn_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bn_weight: torch.Tensor,
    bn_bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    cache: int,
    backend: str,
    precision: str,
    channels_last: bool | None = None,
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    weights = (weight, bn_weight, bn_bias, running_mean, running_var)
    layout = layout_of(x)
    wanted = layout if channels_last is None else LAYOUTS[channels_last]
    given = (x.shape, weight.shape, x.dtype, layout, x.device)
    key = (*given, *stride, *padding, *dilation, groups, relu, eps, backend, precision, wanted)
    kept = followed(cache)
    found = kept.current(key, weights)
    if found is None:
        if x.dtype != storage_dtype(precision):
            raise UsageError(
                f"r18::conv_bn_relu in {precision} takes {storage_dtype(precision)}, got {x.dtype}"
            )
        check_devices("r18::conv_bn_relu", x, weights)
        op = _conv(weight, stride, padding, relu, dilation, groups)
        if not x.numel():
            # As in PyTorch: no image is an empty result, images without pixels are an error. Their
            # padding alone could fill an output, which nothing here would compute.
            op.infer((x.shape[0] or 1, *x.shape[1:]))
            return _conv_bn_relu_fake(
                x,
                *weights,
                eps,
                stride,
                padding,
                relu,
                cache,
                backend,
                precision,
                channels_last,
                dilation,
                groups,
            )
        found = kept.find(
            key,
            weights,
            lambda: Convolution(backend_named(backend), op, eps, x, weights, precision, wanted),
        )
    return cast(Convolution, found).run(x)


def _conv(
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    dilation: Sequence[int],
    groups: int,
) -> Conv2d:
    if weight.dim() != 4:
        raise ShapeError(f"r18::conv_bn_relu takes weights (O, I, kh, kw), got {shape_of(weight)}")
    o, c, kh, kw = weight.shape
    (sh, sw), (ph, pw), (dh, dw) = stride, padding, dilation
    shape = c * groups, o, (kh, kw), (sh, sw), (ph, pw)
    return Conv2d(*shape, relu=relu, groups=groups, dilation=(dh, dw))


def _conv_bn_relu_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bn_weight: torch.Tensor,
    bn_bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    cache: int,
    backend: str,
    precision: str,
    channels_last: bool | None = None,
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    o, c, *kernel = weight.shape
    c = c * groups
    torch._check(x.dim() == 4, lambda: f"r18::conv_bn_relu takes (N, C, H, W), got {x.shape}")
    torch._check(x.shape[1] == c, lambda: f"r18::conv_bn_relu takes {c} channels, got {x.shape}")
    extents = (
        (extent + 2 * pad - apart * (size - 1) - 1) // step + 1
        for extent, size, step, pad, apart in zip(
            x.shape[2:], kernel, stride, padding, dilation, strict=True
        )
    )
    layout = layout_of(x) if channels_last is None else LAYOUTS[channels_last]
    return empty((x.shape[0], o, *extents), layout, x.dtype, x.device)


# -- the network -------------------------------------------------------------------------------


def resnet18(
    images: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: Sequence[float],
    cache: int,
    backend: str,
    precision: str,
) -> torch.Tensor:
    return resnet(images, weights, eps, "resnet18", cache, backend, precision)


def resnet(
    images: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: Sequence[float],
    network: str,
    cache: int,
    backend: str,
    precision: str,
) -> torch.Tensor:
    operator = f"r18::{network if network == 'resnet18' else 'resnet'}"
    precision_of(images.dtype)
    if images.dim() != 4 or images.shape[1] != 3:
        raise ShapeError(f"{operator} takes images (N, 3, H, W), got {shape_of(images)}")
    batch, _, height, width = images.shape
    classes = len(weights[-1])
    variances = tuple(eps)
    if not batch:
        _schedule(classes, height, width, variances, network)  # raises where no window fits
        return empty((0, classes), Layout.NCHW, images.dtype, images.device)
    key = (images.shape, classes, variances, images.device, backend, precision, network)
    kept = followed(cache)
    found = kept.current(key, weights)
    if found is None:
        check_devices(operator, images, weights)
        quantizer = _quantizer(cache, precision, operator)
        found = kept.find(
            key,
            weights,
            lambda: Network(
                backend_named(backend),
                _schedule(classes, height, width, variances, network),
                batch,
                precision,
                images.device,
                weights,
                quantizer,
            ),
        )
    return cast(Network, found).run(images)


QUANTIZERS: WeakValueDictionary[int, Quantizer] = WeakValueDictionary()
"""In int8, what quantises the weights, by the handle of the cache."""


def _schedule(
    classes: int, height: int, width: int, eps: tuple[float, ...], network: str
) -> Schedule:
    return network_schedule(classes, height, width, eps, resnet_of(network))


def _quantizer(cache: int, precision: str, operator: str) -> Quantizer | None:
    """The quantiser of a cache; None in precisions of floats. Raises `UsageError` for int8 without
    one."""
    if precision != INT8.name:
        return None
    found = QUANTIZERS.get(cache)
    if found is None:
        raise UsageError(
            f"{operator} in int8 needs the cache of a module that was calibrated\n"
            "  optimize_resnet18(model, precision='int8', calibration=…) makes one"
        )
    return found


def _resnet18_fake(
    images: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: Sequence[float],
    cache: int,
    backend: str,
    precision: str,
) -> torch.Tensor:
    torch._check(images.dim() == 4, lambda: f"images are (N, 3, H, W), got {images.shape}")
    shape = (images.shape[0], weights[-1].shape[0])
    return empty(shape, Layout.NCHW, images.dtype, images.device)


def _resnet_fake(
    images: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: Sequence[float],
    network: str,
    cache: int,
    backend: str,
    precision: str,
) -> torch.Tensor:
    return _resnet18_fake(images, weights, eps, cache, backend, precision)


# -- registration ------------------------------------------------------------------------------


def check_devices(name: str, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raise `UsageError` unless the weights are on the input's device."""
    elsewhere = dict.fromkeys(str(w.device) for w in weights if w.device != x.device)
    if elsewhere:
        raise UsageError(f"{name}: input is on {x.device}, weights on {', '.join(elsewhere)}")


def _no_gradient(context: object, *gradients: object) -> None:
    raise UsageError(
        "r18's operators are for inference and have no gradient\n"
        "  train the model that was given to optimize_resnet18; the fast one follows its weights"
    )


def register(name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator for inference: what computes on each device, and what only shapes."""
    torch.library.define(name, schema, tags=_TAGS)
    torch.library.impl(name, DEVICES, real)
    torch.library.register_fake(name, fake)
    if not name.endswith("_"):
        torch.library.register_autograd(name, _no_gradient)


def _register() -> None:
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "r18::add_relu": (add_relu, _add_relu_fake),
        "r18::add_relu_": (add_relu_, _add_relu_over_fake),
        "r18::conv_bn_relu": (conv_bn_relu, _conv_bn_relu_fake),
        "r18::resnet": (resnet, _resnet_fake),
        "r18::resnet18": (resnet18, _resnet18_fake),
    }
    for name, (real, fake) in implementations.items():
        register(name, SCHEMAS[name], real, fake)
    # PyTorch writes these two for what returns its result, and for nothing in place.
    for key, layer in {
        "Autograd": _add_relu_over_autograd,
        "ADInplaceOrView": _add_relu_over_counted,
    }.items():
        _LIBRARY.impl("add_relu_", layer, key, with_keyset=True)


_LIBRARY: Any = torch.library.Library("r18", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds our registrations: they last as long as it does."""

_register()
ops: Any = torch.ops.r18
"""The operators, as PyTorch calls them."""
