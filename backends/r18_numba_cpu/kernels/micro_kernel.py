"""The micro-kernel: a register tile of a matrix product, where convolutions spend their time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.arguments import CACHE_LINE
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.vector import (
    FEATURES,
    FLOAT_ALIGNMENT,
    INDEX,
    LANES,
    VECTOR,
    address,
    as_vector_pointer,
    intrinsic,
    splat,
)

VECTORS = 2
COLUMNS = VECTORS * LANES
"""Columns of a register tile. B is packed in panels of COLUMNS columns."""

ROWS = 6 if FEATURES.get("avx2") and not FEATURES.get("avx512f") else 14
"""The most rows of a register tile. Its ROWS·VECTORS sums, the VECTORS columns of B and one factor
of A take a register each: 16 with AVX2, 32 with AVX-512 and on Arm."""


AHEAD_NBYTES = 4096
"""The distance from B's loads to its prefetches. A CPU's own prefetching ends with a page, so it
waits at the beginning of each. Products of integers and `bfloat16.pairs` do not fetch ahead: their
B has a quarter or half of these bytes, and VNNI's became slower.
"""

TO_L2 = 2
"""LLVM's locality of `prefetcht1`."""


@function
def multiply(rows, a, a_at, a_row, b, b_at, c, c_at, c_row, depth):
    """C[p, o] = Σ_(r, k) A[p·a_row + r·stride + k]·B[r·length + k, o], for a `Depth`.

    For p < rows ≤ ROWS, o < COLUMNS, r < runs, k < length. a, b and c are 1-d float32 arrays. In
    them A, B (rows of COLUMNS) and C (rows c_row apart) begin at a_at, b_at and c_at.

    Each sum starts at 0 and runs in the order of r, k. Products are not rounded before they are
    added if the machine has a fused multiply-add. So the result does not depend on `rows`.
    """
    multiply_tile(
        rows, ROWS, 0, a, a_at, a_row, b, b_at, c, c_at, c_row,
        depth.runs, depth.length, depth.stride,
    )  # fmt: skip


@function
def multiply_folded(rows, cut, gap, a, a_at, a_row, b, b_at, c, c_at, c_row, depth):
    """The same as `multiply`, but rows of A from `cut` on begin `gap` elements further.

    Narrow images have two rows of outputs in a register tile: B is read half as often.
    """
    multiply_tile(
        rows, cut, gap, a, a_at, a_row, b, b_at, c, c_at, c_row,
        depth.runs, depth.length, depth.stride,
    )  # fmt: skip


@function
def tile_rows(count, most):
    """The number of rows, at most `most`, that splits `count` rows into even register tiles."""
    tiles = (count + most - 1) // most
    return (count + tiles - 1) // tiles


