"""The quantised ops in PyTorch's own arithmetic, where it is exact: see `r18.graph.quantized`.

Sums are computed in float64. They are exact there in any order: every partial sum is an integer
below 2³¹, which float64 holds. Requantisation is float32, one PyTorch operation for each rounding;
PyTorch rounds what each of them returns, so nothing is fused. `torch.round` rounds ties to even.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from r18.backend import Kernel, RoundingContract
from r18.graph.ops import Op
from r18.graph.precision import INT8
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18_torch.kernels import Run, Tensors, TorchKernel


def quantized_kernels(device: str) -> tuple[Kernel, ...]:
    """One kernel for each op on a device ("cpu" or "cuda")."""
    contract = RoundingContract("integer", INT8.accumulate, INT8.storage)

    def kernel(op: type[Op], algorithm: str, run: Run, **options: Any) -> TorchKernel:
        return TorchKernel(
            op, algorithm, INT8, contract, run, device, batch_invariant=True, **options
        )

    return (
        kernel(QuantizedConv2d, "aten_float64", _conv),
        kernel(QuantizedMaxPool2d, "aten", _maxpool),
        kernel(QuantizedGlobalAvgPool, "aten", _gap),
        kernel(QuantizedLinear, "aten_float64", _linear),
        kernel(Quantize, "aten", _quantize),
        kernel(QuantizePixels, "aten_table", _quantize_pixels),
        kernel(QuantizedRelayout, "aten", _relayout),
    )


def _store(numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Step 4: round to the nearest integer, ties to even, and saturate."""
    limits = torch.iinfo(out.dtype)
    out.copy_(torch.round(numbers).clamp(limits.min, limits.max))


def _conv(op: QuantizedConv2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    weight, bias, multiplier, *residual_multiplier = weights
    around = op.conv.stride, op.conv.padding, op.conv.dilation, op.conv.groups
    sums = F.conv2d(inputs[0].double(), weight.double(), None, *around)
    sums = sums + bias.double()[:, None, None]
    numbers = sums.float() * multiplier[:, None, None]
    if residual_multiplier:
        added = inputs[1].float() * residual_multiplier[0]
        numbers = numbers + added
    if op.conv.relu:
        numbers = numbers.relu()
    _store(numbers, out)


def _maxpool(op: QuantizedMaxPool2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    """In float32, which holds every byte: on CUDA, PyTorch has no max-pooling of integers."""
    pool = op.pool
    out.copy_(F.max_pool2d(inputs[0].float(), pool.kernel_size, pool.stride, pool.padding))


def _gap(op: QuantizedGlobalAvgPool, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    sums = inputs[0].sum(dim=(2, 3), dtype=torch.int64)
    _store(sums.float() * weights[0], out)


def _linear(op: QuantizedLinear, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    weight, bias, multiplier = weights
    sums = F.linear(inputs[0].double(), weight.double()) + bias.double()
    torch.mul(sums.float(), multiplier, out=out)


def _quantize(op: Quantize, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    """NOTE: the scale stays a tensor on the device. By a number, CUDA would divide by multiplying
    with its reciprocal, which rounds twice."""
    _store(inputs[0] / weights[0], out)


def _quantize_pixels(
    op: QuantizePixels, inputs: Tensors, weights: Tensors, out: torch.Tensor
) -> None:
    table = weights[0]
    channels = torch.arange(len(table), device=table.device)[:, None, None]
    out.copy_(table[channels, inputs[0].long()])


def _relayout(op: QuantizedRelayout, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(inputs[0])
