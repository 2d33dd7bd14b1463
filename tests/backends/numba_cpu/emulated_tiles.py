"""AMX's instructions as loops, so that any CPU runs the kernels that are made of them.

Shapes of tiles are read from the 64 bytes that `ldtilecfg` loads, as the CPU does; it refuses what
a CPU would refuse: see `test_amx.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.compiler import Flags

from r18_numba_cpu import compiled
from r18_numba_cpu.kernels.amx import Instructions
from r18_numba_cpu.kernels.cache import KernelCache

TILES, ROWS, NBYTES = 8, 16, 64
MULTIPLYING = tuple(
    f"{form}.{name}"
    for form in ("integers", "bfloat16")
    for name in ("implicit_gemm", "conv_maxpool")
)
"""The modules of kernels with tiles. Each kernel is named after its module."""
BYTES = types.CPointer(types.uint8)
LEAST = np.float32(2.0**-126)
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@contextmanager
def used() -> Iterator[None]:
    """Have the kernels emulate what the CPU lacks, and the backend list them."""
    amx = compiled.module("amx")
    if amx.AVAILABLE:
        yield
        return
    kernels = [getattr(compiled.module(name), name.split(".")[-1]) for name in MULTIPLYING]
    before = amx.INSTRUCTIONS, amx.HAS_BFLOAT16, [kernel._cache for kernel in kernels]
    amx.INSTRUCTIONS = Emulated
    for kernel in kernels:
        kernel._cache = Apart(kernel._cache)
    amx.AVAILABLE = amx.HAS_BFLOAT16 = True
    yield
    amx.INSTRUCTIONS, amx.HAS_BFLOAT16, caches = before
    for kernel, own in zip(kernels, caches, strict=True):
        kernel._cache = own
    amx.AVAILABLE = False


class Apart(KernelCache):
    """A cache with separate files for emulated tiles, which a CPU with AMX must not find."""

    def __init__(self, own: KernelCache) -> None:
        super().__init__(own._kernel, own._folder)

    def _path(self, sig: Any, codegen: Any) -> Path:
        path = super()._path(sig, codegen)
        is_of_amx = sig[1].dtype in (types.int32, types.uint32)  # its weights
        return path.with_name(f"emulated-{DIGEST}-{path.name}") if is_of_amx else path


def kept(kernel: Any) -> bool:
    """Whether all code of a kernel with emulated tiles is on the disk for other processes."""
    codegen = kernel.targetctx.codegen()
    paths = [kernel._cache._path(signature, codegen) for signature in kernel.overloads]
    emulated = [path for path in paths if path.name.startswith("emulated-")]
    return bool(emulated) and all(path.is_file() for path in emulated)


STATES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The emulated tiles of each function that has any, in LLVM's terms."""


class Emulated(Instructions):
    """Emulated instructions, whose tiles are on the stack of the function that multiplies them."""

    def __init__(self, context: Any, builder: Any, configuration: Any) -> None:
        super().__init__(context, builder, configuration)
        self.context = context
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
        flags = Flags()
        flags.nrt = True  # `carray` makes arrays, and kernels' own functions may not
        made = self.context.compile_subroutine(self.builder, function, signature, flags=flags)
        self.context.call_internal(self.builder, made.fndesc, signature, values)


def zero(configuration, state, tile):  # type: ignore[no-untyped-def]
    carray(state, (TILES, ROWS, NBYTES))[tile] = 0


def load(configuration, state, tile, pointer, stride):  # type: ignore[no-untyped-def]
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    rows, nbytes = np.int64(shapes[48 + tile]), np.int64(shapes[16 + 2 * tile])
    read = carray(pointer, ((rows - 1) * stride + nbytes,))
    tiles[tile] = 0
    for row in range(rows):
        tiles[tile, row, :nbytes] = read[row * stride : row * stride + nbytes]


def store(configuration, state, tile, pointer, stride):  # type: ignore[no-untyped-def]
    shapes, tiles = carray(configuration, (64,)), carray(state, (TILES, ROWS, NBYTES))
    rows, nbytes = np.int64(shapes[48 + tile]), np.int64(shapes[16 + 2 * tile])
    written = carray(pointer, ((rows - 1) * stride + nbytes,))
    for row in range(rows):
        written[row * stride : row * stride + nbytes] = tiles[tile, row, :nbytes]


def dot(configuration, state, c, a, b, signed):  # type: ignore[no-untyped-def]
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
def flushed(number):  # type: ignore[no-untyped-def]
    """A float64 rounded to float32, and 0 below the smallest normal number."""
    rounded = np.float32(number)
    return rounded if abs(rounded) >= LEAST or np.isnan(rounded) else np.float32(0)


@njit
def factors(halves):  # type: ignore[no-untyped-def]
    """A tile of bfloat16, as float32. Once for a product: it has 16 times as many factors."""
    bits = halves.astype(np.uint32) << np.uint32(16)
    numbers = bits.view(np.float32)
    for row in range(ROWS):
        for column in range(NBYTES // 2):
            numbers[row, column] = flushed(numbers[row, column])
    return numbers


def dot_of_pairs(configuration, state, c, a, b):  # type: ignore[no-untyped-def]
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
