"""The end of sums in memory: bias, residual and ReLU in float32, and one rounding to bfloat16."""

from __future__ import annotations

from typing import Any

from r18_numba_cpu.kernels.bfloat16 import pairs
from r18_numba_cpu.kernels.jit import function, inlined
from r18_numba_cpu.kernels.micro_kernel import storing
from r18_numba_cpu.kernels.vector import LANES, load, load_lanes, relu, store_lanes


def finishing(put: Any) -> Any:
    """`store_sums` with a `store_lanes`. NOTE: that is not an argument, as in `amx.banded`."""

    @inlined
    def store_sums(sums, at, to, channel, lanes, terms):
        """The epilogue of sums[at : at + lanes], of the channels from `channel` on, at out[to:]."""
        value = load(sums, at) + load(terms.bias, channel)
        if terms.how.residual:
            value = value + load_lanes(terms.residual, to, lanes)
        put(terms.out, to, relu(value) if terms.how.relu else value, lanes)

    return store_sums


@function
def store_rounded_lanes(array, at, value, lanes):
    """`store_lanes` by the instruction for it: subnormal values become 0."""
    if lanes == LANES:
        pairs.store_rounded(array, at, value)
    else:
        store_lanes(array, at, value, lanes)


store_sums = finishing(store_lanes)
store_flushed_sums = finishing(store_rounded_lanes) if pairs.AVAILABLE else store_sums
"""The epilogue after products that flush subnormal values."""
store_tile, store_flushed_tile = storing(store_sums), storing(store_flushed_sums)
