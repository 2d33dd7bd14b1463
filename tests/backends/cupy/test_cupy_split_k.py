"""Split-K of `wgmma` convolutions without a GPU: what the threads of a cluster send, add and write.

NumPy follows the indices of kernels/hopper/cluster_split_k.cuh and of the three layouts of its
blocks. A sum is the number of its output in the tile: channel · pixels + pixel.
"""

from __future__ import annotations

import numpy as np
import pytest

from r18.backend import Array
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18_cupy.bytes.wgmma import ROW_ORDER, ByteTile
from r18_cupy.float8.implicit_gemm_wgmma import ScaledImplicitGemmWgmma
from r18_cupy.hopper.implicit_gemm_wgmma import in_registers, tiles_of
from r18_cupy.hopper.wgmma import ALIGNMENT, BARRIER_NBYTES, WgmmaTile
from r18_cupy.integers.implicit_gemm_wgmma import QuantizedImplicitGemmWgmma

KERNELS = ScaledImplicitGemmWgmma(), QuantizedImplicitGemmWgmma()
TILES = {precision: tiles_of(precision) for precision in (FP16, BF16, TF32, FP16X3)}
SPLIT = [
    pytest.param(precision, tile, id=f"{precision}-{tile.name}")
    for precision, tiles in (TILES | {kernel.precision: kernel.tiles for kernel in KERNELS}).items()
    for tile in tiles
    if tile.parts > 1
]
FOUR_NBYTES = 16


def consumers(tile: WgmmaTile) -> int:
    """The threads that multiply."""
    return 128 * tile.groups_m * tile.groups_n


def accumulators(tile: WgmmaTile, swapped: bool) -> Array:
    """The outputs of the sums of each thread, [thread][block][4]. swapped: A's rows are pixels."""
    thread, v = np.arange(consumers(tile))[:, None, None], np.arange(4)
    group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    blocks = tile.m // 8 if swapped else tile.n // tile.groups_n // 8
    column = 8 * np.arange(blocks)[:, None] + 2 * (lane % 4) + v % 2
    if swapped:
        row = lane // 4 % 4 * 2 + lane // 4 // 4 + 8 * (v // 2)  # every second pixel first
        return column * tile.n + 64 * group + 16 * warp + row
    row = lane // 4 + 8 * (v // 2)
    if isinstance(tile, ByteTile):
        row = np.array(ROW_ORDER)[row]
    channel = group // tile.groups_n * 64 + 16 * warp + row
    return channel * tile.n + group % tile.groups_n * (tile.n // tile.groups_n) + column


def transposed(pairs: Array) -> Array:
    """`movmatrix` of a warp, [thread][2]: lane i has row i / 4, elements 2·(i % 4) and the next."""
    return pairs.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(pairs.shape)


def written(tile: WgmmaTile, precision: Precision, block: int, sums: Array) -> list[Array]:
    """Pairs of a sum and the place that a thread writes it to."""
    thread = np.arange(consumers(tile))
    group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    row = group // tile.groups_n * 64 + 16 * warp
    pixel = group % tile.groups_n * (tile.n // tile.groups_n) + 8 * block
    found = []
    for i in range(2):
        pairs = sums[:, 2 * i : 2 * i + 2]
        for second in range(2):
            if in_registers(tile, precision):
                at = 64 * group + 16 * warp + lane // 4 % 4 * 2 + lane // 4 // 4 + 8 * i
                place = (8 * block + lane % 4 * 2 + second) * tile.n + at
            elif isinstance(tile, ByteTile):  # an element is two channels of a pixel
                channel = row + lane % 4 * 4 + 2 * second + i
                place = channel * tile.n + pixel + lane // 4
            elif precision.dtype.itemsize == 2:
                channel = row + lane % 4 * 2 + 8 * i + second
                place = channel * tile.n + pixel + lane // 4
            else:
                place = (row + lane // 4 + 8 * i) * tile.n + pixel + lane % 4 * 2 + second
            values = transposed(pairs) if precision.dtype.itemsize <= 2 else pairs
            found.append(np.stack([values[:, second], place], axis=1))
    return found


@pytest.mark.parametrize(("precision", "tile"), SPLIT)
def test_each_output_is_added_up_once(precision: Precision, tile: WgmmaTile) -> None:
    """Each is written by one thread of one CTA, to its place, from sums that fill what the host has
    reserved for the others'.
    """
    sums = accumulators(tile, in_registers(tile, precision))
    assert sorted(sums.ravel()) == list(range(tile.m * tile.n))
    blocks, threads = sums.shape[1], consumers(tile)
    own = -(-blocks // tile.parts)
    outputs: list[Array] = []
    for rank in range(tile.parts):
        mine = range(rank * own, min(rank * own + own, blocks))
        places = {
            ((sender - (sender > rank)) * own + i) * threads + thread
            for sender in range(tile.parts)
            if sender != rank
            for i in range(len(mine))
            for thread in range(threads)
        }
        assert len(places) == (tile.parts - 1) * len(mine) * threads  # none is written twice
        end = (max(places, default=-1) + 1) * FOUR_NBYTES
        assert end <= tile.received_nbytes - BARRIER_NBYTES
        assert len(mine) < own or end == tile.received_nbytes - BARRIER_NBYTES
        for block in mine:
            outputs += written(tile, precision, block, sums[:, block])
    values, at = np.concatenate(outputs).T
    np.testing.assert_array_equal(values, at)
    assert sorted(at) == list(range(tile.m * tile.n))


@pytest.mark.parametrize(("precision", "tile"), SPLIT)
def test_received_sums_have_memory_of_their_own(precision: Precision, tile: WgmmaTile) -> None:
    slabs = BARRIER_NBYTES if isinstance(tile, ByteTile) else 0  # for slabs, which split-K has not
    stages = tile.stages * (tile.stage_nbytes + BARRIER_NBYTES) + slabs
    assert tile.shared_nbytes == stages + tile.received_nbytes + ALIGNMENT
    assert (stages + BARRIER_NBYTES) % FOUR_NBYTES == 0, precision
