"""PyTorch's side of the comparison: the network called layer by layer, without torchvision.

torchvision's module makes the same calls and has the same bits. Its import takes a second, as long
as everything that PyTorch has to do here, because it brings the compiler of `torch.compile`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from r18.backend import Array
from r18.bench.baselines.torchvision import Torchvision, on_host
from r18.errors import BackendUnavailable
from r18.graph.ops import Add, BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d, ReLU
from r18.graph.schedule import Schedule, Step


class LayerByLayer(Torchvision):
    """A schedule at level `none` in PyTorch's eager mode. See `r18.bench.rows.Runner`."""

    def exact(self, images: Sequence[Array]) -> list[Array]:
        """The outputs for batches of images, computed in float64 on the CPU."""
        torch = self._torch
        module = copy.deepcopy(self._module).to("cpu").double()
        with torch.inference_mode():
            return [on_host(module(torch.from_numpy(batch).double())) for batch in images]

    def _made(self, schedule: Schedule, weights: Mapping[str, Array]) -> Any:
        return layers(schedule, weights)


def layers(schedule: Schedule, weights: Mapping[str, Array]) -> Any:
    """The `torch.nn.Module` of a schedule at level `none`."""
    import torch

    class Layers(torch.nn.Module):
        """A value is dropped behind its last reader, as in a module's `forward`."""

        def __init__(self) -> None:
            super().__init__()
            for name, array in weights.items():
                self.register_buffer(_plain(name), torch.from_numpy(np.array(array)))
            unread = Counter(value for step in schedule.steps for value in step.inputs)
            self.last: list[list[str]] = []
            for step in schedule.steps:
                unread.subtract(step.inputs)
                self.last.append([value for value in set(step.inputs) if not unread[value]])

        def forward(self, images: Any) -> Any:
            values = {schedule.input: images}
            for step, last in zip(schedule.steps, self.last, strict=True):
                given = [values[name] for name in step.inputs]
                read = [getattr(self, _plain(name)) for name in step.weights]
                values[step.output] = _computed(step, given, read)
                for name in last:
                    del values[name]
            return values[schedule.output]

    return Layers()


def _plain(name: str) -> str:
    """A weight's name as PyTorch takes a buffer's."""
    return name.replace(".", "_")


def _computed(step: Step, x: list[Any], weights: list[Any]) -> Any:
    """One step, by the call that torchvision's module makes for it."""
    from torch.nn import functional

    op = step.op
    match op:
        case Conv2d():
            weight, bias = weights if op.bias else (weights[0], None)
            around = op.stride, op.padding, op.dilation, op.groups
            return functional.conv2d(x[0], weight, bias, *around)
        case BatchNorm():
            scale, shift, mean, variance = weights
            return functional.batch_norm(x[0], mean, variance, scale, shift, eps=op.eps)
        case ReLU():
            return functional.relu_(x[0])
        case Add():
            total = x[0].add_(x[1])
            return functional.relu_(total) if op.relu else total
        case MaxPool2d():
            return functional.max_pool2d(x[0], op.kernel_size, op.stride, op.padding)
        case GlobalAvgPool():
            return functional.adaptive_avg_pool2d(x[0], 1).flatten(1)
        case Linear():
            return functional.linear(x[0], *weights)
    raise BackendUnavailable("PyTorch", f"the demonstration calls no '{op.name}' of it")


__all__ = ["LayerByLayer", "layers"]
