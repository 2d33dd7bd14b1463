"""The end of sums in memory: bias, residual and ReLU in float32, and one rounding to bfloat16."""

from __future__ import annotations

from typing import Any

from r18_numba_cpu.kernels.bfloat16 import pairs
from r18_numba_cpu.kernels.jit import function, inlined
from r18_numba_cpu.kernels.micro_kernel import COLUMNS
from r18_numba_cpu.kernels.vector import LANES, load, load_lanes, relu, store_lanes


def storing(put: Any) -> tuple[Any, Any]:
    """`store_tile` and `store_sums` with a `store_lanes`.

    NOTE: that is not an argument, as in `amx.banded`.
    """

    @function
    def store_tile(rows, sums, at, tile, terms):
        """The epilogue of `rows` pixels, COLUMNS channels or those that are left, of sums[at:]."""
        for v in range(0, COLUMNS, LANES):
            channel = tile.channel + v
            if channel >= tile.outputs:
                break
            lanes = min(LANES, tile.outputs - channel)
            for p in range(rows):
                to = (tile.pixel + p) * tile.outputs + channel
                store_sums(sums, at + p * COLUMNS + v, to, channel, lanes, terms)

    @inlined
    def store_sums(sums, at, to, channel, lanes, terms):
        """The epilogue of sums[at : at + lanes], of the channels from `channel` on, at out[to:]."""
        value = load(sums, at) + load(terms.bias, channel)
        if terms.how.residual:
            value = value + load_lanes(terms.residual, to, lanes)
        put(terms.out, to, relu(value) if terms.how.relu else value, lanes)

    return store_tile, store_sums


@function
def store_rounded_lanes(array, at, value, lanes):
    """`store_lanes` by the instruction for it: subnormal values become 0."""
    if lanes == LANES:
        pairs.store_rounded(array, at, value)
    else:
        store_lanes(array, at, value, lanes)


store_tile, store_sums = storing(store_lanes)
flushing = storing(store_rounded_lanes) if pairs.AVAILABLE else (store_tile, store_sums)
store_flushed_tile, store_flushed_sums = flushing
"""The epilogue after products that flush subnormal values."""
