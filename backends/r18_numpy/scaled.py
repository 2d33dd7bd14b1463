"""The scaled ops in float32, as `r18.graph.scaled` states them.

e4m3 numbers are widened, which is exact, and BLAS adds up their products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import EXTRAS, MaxPool2d, Op, Problem, Relayout
from r18.graph.precision import E4M3, E4M3_LARGEST, FP8
from r18.graph.scaled import (
    Scale,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18_numpy.blocks import Block, cut
from r18_numpy.conv import im2col
from r18_numpy.conv_maxpool import areas, at_a_time, conv_nbytes, maxima, workspace_nbytes
from r18_numpy.others import relayout
from r18_numpy.threads import single_threaded_blas

Arrays = tuple[Array, ...]

SUMS = np.dtype(np.float32)
"""The format of widened numbers and of sums."""


def scaled_kernels() -> tuple[HostKernel, ...]:
    """One kernel for each op."""

    def kernel(
        op: type[Op],
        algorithm: str,
        contract: str,
        run: HostFunction,
        output: str = FP8.storage,
        **options: Any,
    ) -> HostKernel:
        rounding = RoundingContract(contract, FP8.accumulate, output)
        return HostKernel("numpy", op, algorithm, FP8, rounding, run, **options)

    return (
        kernel(
            ScaledConv2d,
            "im2col",
            "scaled_sum",
            conv,
            scratch=partial(conv_nbytes, sums=SUMS),
            pack=pack,
            edges=(1, 7, 8, 14, 16, 28, 56),
            extras=EXTRAS,
        ),
        kernel(MaxPool2d, "taps", "exact", maxpool, batch_invariant=True),
        kernel(ScaledGlobalAvgPool, "mean", "mean", gap, SUMS.name, batch_invariant=True),
        kernel(ScaledLinear, "matmul", "scaled_sum", linear, SUMS.name, pack=pack),
        kernel(Scale, "divide", "scale", scale, batch_invariant=True),
        kernel(Relayout, "copy", "exact", relayout, batch_invariant=True),
        kernel(
            ScaledConvMaxPool,
            "parts",
            "scaled_sum",
            conv_maxpool,
            scratch=partial(workspace_nbytes, sums=SUMS),
            pack=pack,
            edges=(1, 7, 8, 14, 16),
            extras=EXTRAS,
        ),
    )


def pack(op: Op, weights: Arrays) -> Arrays:
    """The weight as a float32 matrix with a row for each output; the others as they are."""
    weight, *others = weights
    return weight.reshape(len(weight), -1).astype(SUMS), *others


def store(numbers: Array, out: Array) -> None:
    """Saturate, and round to e4m3, ties to even."""
    out[...] = np.clip(numbers, -E4M3_LARGEST, E4M3_LARGEST)


def conv(op: ScaledConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Unfold the windows of a block of outputs, one matrix product, and the epilogue.

    inputs: (N, C, H, W), and the residual (N, O, OH, OW) if the op has one. weights:
    (O, C/groups·kh·kw), bias (O,), multiplier (O,), and the residual's (1,). out: (N, O, OH, OW).
    """
    weight, bias, multiplier, *residual_multiplier = weights

    def finish(block: Block, sums: Array) -> None:
        place = block.images, block.channels, block.rows
        sums *= multiplier[block.channels, None, None, None]
        sums += bias[block.channels, None, None, None]
        if residual_multiplier:
            residual = inputs[1][place].swapaxes(0, 1)
            sums += residual.astype(SUMS) * residual_multiplier[0]
        if op.conv.relu:
            np.maximum(sums, 0, out=sums)
        store(sums, out[place].swapaxes(0, 1))

    problem = Problem(op.conv, tuple(a.shape for a in inputs))
    im2col(problem, inputs[0], weight, SUMS, workspace, finish)


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    maxima(op, inputs[0], out, -E4M3_LARGEST)


def gap(
    op: ScaledGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    np.mean(inputs[0].astype(SUMS), axis=(2, 3), out=out)


def linear(op: ScaledLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """inputs: (N, K) in float32. weights: (O, K), bias (O,), multiplier (O,). out: (N, O)."""
    weight, bias, multiplier = weights
    with single_threaded_blas():
        np.matmul(inputs[0], weight.T, out=out)
    out *= multiplier
    out += bias


def scale(op: Scale, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    store(inputs[0] / weights[0], out)


def conv_maxpool(
    op: ScaledConvMaxPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Its ops one after the other, a few images at a time.

    inputs: (N, C, H, W), e4m3 or the image in float32. weights: the convolution's, and the scale if
    the op takes an image. out: (N, O, PH, PW).
    """
    problem = Problem(op, (inputs[0].shape,))
    for some in cut(len(out), at_a_time(problem)):
        count = some.stop - some.start
        scratch, made, images = areas(problem, count, workspace, SUMS, out.dtype, E4M3)
        given = inputs[0][some]
        if op.image is not None:
            scale(op.image, (given,), weights[3:], images, workspace)
            given = images
        conv(op.conv, (given,), weights[:3], made, scratch)
        maxpool(op.pool, (made,), (), out[some], workspace)
