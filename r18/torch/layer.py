"""One layer of any network over tensors, as a custom operator.

`r18::layer(inputs, weights, op, eps, cache, backend, precision, channels_last)`
    A convolution with its fused ops, max-pooling, global average pooling or a linear layer.
    `op` is the `text_of` an op of `r18.graph.ops`. `inputs` are in the precision's storage dtype;
    a convolution with a residual takes it as the second. The result is dense, in channels-last
    memory if `channels_last`; that of global pooling is (N, C).

    `weights` of a convolution are its weight, its bias if it has one, and where `eps` is above 0
    those of its BatchNorm: weight, bias, running_mean, running_var. For a linear layer they are its
    weight and its bias, if it has one.

`cache` is the handle of a `Followed`, as for the operators of `r18.torch.operators`. Importing this
module registers the operator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from r18.backend import Array, Backend, Kernel, input_layout, prepare_weights
from r18.errors import UsageError
from r18.graph.ops import OPS, Conv2d, Layout, Linear, Op, Problem
from r18.graph.passes import fold_weights
from r18.torch.convolution import conv_schedule, pick
from r18.torch.followed import Derived, Packed, Prepared, Tensors, followed
from r18.torch.operators import LAYOUTS, backend_named, check_devices, register
from r18.torch.storage import (
    FORMATS,
    Run,
    capturing,
    empty,
    host_array,
    layout_of,
    shape_of,
    storage_dtype,
)

SCHEMA = (
    "(Tensor[] inputs, Tensor[] weights, str op, float eps, int cache, str backend, "
    "str precision, bool channels_last) -> Tensor"
)


def text_of(op: Op) -> str:
    """An op as JSON: its name and its settings; see `op_of`."""
    return json.dumps({"op": op.name, **op.settings})


@lru_cache(maxsize=1024)
def op_of(text: str) -> Op:
    """The op of a text that `text_of` wrote."""
    settings: dict[str, Any] = json.loads(text)
    kind = OPS[settings.pop("op")]
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


@dataclass(frozen=True)
class Asked:
    """A layer, apart from its tensors.

    eps: of the BatchNorm that is folded into a convolution; 0 where there is none. op.bias says
    whether the kernel adds one: with a BatchNorm it always does.
    wanted: the layout of the output.
    """

    problem: Problem
    eps: float
    reads: Layout
    wanted: Layout

    def kernel(self, backend: Backend, precision: str) -> Kernel:
        """The kernel that computes it; raises `NoKernel`."""
        return pick(backend, self.problem, precision, self.reads, self.wanted)


class Layer(Derived):
    """A layer for inputs of one shape, layout and device."""

    def __init__(
        self,
        asked: Asked,
        backend: Backend,
        precision: str,
        like: torch.Tensor,
        weights: Tensors,
    ) -> None:
        self._asked = asked
        problem = asked.problem
        self._kernel = kernel = asked.kernel(backend, precision)
        moved = len(problem.output) == 4 and kernel.layout is not asked.wanted
        self._format = FORMATS[asked.wanted] if moved else None
        self.prepared = Prepared(backend, like.device, self._pack, weights)
        (packed,) = self.prepared.packed  # rewritten where they are
        self._run = Run(
            backend,
            kernel,
            problem,
            input_layout(kernel, problem),
            kernel.layout,
            problem.output,
            like.dtype,
            like.device,
            packed,
        )

    def _pack(self, tensors: Tensors) -> Packed:
        problem = self._asked.problem
        arrays = weights_of(problem.op, list(map(host_array, tensors)), self._asked.eps)
        roles = [spec.role for spec in problem.op.weights()]
        return (prepare_weights(self._kernel, problem, roles, arrays),)

    def run(self, inputs: Tensors) -> torch.Tensor:
        output = self._run(*inputs)
        if self._format is not None:
            output = output.contiguous(memory_format=self._format)
        if not self.captured:
            self.captured = capturing(output.device)
        return output


def weights_of(op: Op, given: Sequence[Array], eps: float) -> list[Array]:
    """A kernel's weights from a layer's, which are in the order of `r18::layer`."""
    if isinstance(op, Linear) and len(given) == 1:
        return [given[0], np.zeros(op.out_features, given[0].dtype)]
    if not (isinstance(op, Conv2d) and eps):
        return list(given)
    weight, *biases, scale, shift, mean, var = given
    mean = mean.astype(np.float64)
    for bias in biases:  # BatchNorm's mean is of sums with the bias, which `bare` lacks
        mean = mean - bias.astype(np.float64)
    bare = replace(op, bias=False, residual=False, relu=False)
    # A schedule has an image, and folding does not depend on it: one window of the kernel.
    extents = (d * (k - 1) + 1 for d, k in zip(op.dilation, op.kernel_size, strict=True))
    schedule = conv_schedule(bare, eps, (op.in_channels, *extents))
    (step,) = schedule.steps
    names = ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    folded = fold_weights(
        schedule, dict(zip(names, (weight, scale, shift, mean, var), strict=True))
    )
    return [folded[name] for name in step.weights]


# -- the operator ------------------------------------------------------------------------------


def layer(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    op: str,
    eps: float,
    cache: int,
    backend: str,
    precision: str,
    channels_last: bool,
) -> torch.Tensor:
    first = inputs[0]
    shapes = tuple(map(shape_of, inputs))
    reads = layout_of(first)
    key = (op, shapes, first.dtype, reads, first.device, eps, backend, precision, channels_last)
    kept = followed(cache)
    found = kept.current(key, weights)
    if found is None:
        kinds = {(tensor.dtype, tensor.device) for tensor in inputs}
        if kinds != {(storage_dtype(precision), first.device)}:
            raise UsageError(
                f"r18::layer in {precision} takes {storage_dtype(precision)} on one device, got "
                + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            )
        check_devices("r18::layer", first, weights)
        asked = Asked(Problem(op_of(op), shapes), eps, reads, LAYOUTS[channels_last])
        found = kept.find(
            key,
            weights,
            lambda: Layer(asked, backend_named(backend), precision, first, weights),
        )
    return cast(Layer, found).run(inputs)


def _layer_fake(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    op: str,
    eps: float,
    cache: int,
    backend: str,
    precision: str,
    channels_last: bool,
) -> torch.Tensor:
    first = inputs[0]
    shape = op_of(op).infer(*(tuple(map(int, tensor.shape)) for tensor in inputs))
    return empty(shape, LAYOUTS[channels_last], first.dtype, first.device)


register("r18::layer", SCHEMA, layer, _layer_fake)
