"""Tiles of a product by AMX: `tdpbusd` and `tdpbssd` of bytes, `tdpbf16ps` of bfloat16.

A tile is a register of 16 rows of 64 bytes. Each of its sums in C, 16 × 16, gets the products of
a row of A, 64 bytes of K, and a column of B, whose rows are groups of four bytes as in `vnni`, or
of two bfloat16 as in `bfloat16.pairs`. Sums of bytes are int32, exact modulo 2³², and nothing
saturates. Those of bfloat16 are float32; `r18_numba_cpu.bfloat16.products` has their roundings.

1. Two tiles of outputs by two of channels are four sums, numbered 0 to 3. A's tiles are 4 and 5,
   B's 6 and 7: each tile that is loaded is multiplied twice.
2. A's rows are neighbouring outputs. They are loaded where they are in the band, `a_row` apart.
3. Sums are stored, and go through the epilogue from memory.

Linux grants a process the use of tiles if it asks. Permission is for all its threads, for good.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu.kernels.arguments import GROUP, TILES, Cover, Tile
from r18_numba_cpu.kernels.jit import function
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, VECTORS, rolled
from r18_numba_cpu.kernels.vector import FEATURES, INDEX, LANES, address, intrinsic

BYTE = ir.IntType(8)
SUM_NBYTES = 4

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
AVAILABLE = PRESENT and not REFUSAL
HAS_BFLOAT16 = bool(FEATURES.get("amx-bf16"))
"""Whether tiles multiply bfloat16 too, where they are available."""


PRODUCTS = {types.uint8: ("tdpbusd", "tdpbssd"), types.uint16: ("tdpbf16ps",)}
"""By the elements of A: of uint8, and of the int8 in it; of bfloat16."""


class Instructions:
    """The instructions. Tiles are numbered by immediates, so LLVM allocates no registers here.

    The tests have another class in its place, which computes what these do on any CPU.
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


INSTRUCTIONS = Instructions


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
        pointer = _bytes(builder, address(context, builder, signature.args[0], *values))
        getattr(INSTRUCTIONS(context, builder, pointer), method)()
        return context.get_dummy_value()

    return generate


@intrinsic
def multiply_tiles(
    typing: Any, count: Any, signed: Any, a: Any, a_at: Any, a_next: Any, a_row: Any, b: Any,
    b_at: Any, runs: Any, steps: Any, step: Any, stride: Any, c: Any, c_at: Any, c_next: Any,
    numbers: Any, at: Any,
) -> Any:  # fmt: skip
    """C[t, p, o] = Σ_(r, k) A[t·a_next + p·a_row + r·stride + k]·B[r·steps·step + k, o].

    For t < count ≤ TILES, p below the rows that are configured, o < COLUMNS, r < runs, and
    k < steps·step; steps and strides of A are in bytes. a: bytes, int8 if `signed`, or bfloat16
    (uint16); b: groups of four bytes of K. c: int32, or float32 for bfloat16, a tile's rows of
    COLUMNS from c_at + t·c_next on. at: of the configuration in numbers.
    """
    i64, flag = types.int64, types.boolean
    signature = types.void(
        i64, flag, a, i64, i64, i64, b, i64, i64, i64, i64, i64, c, i64, i64, numbers, i64
    )

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        places = [
            _bytes(builder, address(context, builder, kinds[i], *values[i : i + 2]))
            for i in (2, 6, 12, 15)
        ]
        sizes = [*values[4:6], *values[8:12], values[14]]
        kind = builder.add(
            builder.mul(values[0], ir.Constant(INDEX, 2)), builder.zext(values[1], INDEX)
        )
        end = builder.append_basic_block("multiplied")
        switch = builder.switch(kind, end)
        for count in range(1, TILES + 1):
            for signed, name in enumerate(PRODUCTS[kinds[2].dtype]):
                with builder.goto_block(builder.append_basic_block(f"{name}.{count}")):
                    switch.add_case(2 * count + signed, builder.basic_block)
                    tiles = INSTRUCTIONS(context, builder, places[3])
                    _multiply_tiles(count, name, tiles, builder, places[:3], sizes)
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _multiply_tiles(
    count: int, name: str, tiles: Instructions, builder: Any, places: Any, sizes: Any
) -> None:
    """The code for one number of tiles of A."""
    a, b, c = places
    a_next, a_row, runs, steps, step, stride, c_next = sizes
    b_row = ir.Constant(INDEX, SUM_NBYTES * COLUMNS)
    of_b = TILES * VECTORS + TILES  # the number of B's first tile
    for t in range(count * VECTORS):
        tiles.zero(t)
    b_step = builder.mul(step, ir.Constant(INDEX, COLUMNS))
    b_now = cgutils.alloca_once_value(builder, b)
    with cgutils.for_range(builder, runs, intp=INDEX) as run:
        corner = builder.gep(a, [builder.mul(run.index, stride)])
        with rolled(builder, steps) as index:
            here = builder.load(b_now)
            start = builder.gep(corner, [builder.mul(index, step)])
            for v in range(VECTORS):
                tiles.load(of_b + v, _on(builder, here, v * SUM_NBYTES * LANES), b_row)
            for t in range(count):
                from_ = start if t == 0 else builder.gep(start, [a_next])
                tiles.load(TILES * VECTORS + t, from_, a_row)
                for v in range(VECTORS):
                    tiles.dot(name, t * VECTORS + v, TILES * VECTORS + t, of_b + v)
            builder.store(builder.gep(here, [b_step]), b_now)
    for t in range(count):
        to = c if t == 0 else builder.gep(c, [builder.mul(c_next, ir.Constant(INDEX, SUM_NBYTES))])
        for v in range(VECTORS):
            tiles.store(t * VECTORS + v, _on(builder, to, v * SUM_NBYTES * LANES), b_row)


