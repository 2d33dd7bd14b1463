"""The integer convolutions on `wgmma` without a GPU: blocks in NumPy, tiles, launches, PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from compiled import compiled, label
from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.quantize import quantized
from r18.graph.quantized import LIMITS, STORAGES, QuantizedConv2d
from r18.graph.resnet import resnet18, resnet34
from r18_cupy.bytes.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.bytes.wgmma import (
    ALIGNMENT,
    GROUP_M,
    ROW_ORDER,
    SLAB_ROW,
    ByteTile,
    pack_weight,
    packed_depth,
)
from r18_cupy.bytes.wgmma_halo import (
    HALO_SHAPE,
    RESIDENT_TILES,
    Blocking,
    ByteHaloConv,
    blocking_of,
)
from r18_cupy.cuda.compiler import KERNELS as KERNEL_FILES
from r18_cupy.cuda.compiler import Entry, compile_ptx
from r18_cupy.cuda.h200 import (
    MULTIPROCESSOR_NBYTES,
    MULTIPROCESSORS,
    RESERVED_NBYTES,
    SHARED_NBYTES,
)
from r18_cupy.cuda.launch import MAX_GRID, MAX_THREADS, NULL, OUT, GridLaunch, Pointer, Role, X
from r18_cupy.integers.implicit_gemm_wgmma import TILES, QuantizedImplicitGemmWgmma
from r18_cupy.integers.wgmma import QuantizedWgmmaConv
from r18_cupy.integers.wgmma_halo import (
    HALO_TILES,
    QuantizedImplicitGemmWgmmaHalo,
    QuantizedImplicitGemmWgmmaResident,
)
from r18_cupy.kernel import MAX_ELEMENTS

GATHER = QuantizedImplicitGemmWgmma()
HALO = QuantizedImplicitGemmWgmmaHalo()
RESIDENT = QuantizedImplicitGemmWgmmaResident()
KERNELS: tuple[QuantizedWgmmaConv, ...] = (GATHER, HALO, RESIDENT)
HALO_KERNELS: tuple[ByteHaloConv, ...] = (HALO, RESIDENT)
REGISTERS = 65_536  # of a multiprocessor
GARBAGE = 77  # what shared memory holds where nothing was loaded
EACH_KERNEL = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.algorithm)
SMALL = Conv2d(16, 16, (3, 3), (1, 1), (1, 1), bias=True)


def problem_of(conv: Conv2d, n: int, h: int, w: int, *stored: str) -> Problem:
    """A problem of a quantised convolution; a second storage format is a residual's."""
    image = (n, conv.in_channels, h, w)
    op = replace(conv, bias=True, residual=len(stored) > 1)
    added = (conv.infer(image),) if op.residual else ()
    return Problem(QuantizedConv2d(op, stored or ("uint8",)), (image, *added))


def conv_of(problem: Problem) -> Conv2d:
    return cast(QuantizedConv2d, problem.op).conv


def convolutions(batch: int) -> Iterator[Problem]:
    """Convolutions of ResNet-18 and ResNet-34 without the stem, whose channels are refused."""
    for network in (resnet18(), resnet34()):
        for problem in quantized(fuse(network, "all")).problems(batch).values():
            if isinstance(problem.op, QuantizedConv2d) and problem.inputs[0][1] >= 16:
                yield problem


def drawn(problem: Problem) -> tuple[Array, Array]:
    """A uint8 image (N,C,H,W) and int8 weights (O,C,kh,kw)."""
    rng, op = np.random.default_rng(1), conv_of(problem)
    limit = LIMITS[8]
    weight = rng.integers(-limit, limit + 1, (op.out_channels, op.in_channels, *op.kernel_size))
    return rng.integers(0, 256, problem.inputs[0]), weight.astype(np.int8)


def convolved(x: Array, weight: Array, op: Conv2d) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in op.padding)))
    views = np.lib.stride_tricks.sliding_window_view(padded, op.kernel_size, (2, 3))
    strided = views[:, :, :: op.stride[0], :: op.stride[1]]
    found: Array = np.einsum("ocrs,nchwrs->nohw", weight.astype(np.int64), strided)
    return found


