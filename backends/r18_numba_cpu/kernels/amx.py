"""Tiles of a product by AMX: `tdpbusd` and `tdpbssd` of bytes, `tdpbf16ps` of bfloat16.

A tile is a register of 16 rows of 64 bytes. Each of its sums in C, 16 × 16, gets the products of
a row of A, 64 bytes of K, and a column of B, whose rows are groups of four bytes as for VNNI, or
of two bfloat16 as in `bfloat16.pairs`. Sums of bytes are int32, exact modulo 2³², and nothing
saturates. Sums of bfloat16 are float32; `r18_numba_cpu.bfloat16.products` has their roundings.

1. Two tiles of outputs by two of channels are four sums, numbered 0 to 3. A's tiles are 4 and 5,
   B's 6 and 7: each tile that is loaded is multiplied twice.
2. A's rows are neighbouring outputs. They are loaded where they are in the band, `a_row` apart.
   B's tiles follow each other in the order in which they are loaded, so that lines are fetched
   before they are asked for.
3. Where channels are in slices, a slice of a panel multiplies up to MOST_PAIRS pairs of tiles of
   outputs before the next slice does, and is in L1 for all but the first. Sums wait in memory. With
   the last pair, the next slice is fetched into L2.
4. Sums are stored, and go through the epilogue from memory while the next tiles are multiplied: a
   few of their rows after each step over K. A core looks only a few steps ahead, since loading a
   tile is some twenty micro-operations: an epilogue behind all the steps would wait for them.

Linux grants a process the use of tiles if it asks. Permission is for all its threads, for good.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu import emulation
from r18_numba_cpu.kernels import emulated
from r18_numba_cpu.kernels.arguments import (
    COVER_FIELDS,
    GROUP,
    MOST_PAIRS,
    MOST_ROWS,
    TILES,
    Cover,
)
from r18_numba_cpu.kernels.jit import function, inlined
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, VECTORS, fetch_lines
from r18_numba_cpu.kernels.vector import FEATURES, INDEX, LANES, address, intrinsic

BYTE = ir.IntType(8)
SUM_NBYTES = 4
ROW_NBYTES = SUM_NBYTES * LANES
"""The bytes of a row of B's tiles and of sums: a vector of sums, or of groups of four bytes."""

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
"""The system call on x86-64, its request for permission, and the feature that it asks for."""


PRESENT = bool(FEATURES.get("amx-tile") and FEATURES.get("amx-int8"))
"""Whether the CPU has it. LLVM says so only if the operating system saves tiles (XCR0)."""


def refusal() -> str:
    """Ask Linux for permission to use tiles. Returns why it is refused, or nothing."""
    if sys.platform != "linux":
        return f"no permission on {platform.system()}"
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA))):
        return f"arch_prctl: {os.strerror(ctypes.get_errno())}"
    return ""


REFUSAL = refusal() if PRESENT else ""
"""Why Linux does not let a CPU that has tiles use them, or nothing."""
NATIVE = PRESENT and not REFUSAL
EMULATED = not NATIVE and "amx" in emulation.requested()
AVAILABLE = NATIVE or EMULATED
HAS_BFLOAT16 = EMULATED or bool(FEATURES.get("amx-bf16"))
"""Whether tiles multiply bfloat16 too, where they are available."""


PRODUCTS = {types.uint8: ("tdpbusd", "tdpbssd"), types.uint16: ("tdpbf16ps",)}
"""Instructions by the elements of A: uint8, and int8 stored in it; bfloat16."""


class Instructions:
    """The instructions. Tiles are numbered by immediates, so LLVM allocates no registers here.

    `emulated.EmulatedTiles` computes the same on any CPU.
    """

    def __init__(self, context: Any, builder: Any, configuration: Any) -> None:
        """configuration: a pointer to the 64 bytes that `configure` loads."""
        self.builder = builder
        self.configuration = configuration

    def configure(self) -> None:
        self._call("ldtilecfg", self.configuration)

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", tile)

    def load(self, tile: int, pointer: Any, stride: Any) -> None:
        """The rows of a tile, `stride` bytes apart from the pointer on."""
        self._call("tileloadd64", tile, pointer, stride)

    def dot(self, name: str, c: int, a: int, b: int) -> None:
        """C += A·B of tiles, by one of `PRODUCTS`."""
        self._call(name, c, a, b)

    def store(self, tile: int, pointer: Any, stride: Any) -> None:
        self._call("tilestored64", tile, pointer, stride)

    def _call(self, name: str, *arguments: Any) -> None:
        """An int is the number of a tile."""
        values = [ir.Constant(BYTE, a) if isinstance(a, int) else a for a in arguments]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        name = f"llvm.x86.{name}"
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)


