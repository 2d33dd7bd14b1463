"""A convolution in bfloat16 fused with its max pooling. See `kernels.conv_maxpool`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import (
    PAIRED_SUMS,
    Blocks,
    ConvShape,
    Epilogue,
    Summed,
)
from r18_numba_cpu.kernels.bfloat16.implicit_gemm import copy_band, multiply_band
from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.conv_maxpool import pooled
from r18_numba_cpu.kernels.jit import function, kernel


class Image(NamedTuple):
    """x: of bfloat16, (N, C, H, W) if from_nchw, else (N, H, W, C). stored: its channels."""

    x: Any
    from_nchw: bool
    stored: int


@function
def copy_image(image, sample, top, rows, row_length, shape, line, scratch, band):
    """`copy_band` of an `Image`. line: not used."""
    copy_band(
        image.from_nchw, image.x, image.stored, sample, top, rows, row_length, shape, scratch, band,
        1, 0,
    )  # fmt: skip


make_blocks = pooled(copy_image, multiply_band)


@kernel
def conv_maxpool(
    x, weight, bias, out, sums, scratch, made, lines, numbers, pooling, counters
):  # fmt: skip
    """out (N, PH, PW, O): the maxima of windows of the convolution's (N, OH, OW, O).

    x, weight, bias, sums, scratch, numbers: as of `implicit_gemm`, with blocks of one sample and
    all panels, and at most blocking.rows rows of the convolution. made: these rows, and lines: a
    row of keys, for each worker. pooling: a `ConvShape` of the pooling, and the rows of pooled
    outputs in a block, as int64.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    blocking = Blocks(n[13], n[14], n[15], n[16], n[17])
    how = Epilogue(n[18] != 0, n[19] != 0)
    from_nchw, stored = n[20] != 0, n[21]
    p = pooling
    pool = ConvShape(
        p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12]
    )
    line_size = shape.out_w * shape.outputs
    made_size = blocking.rows * line_size
    workers = begin_count(counters)
    for worker in prange(workers):
        conv = made[worker * made_size : (worker + 1) * made_size]
        line = lines[worker * line_size : (worker + 1) * line_size]
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Summed(bias, conv, conv, how)
        make_blocks(
            counters, worker, Image(x, from_nchw, stored), shape, blocking, pool, p[13],
            shape.kernel_w * shape.channels, weight, sums, worker * n[PAIRED_SUMS],
            scratch, worker * blocking.slot, conv, line, terms, numbers, out, np.uint16(0),
        )  # fmt: skip
