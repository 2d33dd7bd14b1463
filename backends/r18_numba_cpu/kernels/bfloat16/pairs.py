"""A register tile of a product of bfloat16, by `vdpbf16ps`.

The instruction adds to each float32 lane the products of its two bfloat16 halves: the upper one and
then the lower one, each by a fused multiply-add that rounds to the nearest, ties to even.
Subnormal factors, sums and results count as zero; MXCSR is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.jit import inlined
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, VECTORS, ahead, each_row, rolled
from r18_numba_cpu.kernels.vector import (
    FEATURES,
    FLOAT_ALIGNMENT,
    HALVES,
    INDEX,
    LANES,
    VECTOR,
    address,
    as_vector_pointer,
    intrinsic,
    splat,
    vector,
    widen,
)

PAIR = 2
"""Elements of K that a lane multiplies at a time."""

AVAILABLE = LANES == 16 and bool(FEATURES.get("avx512bf16"))


class Bfloat16Type(ir.types._BaseFloatType):
    """LLVM's `bfloat`, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


Bfloat16Type._create_instance()
INT32 = ir.IntType(32)
FACTORS = ir.VectorType(Bfloat16Type(), PAIR * LANES)


@inlined
def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, whole, tile, terms):
    """C[p, o] = Σ_(r, k) A[p·a_row + r·stride + k]·B[r·⌈length/2⌉ + k//2, o, k%2], for a `Depth`.

    For p < rows ≤ ROWS, o < COLUMNS, r < runs, k < length. a, b: bfloat16 as uint16; b has rows of
    COLUMNS pairs. In them A and B begin at a_at and b_at. If the length is odd, the last pair of A
    is one element and a zero: the next one may be infinite, which no weight of 0 makes 0.

    If `whole`, the tile has all its columns, and goes through the epilogue from the registers that
    it is in. Otherwise it is stored in c: float32, rows of COLUMNS from c_at on.
    """
    multiply_tile(
        rows, a, a_at, a_row, b, b_at, depth.runs, depth.length, depth.stride, c, c_at, whole,
        tile.pixel * tile.outputs + tile.channel, tile.channel, tile.outputs,
        terms.bias, terms.residual, terms.out, terms.how.residual, terms.how.relu,
    )  # fmt: skip


@intrinsic
def multiply_tile(
    typing: Any, rows: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, runs: Any,
    length: Any, stride: Any, c: Any, c_at: Any, whole: Any, to: Any, channel: Any, out_row: Any,
    bias: Any, residual: Any, out: Any, has_residual: Any, has_relu: Any,
) -> Any:  # fmt: skip
    """See `multiply`, which contains this code once. Each number of rows has code of its own."""
    i64, flag = types.int64, types.boolean
    signature = types.void(
        i64, a, i64, i64, b, i64, i64, i64, i64, c, i64, flag, i64, i64, i64,
        bias, residual, out, flag, flag,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(values[0], end)
        for rows in range(1, ROWS + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{rows}")):
                switch.add_case(rows, builder.basic_block)
                sums = _multiply_rows(rows, context, builder, signature.args, values[:9])
                is_whole = context.is_true(builder, types.boolean, values[11])
                with builder.if_else(is_whole) as (finish, keep):
                    with finish:
                        _finish(sums, context, builder, signature.args[12:], values[12:])
                    with keep:
                        _keep(
                            sums,
                            address(context, builder, signature.args[9], *values[9:11]),
                            builder,
                        )
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _multiply_rows(rows: int, context: Any, builder: Any, kinds: Any, values: Any) -> list[Any]:
    """The code for one number of rows; returns the places of its sums, row by row."""
    _, a, a_at, a_row, b, b_at, runs, length, stride = values
    a_base = address(context, builder, kinds[1], a, a_at)
    kind = ir.FunctionType(VECTOR, [VECTOR, FACTORS, FACTORS])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
    dot = cgutils.get_or_insert_function(builder.module, kind, name)

    # LLVM promotes these to registers, because nothing takes their addresses.
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows * VECTORS)]
    for place in sums:
        builder.store(ir.Constant(VECTOR, None), place)
    b_next = cgutils.alloca_once_value(builder, address(context, builder, kinds[4], b, b_at))

    with cgutils.for_range(builder, runs, intp=INDEX) as run:
        corner = builder.gep(a_base, [builder.mul(run.index, stride)])

        def starts(offset: Any) -> Iterator[Any]:
            return each_row(builder, builder.gep(corner, [offset]), a_row, rows)

        with rolled(builder, builder.lshr(length, ir.Constant(INDEX, 1))) as pair:
            offset = builder.mul(pair, ir.Constant(INDEX, PAIR))
            _multiply_pair(PAIR, starts(offset), b_next, sums, dot, builder)
        odd = builder.and_(length, ir.Constant(INDEX, 1))
        with builder.if_then(builder.icmp_signed("!=", odd, ir.Constant(INDEX, 0))):
            offset = builder.sub(length, ir.Constant(INDEX, 1))
            _multiply_pair(1, starts(offset), b_next, sums, dot, builder)
    return sums


