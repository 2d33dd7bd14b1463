"""Convolution as an implicit GEMM: cache blocking, packed filters, the call. See `kernels`."""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem, Shape
from r18_numba_cpu.blocking import RESIDENT_NBYTES
from r18_numba_cpu.compiled import ceil_div, counters, module, most_threads, run
from r18_numba_cpu.kernels.arguments import Bands, Epilogue
from r18_numba_cpu.packing import (
    FLOAT_NBYTES,
    PANEL,
    Arrays,
    channels_last,
    conv,
    padded_bias,
    panels,
    problem_of,
    round_up,
    tile_size,
    to_panels,
)

BAND_NBYTES = 128 << 10
"""A band of the padded image of about this size stays in a core's L2 cache."""

HIGHER_BAND_NBYTES = 256 << 10
"""A band where filters do not stay in L2: they are read from a farther cache for each band."""


def bands(problem: Problem, threads: int) -> Bands:
    """The cache blocking. It affects the speed only, never the result.

    Bands are as high as the cache holds. If there are fewer of them than threads, output channels
    are split as well.
    """
    op = conv(problem)
    n, outputs, out_h, out_w = problem.output
    length = ((out_w - 1) * op.stride[1] + op.kernel_size[1]) * op.in_channels
    filters = op.depth * round_up(outputs, PANEL) * FLOAT_NBYTES
    most = BAND_NBYTES if filters <= RESIDENT_NBYTES else HIGHER_BAND_NBYTES
    fitting = most // (FLOAT_NBYTES * length)
    rows = max(1, min(out_h, (fitting - op.kernel_size[0]) // op.stride[0] + 1))
    rows = ceil_div(out_h, ceil_div(out_h, rows))
    splits = min(panels(outputs), ceil_div(2 * threads, n * ceil_div(out_h, rows)))
    seen = (rows - 1) * op.stride[0] + op.kernel_size[0]
    slot = round_up(tile_size() + seen * length)
    return Bands(rows, ceil_div(panels(outputs), splits), slot)


def workspace_nbytes(problem: Problem) -> int:
    threads = most_threads()
    return threads * bands(problem, threads).slot * FLOAT_NBYTES


def pack_filters(op: Conv2d, weights: Arrays) -> Arrays:
    """Filters (panels, kh·kw·C, columns), and the bias."""
    matrix = weights[0].transpose(2, 3, 1, 0).reshape(op.depth, op.out_channels)
    return to_panels(matrix), padded_bias(op, weights)


def from_nchw_refuses(problem: Problem) -> str | None:
    if conv(problem).residual:
        return "the residual has the layout of the output, which is not that of the input"
    return None


def implicit_gemm(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    _run(op, inputs[0].shape, inputs, weights, out, workspace, from_nchw=False)


def implicit_gemm_from_nchw(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    shape = channels_last(inputs[0], True)
    _run(op, shape, inputs, weights, out, workspace, from_nchw=True)


def _run(
    op: Conv2d,
    read: Shape,
    inputs: Arrays,
    weights: Arrays,
    out: Array,
    workspace: Array,
    from_nchw: bool,
) -> None:
    """read: the shape of the input as (N, H, W, C), also if it is stored as (N, C, H, W)."""
    problem, shape = problem_of(op, read, out.shape)
    run(
        module("implicit_gemm").implicit_gemm,
        *(inputs[0], *weights, inputs[-1], out, workspace.view(np.float32)),
        *(counters(), shape, bands(problem, most_threads())),
        *(Epilogue(op.residual, op.relu), from_nchw),
    )
