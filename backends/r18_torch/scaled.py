"""The scaled ops in PyTorch's own float32: see `r18.graph.scaled`.

e4m3 numbers are widened to float32, which is exact; PyTorch has no convolution of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from r18.backend import Kernel, RoundingContract
from r18.graph.ops import MaxPool2d, Op, Relayout
from r18.graph.precision import E4M3_LARGEST, FP8
from r18.graph.scaled import Scale, ScaledConv2d, ScaledGlobalAvgPool, ScaledLinear
from r18_torch.kernels import Run, Tensors, TorchKernel

WIDE = "float32"


def scaled_kernels(device: str) -> tuple[Kernel, ...]:
    """One kernel for each op on a device ("cpu" or "cuda")."""

    def kernel(
        op: type[Op], contract: str, run: Run, output: str = FP8.storage, **options: Any
    ) -> TorchKernel:
        rounding = RoundingContract(contract, FP8.accumulate, output)
        return TorchKernel(op, "aten", FP8, rounding, run, device, **options)

    return (
        kernel(ScaledConv2d, "scaled_sum", _conv),
        kernel(MaxPool2d, "exact", _maxpool, batch_invariant=True),
        kernel(ScaledGlobalAvgPool, "mean", _gap, WIDE),
        kernel(ScaledLinear, "scaled_sum", _linear, WIDE),
        kernel(Scale, "scale", _scale, batch_invariant=True),
        kernel(Relayout, "exact", _relayout, batch_invariant=True),
    )


def _store(numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Saturate, and round to e4m3, ties to even."""
    out.copy_(numbers.clamp(-E4M3_LARGEST, E4M3_LARGEST))


def _conv(op: ScaledConv2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    weight, bias, multiplier, *residual_multiplier = weights
    around = op.conv.stride, op.conv.padding, op.conv.dilation, op.conv.groups
    numbers = F.conv2d(inputs[0].float(), weight.float(), None, *around)
    numbers = numbers * multiplier[:, None, None] + bias[:, None, None]
    if residual_multiplier:
        numbers = numbers + inputs[1].float() * residual_multiplier[0]
    if op.conv.relu:
        numbers = numbers.relu()
    _store(numbers, out)


def _maxpool(op: MaxPool2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(F.max_pool2d(inputs[0].float(), op.kernel_size, op.stride, op.padding))


def _gap(op: ScaledGlobalAvgPool, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(inputs[0].float().mean(dim=(2, 3)))


def _linear(op: ScaledLinear, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    weight, bias, multiplier = weights
    out.copy_(F.linear(inputs[0], weight.float()) * multiplier + bias)


def _scale(op: Scale, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    _store(inputs[0] / weights[0], out)


def _relayout(op: Relayout, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(inputs[0])
