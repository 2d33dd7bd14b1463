"""Instructions that a CPU lacks, computed by others: see `r18_numba_cpu.emulation`.

Shapes of tiles are read from the 64 bytes that `ldtilecfg` loads, as the CPU does.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.compiler import Flags

TILES, ROWS, NBYTES = 8, 16, 64
BYTES = types.CPointer(types.uint8)
LEAST = np.float32(2.0**-126)

STATES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The emulated tiles of each function that has any, in LLVM's terms."""


class EmulatedTiles:
    """AMX's instructions as loops, with the methods of `amx.Instructions`. Its tiles are on the
    stack of the function that multiplies them.
    """

    def __init__(self, context: Any, builder: Any, configuration: Any) -> None:
        self.context = context
        self.builder = builder
        self.configuration = configuration
        if builder.function not in STATES:
            content = ir.ArrayType(ir.IntType(8), TILES * ROWS * NBYTES)
            STATES[builder.function] = cgutils.alloca_once(builder, content)
        self.state = builder.bitcast(STATES[builder.function], ir.IntType(8).as_pointer())

    def configure(self) -> None:
        pass

    def release(self) -> None:
        pass

    def zero(self, tile: int) -> None:
        self._run(zero, tile)

    def load(self, tile: int, pointer: Any, stride: Any) -> None:
        self._run(load, tile, pointer, stride)

    def dot(self, name: str, c: int, a: int, b: int) -> None:
        if name == "tdpbf16ps":
            self._run(dot_of_pairs, c, a, b)
        else:
            self._run(dot, c, a, b, int(name == "tdpbssd"))

    def store(self, tile: int, pointer: Any, stride: Any) -> None:
        self._run(store, tile, pointer, stride)

    def _run(self, function: Any, *arguments: Any) -> None:
        pointer, index = ir.IntType(8).as_pointer(), ir.IntType(64)
        values = [ir.Constant(index, a) if isinstance(a, int) else a for a in arguments]
        values = [self.configuration, self.state, *values]
        kinds = [BYTES if value.type == pointer else types.int64 for value in values]
        signature = types.void(*kinds)
        flags: Any = Flags()
        flags.nrt = True  # `carray` makes arrays, and kernels' own functions may not
        made = self.context.compile_subroutine(self.builder, function, signature, flags=flags)
        self.context.call_internal(self.builder, made.fndesc, signature, values)


def zero(configuration, state, tile):
    carray(state, (TILES, ROWS, NBYTES))[tile] = 0


def load(configuration, state, tile, pointer, stride):
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    rows, nbytes = np.int64(shapes[48 + tile]), np.int64(shapes[16 + 2 * tile])
    read = carray(pointer, ((rows - 1) * stride + nbytes,))
    tiles[tile] = 0
    for row in range(rows):
        tiles[tile, row, :nbytes] = read[row * stride : row * stride + nbytes]


def store(configuration, state, tile, pointer, stride):
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    rows, nbytes = np.int64(shapes[48 + tile]), np.int64(shapes[16 + 2 * tile])
    written = carray(pointer, ((rows - 1) * stride + nbytes,))
    for row in range(rows):
        written[row * stride : row * stride + nbytes] = tiles[tile, row, :nbytes]


def dot(configuration, state, c, a, b, signed):
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    sums = tiles.view(np.int32)
    for row in range(np.int64(shapes[48 + a])):
        for group in range(np.int64(shapes[16 + 2 * a]) // 4):
            for column in range(np.int64(shapes[16 + 2 * b]) // 4):
                total = np.int64(sums[c, row, column])
                for q in range(4):
                    byte = tiles[a, row, 4 * group + q]
                    number = np.int64(np.int8(byte)) if signed else np.int64(byte)
                    total += number * np.int64(np.int8(tiles[b, group, 4 * column + q]))
                sums[c, row, column] = np.int32(total)


@njit
def flushed(number):
    """A float64 rounded to float32, and 0 below the smallest normal number."""
    rounded = np.float32(number)
    return rounded if abs(rounded) >= LEAST or np.isnan(rounded) else np.float32(0)


@njit
def factors(halves):
    """A tile of bfloat16, as float32. Once for a product: it has 16 times as many factors."""
    bits = halves.astype(np.uint32) << np.uint32(16)
    numbers = bits.view(np.float32)
    for row in range(ROWS):
        for column in range(NBYTES // 2):
            numbers[row, column] = flushed(numbers[row, column])
    return numbers


def dot_of_pairs(configuration, state, c, a, b):
    """TDPBF16PS by the Intel SDM: a sum of the lower halves and one of the upper halves by fused
    multiply-adds; their sum is added to C. In float64 a product and a sum of float32 are exact,
    except for terms 2⁻²⁹ of the other, which decide at most a tie."""
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    sums, halves = tiles.view(np.float32), tiles.view(np.uint16)
    of_a, of_b = factors(halves[a]), factors(halves[b])
    for row in range(np.int64(shapes[48 + a])):
        for column in range(np.int64(shapes[16 + 2 * b]) // 4):
            lower, upper = np.float32(0), np.float32(0)
            for pair in range(np.int64(shapes[16 + 2 * a]) // 4):
                product = np.float64(of_a[row, 2 * pair]) * of_b[pair, 2 * column]
                lower = flushed(product + lower)
                product = np.float64(of_a[row, 2 * pair + 1]) * of_b[pair, 2 * column + 1]
                upper = flushed(product + upper)
            both = flushed(np.float64(lower) + np.float64(upper))
            sums[c, row, column] = flushed(np.float64(sums[c, row, column]) + np.float64(both))


# -- VNNI ----------------------------------------------------------------------------------------


def add_bytes(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """`vpdpbusd`: to each int32 lane of `sums`, four products of its uint8 in a and int8 in b."""
    count = 4 * sums.type.count
    octets, wide = (ir.VectorType(ir.IntType(bits), count) for bits in (8, 32))
    factors = [builder.bitcast(one, octets) for one in (a, b)]
    products = builder.mul(builder.zext(factors[0], wide), builder.sext(factors[1], wide))
    for q in range(4):
        places = [ir.Constant(ir.IntType(32), 4 * lane + q) for lane in range(sums.type.count)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), sums.type.count), places)
        part = builder.shuffle_vector(products, ir.Constant(wide, ir.Undefined), mask)
        sums = builder.add(sums, part)
    return sums


__all__ = ["EmulatedTiles", "add_bytes"]
