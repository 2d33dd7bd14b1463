"""Every op other than convolution, in a few lines of NumPy each."""

from __future__ import annotations

from itertools import product
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
from r18.graph.precision import Precision
from r18_numpy.blocks import ceil_div, cut
from r18_numpy.taps import inside
from r18_numpy.threads import run_all, single_threaded_blas, thread_count

Arrays = tuple[Array, ...]


def other_kernels(precision: Precision) -> tuple[HostKernel, ...]:
    """One kernel for each op."""

    def kernel(
        op: type[Op], algorithm: str, contract: str, run: HostFunction, **options: Any
    ) -> HostKernel:
        rounding = RoundingContract(contract, precision.accumulate, precision.storage)
        return HostKernel("numpy", op, algorithm, precision, rounding, run, **options)

    return (
        kernel(
            BatchNorm, "scale_shift", "scale_shift", batchnorm, batch_invariant=True, in_place=True
        ),
        kernel(ReLU, "maximum", "exact", relu, batch_invariant=True, in_place=True),
        kernel(Add, "elementwise", "elementwise", add, batch_invariant=True, in_place=True),
        kernel(
            MaxPool2d,
            "separable",
            "exact",
            maxpool,
            batch_invariant=True,
            scratch=lambda problem: _maxpool_scratch(problem) * precision.dtype.itemsize,
        ),
        kernel(GlobalAvgPool, "mean", "mean", gap, batch_invariant=True),
        kernel(Linear, "matmul", "sum", linear),
        kernel(Softmax, "shifted", "softmax", softmax, batch_invariant=True),
        kernel(Relayout, "copy", "exact", relayout, batch_invariant=True),
        kernel(Normalize, "scale_shift", "normalize", normalize, batch_invariant=True),
    )


def batchnorm(op: BatchNorm, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift with scale = weight / √(var + eps) and shift = bias − mean·scale."""
    weight, bias, mean, var = weights
    scale = weight / np.sqrt(var + weight.dtype.type(op.eps))
    shift = bias - mean * scale
    np.multiply(inputs[0], scale[:, None, None], out=out)
    out += shift[:, None, None]


def relu(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    np.maximum(inputs[0], 0, out=out)


def add(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    np.add(inputs[0], inputs[1], out=out)
    if op.relu:
        np.maximum(out, 0, out=out)


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Maxima down the columns, then along the rows: 2k comparisons per output instead of k².

    The columns come first: they are whole rows of memory, and they leave fewer rows for the strided
    second pass. Each worker takes channels of one image at a time, which fit in the cache.
    """
    n, c, h, w = inputs[0].shape
    (kh, kw), (sh, sw), (ph, pw) = op.kernel_size, op.stride, op.padding
    oh, ow = out.shape[2:]
    size = ceil_div(c, thread_count())
    scratch: Array = workspace.view(out.dtype).reshape(-1, size, oh, w)
    blocks = list(product(range(n), cut(c, size)))

    def pool(block: tuple[int, slice], worker: int) -> None:
        x, y = inputs[0][block], out[block]
        down = scratch[worker, : len(x)]
        down[...] = y[...] = -np.inf  # the padding, which never wins
        for r in range(kh):
            to, rows = inside(r - ph, sh, h, oh)
            np.maximum(down[:, to], x[:, rows], out=down[:, to])
        for s in range(kw):
            to, columns = inside(s - pw, sw, w, ow)
            np.maximum(y[..., to], down[..., columns], out=y[..., to])

    run_all(pool, blocks, thread_count())


def _maxpool_scratch(problem: Problem) -> int:
    _, c, _, w = problem.inputs[0]
    workers = thread_count()
    return workers * ceil_div(c, workers) * problem.output[2] * w


def gap(op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    np.mean(inputs[0], axis=(2, 3), out=out)


def linear(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    with single_threaded_blas():
        np.matmul(inputs[0], weights[0].T, out=out)
    out += weights[1]


def softmax(op: Softmax, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    np.subtract(inputs[0], inputs[0].max(axis=1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=1, keepdims=True)


def relayout(op: Relayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    axes = {
        (Layout.NCHW, Layout.NHWC): (0, 2, 3, 1),
        (Layout.NHWC, Layout.NCHW): (0, 3, 1, 2),
    }.get((op.source, op.target), (0, 1, 2, 3))
    out[...] = inputs[0].transpose(axes)


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift: (N, H, W, C) of bytes in, (N, C, H, W) out."""
    scale, shift = (np.array(values, out.dtype)[:, None, None] for values in op.scale_shift)
    np.multiply(inputs[0].transpose(0, 3, 1, 2), scale, out=out)
    out += shift
