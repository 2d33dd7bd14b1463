"""The epilogue of sums in memory: requantised to bytes, or scaled to float32 logits."""

from __future__ import annotations

from numba import types

from r18_numba_cpu.kernels.integers.bytes import load_bytes
from r18_numba_cpu.kernels.integers.requantize import load_sum, store_quantized, widened
from r18_numba_cpu.kernels.jit import inlined, overload
from r18_numba_cpu.kernels.micro_kernel import storing
from r18_numba_cpu.kernels.vector import broadcast, load, store_lanes


@inlined
def store_sums(sums, at, to, channel, lanes, terms):
    """The epilogue of sums[at : at + lanes], of the channels from `channel` on, at out[to:]."""
    number = load_sum(sums, at, terms.bias, channel) * load(terms.multiplier, channel)
    if terms.how.residual:
        added = widened(load_bytes(terms.residual, to, lanes), terms.how.signed_residual)
        number = number + added * broadcast(terms.residual_multiplier[0])
    put_number(terms.out, to, number, lanes, terms.how)


store_tile = storing(store_sums)


def put_number(out, at, number, lanes, how):
    """out[at : at + lanes] = the numbers as logits, or requantised: by the type of `out`."""
    raise NotImplementedError("compiled only")


@overload(put_number)
def _put_number(out, at, number, lanes, how):
    if out.dtype == types.float32:
        return lambda out, at, number, lanes, how: store_lanes(out, at, number, lanes)
    return lambda out, at, number, lanes, how: store_quantized(
        number, out, at, lanes, how.low, how.high
    )
