"""A register tile of a product of bytes, by float32's micro-kernel: for any CPU.

A sum of at most `MOST` products of bytes is an integer that float32 holds, and so is every sum on
the way to it. So float32 adds such sums exactly, in any order, at its own speed; longer ones are
added up in int32.
"""

from __future__ import annotations

import numpy as np

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.micro_kernel import COLUMNS
from r18_numba_cpu.kernels.micro_kernel import multiply as multiply_floats

MOST = 2**24 // (255 * 127)


@function
def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at):
    """As `register_tile.multiply`, into c, of bytes in float32: a group has one. a begins with a
    tile of scratch."""
    tile = rows * COLUMNS
    c[c_at : c_at + tile] = np.int32(0)
    together = max(1, MOST // depth.length)  # runs; of a long one, pieces
    for run in range(0, depth.runs, together):
        runs = min(together, depth.runs - run)
        for first in range(0, depth.length, MOST):
            length = min(MOST, depth.length - first)
            multiply_floats(
                rows, a, a_at + run * depth.stride + first, a_row,
                b, b_at + (run * depth.length + first) * COLUMNS,
                a, 0, COLUMNS, Depth(runs, length, depth.stride),
            )  # fmt: skip
            for at in range(tile):
                c[c_at + at] += np.int32(a[at])
