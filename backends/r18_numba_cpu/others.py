"""Every op other than convolution: its contract and its call."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import (
    Add,
    BatchNorm,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32
from r18_numba_cpu.compiled import NAME, ceil_div, counters, module, most_threads, run
from r18_numba_cpu.packing import (
    FLOAT_NBYTES,
    PANEL,
    TILE_ROWS,
    VECTOR,
    Arrays,
    panels,
    problem_of,
    tile_size,
    to_panels,
)


def other_kernels() -> tuple[HostKernel, ...]:
    """One kernel for each op."""

    def kernel(
        op: type[Op], algorithm: str, contract: str, run: HostFunction, **options: Any
    ) -> HostKernel:
        rounding = RoundingContract(contract, FP32.accumulate, FP32.storage)
        options = {"edges": (VECTOR, PANEL), "batch_invariant": True, **options}
        return HostKernel(NAME, op, algorithm, FP32, rounding, run, layout=Layout.NHWC, **options)

    return (
        kernel(BatchNorm, "scale_shift", "scale_shift", batchnorm, in_place=True),
        kernel(ReLU, "maximum", "exact", relu, in_place=True),
        kernel(Add, "elementwise", "elementwise", add, in_place=True),
        kernel(MaxPool2d, "direct", "exact", maxpool, **POOL),
        kernel(GlobalAvgPool, "mean", "mean", gap),
        kernel(
            Linear,
            "tiled",
            "sum",
            linear,
            edges=(*TILE_ROWS, VECTOR, PANEL),
            scratch=_linear_nbytes,
            pack=lambda op, weights: (to_panels(weights[0].T), weights[1]),
        ),
        kernel(Softmax, "shifted", "softmax", softmax, edges=()),
        kernel(Relayout, "copy", "exact", relayout, edges=()),
        kernel(Normalize, "scale_shift", "normalize", normalize, edges=()),
    )


def batchnorm(op: BatchNorm, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift with scale = weight / √(var + eps) and shift = bias − mean·scale."""
    weight, bias, mean, var = weights
    with np.errstate(invalid="ignore"):  # a negative variance gives NaN
        scale = weight / np.sqrt(var + np.float32(op.eps))
    shift = bias - mean * scale
    _run("scale_shift", inputs[0], scale, shift, out, inputs[0].size // op.channels, op.channels)


def relu(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("rectify", inputs[0], out, _spans(out.size))


def add(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("add", *inputs, out, _spans(out.size), op.relu)


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Max-pooling of float32, or of bfloat16 as uint16."""
    pool(op, inputs[0], out, workspace, 0)


def pool(op: MaxPool2d, x: Array, out: Array, workspace: Array, flip: int) -> None:
    """Maxima of every format. flip: 128 for int8, else 0."""
    _, shape = problem_of(op, x.shape, out.shape)
    bits = np.dtype(f"u{x.itemsize}")
    arrays = x.view(bits), out.view(bits), workspace.view(bits)
    run(module("maxpool").maxpool, *arrays, bits.type(flip), shape, counters())


def line_nbytes(problem: Problem) -> int:
    """A row of the image for each worker, in elements of any format."""
    _, channels, _, width = problem.inputs[0]
    return most_threads() * width * channels * FLOAT_NBYTES


POOL: dict[str, Any] = {"scratch": line_nbytes, "edges": (3, VECTOR, 2 * VECTOR, 4 * VECTOR)}
"""Fields of max-pooling kernels. Edges: of a window of 3 columns, the last two are read together,
and a vector has 16 float32, 32 bfloat16 or 64 bytes."""


def gap(op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    n, height, width, channels = inputs[0].shape
    _run("mean", inputs[0], out, n, height * width, channels)


def linear(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    sizes = (len(out), op.in_features, op.out_features)
    _run("linear", inputs[0], *weights, out, workspace.view(np.float32), *sizes)


def _linear_nbytes(problem: Problem) -> int:
    """A register tile for each panel."""
    return panels(problem.output[1]) * tile_size() * FLOAT_NBYTES


def softmax(op: Softmax, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _run("softmax", inputs[0], out, *out.shape)


def relayout(op: Relayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    moved(op, inputs[0], out)


def moved(op: Relayout, x: Array, out: Array) -> None:
    """The values of x, in its layout, to where `out` has them; of any storage format."""
    if op.source is op.target:
        run(np.copyto, out, x)
    elif op.target is Layout.NHWC:
        _run("to_channels_last", x, out, *x.shape)
    else:
        n, height, width, channels = x.shape
        _run("to_channels_first", x, out, n, channels, height, width)


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift: bytes (N, H, W, C) in, floats in the same order out."""
    scale, shift = (np.array(values, np.float32) for values in op.scale_shift)
    pixels = out.size // op.channels
    _run("normalize", inputs[0], scale, shift, out, pixels, op.channels, _spans(pixels))


def _run(name: str, *arguments: Any) -> None:
    run(getattr(module("others"), name), *arguments)


def _spans(count: int) -> int:
    return ceil_div(count, module("others").SPAN)
