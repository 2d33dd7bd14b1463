"""Every op of the CPU's that is not a convolution: what it promises and what it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import (
    Add,
    BatchNorm,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32
from r18_numba.cpu.compiled import NAME, RUNNING, ceil_div, module, panels
from r18_numba.cpu.conv import FLOAT_NBYTES, GROUPS, LINES, to_panels

Arrays = tuple[Array, ...]


def other_kernels() -> tuple[HostKernel, ...]:
    """One kernel an op."""

    def kernel(
        op: type[Op], algorithm: str, contract: str, run: Callable[..., None], **options: Any
    ) -> HostKernel:
        rounding = RoundingContract(contract, FP32.accumulate, FP32.storage)
        options = {"edges": LINES, "batch_invariant": True, **options}
        return HostKernel(NAME, op, algorithm, FP32, rounding, run, layout=Layout.NHWC, **options)

    return (
        kernel(BatchNorm, "scale_shift", "scale_shift", batchnorm, in_place=True),
        kernel(ReLU, "maximum", "exact", relu, in_place=True),
        kernel(Add, "elementwise", "elementwise", add, in_place=True),
        kernel(MaxPool2d, "direct", "exact", maxpool),
        kernel(GlobalAvgPool, "mean", "mean", gap),
        kernel(
            Linear,
            "tiled",
            "sum",
            linear,
            edges=(*GROUPS, *LINES),
            scratch=_linear_nbytes,
            pack=lambda op, weights: (to_panels(weights[0].T), weights[1]),
        ),
        kernel(Softmax, "shifted", "softmax", softmax, edges=()),
        kernel(Relayout, "copy", "exact", relayout, edges=()),
    )


def batchnorm(op: BatchNorm, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift with scale = weight / √(var + eps) and shift = bias − mean·scale."""
    weight, bias, mean, var = weights
    scale = weight / np.sqrt(var + np.float32(op.eps))
    shift = bias - mean * scale
    pixels = inputs[0].size // op.channels
    _run("scale_shift", *_flat(inputs[0]), scale, shift, *_flat(out), pixels, op.channels)


def relu(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("rectify", *_flat(inputs[0], out), _spans(out))


def add(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("add", *_flat(*inputs, out), _spans(out), op.relu)


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    n, height, width, channels = inputs[0].shape
    sizes = (n, channels, height, width, *out.shape[1:3])
    _run("maxpool", *_flat(inputs[0], out), *sizes, *op.kernel_size, *op.stride, *op.padding)


def gap(op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    n, height, width, channels = inputs[0].shape
    _run("mean", *_flat(inputs[0], out), n, height * width, channels)


def linear(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    sizes = (len(out), op.in_features, op.out_features)
    arrays = _flat(inputs[0], *weights, out)
    _run("linear", *arrays, workspace.view(np.float32), *sizes)


def _linear_nbytes(problem: Problem) -> int:
    """A tile of sums for each panel."""
    product = module("product")
    count = panels(problem.output[1])
    return int(count * product.ROWS * product.COLUMNS * FLOAT_NBYTES)


def softmax(op: Softmax, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("softmax", *_flat(inputs[0], out), *out.shape)


def relayout(op: Relayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    x = inputs[0]
    if op.source is op.target:
        out[...] = x
    elif op.target is Layout.NHWC:
        _run("to_channels_last", *_flat(x, out), *x.shape)
    else:
        n, height, width, channels = x.shape
        _run("to_channels_first", *_flat(x, out), n, channels, height, width)


def _run(name: str, *arguments: Any) -> None:
    with RUNNING:
        getattr(module("others"), name)(*arguments)


def _spans(out: Array) -> int:
    return ceil_div(out.size, module("others").SPAN)


def _flat(*arrays: Array) -> tuple[Any, ...]:
    return tuple(array.reshape(-1) for array in arrays)