def storing(store_sums: Any) -> Any:
    """The epilogue of a tile of sums in memory, by a format's epilogue of a vector of them.

    NOTE: that is not an argument; see `amx.banded`.
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

    return store_tile


@intrinsic
def multiply_tile(
    typing: Any, rows: Any, cut: Any, gap: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any,
    c: Any, c_at: Any, c_row: Any, runs: Any, length: Any, stride: Any,
) -> Any:  # fmt: skip
    """See `multiply_folded`. `multiply` and that contain this code, once each. Each number of rows
    has code of its own.
    """
    i64 = types.int64
    signature = types.void(i64, i64, i64, a, i64, i64, b, i64, c, i64, i64, i64, i64, i64)

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
    _, cut, gap, a, a_at, a_row, b, b_at, c, c_at, c_row, runs, length, stride = values
    a_base = address(context, builder, kinds[3], a, a_at)
    c_base = address(context, builder, kinds[8], c, c_at)
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
    multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

    # LLVM promotes these to registers, because nothing takes their addresses.
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows * VECTORS)]
    for place in sums:
        builder.store(ir.Constant(VECTOR, None), place)
    b_next = cgutils.alloca_once_value(builder, address(context, builder, kinds[6], b, b_at))

    offsets = [_row_offset(builder, a_row, p, cut, gap) for p in range(rows)]
    with cgutils.for_range(builder, runs, intp=INDEX) as run:
        corner = builder.gep(a_base, [builder.mul(run.index, stride)])
        starts = [builder.gep(corner, [offset]) for offset in offsets]
        with rolled(builder, length) as k:
            here = builder.load(b_next)
            columns = [_load(builder, here, v) for v in range(VECTORS)]
            fetch_ahead(builder, here)
            for p, start in enumerate(starts):
                factor = splat(builder, builder.load(builder.gep(start, [k])))
                for v, column in enumerate(columns):
                    place = sums[p * VECTORS + v]
                    arguments = [factor, column, builder.load(place)]
                    builder.store(builder.call(multiply_add, arguments), place)
            builder.store(builder.gep(here, [ir.Constant(INDEX, COLUMNS)]), b_next)

    for p in range(rows):
        start = ahead(builder, c_base, c_row, p)
        for v in range(VECTORS):
            place = as_vector_pointer(builder, _lane(builder, start, v))
            builder.store(builder.load(sums[p * VECTORS + v]), place, align=FLOAT_ALIGNMENT)


def _row_offset(builder: Any, a_row: Any, row: int, cut: Any, gap: Any) -> Any:
    """The elements from the first row of A to this one; see `multiply_folded`."""
    number = ir.Constant(INDEX, row)
    beyond = builder.icmp_signed(">=", number, cut)
    more = builder.select(beyond, gap, ir.Constant(INDEX, 0))
    return builder.add(builder.mul(a_row, number), more)


def fetch_ahead(builder: Any, here: Any) -> None:
    """Prefetch the row of B, COLUMNS float32, that is AHEAD_NBYTES beyond this one.

    An address outside of B does no harm: a prefetch never faults.
    """
    row = builder.bitcast(here, ir.IntType(8).as_pointer())
    fetch_lines(builder, builder.gep(row, [ir.Constant(INDEX, AHEAD_NBYTES)]), COLUMNS * 4)


def fetch_lines(builder: Any, pointer: Any, nbytes: int) -> None:
    """Prefetch the cache lines of `nbytes` bytes into L2."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    hints = [ir.Constant(word, value) for value in (0, TO_L2, 1)]
    for at in range(0, nbytes, CACHE_LINE):
        line = builder.gep(pointer, [ir.Constant(INDEX, at)])
        builder.call(fetch, [line, *hints])


def ahead(builder: Any, pointer: Any, stride: Any, count: int) -> Any:
    return builder.gep(pointer, [builder.mul(stride, ir.Constant(INDEX, count))])


def each_row(builder: Any, first: Any, pitch: Any, rows: int) -> Iterator[Any]:
    """Pointers to `rows` rows of A, `pitch` elements apart, each made of the one before.

    NOTE: an empty statement of inline assembly hides the addition from LLVM. It would keep a
    pointer for each row, or make each from the first, so that all loads are ready in the same
    cycle. Where rows are a multiple of 128 bytes apart, they are of one bank of the L1: a step then
    takes about 30 cycles instead of 28 on a Zen 4.
    """
    size = ir.Constant(INDEX, first.type.pointee.width // 8)
    nbytes = builder.mul(pitch, size)
    place = builder.ptrtoint(first, INDEX)
    for row in range(rows):
        if row:
            place = builder.add(place, nbytes)
            place = builder.asm(
                ir.FunctionType(INDEX, [INDEX]), "", "=r,0", [place], side_effect=True
            )
        yield builder.inttoptr(place, first.type)


def _lane(builder: Any, pointer: Any, v: int) -> Any:
    return builder.gep(pointer, [ir.Constant(INDEX, v * LANES)])


def _load(builder: Any, pointer: Any, v: int) -> Any:
    place = as_vector_pointer(builder, _lane(builder, pointer, v))
    return builder.load(place, align=FLOAT_ALIGNMENT)


@contextmanager
def rolled(builder: Any, count: Any) -> Iterator[Any]:
    """A loop over the indices below `count` that LLVM does not unroll.

    Unrolled twice, 12 rows run out of registers, spill sums to memory and take three times as long.
    """
    body, end = builder.append_basic_block("along"), builder.append_basic_block("along.end")
    zero, one = ir.Constant(INDEX, 0), ir.Constant(INDEX, 1)
    before = builder.basic_block
    builder.cbranch(builder.icmp_signed("<", zero, count), body, end)
    builder.position_at_end(body)
    index = builder.phi(INDEX)
    index.add_incoming(zero, before)
    yield index
    following = builder.add(index, one)
    index.add_incoming(following, builder.basic_block)
    branch = builder.cbranch(builder.icmp_signed("<", following, count), body, end)
    module = builder.module
    rolled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.values.MDValue(module, [rolled], name=str(len(module.metadata)))
    loop.operands = (loop, rolled)  # LLVM ignores what does not refer to itself
    branch.set_metadata("llvm.loop", loop)
    builder.position_at_end(end)
