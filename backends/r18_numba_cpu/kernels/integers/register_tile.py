"""A register tile of a product of integers: see `dots` for what it multiplies with.

A sum goes through the epilogue in the register that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.integers.bytes import INT32, as_bytes
from r18_numba_cpu.kernels.integers.dots import BY_ELEMENT, Dot
from r18_numba_cpu.kernels.integers.requantize import (
    INT_ALIGNMENT,
    INTEGERS,
    load_integers,
    round_packed,
    to_numbers,
    widen,
)
from r18_numba_cpu.kernels.jit import function, inlined
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, VECTORS, ahead, each_row, rolled
from r18_numba_cpu.kernels.vector import (
    FLOAT_ALIGNMENT,
    INDEX,
    LANES,
    address,
    as_vector_pointer,
    intrinsic,
    splat,
)

assert VECTORS == 2, "two pixels' outputs are four vectors, which are packed together"


@inlined
def multiply(rows, a, a_at, a_row, b, b_at, depth, c, c_at, whole, tile, terms):
    """C[p, o] = Σ_(r, g, q) A[p·a_row + r·stride + G·g + q]·B[r·length + g, o, q], for a `Depth`.

    For p < rows ≤ ROWS, o < COLUMNS, r < runs, g < length, q < G, the group. a: uint8, with b of
    int8, groups of four; or uint16, with b of int16, of two. B has rows of COLUMNS groups. In them
    A and B begin at a_at and b_at.

    If `whole`, the tile has all its columns, begins with its bias, and goes through the epilogue
    from the registers that it is in. Otherwise it is stored in c: int32, rows of COLUMNS from c_at
    on.
    """
    multiply_tile(
        rows, a, a_at, a_row, b, b_at, depth.runs, depth.length, depth.stride, c, c_at, whole,
        tile.pixel * tile.outputs + tile.channel, tile.channel, tile.outputs,
        terms.bias, terms.multiplier, terms.residual, terms.residual_multiplier, terms.out,
        terms.how.residual, terms.how.signed_residual, terms.how.low, terms.how.high,
    )  # fmt: skip


@function
def multiply_into(rows, a, a_at, a_row, b, b_at, depth, c, c_at):
    """The same, stored in c. A call has fewer arguments: they take time where K is short."""
    multiply_sums(
        rows, a, a_at, a_row, b, b_at, depth.runs, depth.length, depth.stride, c, c_at
    )  # fmt: skip


@intrinsic
def multiply_sums(
    typing: Any, rows: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, runs: Any,
    length: Any, stride: Any, c: Any, c_at: Any,
) -> Any:  # fmt: skip
    """See `multiply_into`, which contains this code once."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        with _each_count(builder, values[0]) as counts:
            for rows in counts:
                first = [ir.Constant(INTEGERS, None)] * VECTORS
                sums = _multiply_rows(rows, context, builder, signature.args, values[:9], first)
                to = address(context, builder, signature.args[9], *values[9:])
                _keep(sums, to, builder)
        return context.get_dummy_value()

    return types.void(i64, a, i64, i64, b, i64, i64, i64, i64, c, i64), generate