INSTRUCTIONS: Any = emulated.EmulatedTiles if EMULATED else Instructions


# -- as functions of kernels -------------------------------------------------------------------


@intrinsic
def configure(typing: Any, numbers: Any, at: Any) -> Any:
    """Load the configuration of all tiles, the 8 int64 numbers[at:]."""
    return types.void(numbers, types.int64), _of_configuration("configure")


@intrinsic
def release(typing: Any, numbers: Any, at: Any) -> Any:
    """Give the tiles back: while they are in use, each switch of threads saves 8 KB more."""
    return types.void(numbers, types.int64), _of_configuration("release")


def _of_configuration(method: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _configuration(context, builder, signature, values)
        getattr(INSTRUCTIONS(context, builder, pointer), method)()
        return context.get_dummy_value()

    return generate


@intrinsic
def clear_sums(typing: Any, numbers: Any, at: Any) -> Any:
    """C = 0, of all tiles. at: of the configuration in numbers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        tiles = INSTRUCTIONS(context, builder, _configuration(context, builder, signature, values))
        for number in range(TILES * VECTORS):
            tiles.zero(number)
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


@intrinsic
def multiply_tiles(
    typing: Any, count: Any, signed: Any, a: Any, a_at: Any, a_next: Any, a_row: Any, b: Any,
    b_at: Any, b_next: Any, numbers: Any, at: Any,
) -> Any:  # fmt: skip
    """C[t, p, o] += Σ_k A[t·a_next + p·a_row + k]·B[k, o], the products of one step over K.

    For t < count ≤ TILES, p below the rows that are configured, o < COLUMNS, and k below the bytes
    that are configured; strides of A are in bytes. a: bytes, int8 if `signed`, or bfloat16
    (uint16); b: groups of four bytes of K, in tiles of `b_next` bytes. In them A and B begin at
    a_at and b_at. at: of the configuration in numbers. Does nothing for a count of 0.
    """
    i64 = types.int64
    signature = types.void(i64, types.boolean, a, i64, i64, i64, b, i64, i64, numbers, i64)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        places = [
            _bytes(builder, address(context, builder, kinds[i], *values[i : i + 2]))
            for i in (2, 6, 9)
        ]
        tiles = INSTRUCTIONS(context, builder, places[2])
        kind = builder.add(
            builder.mul(values[0], ir.Constant(INDEX, 2)), builder.zext(values[1], INDEX)
        )
        # NOTE: hidden by an empty statement of assembly, or LLVM makes a loop over K for each kind.
        kind = builder.asm(
            ir.FunctionType(INDEX, [INDEX]), "", "=r,0", [kind], side_effect=True, name="kind"
        )
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(kind, end)
        for count in range(1, TILES + 1):
            for signed, name in enumerate(PRODUCTS[kinds[2].dtype]):
                with builder.goto_block(builder.append_basic_block(f"{name}.{count}")):
                    switch.add_case(2 * count + signed, builder.basic_block)
                    strides = (*values[4:6], values[8])
                    _multiply_tiles(count, name, tiles, builder, places[:2], strides)
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _multiply_tiles(
    count: int, name: str, tiles: Instructions, builder: Any, places: Any, strides: Any
) -> None:
    """The code for one number of tiles of A."""
    a, b = places
    a_next, a_row, b_next = strides
    of_b = TILES * VECTORS + TILES  # the number of B's first tile
    for v in range(VECTORS):
        b_tile = builder.gep(b, [builder.mul(b_next, ir.Constant(INDEX, v))])
        tiles.load(of_b + v, b_tile, ir.Constant(INDEX, ROW_NBYTES))
    for t in range(count):
        tiles.load(TILES * VECTORS + t, builder.gep(a, [a_next]) if t else a, a_row)
        for v in range(VECTORS):
            tiles.dot(name, t * VECTORS + v, TILES * VECTORS + t, of_b + v)


@intrinsic
def fetch_tiles(typing: Any, b: Any, at: Any) -> Any:
    """Fetch the tiles of B for one step, which begin at b[at], into L2.

    NOTE: those of a step of MOST_NBYTES, as slices have it.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _bytes(builder, address(context, builder, signature.args[0], *values))
        fetch_lines(builder, place, VECTORS * MOST_ROWS * ROW_NBYTES)
        return context.get_dummy_value()

    return types.void(b, types.int64), generate


@intrinsic
def store_tiles(typing: Any, c: Any, c_at: Any, c_next: Any, numbers: Any, at: Any) -> Any:
    """c[c_at + t·c_next + p·COLUMNS + o] = C[t, p, o], of all tiles.

    c: int32, or float32 for bfloat16. at: of the configuration in numbers.
    """
    return types.void(c, types.int64, types.int64, numbers, types.int64), _of_sums("store")


@intrinsic
def load_tiles(typing: Any, c: Any, c_at: Any, c_next: Any, numbers: Any, at: Any) -> Any:
    """C[t, p, o] = c[c_at + t·c_next + p·COLUMNS + o], what `store_tiles` has stored."""
    return types.void(c, types.int64, types.int64, numbers, types.int64), _of_sums("load")


def _of_sums(method: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        sums = _bytes(builder, address(context, builder, kinds[0], *values[:2]))
        configuration = _bytes(builder, address(context, builder, kinds[3], *values[3:]))
        tiles = INSTRUCTIONS(context, builder, configuration)
        size = builder.mul(values[2], ir.Constant(INDEX, SUM_NBYTES))
        for t in range(TILES):
            to = builder.gep(sums, [builder.mul(size, ir.Constant(INDEX, t))])
            for v in range(VECTORS):
                part = builder.gep(to, [ir.Constant(INDEX, v * ROW_NBYTES)])
                row = ir.Constant(INDEX, ROW_NBYTES * VECTORS)
                getattr(tiles, method)(t * VECTORS + v, part, row)
        return context.get_dummy_value()

    return generate


def _configuration(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    return _bytes(builder, address(context, builder, signature.args[0], *values))


def _bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, BYTE.as_pointer())


# -- a band ------------------------------------------------------------------------------------


@function
def corner(tile, each, row_stride, tile_stride):
    """The element of a band at which a tile begins.

    each: tiles in a row of outputs, or in the band if its rows are merged.
    """
    return tile // each * row_stride + tile % each * tile_stride


def banded(store_sums: Any) -> Any:
    """`multiply_band` with the epilogue of a vector of sums.

    NOTE: the epilogue is not an argument. Code that passes a function on holds its address, and
    code with an address is not kept on the disk: each process would compile the kernel again.
    """

    @inlined
    def store_places(row, end, places, places_at, pixels, sums, at, tile, terms):
        """The epilogue of those of rows row … end − 1 of sums[at:] whose place is below `pixels`.

        places: from places_at on, the pixel of each row, after tile.pixel; −1: it has none.
        """
        # NOTE: each call has a loop of its own, without what it does not need.
        if tile.channel + COLUMNS > tile.outputs:
            store_rows(row, end, places, places_at, pixels, sums, at, tile, False, terms)
        elif terms.how.residual:
            store_rows(row, end, places, places_at, pixels, sums, at, tile, True, terms)
        else:
            store_rows(row, end, places, places_at, pixels, sums, at, tile, True, terms)

    @inlined
    def store_rows(begin, end, places, places_at, pixels, sums, at, tile, whole, terms):
        """`store_places` of a panel that is whole, or not."""
        # NOTE: numbers without a sign, or Numba asks whether an index is counted from the end.
        first, limit, row_size = np.uint64(places_at), np.uint64(pixels), np.uint64(tile.outputs)
        origin = tile.pixel * tile.outputs + tile.channel
        for row in range(np.uint64(begin), np.uint64(end)):
            place = np.uint64(places[first + row])
            if place < limit:
                to = origin + np.int64(place * row_size)
                here = at + np.int64(row) * COLUMNS
                for v in range(0, COLUMNS, LANES):
                    left = tile.outputs - tile.channel - v
                    if whole or left > 0:
                        lanes = LANES if whole else min(LANES, left)
                        store_sums(sums, here + v, to + v, tile.channel + v, lanes, terms)

    @function
    def multiply_band(
        rows, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers, at_cover
    ):  # fmt: skip
        """The outputs of a panel in `rows` rows, from tile.pixel on, of a band that begins at a_at.

        shape, depth: of the convolution, with the channels of a slice; a: bytes or bfloat16;
        b: groups of four bytes; c: sums, as many as `integers.tiles.sums_size`. numbers: from
        at_cover on, what `integers.tiles.arguments` makes.
        """
        n = numbers[at_cover:]
        cover = Cover(n[0], n[1] != 0, n[2], n[3], n[4] != 0, n[5], n[6])
        configuration = at_cover + COVER_FIELDS
        places = configuration + 8  # after 64 bytes
        nbytes = a.itemsize
        steps = depth.length * GROUP // cover.step
        a_step, b_step = cover.step // nbytes, cover.step // GROUP * COLUMNS
        b_next = b_step // VECTORS * GROUP
        pixel_stride = shape.stride_w * shape.channels
        row_stride = shape.stride_h * depth.stride
        tile_stride = cover.height * pixel_stride
        lines = rows if cover.merged else 1
        pixels = (lines - 1) * cover.pitch + shape.out_w
        each = (pixels + cover.height - 1) // cover.height
        tiles = rows // lines * each
        size = cover.height * COLUMNS
        slot = TILES * size
        most = TILES * cover.height
        b_slice = depth.runs * steps * b_step
        pairs = (tiles + TILES - 1) // TILES
        # Even turns of at most MOST_PAIRS pairs; of a band in one slice, pair after pair.
        turns = (pairs + MOST_PAIRS - 1) // MOST_PAIRS if cover.slices > 1 else pairs
        turn = (pairs + turns - 1) // turns
        slots = max(2, turn)  # sums stay in theirs until they are read
        stored = done = 0  # how many rows of sums are complete, and of which pair
        begin = pair = piece = 0  # of the turn; and the slice
        configure(numbers, configuration)
        # Once more at the end, without tiles and in one step: for the epilogue of the last sums.
        for _ in range(pairs * cover.slices + 1):
            first = TILES * pair
            count = max(0, min(TILES, tiles - first))
            runs, each_run = (depth.runs, steps) if count > 0 else (1, 1)
            share = (stored + runs * each_run - 1) // (runs * each_run)
            start = corner(first, each, row_stride, tile_stride)
            following = nbytes * (corner(first + 1, each, row_stride, tile_stride) - start)
            sums, summed = c_at + pair % slots * slot, c_at + done % slots * slot
            if piece == 0:
                clear_sums(numbers, configuration)
            else:
                load_tiles(c, sums, size, numbers, configuration)
            is_last = piece == cover.slices - 1
            fetches = not is_last and pair == min(begin + turn, pairs) - 1
            row, of_b = 0, b_at + piece * b_slice
            for run in range(runs):
                of_a = a_at + piece * cover.slice_stride + start + run * depth.stride
                for _ in range(each_run):
                    multiply_tiles(
                        count, cover.signed, a, of_a, following, nbytes * pixel_stride, b, of_b,
                        b_next, numbers, configuration,
                    )  # fmt: skip
                    if fetches:
                        fetch_tiles(b, of_b + b_slice)
                    end = min(stored, row + share)
                    store_places(
                        row, end, numbers, places + done * most, rows * shape.out_w, c, summed,
                        tile, terms,
                    )  # fmt: skip
                    row, of_a, of_b = end, of_a + a_step, of_b + b_step
            store_tiles(c, sums, size, numbers, configuration)
            stored, done = is_last * count * cover.height, pair
            pair += 1
            if pair == min(begin + turn, pairs):
                piece = 0 if is_last else piece + 1
                begin = pair = pair if is_last else begin
        release(numbers, configuration)

    return multiply_band
