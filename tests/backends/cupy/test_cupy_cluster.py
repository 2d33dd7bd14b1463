"""Float32 implicit GEMM with split-K across a cluster: what the host prepares, who writes what."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from compiled import compiled
from r18.graph.ops import Conv2d, Problem
from r18_cupy.choices import with_one_tile
from r18_cupy.conv.implicit_gemm import TILES as TWO_LAUNCH_TILES
from r18_cupy.conv.implicit_gemm import TiledImplicitGemm, Tiling, choose_tile, cycles
from r18_cupy.conv.sgemm import GEMM_SHAPE
from r18_cupy.cuda.compiler import KERNELS
from r18_cupy.cuda.h200 import MULTIPROCESSOR_NBYTES, RESERVED_NBYTES
from r18_cupy.hopper.implicit_gemm_cluster import (
    TILES,
    ClusterTile,
    ImplicitGemmCluster,
    estimate,
)

KERNEL = ImplicitGemmCluster()
SOURCE = (KERNELS / "hopper/implicit_gemm_cluster.cu").read_text("utf-8")
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)


def conv(n: int, c: int, o: int, size: int, window: int = 3) -> Problem:
    half = window // 2
    op = Conv2d(c, o, (window, window), (2, 2), (half, half), bias=True, relu=True)
    return Problem(op, ((n, c, size, size),))


@EACH_TILE
def test_four_blocks_share_a_multiprocessor(tile: ClusterTile) -> None:
    """A block has tiles in flight and, where they were, its sums with four floats of padding."""
    found = compiled(tile.entry, "sm_90")
    stages = tile.stages * tile.k * (tile.m + tile.n) * 4
    assert found.spill_nbytes == 0
    assert max(stages, tile.m * (tile.n + 4) * 4) <= 48 * 1024  # static shared memory
    assert tile.resident == 4
    nbytes = max(stages, tile.m * (tile.n + 4) * 4) + RESERVED_NBYTES
    assert tile.resident * nbytes <= MULTIPROCESSOR_NBYTES
    assert tile.parts <= 8  # the largest cluster that every device takes


@EACH_TILE
def test_every_channel_of_a_tile_is_written_once(tile: ClusterTile) -> None:
    """`row` of the device code, for every CTA, round and thread."""
    assert "((int)blockIdx.z + i * TILE_PARTS) * kRows + threadIdx.x / kVectors" in SOURCE
    vectors = tile.n // 4
    rows = tile.threads // vectors
    rounds = -(-(tile.m // rows) // tile.parts)
    written = [
        ((part + i * tile.parts) * rows + thread // vectors, thread % vectors)
        for part in range(tile.parts)
        for i in range(rounds)
        for thread in range(tile.threads)
    ]
    inside = [place for place in written if place[0] < tile.m]
    assert sorted(inside) == [(row, four) for row in range(tile.m) for four in range(vectors)]


@pytest.mark.parametrize("c", [1, 16, 17, 48, 64, 512])
@pytest.mark.parametrize("window", [1, 3])
@EACH_TILE
def test_parts_divide_all_steps_of_k(tile: ClusterTile, c: int, window: int) -> None:
    """As `BlockTile` of sgemm.cuh computes a block's share; with few channels a part has none."""
    problem = conv(2, c, 70, 9, window)
    (launch,) = with_one_tile(KERNEL, tile, tile.name).launches(problem)
    assert launch.grid[2] == tile.parts
    gemm = cast(np.ndarray, launch.arguments[-1]).view(GEMM_SHAPE)[0]
    each, steps = int(gemm["split_tiles"]), -(-c // 16) * window**2
    assert gemm["k_tiles"] == steps
    shares = [range(part * each, min((part + 1) * each, steps)) for part in range(tile.parts)]
    assert sorted(step for share in shares for step in share) == list(range(steps))


def test_weights_are_packed_as_for_two_launches() -> None:
    problem = conv(1, 19, 70, 9)
    weight = np.random.default_rng(3).standard_normal((70, 19, 3, 3)).astype(np.float32)
    bias = np.arange(70, dtype=np.float32)
    tile = KERNEL.tile_for(problem)
    same = next(t for t in TWO_LAUNCH_TILES if (t.m, t.n, t.k) == (tile.m, tile.n, tile.k))
    expected = TiledImplicitGemm(fixed=Tiling(same)).pack(problem, (weight, bias))
    for got, wanted in zip(KERNEL.pack(problem, (weight, bias)), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_launch_covers_all_outputs() -> None:
    """3 images of 5 × 5 outputs are two tiles of 64 pixels; 70 channels are two tiles of 64."""
    problem = conv(3, 19, 70, 9)
    tile = next(tile for tile in TILES if (tile.m, tile.n, tile.parts) == (64, 64, 4))
    (launch,) = with_one_tile(KERNEL, tile, tile.name).launches(problem)
    assert launch.grid == (4, 1, 4)
    assert launch.block == (128, 1, 1)
    assert cast(np.ndarray, launch.arguments[-1]).view(GEMM_SHAPE)[0]["pixels"] == 75
    assert not KERNEL.scratch(problem)


def test_few_pixels_have_more_parts() -> None:
    """Of layer 4's first convolution: as many blocks as a GPU takes, whatever the batch."""
    parts = [KERNEL.tile_for(conv(n, 256, 512, 14)).parts for n in (8, 64, 256)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] == 8
    assert parts[-1] == 2


def test_estimates_order_it_and_implicit_gemm_as_their_times_on_an_h200() -> None:
    """docs/performance-log.md, "float32: split-K across a cluster"."""
    for n, c, o, size in ((1, 64, 128, 56), (8, 64, 128, 56), (8, 128, 256, 28), (8, 256, 512, 14)):
        problem = conv(n, c, o, size)
        assert estimate(problem, KERNEL.tile_for(problem)) < cycles(problem, choose_tile(problem))
    slower = conv(1, 256, 512, 14)
    assert estimate(slower, KERNEL.tile_for(slower)) > cycles(slower, choose_tile(slower))
