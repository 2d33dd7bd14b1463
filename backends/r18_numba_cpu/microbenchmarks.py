"""Rates of the instructions that kernels multiply with, for `r18 roofline --measure`.

Operands are random and in registers. Every worker repeats the same products.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from r18.backend import Array, Ceiling
from r18.backend.ceilings import Timed, measure
from r18.graph.precision import BF16, FP32, INT8
from r18_numba_cpu.compiled import module, run, workers

OF_BF16_TILES, OF_BYTE_TILES, OF_PAIRS, OF_BYTES = "tdpbf16ps", "tdpbusd", "vdpbf16ps", "vpdpbusd"
UNIT = 1 << 16
"""Turns of the loop in a repeat, which takes longer than starting the threads."""
TILE_ROWS, TILE_NBYTES = 16, 64
"""Rows of an AMX tile, and bytes of a row."""


@dataclass(frozen=True)
class Microbenchmark:
    """An instruction and the types of its factors.

    factors: the type of their elements; of bfloat16 uint16.
    tiles:   by AMX; otherwise by vectors.
    """

    what: str
    precision: str
    factors: type[np.generic]
    tiles: bool = False

    @property
    def elements(self) -> int:
        """Elements of K that a lane multiplies at a time."""
        return 4 // np.dtype(self.factors).itemsize

    @property
    def sums(self) -> type[np.generic]:
        return np.int32 if self.precision == INT8.name else np.float32

    @property
    def operations(self) -> int:
        """Operations of one worker in one turn of the loop; a multiply-accumulate is two."""
        kernels = module("microbenchmarks")
        sums = 4 * TILE_ROWS**2 * TILE_ROWS if self.tiles else kernels.SUMS * module("vector").LANES
        return 2 * sums * self.elements


def multiply_add() -> str:
    """The instruction that LLVM selects on this machine to add a product to a float32 sum."""
    if platform.machine() in ("x86_64", "AMD64"):
        return "vfmadd231ps" if module("vector").FEATURES.get("fma") else "mulps"
    return "fmla"


def of_words() -> str:
    """The instruction that LLVM selects to add products of int16 to int32 sums."""
    return "vpdpwssd" if module("integers.dots").HAS_VNNI else "vpmaddwd"


def microbenchmarks() -> tuple[Microbenchmark, ...]:
    """The microbenchmarks of the instructions that this CPU has."""
    amx, found = module("amx"), [Microbenchmark(multiply_add(), FP32.name, np.float32)]
    if module("bfloat16.pairs").AVAILABLE:
        found.append(Microbenchmark(OF_PAIRS, BF16.name, np.uint16))
    if module("integers.dots").HAS_WORDS:
        found.append(Microbenchmark(of_words(), INT8.name, np.int16))
    if module("integers.dots").HAS_VNNI:
        found.append(Microbenchmark(OF_BYTES, INT8.name, np.uint8))
    if amx.AVAILABLE and amx.HAS_BFLOAT16:
        found.append(Microbenchmark(OF_BF16_TILES, BF16.name, np.uint16, tiles=True))
    if amx.AVAILABLE:
        found.append(Microbenchmark(OF_BYTE_TILES, INT8.name, np.uint8, tiles=True))
    return tuple(found)


def ceilings(progress: Callable[[str], None]) -> Iterator[Ceiling]:
    """The ceilings of this CPU with all threads. progress: called as each measurement begins."""
    for one in microbenchmarks():
        progress(f"{one.what} {one.precision}")
        count = workers()
        sustained, burst = measure(_timer(one, count), UNIT * one.operations * count)
        registers = "tiles" if one.tiles else f"vectors of {module('vector').LANES}"
        how = f"{one.what} on {registers} in registers, {count} thread{'s' * (count != 1)}"
        yield Ceiling(one.what, one.precision, sustained, burst, how)


def _timer(one: Microbenchmark, count: int) -> Timed:
    kernels = module("microbenchmarks")
    factors, sums = _factors(one), _sums(one, count)

    def timed(repeats: int, launches: int) -> list[float]:
        found = []
        for _ in range(launches):
            begin = time.perf_counter()
            if one.tiles:
                run(kernels.by_tiles, factors, sums, UNIT * repeats, configuration(), count)
            else:
                run(kernels.by_vectors, factors, sums, UNIT * repeats, count)
            found.append(time.perf_counter() - begin)
        return found

    return timed


def _factors(one: Microbenchmark) -> Array:
    """Two vectors, or four tiles, of random values."""
    rng = np.random.default_rng(0)
    itemsize = np.dtype(one.factors).itemsize
    nbytes = 4 * TILE_ROWS * TILE_NBYTES if one.tiles else 2 * module("microbenchmarks").NBYTES
    if one.precision == INT8.name:
        return rng.integers(0, 256, nbytes, np.uint8).astype(one.factors)[: nbytes // itemsize]
    wide = rng.standard_normal(nbytes // itemsize, np.float32)
    return wide if itemsize == 4 else (wide.view(np.uint32) >> 16).astype(np.uint16)


def _sums(one: Microbenchmark, count: int) -> Array:
    """The sums of each worker. Their initial values differ, since LLVM would merge equal ones."""
    size = 4 * TILE_ROWS**2 if one.tiles else module("microbenchmarks").SUMS * _lanes()
    return np.arange(count * size).astype(one.sums)


def _lanes() -> int:
    return int(module("vector").LANES)


def configuration() -> Array:
    """The 64 bytes that `ldtilecfg` loads for eight whole tiles, as eight int64."""
    found = np.zeros(64, np.uint8)
    found[0] = 1  # the palette
    found[16:32:2] = TILE_NBYTES
    found[48:56] = TILE_ROWS
    return found.view(np.int64)


__all__ = ["Microbenchmark", "ceilings", "microbenchmarks", "multiply_add"]
