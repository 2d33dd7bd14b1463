"""The weight-stationary convolution on `wgmma`: what the host prepares, and where it pays."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest

from compiled import compiled
from r18.backend import Preferred
from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.precision import Precision
from r18.graph.resnet import resnet18
from r18_cupy import Backend
from r18_cupy.choices import with_one_tile
from r18_cupy.cuda.h200 import MULTIPROCESSORS, SHARED_NBYTES
from r18_cupy.cuda.launch import OUT, Pointer, Role, X
from r18_cupy.cuda.tensor_map import ROW_BYTES, PatchMap
from r18_cupy.hopper import wgmma
from r18_cupy.hopper.implicit_gemm_wgmma_stationary import (
    THREADS,
    ImplicitGemmWgmmaStationary,
    StationaryTile,
    estimate,
    lane_order,
    rounds,
    tiles_in,
    tiles_of,
)
from r18_cupy.hopper.wgmma import pack_weight
from r18_oracle.generate.corners import many_tiles
from r18_oracle.search.profiles import PROFILES

PRECISIONS = pytest.mark.parametrize("precision", wgmma.PRECISIONS, ids=str)
LAYER1 = Conv2d(64, 64, (3, 3), padding=(1, 1), bias=True, relu=True)


def problem_of(op: Conv2d, n: int, h: int, w: int) -> Problem:
    plain = Problem(replace(op, residual=False), ((n, op.in_channels, h, w),))
    return Problem(op, (*plain.inputs, plain.output)) if op.residual else plain


def tile_of(kernel: ImplicitGemmWgmmaStationary, problem: Problem) -> StationaryTile:
    tile = kernel.tile_for(problem)
    assert tile is not None
    return tile


@PRECISIONS
@pytest.mark.parametrize("outputs", [64, 72])
def test_each_lane_holds_its_fragment_of_the_weights(precision: Precision, outputs: int) -> None:
    """PTX ISA, "wgmma.mma_async.m64nNk16", A in registers: lane i of warp w holds rows 16·w + i / 4
    and 16·w + i / 4 + 8, of each its words i % 4 and i % 4 + 4 of every K step."""
    k = tiles_of(precision)[0].k
    for chunks in (1, 2):
        op = Conv2d(chunks * k, outputs, (3, 3))
        weight = np.random.default_rng(0).normal(size=(outputs, chunks * k, 3, 3))
        packed = pack_weight(weight, op, precision)
        words = packed.view(np.uint32).reshape(outputs, 9, chunks, 4, 8)
        tiles = math.ceil(outputs / 64)
        held = lane_order(packed, chunks).reshape(tiles, chunks, 9, 4, 128, 4)
        rng = np.random.default_rng(1)
        for _ in range(500):
            tile, chunk, position, step, thread, register = (
                int(rng.integers(size)) for size in held.shape
            )
            warp, lane = divmod(thread, 32)
            row = 64 * tile + 16 * warp + lane // 4 + 8 * (register % 2)
            word = lane % 4 + 4 * (register // 2)
            wanted = words[row, position, chunk, step, word] if row < outputs else 0
            assert held[tile, chunk, position, step, thread, register] == wanted


@PRECISIONS
def test_every_weight_is_held_once(precision: Precision) -> None:
    """Numbered words, none of them zero, all arrive; rows past the last are zeros."""
    depth = 9 * 2 * 32  # words of two chunks
    numbered = np.arange(1, 72 * depth + 1, dtype=np.uint32).reshape(72, depth)
    held = lane_order(numbered.view(precision.dtype), 2)
    assert held.size == 128 * depth
    assert np.array_equal(np.sort(held[held > 0]), numbered.reshape(-1))


@PRECISIONS
def test_tiles_fit_a_multiprocessor_without_spills(precision: Precision) -> None:
    """The registers hold the weights and the sums: nothing is spilled, no product serialized."""
    tiles = tiles_of(precision)
    kernel = ImplicitGemmWgmmaStationary(precision)
    assert len({tile.name for tile in tiles}) == len(tiles)
    for tile, entry in zip(tiles, kernel.entries(), strict=True):
        assert tile.k * precision.dtype.itemsize == ROW_BYTES
        assert tile.n == 8 * tile.height
        assert tile.stages >= 2 * tile.groups_k, "a tile is loaded while another one is multiplied"
        assert tile.shared_nbytes <= SHARED_NBYTES
        found = compiled(entry, "sm_90a")
        assert (found.threads, found.spill_nbytes, found.serialized) == (THREADS, 0, False)


@PRECISIONS
@pytest.mark.parametrize("residual", [False, True])
def test_a_launch(precision: Precision, residual: bool) -> None:
    """Patches have a halo of one pixel, boxes of outputs and residuals have none."""
    op = Conv2d(40, 72, (3, 3), padding=(1, 0), bias=True, residual=residual)
    kernel = ImplicitGemmWgmmaStationary(precision)
    problem = problem_of(op, 3, 20, 21)
    tile = tile_of(kernel, problem)
    (launch,) = kernel.launches(problem)
    assert launch.grid == (2, min(tiles_in(problem, tile), MULTIPROCESSORS // 2), 1)
    assert launch.block == (THREADS, 1, 1)
    assert launch.overlaps
    assert launch.shared_nbytes == tile.shared_nbytes
    pixels, weight, added, written, bias, _, shape = launch.arguments
    storage = precision.storage
    assert pixels == PatchMap(X, storage, (3, 40, 20, 21), tile.height + 2, 10)
    assert written == PatchMap(OUT, storage, (3, 72, 20, 19), tile.height, 8)
    assert added == replace(written, pointer=Pointer(Role.INPUT, 1) if residual else OUT)
    assert (weight, bias) == (Pointer(Role.WEIGHT), Pointer(Role.WEIGHT, 1))
    assert isinstance(shape, np.ndarray)
    rows = math.ceil(20 / tile.height)
    expected = [3 * rows * 3, rows, 3, residual]
    assert shape.view(np.int32).tolist() == expected


@PRECISIONS
@pytest.mark.parametrize(("n", "h", "w"), [(1, 1, 1), (2, 15, 9), (3, 28, 56), (1, 56, 7)])
def test_tiles_cover_each_output_once(precision: Precision, n: int, h: int, w: int) -> None:
    """The device finds a tile's rows and columns from its index, image after image."""
    kernel = ImplicitGemmWgmmaStationary(precision)
    for tile in kernel.tiles:
        problem = problem_of(replace(LAYER1, in_channels=tile.groups_k * tile.k), n, h, w)
        (launch,) = with_one_tile(kernel, tile, tile.name).launches(problem)
        height = tile.height
        count, rows, columns, _ = launch.arguments[-1].view(np.int32).tolist()  # type: ignore[union-attr]
        covered = np.zeros((n, rows * height, columns * 8), int)
        for index in range(count):
            image, row, column = (
                index // columns // rows,
                index // columns % rows,
                index % columns,
            )
            covered[image, row * height :, column * 8 :][:height, :8] += 1
        assert (covered == 1).all()
        assert covered.shape[1] >= h > covered.shape[1] - height
        assert covered.shape[2] >= w > covered.shape[2] - 8
        assert tiles_in(problem, tile) == n * math.ceil(h / tile.height) * math.ceil(w / 8)


