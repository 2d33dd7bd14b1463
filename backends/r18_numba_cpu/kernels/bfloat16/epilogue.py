"""The end of sums in memory: bias, residual and ReLU in float32, and one rounding to bfloat16."""

from __future__ import annotations

from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.micro_kernel import COLUMNS
from r18_numba_cpu.kernels.vector import LANES, load, store_output


@function
def store_tile(rows, sums, at, tile, terms):
    """The epilogue of `rows` pixels, COLUMNS channels or those that are left, of sums[at:]."""
    for v in range(0, COLUMNS, LANES):
        channel = tile.channel + v
        if channel >= tile.outputs:
            break
        lanes = min(LANES, tile.outputs - channel)
        bias = load(terms.bias, channel)
        for p in range(rows):
            value = load(sums, at + p * COLUMNS + v)
            to = (tile.pixel + p) * tile.outputs + channel
            store_output(value, bias, terms.residual, terms.out, to, lanes, terms.how)