@intrinsic
def multiply_tile(
    typing: Any, rows: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, runs: Any,
    length: Any, stride: Any, c: Any, c_at: Any, whole: Any, to: Any, channel: Any, out_row: Any,
    bias: Any, multiplier: Any, residual: Any, residual_multiplier: Any, out: Any,
    has_residual: Any, signed: Any, low: Any, high: Any,
) -> Any:  # fmt: skip
    """See `multiply`, which contains this code once. Each number of rows has code of its own."""
    i64, flag, number = types.int64, types.boolean, types.float32
    signature = types.void(
        i64, a, i64, i64, b, i64, i64, i64, i64, c, i64, flag, i64, i64, i64,
        bias, multiplier, residual, residual_multiplier, out, flag, flag, number, number,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        with _each_count(builder, values[0]) as counts:
            for rows in counts:
                is_whole = context.is_true(builder, types.boolean, values[11])
                shift = address(context, builder, signature.args[15], values[15], values[13])
                # A tile in c gets its bias from `store_tile`.
                first = [
                    builder.select(
                        is_whole,
                        load_integers(builder, _lane(builder, shift, v)),
                        ir.Constant(INTEGERS, None),
                    )
                    for v in range(VECTORS)
                ]
                sums = _multiply_rows(rows, context, builder, signature.args, values[:9], first)
                with builder.if_else(is_whole) as (finish, keep):
                    with finish:
                        _finish(sums, context, builder, signature.args[12:], values[12:])
                    with keep:
                        to = address(context, builder, signature.args[9], *values[9:11])
                        _keep(sums, to, builder)
        return context.get_dummy_value()

    return signature, generate


@contextmanager
def _each_count(builder: Any, rows: Any) -> Iterator[Iterator[int]]:
    """Code of its own for each number of rows: what is built before the next number is taken."""
    end = builder.append_basic_block("multiplied")
    switch = builder.switch(rows, end)

    def counts() -> Iterator[int]:
        for count in range(1, ROWS + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{count}")):
                switch.add_case(count, builder.basic_block)
                yield count
                builder.branch(end)

    yield counts()
    builder.position_at_end(end)


def _multiply_rows(
    rows: int, context: Any, builder: Any, kinds: Any, values: Any, first: list[Any]
) -> list[Any]:
    """The code for one number of rows; returns the places of its sums, row by row.

    first: what a row's sums begin with.
    """
    _, a, a_at, a_row, b, b_at, runs, length, stride = values
    a_base = address(context, builder, kinds[1], a, a_at)
    dot: Dot = BY_ELEMENT[kinds[1].dtype]

    # LLVM promotes these to registers, because nothing takes their addresses.
    sums = [cgutils.alloca_once(builder, INTEGERS) for _ in range(rows * VECTORS)]
    for index, place in enumerate(sums):
        builder.store(first[index % VECTORS], place)
    b_next = cgutils.alloca_once_value(builder, address(context, builder, kinds[4], b, b_at))

    with cgutils.for_range(builder, runs, intp=INDEX) as run:
        corner = builder.gep(a_base, [builder.mul(run.index, stride)])
        with rolled(builder, length) as group:
            here = builder.load(b_next)
            columns = [_columns(builder, here, v, dot) for v in range(VECTORS)]
            start = builder.gep(corner, [builder.mul(group, ir.Constant(INDEX, dot.group))])
            for p, place in enumerate(each_row(builder, start, a_row, rows)):
                read = builder.load(builder.bitcast(place, INT32.as_pointer()), align=1)
                factor = builder.bitcast(splat(builder, read), dot.factors)
                for v, column in enumerate(columns):
                    total = sums[p * VECTORS + v]
                    builder.store(dot.add(builder, builder.load(total), factor, column), total)
            builder.store(builder.gep(here, [ir.Constant(INDEX, dot.group * COLUMNS)]), b_next)
    return sums


def _keep(sums: list[Any], c: Any, builder: Any) -> None:
    """Store the sums from the pointer c on."""
    for index, place in enumerate(sums):
        to = builder.bitcast(_lane(builder, c, index), INTEGERS.as_pointer())
        builder.store(builder.load(place), to, align=INT_ALIGNMENT)


def _finish(sums: list[Any], context: Any, builder: Any, kinds: Any, values: Any) -> None:
    """The epilogue of the sums, with a residual and without."""
    flags = [context.is_true(builder, types.boolean, flag) for flag in values[8:10]]
    arguments = sums, context, builder, kinds, values
    if kinds[7].dtype == types.float32:
        _store_finished(None, *arguments)
        return
    with builder.if_else(flags[0]) as (with_residual, without):
        with with_residual:
            _store_finished(flags[1], *arguments)
        with without:
            _store_finished(None, *arguments)


def _store_finished(
    signed: Any, sums: list[Any], context: Any, builder: Any, kinds: Any, values: Any
) -> None:
    """signed: a bit, of the residual; None if there is none. The sums have their bias."""
    to, channel, out_row, _, multiplier, residual, residual_multiplier, out, *_, low, high = values
    scale = address(context, builder, kinds[4], multiplier, channel)
    read = address(context, builder, kinds[5], residual, to)
    factor = address(context, builder, kinds[6], residual_multiplier, ir.Constant(INDEX, 0))
    written = address(context, builder, kinds[7], out, to)
    scales = [
        builder.load(as_vector_pointer(builder, _lane(builder, scale, v)), align=FLOAT_ALIGNMENT)
        for v in range(VECTORS)
    ]
    if signed is not None:
        factors = splat(builder, builder.load(factor))

    def number(p: int, v: int) -> Any:
        """The output of pixel p and vector v before it is rounded."""
        found = builder.fmul(to_numbers(builder, builder.load(sums[p * VECTORS + v])), scales[v])
        if signed is None:
            return found
        added = as_bytes(builder, _lane(builder, ahead(builder, read, out_row, p), v))
        added = widen(builder, builder.load(added, align=1), signed)
        return builder.fadd(found, builder.fmul(added, factors))

    pixels = len(sums) // VECTORS
    rows = [ahead(builder, written, out_row, p) for p in range(pixels)]
    if kinds[7].dtype == types.float32:
        for p, v in product(range(pixels), range(VECTORS)):
            place = as_vector_pointer(builder, _lane(builder, rows[p], v))
            builder.store(number(p, v), place, align=FLOAT_ALIGNMENT)
        return
    for p in range(0, pixels, 2):
        pairs = [[number(q, v) for v in range(VECTORS)] for q in (p, min(p + 1, pixels - 1))]
        for row, found in zip(rows[p:], round_packed(builder, pairs, low, high), strict=False):
            builder.store(found, builder.bitcast(row, found.type.as_pointer()), align=1)


def _lane(builder: Any, pointer: Any, v: int) -> Any:
    """The v-th vector from a pointer on."""
    return builder.gep(pointer, [ir.Constant(INDEX, v * LANES)])


def _columns(builder: Any, pointer: Any, v: int, dot: Dot) -> Any:
    """The groups of the v-th LANES columns."""
    place = builder.gep(pointer, [ir.Constant(INDEX, v * dot.group * LANES)])
    return builder.load(builder.bitcast(place, dot.factors.as_pointer()), align=1)
