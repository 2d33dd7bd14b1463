"""A register tile of a product of bytes, by VNNI: `vpdpbusd`.

The instruction adds to each int32 lane the four products of uint8 and int8 that lie in its bytes.
It does not saturate: sums are exact modulo 2³², and so is whatever is added to them. A sum that
int32 holds is right at its end, whatever it was on the way.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.integers.bytes import BYTE, INT32
from r18_numba_cpu.kernels.integers.requantize import INT_ALIGNMENT, INTEGERS
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, VECTORS, ahead, rolled
from r18_numba_cpu.kernels.vector import FEATURES, INDEX, LANES, address, intrinsic, splat

GROUP = 4
"""Bytes that a lane multiplies at a time."""

AVAILABLE = bool(
    FEATURES.get("avx512vnni") and FEATURES.get("avx512vl")
    if LANES == 16
    else FEATURES.get("avxvnni")
)

FACTORS = ir.VectorType(BYTE, GROUP * LANES)
TYPED = llvmlite.binding.llvm_version_info >= (22,)
"""Whether LLVM declares the factors as bytes, as they are (llvm-project #97271), and not as int32.
Releases that were changed before 22 accept the old types as well."""


@function
def multiply(rows, a, a_at, a_row, b, b_at, c, c_at, depth):
    """C[p, o] = Σ_(r, g, q) A[p·a_row + r·stride + 4g + q]·B[r·length + g, o, q], for a `Depth`.

    For p < rows ≤ ROWS, o < COLUMNS, r < runs, g < length, q < 4. a: uint8; b: int8, rows of
    COLUMNS groups. In them A and B begin at a_at and b_at. c: int32, rows of COLUMNS from c_at on.
    """
    multiply_tile(rows, a, a_at, a_row, b, b_at, c, c_at, depth.runs, depth.length, depth.stride)


@intrinsic
def multiply_tile(
    typing: Any, rows: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, c: Any, c_at: Any,
    runs: Any, length: Any, stride: Any,
) -> Any:  # fmt: skip
    """See `multiply`, which contains this code once. Each number of rows has code of its own."""
    i64 = types.int64
    signature = types.void(i64, a, i64, i64, b, i64, c, i64, i64, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(values[0], end)
        for rows in range(1, ROWS + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{rows}")):
                switch.add_case(rows, builder.basic_block)
                _multiply_rows(rows, context, builder, signature.args, values)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _multiply_rows(rows: int, context: Any, builder: Any, kinds: Any, values: Any) -> None:
    """The code for one number of rows."""
    _, a, a_at, a_row, b, b_at, c, c_at, runs, length, stride = values
    a_base = address(context, builder, kinds[1], a, a_at)
    c_base = address(context, builder, kinds[6], c, c_at)
    dot = _declared(builder)

    # LLVM promotes these to registers, because nothing takes their addresses.
    sums = [cgutils.alloca_once(builder, INTEGERS) for _ in range(rows * VECTORS)]
    for place in sums:
        builder.store(ir.Constant(INTEGERS, None), place)
    b_next = cgutils.alloca_once_value(builder, address(context, builder, kinds[4], b, b_at))

    with cgutils.for_range(builder, runs, intp=INDEX) as run:
        corner = builder.gep(a_base, [builder.mul(run.index, stride)])
        starts = [ahead(builder, corner, a_row, p) for p in range(rows)]
        with rolled(builder, length) as group:
            here = builder.load(b_next)
            columns = [_columns(builder, here, v, dot) for v in range(VECTORS)]
            offset = builder.mul(group, ir.Constant(INDEX, GROUP))
            for p, start in enumerate(starts):
                place = builder.bitcast(builder.gep(start, [offset]), INT32.as_pointer())
                factor = splat(builder, builder.load(place, align=1))
                factor = builder.bitcast(factor, dot.args[1].type)
                for v, column in enumerate(columns):
                    place = sums[p * VECTORS + v]
                    arguments = [builder.load(place), factor, column]
                    builder.store(builder.call(dot, arguments), place)
            builder.store(builder.gep(here, [ir.Constant(INDEX, GROUP * COLUMNS)]), b_next)

    for index, place in enumerate(sums):
        to = builder.gep(c_base, [ir.Constant(INDEX, index * LANES)])
        to = builder.bitcast(to, INTEGERS.as_pointer())
        builder.store(builder.load(place), to, align=INT_ALIGNMENT)


def _declared(builder: Any) -> Any:
    """`vpdpbusd` of this machine's registers, with the types that LLVM declares."""
    factors = FACTORS if TYPED else INTEGERS
    kind = ir.FunctionType(INTEGERS, [INTEGERS, factors, factors])
    name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _columns(builder: Any, pointer: Any, v: int, dot: Any) -> Any:
    """The groups of the v-th LANES columns."""
    place = builder.gep(pointer, [ir.Constant(INDEX, v * GROUP * LANES)])
    kind = dot.args[2].type
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)
