"""From int32 sums to bytes, a vector at a time: the steps of `r18.graph.quantized`.

Each float32 operation is an instruction of its own. NOTE: LLVM fuses a product and a sum only where
the IR says that it may (`llvm.fmuladd`, or the flag `contract`); `*` and `+` of `kernels.vector`
are plain `fmul` and `fadd`, so they stay apart.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.integers.bytes import BYTES, INT32, byte_vector, store_bytes
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    LANES,
    VECTOR,
    address,
    broadcast,
    intrinsic,
    vector,
)

INTEGERS = ir.VectorType(INT32, LANES)
INT_ALIGNMENT = 4  # bytes: a vector may begin at any int32


@intrinsic
def load_sum(typing: Any, sums: Any, at: Any, bias: Any, channel: Any) -> Any:
    """sums[at : at + LANES] + bias[channel : channel + LANES] in int32, rounded to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        terms = [
            builder.load(
                builder.bitcast(address(context, builder, kind, *place), INTEGERS.as_pointer()),
                align=INT_ALIGNMENT,
            )
            for kind, place in ((kinds[0], values[:2]), (kinds[2], values[2:]))
        ]
        return builder.sitofp(builder.add(*terms), VECTOR)

    return vector(sums, types.int64, bias, types.int64), generate


@intrinsic
def widened(typing: Any, value: Any, signed: Any) -> Any:
    """Bytes, or signed ones, as float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, signed = values
        wide = builder.select(
            context.is_true(builder, types.boolean, signed),
            builder.sext(value, INTEGERS),
            builder.zext(value, INTEGERS),
        )
        return builder.sitofp(wide, VECTOR)

    return vector(byte_vector, types.boolean), generate


@intrinsic
def rounded(typing: Any, value: Any) -> Any:
    """The nearest integers, ties to even, in the low byte of each lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
        whole = builder.fptosi(builder.call(rint, [values[0]]), INTEGERS)
        return builder.trunc(whole, BYTES)

    return byte_vector(vector), generate


@intrinsic
def clamp(typing: Any, value: Any, low: Any, high: Any) -> Any:
    """min(max(value, low), high) in each lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, low, high = values
        raised = builder.select(builder.fcmp_ordered(">", value, low), value, low)
        return builder.select(builder.fcmp_ordered("<", raised, high), raised, high)

    return vector(vector, vector, vector), generate


@function
def store_quantized(value, out, at, lanes, low, high):
    """Steps 3 and 4: out[at : at + lanes] = the numbers, rounded, ties to even, and saturated.

    They are saturated first: the limits are integers, so the order does not matter, and int32 then
    holds every number. Step 3 is part of it, because what has a ReLU is stored as uint8.
    """
    store_bytes(out, at, rounded(clamp(value, broadcast(low), broadcast(high))), lanes)
