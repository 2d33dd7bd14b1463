"""The quantised ops, step by step as `r18.graph.quantized` specifies them.

Sums are computed in float64 by BLAS, which has no products of integers. They are exact there: every
partial sum, in any order, is an integer below 2³¹.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import EXTRAS, Op, Problem
from r18.graph.precision import INT8
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18_numpy.blocks import Block, cut
from r18_numpy.conv import im2col
from r18_numpy.conv_maxpool import areas, at_a_time, conv_nbytes, maxima, workspace_nbytes
from r18_numpy.others import relayout
from r18_numpy.threads import single_threaded_blas

Arrays = tuple[Array, ...]

SUMS = np.dtype(np.float64)
"""The format of a convolution's sums, in which BLAS multiplies integers exactly."""
INTEGERS = np.dtype(np.int8)
"""The dtype of a quantised image."""


def quantized_kernels() -> tuple[HostKernel, ...]:
    """One kernel for each op."""
    contract = RoundingContract("integer", INT8.accumulate, INT8.storage)

    def kernel(op: type[Op], algorithm: str, run: HostFunction, **options: Any) -> HostKernel:
        return HostKernel(
            "numpy", op, algorithm, INT8, contract, run, batch_invariant=True, **options
        )

    return (
        kernel(
            QuantizedConv2d,
            "im2col",
            conv,
            scratch=partial(conv_nbytes, sums=SUMS),
            pack=pack,
            extras=EXTRAS,
        ),
        kernel(QuantizedMaxPool2d, "taps", maxpool),
        kernel(QuantizedGlobalAvgPool, "sum", gap),
        kernel(QuantizedLinear, "matmul", linear, pack=pack),
        kernel(Quantize, "divide", quantize),
        kernel(QuantizePixels, "table", quantize_pixels),
        kernel(QuantizedRelayout, "copy", relayout),
        kernel(
            QuantizedConvMaxPool,
            "parts",
            conv_maxpool,
            scratch=partial(workspace_nbytes, sums=SUMS),
            pack=pack,
            extras=EXTRAS,
        ),
    )


def pack(op: Op, weights: Arrays) -> Arrays:
    """The weight as a float64 matrix with a row for each output; the others as they are."""
    weight, *others = weights
    return weight.reshape(len(weight), -1).astype(np.float64), *others


def store(numbers: Array, out: Array) -> None:
    """Step 4: round to the nearest integer, ties to even, and saturate."""
    limits = np.iinfo(out.dtype)
    out[...] = np.clip(np.rint(numbers), limits.min, limits.max)


def conv(
    op: QuantizedConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Unfold the windows of a block of outputs, one matrix product, and requantise.

    inputs: (N, C, H, W), and the residual (N, O, OH, OW) if the op has one. weights:
    (O, C/groups·kh·kw), bias (O,), multiplier (O,), and the residual's (1,). out: (N, O, OH, OW).
    """
    weight, bias, multiplier, *residual_multiplier = weights

    def finish(block: Block, sums: Array) -> None:
        place = block.images, block.channels, block.rows
        sums += bias[block.channels, None, None, None]
        numbers = sums.astype(np.float32) * multiplier[block.channels, None, None, None]
        if residual_multiplier:
            residual = inputs[1][place].swapaxes(0, 1)
            numbers += residual.astype(np.float32) * residual_multiplier[0]
        if op.conv.relu:
            np.maximum(numbers, 0, out=numbers)
        store(numbers, out[place].swapaxes(0, 1))

    problem = Problem(op.conv, tuple(a.shape for a in inputs))
    im2col(problem, inputs[0], weight, SUMS, workspace, finish)


def maxpool(
    op: QuantizedMaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    maxima(op.pool, inputs[0], out, np.iinfo(out.dtype).min)


def gap(
    op: QuantizedGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    sums = inputs[0].sum(axis=(2, 3), dtype=np.int32)
    store(sums.astype(np.float32) * weights[0], out)


def linear(
    op: QuantizedLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """inputs: (N, K). weights: (O, K), bias (O,), multiplier (O,). out: (N, O) in float32."""
    weight, bias, multiplier = weights
    with single_threaded_blas():
        sums = inputs[0].astype(np.float64) @ weight.T
    sums += bias
    np.multiply(sums.astype(np.float32), multiplier, out=out)


def quantize(op: Quantize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    store(inputs[0] / weights[0], out)


def quantize_pixels(
    op: QuantizePixels, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """(N, H, W, C) of bytes in, (N, C, H, W) out."""
    channels = np.arange(len(weights[0]))[:, None, None]
    out[...] = weights[0][channels, inputs[0].transpose(0, 3, 1, 2)]


def conv_maxpool(
    op: QuantizedConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Its ops one after the other, a few images at a time.

    inputs: (N, C, H, W), or (N, H, W, C) of pixels. weights: the convolution's, and the scale or
    the table if the op makes integers of the image. out: (N, O, PH, PW).
    """
    x, pool = inputs[0], QuantizedMaxPool2d(op.pool, op.output_storage)
    shape = (len(x), x.shape[3], *x.shape[1:3]) if op.of_pixels else x.shape
    problem = Problem(op, (shape,))
    for some in cut(len(out), at_a_time(problem)):
        count = some.stop - some.start
        scratch, sums, images = areas(problem, count, workspace, SUMS, out.dtype, INTEGERS)
        given = x[some]
        if op.image is not None:
            make: HostFunction = quantize if isinstance(op.image, Quantize) else quantize_pixels
            make(op.image, (given,), weights[3:], images, workspace)
            given = images
        conv(op.conv, (given,), weights[:3], sums, scratch)
        maxpool(pool, (sums,), (), out[some], workspace)