def _bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, BYTE.as_pointer())


def _on(builder: Any, pointer: Any, nbytes: int) -> Any:
    return builder.gep(pointer, [ir.Constant(INDEX, nbytes)])


# -- a band ------------------------------------------------------------------------------------


def banded(store_tile: Any) -> Any:
    """`multiply_band` with an epilogue.

    NOTE: the epilogue is no argument. Code that passes a function on holds its address, and code
    with an address is not kept on the disk: each process would compile the kernel again.
    """

    @function
    def multiply_band(
        rows, a, a_at, shape, b, b_at, depth, c, c_at, tile, terms, numbers, at_cover
    ):  # fmt: skip
        """The outputs of a panel in `rows` rows, from tile.pixel on, of a band that begins at a_at.

        shape, depth: of the convolution; a: bytes or bfloat16; b: groups of four bytes; c: TILES
        tiles. numbers: a `Cover` and the configuration of tiles from at_cover on.
        """
        n = numbers[at_cover:]
        cover = Cover(n[0], n[1] != 0, n[2], n[3], n[4] != 0)
        configuration = at_cover + 5
        nbytes = a.itemsize
        steps = depth.length * GROUP // cover.step
        pixel_stride = shape.stride_w * shape.channels
        row_stride = shape.stride_h * depth.stride
        lines = rows if cover.merged else 1
        pixels = (lines - 1) * cover.pitch + shape.out_w
        each = (pixels + cover.height - 1) // cover.height
        tiles = rows // lines * each
        size = cover.height * COLUMNS
        configure(numbers, configuration)
        for first in range(0, tiles, TILES):
            count = min(TILES, tiles - first)
            start = first // each * row_stride + first % each * cover.height * pixel_stride
            second = first + 1
            following = second // each * row_stride + second % each * cover.height * pixel_stride
            multiply_tiles(
                count, cover.signed, a, a_at + start, nbytes * (following - start),
                nbytes * pixel_stride, b, b_at, depth.runs, steps, cover.step,
                nbytes * depth.stride, c, c_at, size, numbers, configuration,
            )  # fmt: skip
            for t in range(count):
                row, at = (first + t) // each, (first + t) % each * cover.height
                end = min(at + cover.height, pixels)
                sums = c_at + t * size
                while at < end:  # a tile of merged rows has parts of several
                    line, column = at // cover.pitch, at % cover.pitch
                    outputs = min(end - at, shape.out_w - column)
                    if outputs > 0:
                        pixel = tile.pixel + (row + line) * shape.out_w + column
                        part = Tile(pixel, tile.channel, tile.outputs)
                        store_tile(outputs, c, sums, part, terms)
                    sums += min(end - at, cover.pitch - column) * COLUMNS
                    at += min(end - at, cover.pitch - column)
        release(numbers, configuration)

    return multiply_band