@PRECISIONS
def test_some_problem_fills_each_ring_again(precision: Precision) -> None:
    """Each tile has a problem whose blocks load more patches than there are stages."""
    kernel, quick = ImplicitGemmWgmmaStationary(precision), PROFILES["quick"]
    for tile in kernel.tiles:
        one = with_one_tile(kernel, tile, tile.name)
        found = (*one.extra_problems, *many_tiles(Conv2d, quick.max_elements, quick.max_macs))
        taken = [problem for problem in found if one.refusal(problem) is None]
        assert max(rounds(problem, tile) * tile.groups_k for problem in taken) > tile.stages


@PRECISIONS
def test_extra_problems_fill_each_tile_and_leave_one_in_part(precision: Precision) -> None:
    kernel = ImplicitGemmWgmmaStationary(precision)
    for tile in kernel.tiles:
        one = with_one_tile(kernel, tile, tile.name)
        ops = [cast(Conv2d, p.op) for p in one.extra_problems if one.refusal(p) is None]
        full = tile.groups_k * tile.k
        assert any(op.residual and (op.in_channels, op.out_channels) == (full, 128) for op in ops)
        assert any(
            not op.residual and op.in_channels % tile.k and 64 < op.out_channels < 128 for op in ops
        )


@PRECISIONS
def test_chunks_of_channels_decide_which_tiles_fit(precision: Precision) -> None:
    """The layout of the weights follows from the op alone, not from the tile."""
    kernel = ImplicitGemmWgmmaStationary(precision)
    k = kernel.tiles[0].k
    for channels, chunks in ((8, 1), (k, 1), (k + 8, 2), (2 * k, 2)):
        op = Conv2d(channels, 64, (3, 3), padding=(1, 1))
        fitting = [tile for tile in kernel.tiles if tile.groups_k == chunks]
        assert fitting or (precision.splits and chunks == 1)
        for n, size in product((1, 64), (7, 56)):
            problem = problem_of(op, n, size, size)
            times = {tile.name: estimate(problem, precision, tile) for tile in fitting}
            chosen = kernel.tile_for(problem)
            assert (chosen.name if chosen else None) == min(
                times, key=times.__getitem__, default=None
            )
            assert (kernel.refusal(problem) is None) == bool(fitting)


