"""One instruction repeated on registers: the most that a CPU multiplies.

Each sum waits for its own previous product only. There are more sums than an instruction takes
cycles, and none leaves its register.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from r18_numba_cpu.kernels import amx
from r18_numba_cpu.kernels.amx import configure, release
from r18_numba_cpu.kernels.arguments import TILES
from r18_numba_cpu.kernels.bfloat16 import pairs
from r18_numba_cpu.kernels.integers import dots
from r18_numba_cpu.kernels.integers.requantize import INTEGERS
from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.micro_kernel import VECTORS, rolled
from r18_numba_cpu.kernels.vector import INDEX, LANES, VECTOR, address, intrinsic

SUMS = 12
"""Registers of sums. With the two factors they fit into the 16 registers of AVX2."""
NBYTES = 4 * LANES
"""Bytes of a register."""
TILE_NBYTES = 1024


@intrinsic
def repeat(typing: Any, factors: Any, sums: Any, at: Any, count: Any) -> Any:
    """Add the product of two registers of factors to each of SUMS registers, `count` times.

    factors: NBYTES of each, one after the other. By their elements: float32, or bfloat16 as uint16
    for `vdpbf16ps`, int16 for `vpmaddwd`, or uint8 for `vpdpbusd`. sums: float32, of integers
    int32; SUMS registers begin at `at`.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, into = (
            _bytes(builder, address(context, builder, kind, array, place))
            for kind, array, place in (
                (factors, values[0], ir.Constant(INDEX, 0)),
                (sums, values[1], values[2]),
            )
        )
        total, factor, add = PRODUCTS[factors.dtype]
        x, y = (cgutils.alloca_once_value(builder, _load(builder, start, i, factor))
                for i in range(2))  # fmt: skip
        held = [cgutils.alloca_once_value(builder, _load(builder, into, i, total))
                for i in range(SUMS)]  # fmt: skip
        with rolled(builder, values[3]):
            for place in held:
                builder.store(_as_if_new(builder, builder.load(x)), x)
                given = map(builder.load, (place, x, y))
                builder.store(add(builder, *given), place)
        for i, place in enumerate(held):
            to = builder.bitcast(_on(builder, into, i * NBYTES), total.as_pointer())
            builder.store(builder.load(place), to, align=4)
        return context.get_dummy_value()

    return types.void(factors, sums, types.int64, types.int64), generate


def _multiply_add(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, sums])


def _add_pairs(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR, pairs.FACTORS, pairs.FACTORS])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [sums, a, b])


def _as_if_new(builder: Any, value: Any) -> Any:
    """The value, which LLVM takes for a new one: computations with it are repeated."""
    register = "x" if platform.machine() in ("x86_64", "AMD64") else "w"
    kind = ir.FunctionType(value.type, [value.type])
    return builder.asm(kind, "", f"={register},0", [value], side_effect=True)


PRODUCTS: dict[Any, tuple[Any, Any, Callable[..., Any]]] = {
    types.float32: (VECTOR, VECTOR, _multiply_add),
    types.uint16: (VECTOR, pairs.FACTORS, _add_pairs),
    types.int16: (INTEGERS, dots.WORDS.factors, dots.WORDS.add),
    types.uint8: (INTEGERS, dots.VNNI.factors, dots.VNNI.add),
}
"""By the elements of factors: registers of sums and of factors, and a function that adds
products."""


@intrinsic
def repeat_tiles(
    typing: Any, factors: Any, sums: Any, at: Any, count: Any, numbers: Any
) -> Any:  # fmt: skip
    """Add products of AMX's tiles to all four sums, `count` times.

    factors: TILES tiles of activations, and then VECTORS of weights, uint8 or bfloat16 as uint16.
    sums: int32 or float32, the four tiles from `at` on. numbers: the tiles' configuration.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        zero = ir.Constant(INDEX, 0)
        start, into, words = (
            _bytes(builder, address(context, builder, kind, array, place))
            for kind, array, place in (
                (factors, values[0], zero),
                (sums, values[1], values[2]),
                (numbers, values[4], zero),
            )
        )
        tiles, row = amx.INSTRUCTIONS(context, builder, words), ir.Constant(INDEX, 64)
        name = amx.PRODUCTS[factors.dtype][0]
        first = TILES * VECTORS
        for i in range(first):
            tiles.zero(i)
        for i in range(TILES + VECTORS):
            tiles.load(first + i, _on(builder, start, i * TILE_NBYTES), row)
        with rolled(builder, values[3]):
            for t in range(TILES):
                for v in range(VECTORS):
                    tiles.dot(name, t * VECTORS + v, first + t, first + TILES + v)
        for i in range(first):
            tiles.store(i, _on(builder, into, i * TILE_NBYTES), row)
        return context.get_dummy_value()

    return types.void(factors, sums, types.int64, types.int64, numbers), generate


def _bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, ir.IntType(8).as_pointer())


def _on(builder: Any, pointer: Any, nbytes: int) -> Any:
    return builder.gep(pointer, [ir.Constant(INDEX, nbytes)])


def _load(builder: Any, pointer: Any, register: int, kind: Any) -> Any:
    place = builder.bitcast(_on(builder, pointer, register * NBYTES), kind.as_pointer())
    return builder.load(place, align=4)


@kernel
def by_vectors(factors, sums, count, workers):
    """Each worker repeats its products; sums: SUMS registers for each."""
    for worker in prange(workers):
        repeat(factors, sums, worker * SUMS * LANES, count)


@kernel
def by_tiles(factors, sums, count, numbers, workers):
    """The same with AMX; sums: four tiles for each worker."""
    for worker in prange(workers):
        configure(numbers, 0)
        repeat_tiles(factors, sums, worker * 1024, count, numbers)
        release(numbers, 0)
