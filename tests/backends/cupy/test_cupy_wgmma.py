"""The Hopper convolution without a GPU: packed weights, tensor maps, the choice of tiles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiled import compiled
from r18.backend import Array, Preferred
from r18.graph.ops import Conv2d, Layout, Linear, Problem
from r18.graph.passes import fuse
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18.graph.resnet import resnet18
from r18_cupy import Backend
from r18_cupy.catalogue import kernels_for
from r18_cupy.conv.operands import split
from r18_cupy.cuda.compiler import compile_ptx
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import MAX_THREADS, OUT, GridLaunch, Pointer, Role, X
from r18_cupy.cuda.tensor_map import ROW_BYTES, Im2colMap, MatrixMap, PatchMap
from r18_cupy.hopper import wgmma
from r18_cupy.hopper.implicit_gemm_wgmma import (
    ImplicitGemmWgmma,
    estimate,
    implicit_gemm_wgmma_kernels,
    tiles_of,
)
from r18_cupy.hopper.implicit_gemm_wgmma_halo import (
    HaloBlocking,
    ImplicitGemmWgmmaHalo,
    blocking_of,
)
from r18_cupy.hopper.implicit_gemm_wgmma_halo import tiles_of as rows_tiles
from r18_cupy.hopper.implicit_gemm_wgmma_persistent import ImplicitGemmWgmmaPersistent
from r18_cupy.hopper.implicit_gemm_wgmma_pingpong import TURNS, ImplicitGemmWgmmaPingpong
from r18_cupy.hopper.implicit_gemm_wgmma_stationary import ImplicitGemmWgmmaStationary
from r18_cupy.hopper.linear_wgmma import LinearWgmma, as_convolution
from r18_cupy.hopper.wgmma import (
    WgmmaTile,
    chunk_of,
    pack_weight,
    packed_channels,
    packed_depth,
)
from r18_cupy.kernel import CudaKernel

PRECISIONS = pytest.mark.parametrize("precision", wgmma.PRECISIONS, ids=str)
SHARED_NBYTES = 227 * 1024  # a block's on sm_90
MULTIPROCESSOR_NBYTES = 228 * 1024
RESERVED_NBYTES = 1024  # of each block, by the device


def factors_of(packed: Array, precision: Precision) -> Array:
    """The factors of packed weights, [O][depth]."""
    if precision != FP16X3:
        return packed.astype(np.float64)
    rows = packed.view(np.float16).astype(np.float64).reshape(len(packed), -1, 2, 32)
    return (rows[:, :, 0] + rows[:, :, 1] / 2**11).reshape(len(packed), -1)


def problem_of(op: Conv2d, n: int, h: int, w: int) -> Problem:
    x = (n, op.in_channels, h, w)
    return Problem(op, (x, replace(op, residual=False).infer(x)) if op.residual else (x,))


def windows_of(pixels: Im2colMap) -> Iterator[tuple[int, int, int]]:
    """Where the windows of a run begin, (n, h, w), as TMA traverses them: along a
    row until its upper corner, then from the lower corner of the next row, then the next image.

    CUDA Driver API, `cuTensorMapEncodeIm2col`.
    """
    n, _, h, w = pixels.shape
    lower, upper = pixels.corners
    for image in range(n):
        for row in range(lower[0], h + upper[0], pixels.stride[0]):
            for column in range(lower[1], w + upper[1], pixels.stride[1]):
                yield image, row, column


@PRECISIONS
@pytest.mark.parametrize(
    "op",
    [
        Conv2d(64, 8, (3, 3), (1, 1), (1, 1)),
        Conv2d(8, 16, (3, 3), (2, 2), (1, 1)),
        Conv2d(16, 8, (1, 1), (2, 2)),
        Conv2d(40, 8, (2, 5), (3, 1), (0, 2)),
        Conv2d(8, 8, (1, 4), (1, 3), (2, 1)),
    ],
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}s{op.stride[0]}",
)
def test_copied_pixels_times_packed_weights_are_the_convolution(
    precision: Precision, op: Conv2d
) -> None:
    """Small integers: every product and sum is exact, so the results are equal."""
    rng = np.random.default_rng(1)
    problem = problem_of(op, 2, 7, 9)
    x = rng.integers(-4, 5, problem.inputs[0]).astype(np.float64)
    weight = rng.integers(-4, 5, (op.out_channels, op.in_channels, *op.kernel_size))
    packed = factors_of(pack_weight(weight.astype(np.float64), op, precision), precision)
    pixels = ImplicitGemmWgmma(precision).pixels(problem, 64)
    n, o, oh, ow = problem.output
    channels = packed_channels(op, precision)
    found = np.array([packed @ copied(x, op, channels, *at) for at in windows_of(pixels)])
    assert len(found) == n * oh * ow
    got = found.reshape(n, oh, ow, o).transpose(0, 3, 1, 2)
    padding = ((0, 0), (0, 0), *((p, p) for p in op.padding))
    views = np.lib.stride_tricks.sliding_window_view(np.pad(x, padding), op.kernel_size, (2, 3))
    strided = views[:, :, :: op.stride[0], :: op.stride[1]]
    np.testing.assert_array_equal(got, np.einsum("ocrs,nchwrs->nohw", weight, strided))


def copied(x: Array, op: Conv2d, channels: int, n: int, row: int, column: int) -> Array:
    """All of K for one window, as tiles of pixels hold it; zero outside the image."""
    _, c, h, w = x.shape
    found = np.zeros((*op.kernel_size, channels))
    for r in range(op.kernel_size[0]):
        for s in range(op.kernel_size[1]):
            if 0 <= row + r < h and 0 <= column + s < w:
                found[r, s, :c] = x[n, :, row + r, column + s]
    return found.reshape(-1)


@PRECISIONS
def test_packed_weights_are_whole_steps(precision: Precision) -> None:
    for op in (Conv2d(8, 8, (7, 7)), Conv2d(64, 8, (3, 3)), Conv2d(72, 8, (1, 1))):
        assert packed_depth(op, precision) * precision.dtype.itemsize % ROW_BYTES == 0
        weight = np.ones((op.out_channels, op.in_channels, *op.kernel_size))
        packed = pack_weight(weight, op, precision)
        assert packed.shape == (op.out_channels, packed_depth(op, precision))
        assert packed.dtype == (np.int32 if precision == FP16X3 else precision.dtype)
        # The weights themselves, and nothing but zeros next to them.
        assert factors_of(packed, precision).sum() == weight.size


def test_weights_of_tf32_are_rounded() -> None:
    """Weights in tf32 are packed rounded to nearest, since the unit would truncate."""
    op = Conv2d(4, 4, (1, 1))
    weight = np.full((4, 4, 1, 1), 1 + 3 * 2.0**-12)
    assert pack_weight(weight, op, TF32)[0, 0] == np.float32(1 + 2.0**-10)


def test_products_of_split_factors_are_of_float32s_grade() -> None:
    """Split products, paired as on the device in 32-byte instructions over 128-byte rows, lose at
    most 2⁻²¹ of each single product."""
    rng = np.random.default_rng(3)
    op = Conv2d(32, 64, (1, 1))
    weight, x = (
        (rng.uniform(1, 2, (64, 32)) * 2.0 ** rng.integers(-6, 7, (64, 32))).astype(np.float32)
        for _ in range(2)
    )
    # Steps of 16 halves; each product of a row by itself.
    packed = pack_weight(weight[:, :, None, None], op, FP16X3)
    a = packed.view(np.float16).astype(np.float64).reshape(64, 4, 16)
    b = np.concatenate(split(x), axis=1).astype(np.float64).reshape(64, 4, 16)
    main = a[:, :2] * b[:, :2]
    cross = a[:, :2] * b[:, 2:] + a[:, 2:] * b[:, :2]
    found = (main + cross / 2**11).reshape(64, 32)
    exact = weight.astype(np.float64) * x
    assert np.all(np.abs(found - exact) <= 2.0**-21 * np.abs(exact))
    assert np.any(np.abs(main.reshape(64, 32) - exact) > 2.0**-13 * np.abs(exact))


def test_halves_of_split_factors() -> None:
    tie = np.float32(1 + 2.0**-11)  # between two float16 numbers: to the even one
    values = np.array([0.0, -1.5, tie, 65504, 2.0**-24, 2.0**-30], np.float32)
    high, low = split(values)
    assert high.dtype == low.dtype == np.float16
    assert high.tolist() == [0, -1.5, 1, 65504, 2.0**-24, 0]
    assert low.tolist() == [0, 0, 1, 0, 0, 2.0**-19]
    high, low = split(np.array([65520, -np.inf, np.nan], np.float32))
    assert high[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(high[2])
    assert not np.isfinite(low).any()


def test_split_factors_keep_several_sums_in_registers() -> None:
    """Split tiles have at most 128 pixels a warpgroup, since they need registers for more sums."""
    kernels = (ImplicitGemmWgmma, ImplicitGemmWgmmaHalo)
    for kernel in (kind(FP16X3) for kind in kernels):
        for tile, entry in zip(kernel.tiles, kernel.entries(), strict=True):
            assert tile.n <= 128 * tile.groups_n
            assert ("SPLIT", 1) in entry.defines
    gathering = ImplicitGemmWgmma(FP16X3)
    for tile in gathering.tiles:
        entry = gathering.entry(tile)
        in_place = entry.source == "hopper/implicit_gemm_wgmma"
        assert in_place == (max(tile.m, tile.n) > 64)
        assert entry.symbol == "conv2d_implicit_gemm_wgmma", "of either file"
    for kernel in (kind(TF32) for kind in kernels):
        assert not any(name == "SPLIT" for entry in kernel.entries() for name, _ in entry.defines)


@pytest.mark.parametrize("kind", [ImplicitGemmWgmma, ImplicitGemmWgmmaHalo])
def test_consumers_acquire_no_more_registers_than_producers_release(kind: Any) -> None:
    """Consumers take only registers that the CTA has; otherwise they would wait for ever."""
    kernel = kind(FP16X3)
    groups = 0
    for tile in kernel.tiles:
        entry = kernel.entry(tile)
        code = compile_ptx(entry, "sm_90a")
        wanted = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+);", code)
        consumers, producers = tile.threads, kernel.producers(tile)
        assert kernel.threads(tile) == consumers + producers
        if producers < 128:
            assert not wanted
            continue
        groups += 1
        launched = compiled(entry, "sm_90a").registers * (consumers + producers)
        counts = {name: int(count) for name, count in wanted}
        assert counts["inc"] * consumers + counts["dec"] * producers <= launched
        assert launched * tile.blocks <= 65536
    assert groups >= 3


@pytest.mark.parametrize("kind", [ImplicitGemmWgmma, ImplicitGemmWgmmaHalo])
def test_split_sums_begin_at_zero_in_each_tile(kind: Any) -> None:
    """Only the high·high products of split factors, which are added in registers, begin at zero."""
    for precision in (FP16, TF32, FP16X3):
        kernel = kind(precision)
        for tile in (kernel.tiles[0], kernel.tiles[-1]):
            code = compile_ptx(kernel.entry(tile), "sm_90a")
            begun = code.count("setp.eq.u32 add, 0, 1;")
            assert (begun > 0) == precision.splits
            assert code.count("wgmma.mma_async") > begun
        assert kernel.contract.promoted == (kernel.tiles[0].k if precision.splits else 0)


@PRECISIONS
def test_tiles_fit_a_multiprocessor(precision: Precision) -> None:
    tiles = tiles_of(precision)
    assert len({tile.name for tile in tiles}) == len(tiles)
    for tile in tiles:
        assert tile.k * precision.dtype.itemsize == ROW_BYTES
        assert tile.m == 64 * tile.groups_m
        assert tile.n % (8 * tile.groups_n) == 0
        assert tile.n <= 256, "the rows of a box"
        assert tile.parts <= 8, "the blocks of a cluster"
        assert ImplicitGemmWgmma(precision).threads(tile) <= MAX_THREADS
        assert tile.shared_nbytes <= SHARED_NBYTES
        assert tile.blocks * (tile.shared_nbytes + RESERVED_NBYTES) <= MULTIPROCESSOR_NBYTES


@PRECISIONS
def test_the_choice(precision: Precision) -> None:
    """The chosen tile has the least estimate; K is split where tiles are few, and only there."""
    kernel = ImplicitGemmWgmma(precision)
    for batch in (1, 64):
        for problem in fuse(resnet18(), "all").problems(batch).values():
            if kernel.refusal(problem) is None:
                chosen = kernel.tile_for(problem)
                assert estimate(problem, precision, chosen) == min(
                    estimate(problem, precision, tile) for tile in tiles_of(precision)
                )
    deep = Conv2d(512, 512, (3, 3), (1, 1), (1, 1))
    assert kernel.tile_for(problem_of(deep, 1, 7, 7)).parts > 1
    assert kernel.tile_for(problem_of(deep, 256, 7, 7)).parts == 1
    alone = kernel.tile_for(problem_of(deep, 64, 7, 7))
    assert alone.blocks == 1 or precision.splits, "a hundred tiles, each of a multiprocessor"
    assert (alone.stages >= 6) == (alone.blocks == 1), "which waits for its copies less often"
    narrow = kernel.tile_for(problem_of(Conv2d(64, 64, (3, 3), (1, 1), (1, 1)), 256, 56, 56))
    assert narrow.m == 64


def launch_of(kernel: CudaKernel, problem: Problem) -> GridLaunch:
    (launch,) = kernel.launches(problem)
    return launch


@PRECISIONS
def test_a_launch(precision: Precision) -> None:
    op = Conv2d(64, 72, (3, 3), (2, 1), (1, 0), bias=True, residual=True)
    problem = problem_of(op, 3, 20, 21)
    tile = ImplicitGemmWgmma(precision).tile_for(problem)
    launch = launch_of(ImplicitGemmWgmma(precision), problem)
    n, o, oh, ow = problem.output
    assert launch.grid == (math.ceil(n * oh * ow / tile.n) * math.ceil(o / tile.m), tile.parts, 1)
    assert launch.block == (ImplicitGemmWgmma(precision).threads(tile), 1, 1)
    assert launch.overlaps
    pixels, weight, added, written, bias, residual, out, _, k_tiles = launch.arguments
    windows = ((3, 3), (2, 1), (1, 0))
    assert pixels == Im2colMap(X, precision.storage, (3, 64, 20, 21), *windows, tile.n)
    depth = 9 * packed_channels(op, precision)
    kind = "int32" if precision == FP16X3 else precision.storage
    assert weight == MatrixMap(Pointer(Role.WEIGHT), kind, 72, depth, tile.m)
    assert written == MatrixMap(OUT, precision.storage, n * oh * ow, o, tile.n)
    assert added == replace(written, pointer=Pointer(Role.INPUT, 1))
    assert (bias, residual, out) == (Pointer(Role.WEIGHT, 1), Pointer(Role.INPUT, 1), OUT)
    assert k_tiles == depth // tile.k


@PRECISIONS
def test_refusals(precision: Precision) -> None:
    kernel = ImplicitGemmWgmma(precision)
    chunk = chunk_of(precision)

    def refused(op: Conv2d, h: int = 9, w: int = 9) -> str:
        return kernel.refusal(problem_of(op, 1, h, w)) or ""

    taken = Conv2d(chunk, chunk, (3, 3), (1, 1), (1, 1))
    assert refused(taken) == ""
    assert "writes" in refused(replace(taken, out_channels=chunk + 1))
    assert "copies" in refused(replace(taken, in_channels=chunk + 1))
    assert "strides" in refused(replace(taken, stride=(9, 1)))
    assert refused(replace(taken, stride=(8, 8))) == ""
    assert "windows" in refused(replace(taken, kernel_size=(257, 3), padding=(130, 1)))
    assert "padding" in refused(replace(taken, padding=(129, 1)))
    assert refused(replace(taken, padding=(128, 1))) == ""


def test_only_hopper_runs_them() -> None:
    found = implicit_gemm_wgmma_kernels()
    listed = {
        (device, kernel.id)
        for device in [(8, 0), (9, 0), (10, 0)]
        for kernel in kernels_for(device)
    }
    for kernel in found:
        assert kernel.layout is Layout.NHWC
        assert ((9, 0), kernel.id) in listed
        assert ((8, 0), kernel.id) not in listed
        assert ((10, 0), kernel.id) not in listed


def test_a_tile_names_its_parts() -> None:
    assert WgmmaTile(64, 64, 32, 1, 1, stages=4, blocks=3).name == "m64n64k32s4"
    assert WgmmaTile(64, 64, 32, 1, 1, stages=4, blocks=3, parts=8).name == "m64n64k32s4p8"


# -- whole rows --------------------------------------------------------------------------------

ROWS = pytest.mark.parametrize(
    "kind", [ImplicitGemmWgmmaHalo, ImplicitGemmWgmmaPersistent, ImplicitGemmWgmmaPingpong]
)


def row_of(place: int, blocking: HaloBlocking) -> int:
    """The row of a slab that the device writes for a place (`RowOf<true>`)."""
    line, column = divmod(place, blocking.padded)
    if line < blocking.rows and column < blocking.width:
        return line * blocking.width + column
    return place + max(blocking.rows - 1 - line, 0) * blocking.width


@PRECISIONS
@pytest.mark.parametrize(
    "op",
    [
        Conv2d(8, 8, (3, 3), padding=(1, 1), residual=True),
        Conv2d(72, 16, (2, 4), padding=(0, 3), residual=True),
        Conv2d(8, 8, (1, 1)),
    ],
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}",
)
def test_every_output_is_one_place_of_one_tile(precision: Precision, op: Conv2d) -> None:
    """Every output is one place of one tile, whose window holds all pixels it multiplies."""
    h, w = 11, 13
    problem = problem_of(op, 1, h, w)
    _, _, oh, ow = problem.output
    kh, kw = op.kernel_size
    for tile in rows_tiles(precision):
        blocking = blocking_of(problem, tile)
        assert blocking.rows * blocking.padded - (kw - 1) <= tile.n
        assert blocking.padded == w + 2 * op.padding[1]
        written = []
        rows = [row_of(place, blocking) for place in range(tile.n)]
        assert sorted(rows) == list(range(tile.n)), "no two places write the same row of a slab"
        for line0 in range(0, oh, blocking.rows):
            for place in range(tile.n):
                line, column = divmod(place, blocking.padded)
                # The device divides by multiplying.
                assert line == place * math.ceil(2**16 / blocking.padded) >> 16
                if line >= blocking.rows or column >= ow or line0 + line >= oh:
                    assert line0 + line >= oh or rows[place] >= blocking.rows * ow
                    continue
                assert rows[place] == line * ow + column, "as TMA reads a slab"
                written.append((line0 + line, column))
                for r in range(kh):
                    for s in range(kw):
                        row, pixel = divmod(place + r * blocking.padded + s, blocking.padded)
                        assert (row, pixel) == (line + r, column + s)
                        assert row < blocking.height
        assert sorted(written) == [(i, j) for i in range(oh) for j in range(ow)]


@PRECISIONS
@ROWS
def test_rows_fit_a_block(kind: type[ImplicitGemmWgmmaHalo], precision: Precision) -> None:
    kernel = kind(precision)
    taken = 0
    for batch in (1, 64):
        for problem in fuse(resnet18(), "all").problems(batch).values():
            if kernel.op is not type(problem.op) or kernel.refusal(problem) is not None:
                continue
            taken += 1
            launch = launch_of(kernel, problem)
            assert launch.shared_nbytes <= SHARED_NBYTES
            assert launch.overlaps
            patch = launch.arguments[0]
            assert isinstance(patch, PatchMap)
            assert max(patch.height, patch.width) <= 256
    assert taken == 2 * 13, "the convolutions of 3×3 and stride 1, at two batches"


@PRECISIONS
@ROWS
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_where_slots_and_slabs_lie(
    kind: type[ImplicitGemmWgmmaHalo], precision: Precision, residual: bool
) -> None:
    """Slots and slabs begin at the swizzle's period and end before memory that they must not
    touch."""
    kernel = kind(precision)
    for channels, size in [(32, 7), (64, 56), (128, 28), (256, 14), (512, 7), (64, 3)]:
        op = Conv2d(channels, 64, (3, 3), padding=(1, 1), residual=residual)
        problem = problem_of(op, 1, size, size)
        for tile in kernel.tiles:
            if kernel.obstacle(problem, tile) is not None:
                continue
            blocking = blocking_of(problem, tile)
            slots, slabs = kernel.slots(blocking, tile), tile.m // tile.k
            assert slots.pitch % 1024 == slots.nbytes % 1024 == blocking.slab_pitch % 1024 == 0
            assert blocking.slab_pitch >= tile.n * ROW_BYTES
            assert slots.pitch >= max(blocking.patch_nbytes, blocking.slab_nbytes)
            last = slots.nbytes - (slots.count - 1) * slots.pitch
            if residual:
                assert last >= blocking.slab_nbytes
            if kind is ImplicitGemmWgmmaPersistent:  # outputs leave from the slots
                assert last >= blocking.patch_nbytes or blocking.chunks == slabs == 1
                assert min(slots.pitch, last) >= blocking.slab_pitch
            elif isinstance(kernel, ImplicitGemmWgmmaPingpong):  # slabs have memory of their own
                assert last >= blocking.patch_nbytes
                assert slots.count >= min(2, blocking.chunks)
                held = slots.nbytes + tile.stages * tile.m * ROW_BYTES
                held += kernel.sets(blocking) * slabs * blocking.slab_pitch
                barriers = 16 * (tile.stages + slots.count) + 16 * TURNS
                assert kernel.shared_nbytes(problem, tile) >= 1024 + held + barriers
            else:  # from where the slots and weights were
                assert last >= blocking.patch_nbytes or blocking.chunks == 1
                weights = tile.stages * tile.m * ROW_BYTES
                assert slots.nbytes + weights >= slabs * blocking.slab_pitch
            assert kernel.shared_nbytes(problem, tile) > slots.nbytes


@PRECISIONS
@ROWS
def test_what_rows_refuse(kind: type[ImplicitGemmWgmmaHalo], precision: Precision) -> None:
    kernel = kind(precision)
    op = Conv2d(kernel.tiles[0].k, 64, (3, 3), padding=(1, 1))  # a chunk of channels

    def refused(op: Conv2d, h: int, w: int) -> str:
        return kernel.refusal(problem_of(op, 1, h, w)) or ""

    assert refused(op, 20, 20) == ""
    assert "stride" in refused(replace(op, stride=(1, 2)), 20, 20)
    longest = max(tile.n for tile in kernel.tiles) + 2 - 2  # a row with its padding, less that
    assert refused(op, 1, longest) == ""
    assert "rows of" in refused(op, 1, longest + 1)
    assert "shared memory" in refused(replace(op, kernel_size=(23, 3), padding=(11, 1)), 40, 90)


@PRECISIONS
def test_blocks_that_stay_are_as_many_as_run_at_once(precision: Precision) -> None:
    kernel = ImplicitGemmWgmmaPersistent(precision)
    op = Conv2d(64, 64, (3, 3), padding=(1, 1))
    few, many = (launch_of(kernel, problem_of(op, n, 56, 56)) for n in (1, 64))
    tile = kernel.tile_for(problem_of(op, 64, 56, 56))
    assert tile is not None
    assert many.grid == (MULTIPROCESSORS * tile.blocks, 1, 1)
    assert few.grid < many.grid


@PRECISIONS
def test_two_warpgroups_take_turns_in_a_block_per_multiprocessor(precision: Precision) -> None:
    kernel = ImplicitGemmWgmmaPingpong(precision)
    op = Conv2d(64, 64, (3, 3), padding=(1, 1), residual=True)
    few, many = (launch_of(kernel, problem_of(op, n, 56, 56)) for n in (1, 64))
    assert many.grid == (MULTIPROCESSORS, 1, 1)
    assert few.grid < many.grid
    assert many.block == (TURNS * 128 + 64, 1, 1)


@PRECISIONS
@pytest.mark.parametrize("size", [14, 56])
def test_each_turn_has_slabs_of_its_own_where_there_is_a_residual(
    precision: Precision, size: int
) -> None:
    """With a residual each turn has its own slabs, and only its own warpgroup loads a residual."""
    kernel = ImplicitGemmWgmmaPingpong(precision)
    for residual in (False, True):
        op = Conv2d(64, 64, (3, 3), padding=(1, 1), residual=residual)
        problem = problem_of(op, 64, size, size)
        sets = TURNS if residual else 1
        assert launch_of(kernel, problem).arguments[-1] == sets
        fitting = [tile for tile in kernel.tiles if kernel.obstacle(problem, tile) is None]
        assert fitting
        for tile in fitting:
            blocking = blocking_of(problem, tile)
            held = kernel.slots(blocking, tile).nbytes + tile.stages * tile.m * ROW_BYTES
            held += sets * (tile.m // tile.k) * blocking.slab_pitch
            assert kernel.shared_nbytes(problem, tile) >= held


@pytest.mark.parametrize("precision", [FP16, BF16, TF32], ids=str)
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_turns_pay_in_large_images_of_large_batches(precision: Precision, batch: int) -> None:
    """As measured on an H200, turns pay in layers 1 and 2 of a ResNet-18, not in layers 3 and 4. In
    tf32 layer 2 takes as long as the gathering kernel."""
    kernel = ImplicitGemmWgmmaPingpong(precision)
    steps = fuse(resnet18(), "all").problems(batch).items()
    paying = {name for name, problem in steps if kernel.pays(problem)}
    ones = {name for name, p in steps if isinstance(p.op, Conv2d) and p.op.stride == (1, 1)}
    ones = {name for name in ones if name.startswith(("layer1", "layer2"))}
    if precision == TF32:
        assert {name for name in paying if not name.startswith("layer2")} == (
            {name for name in ones if name.startswith("layer1")} if batch >= 64 else set()
        )
        assert paying <= ones
    else:
        assert paying == (ones if batch >= 64 else set())
    unprobed, stationary = Backend(), ImplicitGemmWgmmaStationary(precision)
    for name, problem in steps:
        found = unprobed.fastest(problem, precision.name)
        preferred = name in paying and not stationary.pays(problem)
        assert (found == Preferred(kernel.id)) is preferred


@PRECISIONS
def test_turns_do_not_pay_where_none_was_measured(precision: Precision) -> None:
    """Turns do not pay for windows of one pixel, a stride of 2, or a refused problem."""
    kernel = ImplicitGemmWgmmaPingpong(precision)
    window = Conv2d(64, 64, (3, 3), padding=(1, 1))
    assert kernel.pays(problem_of(window, 256, 56, 56))
    pixel = replace(window, kernel_size=(1, 1), padding=(0, 0))
    assert kernel.refusal(problem_of(pixel, 256, 56, 56)) is None
    assert not kernel.pays(problem_of(pixel, 256, 56, 56))
    assert not kernel.pays(problem_of(replace(window, stride=(2, 2)), 256, 56, 56))
    assert not kernel.pays(problem_of(window, 256, 56, 512))


# -- linear ------------------------------------------------------------------------------------


@PRECISIONS
def test_a_linear_layer_is_a_convolution(precision: Precision) -> None:
    problem = Problem(Linear(64, 24), ((5, 64),))
    kernel = LinearWgmma(precision)
    assert kernel.refusal(problem) is None
    assert as_convolution(problem).output == (5, 24, 1, 1)
    weight = np.arange(24 * 64, dtype=np.float64).reshape(24, 64) / 2048
    packed, bias = kernel.pack(problem, (weight, np.ones(24)))
    assert packed.shape == (24, 64)
    assert factors_of(packed, precision)[3, 5] == weight[3, 5]
    assert bias.dtype == np.float32
    assert "multiple" in (kernel.refusal(Problem(Linear(64, 25), ((5, 64),))) or "")