@PRECISIONS
def test_refusals(precision: Precision) -> None:
    kernel = ImplicitGemmWgmmaStationary(precision)
    most = 2 * kernel.tiles[0].k
    for op, reason in (
        (replace(LAYER1, stride=(2, 2)), "3×3 windows of stride 1"),
        (replace(LAYER1, kernel_size=(1, 1), padding=(0, 0)), "3×3 windows of stride 1"),
        (replace(LAYER1, out_channels=66), "writes"),
        (replace(LAYER1, in_channels=3), "copies"),
        (replace(LAYER1, in_channels=most + 8), f"at most {most} input channels, got {most + 8}"),
    ):
        found = kernel.refusal(problem_of(op, 1, 8, 8))
        assert found is not None
        assert reason in found
    assert kernel.refusal(problem_of(replace(LAYER1, padding=(2, 0)), 1, 8, 8)) is None
    tile = kernel.tiles[0]
    channels = most if tile.groups_k == 1 else most // 2
    obstacle = kernel.obstacle(problem_of(replace(LAYER1, in_channels=channels), 1, 8, 8), tile)
    assert obstacle == f"keeps the weights of {tile.groups_k} chunks of {most // 2}; got {channels}"


@PRECISIONS
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_where_it_pays(precision: Precision, batch: int) -> None:
    """By its estimate, without a tuning table: in layer 1 at every batch, and in layer 2 in 16
    bits."""
    kernel = ImplicitGemmWgmmaStationary(precision)
    steps = fuse(resnet18(), "all").problems(batch).items()
    layers = ("layer1",) if precision.dtype.itemsize == 4 else ("layer1", "layer2")
    wanted = {
        name
        for name, problem in steps
        if isinstance(problem.op, Conv2d)
        and problem.op.stride == (1, 1)
        and name.startswith(layers)
    }
    assert {name for name, problem in steps if kernel.pays(problem)} == wanted
    unprobed = Backend()
    for name, problem in steps:
        found = unprobed.fastest(problem, precision.name)
        assert (found == Preferred(kernel.id)) is (name in wanted)
