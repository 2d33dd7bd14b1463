"""A convolution in bfloat16 fused with its max pooling: its output stays in a core's cache.

1. A block is a few rows of pooled outputs. A worker copies the band of the padded image that they
   need, and makes the convolution's rows of it in a buffer of its own, as `implicit_gemm` does. It
   keeps rows that it made for the block before. Rows that another worker made are made again.
2. It pools them, as `maxpool` does.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import (
    PAIRED_SUMS,
    Blocks,
    ConvShape,
    Depth,
    Epilogue,
    Summed,
    Tile,
)
from r18_numba_cpu.kernels.bfloat16.implicit_gemm import copy_band, multiply_band
from r18_numba_cpu.kernels.blocks import take_block
from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.maxpool import pool_row
from r18_numba_cpu.kernels.micro_kernel import COLUMNS


@kernel
def conv_maxpool(
    x, weight, bias, out, sums, scratch, made, lines, numbers, pooling, workers
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
    each_rows = p[13]
    row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    panel_size = weight.size // panels
    depth = Depth(shape.kernel_h, shape.kernel_w * shape.channels, row_length)
    line_size = shape.out_w * shape.outputs
    made_size = blocking.rows * line_size
    bands = (pool.out_h + each_rows - 1) // each_rows
    blocks = shape.samples * bands
    counters = np.zeros(workers, np.int64)
    for worker in prange(workers):
        conv = made[worker * made_size : (worker + 1) * made_size]
        line = lines[worker * line_size : (worker + 1) * line_size]
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Summed(bias, conv, conv, how)
        slot = worker * blocking.slot
        last_block, last_end, last_size = -1, 0, 0  # what `conv` holds
        block = take_block(counters, worker, blocks)
        while block < blocks:
            sample, first = block // bands, block % bands * each_rows
            end = min(pool.out_h, first + each_rows)
            first_row = max(0, first * pool.stride_h - pool.pad_h)
            end_row = min(shape.out_h, (end - 1) * pool.stride_h - pool.pad_h + pool.kernel_h)
            kept = 0
            if first > 0 and block == last_block + 1:
                kept = max(0, last_end - first_row)
                conv[: kept * line_size] = conv[last_size - kept * line_size : last_size]
            rows = end_row - first_row - kept
            if rows > 0:
                top = (first_row + kept) * shape.stride_h - shape.pad_h
                seen = (rows - 1) * shape.stride_h + shape.kernel_h
                copy_band(from_nchw, x, stored, sample, top, seen, row_length, shape, scratch, slot)
                for panel in range(panels):
                    tile = Tile(kept * shape.out_w, panel * COLUMNS, shape.outputs)
                    multiply_band(
                        rows, top, scratch, slot, shape, weight, panel * panel_size, depth, sums,
                        worker * n[PAIRED_SUMS], tile, terms, numbers,
                    )  # fmt: skip
            for row in range(first, end):
                to = (sample * pool.out_h + row) * pool.out_w * pool.outputs
                pool_row(conv, -first_row, row, out, to, line, np.uint16(0), pool)
            last_block, last_end, last_size = block, end_row, (end_row - first_row) * line_size
            block = take_block(counters, worker, blocks)
