"""The reference: every op in float64, through PyTorch on the CPU. It imports no backend.

The semantics are those at the top of `r18.backend`. While a kernel runs, the reference refuses to
(`KernelRunning`): a kernel that asks the judge for its answer is caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from r18.backend import Array
from r18.errors import R18Error, UsageError
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)

Tensors = tuple[torch.Tensor, ...]


class KernelRunning(R18Error):
    """The reference was called from inside a kernel."""


_running = threading.Event()


@contextmanager
def kernel_running() -> Iterator[None]:
    """Mark that a kernel has control, so that the reference refuses to answer it."""
    _running.set()
    try:
        yield
    finally:
        _running.clear()


def no_kernel_running() -> None:
    """Raise `KernelRunning` when a kernel under test has control."""
    if _running.is_set():
        raise KernelRunning("a kernel under test called the oracle's reference")


def reference(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The result in float64 of float64 inputs and weights (logical shapes, `op.weights()` order).

    Raises `KernelRunning` when a kernel under test has control.
    """
    return _run(_REFERENCES, problem.op, inputs, weights)


def pre_epilogue(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The sum of products alone, of a convolution or linear: no bias, residual or ReLU."""
    return _run(_SUMS, problem.op, inputs, weights)


def magnitude(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """S = Σ|w||x| of a convolution or linear: the sum of products over absolute values."""
    return pre_epilogue(
        problem, tuple(np.abs(a) for a in inputs), tuple(np.abs(a) for a in weights)
    )


def _run(
    table: dict[type[Op], Callable[..., torch.Tensor]],
    op: Op,
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Array:
    no_kernel_running()
    if type(op) not in table:
        raise UsageError(f"the oracle has no float64 reference for {op.label}")
    for array in (*inputs, *weights):
        if array.dtype != np.float64:
            raise UsageError(f"the reference takes float64 alone, got {array.dtype}")
    with torch.inference_mode():
        y: Array = table[type(op)](op, _tensors(inputs), _tensors(weights)).numpy()
    return y


def _tensors(arrays: tuple[Array, ...]) -> Tensors:
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)


def _conv_sum(op: Conv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return F.conv2d(inputs[0], weights[0], None, op.stride, op.padding)


def _conv(op: Conv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    y = _conv_sum(op, inputs, weights)
    if op.bias:
        y = y + weights[1][:, None, None]
    if op.residual:
        y = y + inputs[1]
    return F.relu(y) if op.relu else y


def _batchnorm(op: BatchNorm, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    return (inputs[0] - mean) / torch.sqrt(var + op.eps) * weight + bias


def _relu(op: ReLU, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return F.relu(inputs[0])


def _add(op: Add, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    y = inputs[0] + inputs[1]
    return F.relu(y) if op.relu else y


def _maxpool(op: MaxPool2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return F.max_pool2d(inputs[0], op.kernel_size, op.stride, op.padding)


def _conv_maxpool(op: ConvMaxPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return _maxpool(op.pool, (_conv(op.conv, inputs, weights),), ())


def _gap(op: GlobalAvgPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return inputs[0].sum(dim=(2, 3)) / (inputs[0].shape[2] * inputs[0].shape[3])


def _linear_sum(op: Linear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return inputs[0] @ weights[0].T


def _linear(op: Linear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return _linear_sum(op, inputs, weights) + weights[1]


def _softmax(op: Softmax, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return torch.softmax(inputs[0], dim=1)


def _relayout(op: Relayout, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    return inputs[0].clone()


def _normalize(op: Normalize, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (op.mean, op.std)
    )
    return (inputs[0] / 255 - mean) / std


_REFERENCES: dict[type[Op], Callable[[Any, Tensors, Tensors], torch.Tensor]] = {
    Conv2d: _conv,
    BatchNorm: _batchnorm,
    ReLU: _relu,
    Add: _add,
    MaxPool2d: _maxpool,
    ConvMaxPool: _conv_maxpool,
    GlobalAvgPool: _gap,
    Linear: _linear,
    Softmax: _softmax,
    Relayout: _relayout,
    Normalize: _normalize,
}
_SUMS: dict[type[Op], Callable[[Any, Tensors, Tensors], torch.Tensor]] = {
    Conv2d: _conv_sum,
    Linear: _linear_sum,
}
