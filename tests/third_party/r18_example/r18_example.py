"""A complete backend in one file, as somebody outside the project would write it.

float32 on the host, one kernel an op, each in the fewest lines of NumPy: windows and `einsum`. It
imports `r18` alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Backend as BackendBase
from r18.backend import DeviceInfo, Kernel, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32

Arrays = tuple[Any, ...]


class Backend(BackendBase):
    """The class that the entry point names, made without arguments."""

    name = "example"

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "an example of a CPU")

    def kernels(self) -> tuple[Kernel, ...]:
        return KERNELS


def windows(x: Any, op: Any, fill: float) -> Any:
    """(N, C, OH, OW, kh, kw) of a padded image."""
    (ph, pw), (sh, sw) = op.padding, op.stride
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=fill)
    return sliding_window_view(padded, op.kernel_size, axis=(2, 3))[:, :, ::sh, ::sw]


def conv(op: Conv2d, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    y = np.einsum("nchwrs,ocrs->nohw", windows(inputs[0], op, 0), weights[0], optimize=True)
    if op.bias:
        y += weights[1][:, None, None]
    if op.residual:
        y += inputs[1]
    out[...] = np.maximum(y, 0) if op.relu else y


def batchnorm(op: BatchNorm, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    weight, bias, mean, var = (array[:, None, None] for array in weights)
    out[...] = (inputs[0] - mean) / np.sqrt(var + np.float32(op.eps)) * weight + bias


def relu(op: ReLU, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    out[...] = np.maximum(inputs[0], 0)


def add(op: Add, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    y = inputs[0] + inputs[1]
    out[...] = np.maximum(y, 0) if op.relu else y


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    out[...] = windows(inputs[0], op, -np.inf).max(axis=(4, 5))


def gap(op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    out[...] = inputs[0].mean(axis=(2, 3))


def linear(op: Linear, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    out[...] = inputs[0] @ weights[0].T + weights[1]


def softmax(op: Softmax, inputs: Arrays, weights: Arrays, out: Any, workspace: Any) -> None:
    e = np.exp(inputs[0] - inputs[0].max(axis=1, keepdims=True))
    out[...] = e / e.sum(axis=1, keepdims=True)


def kernel(op: type[Op], contract: str, run: HostFunction) -> HostKernel:
    rounding = RoundingContract(contract, "float32", "float32")
    return HostKernel("example", op, "windows", FP32, rounding, run)


KERNELS: tuple[Kernel, ...] = (
    kernel(Conv2d, "sum", conv),
    kernel(BatchNorm, "batchnorm", batchnorm),
    kernel(ReLU, "exact", relu),
    kernel(Add, "elementwise", add),
    kernel(MaxPool2d, "exact", maxpool),
    kernel(GlobalAvgPool, "mean", gap),
    kernel(Linear, "sum", linear),
    kernel(Softmax, "softmax", softmax),
)
