"""A convolution fused with its max pooling, of any format: its output stays in a core's cache.

1. A block is a few rows of pooled outputs. A worker copies the band of the padded image that they
   need, and makes the convolution's rows of it in a buffer of its own, as `implicit_gemm` does. It
   keeps rows that it made for the block before. Rows that another worker made are made again.
2. It pools them, as `maxpool` does.
"""

from __future__ import annotations

from typing import Any

from r18_numba_cpu.kernels.arguments import Depth, Tile
from r18_numba_cpu.kernels.blocks import take_block
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.maxpool import pool_row
from r18_numba_cpu.kernels.micro_kernel import COLUMNS
from r18_numba_cpu.kernels.vector import move_run


def pooled(copy_image: Any, multiply_band: Any) -> Any:
    """What a worker does, for a format's bands and products.

    NOTE: they are not arguments; see `amx.banded`.
    """

    @function
    def make_blocks(
        counters, worker, image, shape, blocking, pool, each_rows, length, weight, sums, sums_at,
        scratch, band, conv, line, terms, numbers, out, flip,
    ):  # fmt: skip
        """Make and pool block after block, until none is left.

        image: what `copy_image` takes. shape, blocking: of the convolution, with blocks of one
        sample and all panels, and at most blocking.rows rows. pool: the `ConvShape` of the pooling;
        each_rows: rows of pooled outputs in a block. length: groups of K in a kernel row.
        sums, scratch: the worker's, from sums_at and `band` on. conv: a buffer of blocking.rows
        rows, and line: of one row, of the convolution's outputs. flip: see `maxpool`.
        """
        row_length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
        panels = (shape.outputs + COLUMNS - 1) // COLUMNS
        panel_size = weight.size // panels
        depth = Depth(shape.kernel_h, length, row_length)
        line_size = shape.out_w * shape.outputs
        bands = (pool.out_h + each_rows - 1) // each_rows
        blocks = shape.samples * bands
        last_block = -1  # whose rows `conv` holds
        block = take_block(counters, worker, blocks)
        while block < blocks:
            sample, first = block // bands, block % bands * each_rows
            end = min(pool.out_h, first + each_rows)
            first_row = max(0, first * pool.stride_h - pool.pad_h)
            end_row = min(shape.out_h, (end - 1) * pool.stride_h - pool.pad_h + pool.kernel_h)
            kept = 0
            if first > 0 and block == last_block + 1:
                above_row = max(0, (first - each_rows) * pool.stride_h - pool.pad_h)
                above_end = min(
                    shape.out_h, (first - 1) * pool.stride_h - pool.pad_h + pool.kernel_h
                )
                kept = max(0, above_end - first_row)
                move_run(conv, (first_row - above_row) * line_size, 0, kept * line_size)
            rows = end_row - first_row - kept
            if rows > 0:
                top = (first_row + kept) * shape.stride_h - shape.pad_h
                seen = (rows - 1) * shape.stride_h + shape.kernel_h
                copy_image(image, sample, top, seen, row_length, shape, line, scratch, band)
                for panel in range(panels):
                    tile = Tile(kept * shape.out_w, panel * COLUMNS, shape.outputs)
                    multiply_band(
                        rows, top, scratch, band, shape, weight, panel * panel_size, depth,
                        sums, sums_at, tile, terms, numbers,
                    )  # fmt: skip
            for row in range(first, end):
                to = (sample * pool.out_h + row) * pool.out_w * pool.outputs
                pool_row(conv, -first_row, row, out, to, line, flip, pool)
            last_block = block
            block = take_block(counters, worker, blocks)

    return make_blocks