def _multiply_pair(
    elements: int, places: Iterator[Any], b_next: Any, sums: list[Any], dot: Any, builder: Any
) -> None:
    """Add the products of a pair of each row of A, at `places`, or of one element and a zero."""
    here = builder.load(b_next)
    columns = [_columns(builder, here, v) for v in range(VECTORS)]
    for p, place in enumerate(places):
        if elements == PAIR:
            both = builder.load(builder.bitcast(place, INT32.as_pointer()), align=2)
        else:
            both = builder.zext(builder.load(place), INT32)
        factor = builder.bitcast(splat(builder, both), FACTORS)
        for v, column in enumerate(columns):
            place = sums[p * VECTORS + v]
            builder.store(builder.call(dot, [builder.load(place), factor, column]), place)
    builder.store(builder.gep(here, [ir.Constant(INDEX, PAIR * COLUMNS)]), b_next)


def _keep(sums: list[Any], c: Any, builder: Any) -> None:
    """Store the sums from the pointer c on."""
    for index, place in enumerate(sums):
        to = as_vector_pointer(builder, _lane(builder, c, index))
        builder.store(builder.load(place), to, align=FLOAT_ALIGNMENT)


def _finish(sums: list[Any], context: Any, builder: Any, kinds: Any, values: Any) -> None:
    """The epilogue of the sums, with a residual and without, with ReLU and without."""
    has_residual, has_relu = (context.is_true(builder, types.boolean, flag) for flag in values[6:])
    with builder.if_else(has_residual) as (with_residual, without):
        with with_residual:
            _store_finished(True, has_relu, sums, context, builder, kinds, values)
        with without:
            _store_finished(False, has_relu, sums, context, builder, kinds, values)


def _store_finished(
    added: bool, has_relu: Any, sums: list[Any], context: Any, builder: Any, kinds: Any, values: Any
) -> None:
    """has_relu: a bit. Without ReLU, the least value that is kept is −∞."""
    to, channel, out_row, bias, residual, out = values[:6]
    shift = address(context, builder, kinds[3], bias, channel)
    read = address(context, builder, kinds[4], residual, to)
    written = address(context, builder, kinds[5], out, to)
    number = VECTOR.element
    zero, least = ir.Constant(number, 0.0), ir.Constant(number, float("-inf"))
    floor = splat(builder, builder.select(has_relu, zero, least))
    for v in range(VECTORS):
        place = as_vector_pointer(builder, _lane(builder, shift, v))
        shifts = builder.load(place, align=FLOAT_ALIGNMENT)
        for p in range(len(sums) // VECTORS):
            total = builder.fadd(builder.load(sums[p * VECTORS + v]), shifts)
            if added:
                here = _lane(builder, ahead(builder, read, out_row, p), v)
                halves = builder.load(builder.bitcast(here, HALVES.as_pointer()), align=2)
                total = builder.fadd(total, widen(builder, halves))
            below = builder.fcmp_ordered(">", floor, total)  # never of NaN
            total = builder.select(below, floor, total)
            here = _lane(builder, ahead(builder, written, out_row, p), v)
            here = builder.bitcast(here, HALVES.as_pointer())
            builder.store(_rounded(builder, total), here, align=2)


@intrinsic
def store_rounded(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + LANES] = a vector rounded to bfloat16; subnormal values become 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values[:2])
        pointer = builder.bitcast(pointer, HALVES.as_pointer())
        builder.store(_rounded(builder, values[2]), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def _rounded(builder: Any, value: Any) -> Any:
    """The bits of float32 rounded to bfloat16 as `kernels.vector` does it, by the CPU's own
    instruction: subnormal values become 0."""
    kind = ir.FunctionType(ir.VectorType(Bfloat16Type(), LANES), [VECTOR])
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * LANES}"
    convert = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.bitcast(builder.call(convert, [value]), HALVES)


def _lane(builder: Any, pointer: Any, v: int) -> Any:
    """The v-th vector from a pointer on."""
    return builder.gep(pointer, [ir.Constant(INDEX, v * LANES)])


def _columns(builder: Any, pointer: Any, v: int) -> Any:
    """The pairs of the v-th LANES columns."""
    place = builder.gep(pointer, [ir.Constant(INDEX, v * PAIR * LANES)])
    return builder.load(builder.bitcast(place, FACTORS.as_pointer()), align=2)
