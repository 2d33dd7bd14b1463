"""The scaled ops in float32, as `r18.graph.scaled` states them.

e4m3 numbers are widened, which is exact, and BLAS adds up their products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import EXTRAS, MaxPool2d, Op, Problem, Relayout, parts_of
from r18.graph.precision import E4M3, E4M3_LARGEST, FP8
from r18.graph.scaled import (
    Scale,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18_numpy.blocks import BLOCK_NBYTES, Block, cut
from r18_numpy.conv import im2col, im2col_nbytes
from r18_numpy.others import relayout
from r18_numpy.taps import inside
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
            scratch=_conv_nbytes,
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
            scratch=_conv_maxpool_nbytes,
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


def _conv_nbytes(problem: Problem) -> int:
    assert isinstance(problem.op, ScaledConv2d)
    return im2col_nbytes(Problem(problem.op.conv, problem.inputs), SUMS.itemsize)


def maxpool(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """The maximum over the window's taps, each of them the image shifted by the tap."""
    (h, w), (oh, ow) = inputs[0].shape[2:], out.shape[2:]
    (sh, sw), (ph, pw) = op.stride, op.padding
    out[...] = -E4M3_LARGEST  # the padding, which never wins
    for r, s in np.ndindex(op.kernel_size):
        to_rows, rows = inside(r - ph, sh, h, oh)
        to_columns, columns = inside(s - pw, sw, w, ow)
        part = out[..., to_rows, to_columns]
        np.maximum(part, inputs[0][..., rows, columns], out=part)


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
    for some in cut(len(out), _at_a_time(problem)):
        scratch, made, images = _parts_of(problem, some.stop - some.start, workspace)
        given = inputs[0][some]
        if op.image is not None:
            scale(op.image, (given,), weights[3:], images, workspace)
            given = images
        conv(op.conv, (given,), weights[:3], made, scratch)
        maxpool(op.pool, (made,), (), out[some], workspace)


def _at_a_time(problem: Problem) -> int:
    """Images whose convolution's outputs fit a block."""
    *_, pool = parts_of(problem)
    return max(1, min(problem.batch, BLOCK_NBYTES // math.prod(pool.inputs[0][1:])))


def _parts_of(problem: Problem, count: int, workspace: Array) -> Arrays:
    """Of `count` images: the convolution's workspace, what it makes, and the images in e4m3."""
    *_, conv, pool = parts_of(problem)
    made, given = (count, *pool.inputs[0][1:]), (count, *conv.inputs[0][1:])
    first = _scratch_nbytes(problem)
    second = first + math.prod(made)
    scratch, sums, images = workspace[:first], workspace[first:second], workspace[second:]
    if len(parts_of(problem)) == 3:
        images = images[: math.prod(given)].view(E4M3).reshape(given)
    return scratch, sums.view(E4M3).reshape(made), images


def _scratch_nbytes(problem: Problem) -> int:
    """The workspace of the convolution of as many images as are taken at a time, or of the rest."""
    *_, conv, _ = parts_of(problem)
    most = _at_a_time(problem)
    counts = {most, problem.batch % most or most}
    return max(
        _conv_nbytes(replace(conv, inputs=tuple((n, *shape[1:]) for shape in conv.inputs)))
        for n in counts
    )


def _conv_maxpool_nbytes(problem: Problem) -> int:
    *image, conv, pool = parts_of(problem)
    pixels = math.prod(conv.inputs[0][1:]) if image else 0
    made = math.prod(pool.inputs[0][1:])
    return _scratch_nbytes(problem) + _at_a_time(problem) * (made + pixels)