def channel_of(row: int) -> int:
    """The channel of a row of A, as the epilogue's threads count them.

    A thread with sums of rows i and i + 8 of its warp's 16 writes channels 2·i and 2·i + 1.
    """
    warp, i = divmod(row, 16)
    return 16 * warp + 2 * (i % 8) + i // 8


def by_channel(rows: Array) -> Array:
    """Rows of A, a multiple of 16, in the order of their channels."""
    found = np.empty_like(rows)
    for row in range(len(rows)):
        found[channel_of(row)] = rows[row]
    return found


# -- weights -----------------------------------------------------------------------------------


def test_the_order_of_rows_is_that_of_the_threads() -> None:
    assert [channel_of(row) for row in range(16)] == list(ROW_ORDER)
    assert sorted(channel_of(row) for row in range(64)) == list(range(64))


@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize(
    "op",
    [
        Conv2d(16, 32, (3, 3), (1, 1), (1, 1)),
        Conv2d(144, 16, (1, 1), (2, 2)),
        Conv2d(80, 48, (2, 5), (3, 1), (0, 2)),
        Conv2d(64, 16, (1, 4), (1, 3), (2, 1)),
    ],
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}s{op.stride[0]}",
)
def test_gathered_pixels_times_packed_weights_are_the_convolution(op: Conv2d, k: int) -> None:
    """Gathered pixels times packed weights are the convolution: by tap, `k` channels at a time."""
    problem = problem_of(op, 2, 7, 9)
    x, weight = drawn(problem)
    packed = pack_weight(weight, op, k)
    assert (packed.dtype, packed.shape) == (np.int8, (op.out_channels, packed_depth(op, k)))
    _, c, h, w = problem.inputs[0]
    n, o, oh, ow = problem.output
    tile = next(tile for tile in TILES if tile.k == k)
    lower, upper = GATHER.pixels(problem, tile).corners
    starts = list(  # of windows, as TMA's im2col mode traverses them
        product(
            range(n),
            range(lower[0], h + upper[0], op.stride[0]),
            range(lower[1], w + upper[1], op.stride[1]),
        )
    )
    assert len(starts) == n * oh * ow
    runs = -(-c // k)
    sums = np.zeros((o, len(starts)), np.int64)
    for step in range(packed_depth(op, k) // k):
        position, run = divmod(step, runs)
        r, s = divmod(position, op.kernel_size[1])
        pixels = np.zeros((len(starts), k), np.int64)
        for at, (image, row, column) in enumerate(starts):
            if 0 <= row + r < h and 0 <= column + s < w:
                channels = x[image, run * k : (run + 1) * k, row + r, column + s]
                pixels[at, : len(channels)] = channels
        sums += packed[:, step * k : (step + 1) * k].astype(np.int64) @ pixels.T
    found = by_channel(sums).reshape(o, n, oh, ow).transpose(1, 0, 2, 3)
    np.testing.assert_array_equal(found, convolved(x, weight, op))


@EACH_KERNEL
@pytest.mark.parametrize("bits", LIMITS)
def test_weights_of_every_width_are_packed_as_bytes(kernel: QuantizedWgmmaConv, bits: int) -> None:
    problem = problem_of(SMALL, 1, 5, 6)
    problem = replace(problem, op=replace(cast(QuantizedConv2d, problem.op), bits=bits))
    weight = np.full((16, 16, 3, 3), -LIMITS[bits])
    packed, bias, multiplier = kernel.pack(problem, (weight, np.arange(16), np.ones(16)))
    tile = kernel.tile_for(problem)
    assert tile is not None
    assert packed.shape == (16, 9 * tile.k)
    assert packed.dtype == np.int8
    assert packed.astype(int).sum() == weight.sum()
    # Bias and multiplier stay in the order of channels.
    assert (bias.dtype, bias.tolist()) == (np.int32, list(range(16)))
    assert multiplier.dtype == np.float32


# -- a tile with its halo ----------------------------------------------------------------------


def row_of(place: int, blocking: Blocking) -> int:
    """The slab row of a place, as in `RowOf` of kernels/bytes/hopper/halo.cuh."""
    per_place = -(-(2**16) // blocking.padded)
    line = place * per_place >> 16
    column = place - line * blocking.padded
    if line < blocking.rows and column < blocking.width:
        return line * blocking.width + column
    return place + max(blocking.rows - 1 - line, 0) * blocking.width


def by_tiles(problem: Problem, tile: ByteTile) -> Array:
    """The sums (N,O,OH,OW) as the halo kernels compute them, tile by tile; −1 if not written."""
    blocking, op = blocking_of(problem, tile), conv_of(problem)
    x, weight = drawn(problem)
    packed = pack_weight(weight, op, tile.k).astype(np.int64)
    *_, h, w = problem.inputs[0]
    n, o, oh, ow = problem.output
    kh, kw = op.kernel_size
    channel_tiles, row_tiles = -(-o // GROUP_M), -(-oh // blocking.rows)
    found = np.full((n, oh * ow, o), -1, np.int64)
    for index in range(blocking.tiles):
        channel0 = index % channel_tiles * GROUP_M
        line0 = index // channel_tiles % row_tiles * blocking.rows
        image = index // channel_tiles // row_tiles
        sums = np.zeros((GROUP_M, tile.group_n), np.int64)
        for chunk, r, s in product(range(blocking.chunks), range(kh), range(kw)):
            run = np.zeros((blocking.height, blocking.padded, tile.k), np.int64)
            for i, j in np.ndindex(blocking.height, blocking.padded):
                row, column = line0 - op.padding[0] + i, j - op.padding[1]
                if 0 <= row < h and 0 <= column < w:
                    channels = x[image, chunk * tile.k : (chunk + 1) * tile.k, row, column]
                    run[i, j, : len(channels)] = channels
            flat = run.reshape(-1, tile.k)
            behind = np.full((blocking.reach_nbytes // tile.k, tile.k), GARBAGE)
            first = r * blocking.padded + s
            b = np.concatenate([flat, behind])[first : first + tile.group_n]
            assert len(b) == tile.group_n
            assert (first + tile.group_n) * tile.k <= blocking.reach_nbytes
            step = (r * kw + s) * blocking.chunks + chunk
            a = packed[channel0 : channel0 + GROUP_M, step * tile.k : (step + 1) * tile.k]
            sums[: len(a)] += a @ b.T
        slab = np.full((blocking.slab_pitch // SLAB_ROW, GROUP_M), GARBAGE, np.int64)
        slab[[row_of(place, blocking) for place in range(tile.group_n)]] = by_channel(sums).T
        box = found[image, line0 * ow :][: blocking.rows * ow, channel0 : channel0 + GROUP_M]
        box[:] = slab[: box.shape[0], : box.shape[1]]
    return found.transpose(0, 2, 1).reshape(n, o, oh, ow)


@pytest.mark.parametrize(
    ("conv", "h", "w"),
    [
        (Conv2d(16, 80, (3, 3), (1, 1), (1, 1)), 9, 11),
        (Conv2d(80, 16, (3, 3), (1, 1), (1, 1)), 7, 58),
        (Conv2d(144, 16, (2, 5), (1, 1), (0, 2)), 8, 6),
        (Conv2d(16, 16, (1, 1)), 3, 64),
        (Conv2d(16, 16, (3, 4), (1, 1), (2, 0)), 4, 9),
    ],
    ids=lambda value: f"c{value.in_channels}" if isinstance(value, Conv2d) else None,
)
def test_shifted_rows_times_packed_weights_are_the_convolution(
    conv: Conv2d, h: int, w: int
) -> None:
    """The halo kernels' tiles give the convolution: products behind image rows reach no output."""
    problem = problem_of(conv, 2, h, w)
    tiles = [t for t in HALO_TILES if HALO.obstacle(problem, t) is None]
    tiles += [t for t in RESIDENT_TILES if RESIDENT.obstacle(problem, t) is None]
    assert tiles
    expected = convolved(*drawn(problem), conv)
    for tile in {(t.group_n, t.k): t for t in tiles}.values():
        np.testing.assert_array_equal(by_tiles(problem, tile), expected, tile.name)


def test_places_have_rows_of_their_own() -> None:
    """Every place has its own row in the slab, at any image width; outputs come first, in order."""
    tiles = {tile.group_n: tile for tile in (*HALO_TILES, *RESIDENT_TILES)}.values()
    for tile, kw, width in product(tiles, (1, 2, 3, 5), range(1, 257)):
        problem = problem_of(replace(SMALL, kernel_size=(3, kw), padding=(1, 0)), 1, 300, width + 8)
        blocking = blocking_of(problem, tile)
        if HALO.obstacle(problem, tile):
            continue
        rows = [row_of(place, blocking) for place in range(tile.group_n)]
        assert len(set(rows)) == tile.group_n
        assert 0 <= min(rows) <= max(rows) < blocking.slab_pitch // SLAB_ROW
        for i, j in np.ndindex(blocking.rows, blocking.width):
            assert rows[i * blocking.padded + j] == i * blocking.width + j


@pytest.mark.parametrize(
    ("channels", "size", "n", "rows", "height"),
    [(64, 56, 240, 4, 6), (128, 28, 208, 7, 9), (256, 14, 224, 14, 16), (512, 7, 64, 7, 9)],
)
def test_the_rows_of_a_resnet_fill_tiles(
    channels: int, size: int, n: int, rows: int, height: int
) -> None:
    problem = problem_of(Conv2d(channels, channels, (3, 3), (1, 1), (1, 1)), 2, size, size)
    for tile in (tile for tile in HALO_TILES if tile.n == n):
        found = blocking_of(problem, tile)
        assert (found.rows, found.width, found.padded) == (rows, size, size + 2)
        assert (found.height, found.positions) == (height, 9)
        assert found.chunks == -(-channels // tile.k)
        assert found.tiles == 2 * (size // rows) * (channels // 64)
        assert found.patch_pitch % ALIGNMENT == found.slab_pitch % ALIGNMENT == 0


# -- tiles -------------------------------------------------------------------------------------


def instances() -> set[int]:
    """The N of all product instructions in kernels/bytes/hopper/wgmma.cuh."""
    path = KERNEL_FILES / "bytes/hopper/wgmma.cuh"
    return {int(n) for n in re.findall(r"^WGMMA_BYTES\((\d+),", path.read_text(), re.M)}


@EACH_KERNEL
def test_tiles_are_legal(kernel: QuantizedWgmmaConv) -> None:
    assert len({tile.name for tile in kernel.tiles}) == len(kernel.tiles)
    for tile in kernel.tiles:
        assert tile.m == GROUP_M * tile.groups_m
        assert tile.k in (64, 128)
        assert tile.n == tile.group_n * tile.groups_n
        assert tile.group_n in instances()
        assert tile.groups_m * tile.groups_n <= 2, "each warpgroup has a barrier"
        assert tile.threads * tile.blocks <= 2048
        assert tile.threads <= MAX_THREADS


def test_every_instance_of_a_product_is_of_use() -> None:
    used = {tile.group_n for kernel in KERNELS for tile in kernel.tiles}
    assert used == instances()


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_gathering_tiles_fit_a_multiprocessor(tile: ByteTile) -> None:
    shared = tile.shared_nbytes
    assert shared <= SHARED_NBYTES
    assert tile.blocks * (shared + RESERVED_NBYTES) <= MULTIPROCESSOR_NBYTES
    # Swizzled rows of stages and slabs are aligned.
    assert tile.m * tile.k % ALIGNMENT == tile.stage_nbytes % ALIGNMENT == 0
    if tile.parts > 1:
        sums = 4 * tile.n * (tile.m + 4)
        assert sums <= tile.stages * tile.stage_nbytes
        assert tile.parts in (2, 4, 8), "CTAs of a portable cluster"


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_tiles_with_halo_fit_a_multiprocessor(batch: int) -> None:
    """Halo tiles fit a multiprocessor on each layer they are chosen for. All persistent blocks have
    to be resident at once; of others, as many are as fit."""
    taken = 0
    for kernel, problem in product(HALO_KERNELS, convolutions(batch)):
        tile = kernel.tile_for(problem) if kernel.refusal(problem) is None else None
        if tile is None:
            continue
        taken += 1
        blocking = blocking_of(problem, tile)
        shared = kernel.shared_nbytes(blocking)
        assert shared <= SHARED_NBYTES
        if kernel is RESIDENT:
            assert tile.blocks * (shared + RESERVED_NBYTES) <= MULTIPROCESSOR_NBYTES
        # Products of the last slot read nothing beyond shared memory.
        last_slot = (kernel.slots(blocking) - 1) * blocking.patch_pitch
        assert ALIGNMENT + last_slot + blocking.reach_nbytes <= shared
    assert taken > 8


@EACH_KERNEL
def test_registers_let_the_blocks_be_resident(kernel: QuantizedWgmmaConv) -> None:
    for tile, stored in product(kernel.tiles, STORAGES):
        entry = kernel.entry(tile, stored)
        found = compiled(entry, "sm_90a")
        allocated = -(-found.registers // 8) * 8 * tile.threads
        assert allocated * tile.blocks <= REGISTERS, label(entry)


# -- refusals ----------------------------------------------------------------------------------


def refused(kernel: QuantizedWgmmaConv, conv: Conv2d, h: int = 9, w: int = 9) -> str | None:
    return kernel.refusal(problem_of(conv, 1, h, w))


@EACH_KERNEL
def test_channels_that_are_refused(kernel: QuantizedWgmmaConv) -> None:
    assert refused(kernel, SMALL) is None
    said = "copies 16 channels at a time, and 24 is not a multiple"
    assert refused(kernel, replace(SMALL, in_channels=24)) == said
    said = "writes 16 channels at a time, and 40 is not a multiple"
    assert refused(kernel, replace(SMALL, out_channels=40)) == said
    # 9 positions of 128 channels each, whatever the channels are.
    most = MAX_ELEMENTS // (9 * 128) // 16 * 16
    assert refused(kernel, replace(SMALL, out_channels=most)) is None
    said = "indexes with 32 bits; the packed weights have too many elements"
    beyond = refused(kernel, replace(SMALL, out_channels=most + 16))
    assert beyond == said


def test_windows_that_are_refused() -> None:
    assert refused(GATHER, replace(SMALL, stride=(9, 1))) == (
        "TMA takes strides of at most 8, got (9, 1)"
    )
    assert refused(GATHER, replace(SMALL, kernel_size=(1, 257)), w=300) == (
        "TMA takes windows of at most 256, got (1, 257)"
    )
    assert refused(GATHER, replace(SMALL, padding=(129, 0))) == (
        "TMA takes padding and window within 128, got (129, 0), (3, 3)"
    )
    for kernel in HALO_KERNELS:
        assert refused(kernel, replace(SMALL, stride=(1, 2))) == (
            "reads its windows from whole rows, one pixel apart; the stride is (1, 2)"
        )
        most = kernel.tiles[0].group_n + 2
        assert refused(kernel, SMALL, w=most - 2) is None
        assert refused(kernel, SMALL, w=most - 1) == (
            f"holds rows of {most} pixels with their padding, got {most + 1}"
        )
    assert refused(RESIDENT, replace(SMALL, kernel_size=(1, 3), padding=(0, 1))) == (
        "has unrolled a window of (3, 3), got (1, 3)"
    )
    assert refused(RESIDENT, replace(SMALL, in_channels=128)) is None
    assert refused(RESIDENT, replace(SMALL, in_channels=144)) == (
        "keeps 64 channels of all weights, got 144"
    )


def test_shared_memory_that_is_refused() -> None:
    tall = replace(SMALL, kernel_size=(101, 1), padding=(0, 0), in_channels=256)
    reason = refused(HALO, tall, h=101, w=100)
    assert re.fullmatch(
        rf"has {SHARED_NBYTES} bytes of shared memory, and .* needs \d+", f"{reason}"
    )
    reason = refused(HALO, replace(SMALL, kernel_size=(257, 1), padding=(0, 0)), h=257, w=1)
    assert str(reason).startswith("copies at most 256 rows of 256 pixels, got Blocking")


# -- launches ----------------------------------------------------------------------------------


def problems() -> Iterator[Problem]:
    """Small problems, those of the networks, and the kernels' own."""
    for stored, added in product(STORAGES, STORAGES):
        yield problem_of(SMALL, 2, 5, 6, stored)
        yield problem_of(replace(SMALL, out_channels=80, relu=True), 3, 9, 60, stored, added)
    for batch in (1, 2, 8, 64, 256):
        yield from convolutions(batch)
    for kernel in KERNELS:
        yield from kernel.extra_problems


def only(launches: tuple[GridLaunch, ...]) -> GridLaunch:
    (launch,) = launches
    return launch


@EACH_KERNEL
def test_launches_are_within_limits(kernel: QuantizedWgmmaConv) -> None:
    taken = 0
    for problem in problems():
        if kernel.refusal(problem) is not None:
            continue
        taken += 1
        tile, op = kernel.tile_for(problem), cast(QuantizedConv2d, problem.op)
        assert tile is not None
        launch = only(kernel.launches(problem))
        assert launch.entry == kernel.entry(tile, op.stored[0])
        assert ("X_SIGNED", int(op.stored[0] == "int8")) in launch.entry.defines
        assert launch.entry in kernel.entries()
        assert launch.overlaps
        assert launch.block == (tile.threads, 1, 1)
        assert launch.shared_nbytes <= SHARED_NBYTES
        assert all(0 < g <= most for g, most in zip(launch.grid, MAX_GRID, strict=True))
    assert taken > 20


def test_a_persistent_block_for_each_that_is_resident_and_a_cluster_for_each_tile() -> None:
    seen = set()
    for problem in problems():
        if GATHER.refusal(problem) is not None:
            continue
        tile, launch = GATHER.tile_for(problem), only(GATHER.launches(problem))
        n, o, oh, ow = problem.output
        tiles = -(-o // tile.m) * -(-n * oh * ow // tile.n)
        *_, passed, k_tiles = cast(tuple[Any, ...], launch.arguments)
        assert passed == tiles
        assert k_tiles * tile.k == packed_depth(conv_of(problem), tile.k)
        resident = MULTIPROCESSORS * tile.blocks
        expected = tiles if tile.parts > 1 else min(tiles, resident)
        assert launch.grid == (expected, tile.parts, 1)
        seen.add((tile.parts > 1, tiles > expected))
    assert seen == {(True, False), (False, False), (False, True)}


def test_blocks_with_resident_weights_keep_their_channels() -> None:
    """A resident block keeps its channels: the grid is a multiple of the channel tiles."""
    several = 0
    for problem in problems():
        if RESIDENT.refusal(problem) is not None:
            continue
        tile = RESIDENT.tile_for(problem)
        assert tile is not None
        (blocks, _, _) = only(RESIDENT.launches(problem)).grid
        blocking = blocking_of(problem, tile)
        assert blocks <= blocking.tiles
        assert blocks % -(-problem.output[1] // GROUP_M) == 0
        assert blocks <= MULTIPROCESSORS * tile.blocks or blocks == -(-problem.output[1] // GROUP_M)
        several += blocking.tiles > blocks
        slabs = RESIDENT.slabs(blocking)
        assert tile.groups_n <= slabs <= max(tile.stages, tile.groups_n)
    assert several > 5


def test_a_block_for_each_tile_with_halo_and_what_it_is_told() -> None:
    problem = problem_of(Conv2d(256, 128, (3, 3), (1, 1), (1, 1)), 5, 14, 14, "uint8", "int8")
    tile = HALO.tile_for(problem)
    assert tile is not None
    blocking, launch = blocking_of(problem, tile), only(HALO.launches(problem))
    assert launch.grid == (blocking.tiles, 1, 1)
    assert launch.shared_nbytes == HALO.shared_nbytes(blocking)
    *_, shape = cast(tuple[Any, ...], launch.arguments)
    fields = {name: int(shape.view(HALO_SHAPE)[name][0]) for name in HALO_SHAPE.names or ()}
    assert fields == {
        "tiles": blocking.tiles,
        "rows": blocking.rows,
        "padded": 16,
        "per_place": 2**16 // 16,
        "patch_nbytes": blocking.height * 16 * tile.k,
        "patch_pitch": blocking.patch_pitch,
        "slots": 2,
        "slabs": 1,
        "slab_pitch": blocking.slab_pitch,
    }


def test_the_struct_is_the_devices() -> None:
    text = (KERNEL_FILES / "bytes/hopper/halo.cuh").read_text()
    struct = re.search(r"struct HaloShape {(.*?)};", text, re.S)
    assert struct is not None
    declared = re.findall(r"int ([\w, ]+);", struct[1])
    assert [name for line in declared for name in line.split(", ")] == list(HALO_SHAPE.names or ())


@EACH_KERNEL
@pytest.mark.parametrize("added", [(), *((stored,) for stored in STORAGES)])
def test_maps_and_epilogue(kernel: QuantizedWgmmaConv, added: tuple[str, ...]) -> None:
    problem = problem_of(SMALL, 2, 5, 6, "int8", *added)
    tile, (launch,) = kernel.tile_for(problem), kernel.launches(problem)
    assert tile is not None
    image, weights, residual, out, bias, multiplier, *rest = cast(tuple[Any, ...], launch.arguments)
    assert image.pointer == X
    assert isinstance(image, ByteIm2colMap if kernel is GATHER else ByteMap)
    assert weights == ByteMap(Pointer(Role.WEIGHT), (9 * tile.k, 16), (tile.k, tile.m))
    assert out.pointer == OUT
    assert residual == (replace(out, pointer=Pointer(Role.INPUT, 1)) if added else out)
    assert (out.box[0], out.extents[0]) == (SLAB_ROW, 16)
    assert max(out.box) <= 256
    assert (bias, multiplier) == (Pointer(Role.WEIGHT, 1), Pointer(Role.WEIGHT, 2))
    given = Pointer(Role.INPUT, 1) if added else NULL
    if kernel is GATHER:
        first, *rest = rest
        assert first == given
    assert rest[0] == (Pointer(Role.WEIGHT, 3) if added else NULL)
    assert rest[1] == int(added == ("int8",))


# -- arithmetic --------------------------------------------------------------------------------


def sampled() -> list[Entry]:
    """One function for each kernel and storage format, and one with split-K."""
    split = next(tile for tile in TILES if tile.parts > 1)
    chosen = [(kernel, kernel.tiles[-1]) for kernel in (HALO, RESIDENT)]
    pairs: list[tuple[QuantizedWgmmaConv, ByteTile]] = [
        (GATHER, TILES[0]),
        (GATHER, split),
        *chosen,
    ]
    return [kernel.entry(tile, stored) for (kernel, tile), stored in product(pairs, STORAGES)]


@pytest.mark.parametrize("entry", sampled(), ids=label)
def test_products_and_requantisation_in_ptx(entry: Entry) -> None:
    ptx, macros = compile_ptx(entry, "sm_90a"), dict(entry.defines)
    group_n = int(macros["TILE_N"]) // int(macros["TILE_GROUPS_N"])
    kind = "s8" if macros["X_SIGNED"] else "u8"
    products = re.findall(r"wgmma\.mma_async[.\w]*", ptx)
    assert set(products) == {f"wgmma.mma_async.sync.aligned.m64n{group_n}k32.s32.s8.{kind}"}
    assert len(products) % (int(macros["TILE_K"]) // 32) == 0
    floats = set(re.findall(r"\b(?:fma|mad|add|sub|mul|div|rcp|cvt)[.\w]*\.f32[.\w]*", ptx))
    assert floats == {"mul.rn.f32", "add.rn.f32", "cvt.rn.f32.s32", "cvt.rni.s32.f32"}
    assert not re.search(r"\.ftz\b|\bfma\b|\.approx\b|\.satfinite\b", ptx)
    if int(macros["TILE_PARTS"]) == 1:
        assert {"cvt.pack.sat.u8.s32.b32", "cvt.pack.sat.s8.s32.b32"} <= set(
            re.findall(r"cvt\.pack[.\w]*", ptx)
        )
