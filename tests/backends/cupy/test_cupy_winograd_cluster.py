"""Winograd divided over a cluster, without a GPU: packed filters, parts, and who has which sums."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from compiled import compiled
from r18.backend.tuned import read_table
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32
from r18_cupy.catalogue import kernels_for
from r18_cupy.choices import with_one_tile
from r18_cupy.conv.winograd import FILTER_TRANSFORMS, WinogradF2x2
from r18_cupy.cuda.compiler import KERNELS, CompileError, compile_ptx
from r18_cupy.cuda.h200 import SHARED_NBYTES
from r18_cupy.hopper.winograd_cluster import (
    MULTIPLIERS,
    OUTPUT_TILE,
    PARTS,
    POSITIONS,
    PRODUCERS,
    SIDE,
    THREADS,
    TILES,
    WinogradCluster,
    WinogradTile,
    divide,
    row_floats,
    row_places,
)

Array = np.ndarray[Any, np.dtype[Any]]
KERNEL = WinogradCluster()
TUNED = KERNELS.parent / "tuned"
SOURCE = (KERNELS / "hopper/winograd_cluster.cu").read_text("utf-8")
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)


def conv(shape: tuple[int, int, int, int], o: int, padding: tuple[int, int] = (1, 1)) -> Problem:
    return Problem(Conv2d(shape[1], o, (3, 3), (1, 1), padding), (shape,))


# -- rows of shared memory -------------------------------------------------------------------------


@pytest.mark.parametrize("values", range(1, 17))
def test_a_lane_reads_its_values_as_aligned_vectors(values: int) -> None:
    """`Row::load`: vectors of four, and a last one of one, two or four floats."""
    places = row_places(values)
    assert len(set(places)) == SIDE * values
    assert max(places) < row_floats(values)
    for lane in range(SIDE):
        own = [places[i * SIDE + lane] for i in range(values)]
        for first in range(0, values, 4):
            vector = own[first : first + 4]
            assert vector == list(range(vector[0], vector[0] + len(vector)))
            width = 4 if len(vector) == 3 else len(vector)
            assert vector[0] % width == 0


def test_four_neighbouring_lanes_read_two_addresses_of_each_operand() -> None:
    """`Multiplier`: then a 128-bit read takes two cycles instead of four."""
    assert "channel_lane(index / 2 % 2 + index / 8 % 2 * 2)" in SOURCE
    assert "tile_lane(index % 2 + index / 4 % 2 * 2)" in SOURCE
    lanes = [(i // 2 % 2 + i // 8 % 2 * 2, i % 2 + i // 4 % 2 * 2) for i in range(SIDE * SIDE)]
    assert len(set(lanes)) == SIDE * SIDE
    for first in range(0, SIDE * SIDE, 4):
        channels, tiles = zip(*lanes[first : first + 4], strict=True)
        assert len(set(channels)) == len(set(tiles)) == 2


@EACH_TILE
def test_eight_lanes_store_sums_to_different_banks(tile: WinogradTile) -> None:
    """Rows of sums are `SUM_PITCH` floats; lanes 0 to 7 have two channels and all four tiles."""
    assert "SUM_PITCH = (Tiles::FLOATS + 15) / 32 * 32 + 16" in SOURCE
    floats = row_floats(tile.n // SIDE)
    pitch = (floats + 15) // 32 * 32 + 16
    assert pitch >= floats
    starts = [channel * pitch + lane * 4 for channel in range(2) for lane in range(SIDE)]
    banks = [(start + i) % 32 for start in starts for i in range(4)]
    assert len(set(banks)) == 32


# -- resources -------------------------------------------------------------------------------------


@EACH_TILE
def test_a_block_fits(tile: WinogradTile) -> None:
    found = compiled(tile.entry, "sm_90")
    assert found.spill_nbytes == 0
    assert found.threads == THREADS == PRODUCERS + MULTIPLIERS
    assert found.registers * THREADS <= 65536
    assert tile.shared_nbytes <= SHARED_NBYTES
    assert tile.parts <= 8  # the largest cluster that every device takes
    lanes = 16 if tile.n <= 16 else 32
    assert tile.k % (PRODUCERS // lanes) == 0  # producers have whole steps
    assert tile.m % SIDE == tile.n % SIDE == 0


@pytest.mark.parametrize("more", [0, 128])
@EACH_TILE
def test_the_launch_has_the_shared_memory_that_the_device_declares(
    tile: WinogradTile, more: int, kernel_sources: Path
) -> None:
    text = f'{SOURCE}\nstatic_assert(sizeof(Shared) == {tile.shared_nbytes + more}, "shared");\n'
    (kernel_sources / "hopper/winograd_cluster.cu").write_text(text, "utf-8")
    if more:
        with pytest.raises(CompileError, match="shared"):
            compile_ptx.__wrapped__(tile.entry, "sm_90")
    else:
        assert "winograd_cluster" in compile_ptx.__wrapped__(tile.entry, "sm_90")


def test_devices_with_less_shared_memory_do_not_have_it() -> None:
    for capability, has in (((9, 0), True), ((10, 0), True), ((12, 0), False), ((8, 9), False)):
        assert (KERNEL.id in [kernel.id for kernel in kernels_for(capability)]) == has


def test_the_device_mirrors_constants_and_fields() -> None:
    assert f"PRODUCERS = {PRODUCERS}, MULTIPLIERS = 16 * POSITIONS" in SOURCE
    assert f"SIDE = {SIDE};" in SOURCE
    assert f"OUTPUT = {OUTPUT_TILE}," in SOURCE
    body = re.search(r"struct WinogradParts \{(.*?)\};", SOURCE, re.DOTALL)
    assert body
    declared = re.findall(r"(?:FastDivisor|int) ([\w, ]+);", body[1])
    assert tuple(name for names in declared for name in names.split(", ")) == PARTS.names


# -- packed filters and parts ----------------------------------------------------------------------


@EACH_TILE
def test_filters_are_in_the_order_of_shared_memory(tile: WinogradTile) -> None:
    problem = conv((1, 19, 6, 6), 70)
    kernel = with_one_tile(KERNEL, tile, tile.name)
    weight = np.random.default_rng(5).standard_normal((70, 19, 3, 3)).astype(np.float32)
    (packed,) = kernel.pack(problem, (weight,))
    g = FILTER_TRANSFORMS[OUTPUT_TILE]
    filters = (g @ weight.astype(np.float64) @ g.T).astype(np.float32)
    blocks, steps = -(-70 // tile.m), -(-19 // tile.k)
    assert packed.shape == (blocks, steps, tile.k, POSITIONS, tile.row)
    places = row_places(tile.m // SIDE)
    expected = np.zeros(packed.shape, np.float32)
    for o in range(70):
        for c in range(19):
            block, step = o // tile.m, c // tile.k
            expected[block, step, c % tile.k, :, places[o % tile.m]] = filters[o, c].ravel()
    np.testing.assert_array_equal(packed, expected)


def test_filters_are_those_of_three_launches() -> None:
    problem = conv((1, 8, 6, 6), 32)
    weight = np.random.default_rng(6).standard_normal((32, 8, 3, 3)).astype(np.float32)
    tile = TILES[0]
    (packed,) = with_one_tile(KERNEL, tile, tile.name).pack(problem, (weight,))
    (other,) = WinogradF2x2(FP32).pack(problem, (weight,))
    ours = np.sort(packed, axis=None)
    theirs = np.sort(other, axis=None)
    np.testing.assert_array_equal(ours[ours != 0], theirs[theirs != 0])


@pytest.mark.parametrize("c", [1, 8, 9, 64, 150, 600])
@EACH_TILE
def test_parts_divide_all_steps(tile: WinogradTile, c: int) -> None:
    """With few channels, some part has none."""
    parts = divide(conv((2, c, 9, 7), 33), tile)[0]
    steps, each = int(parts["steps"]), int(parts["part_steps"])
    assert steps == -(-c // tile.k)
    shares = [range(part * each, min((part + 1) * each, steps)) for part in range(tile.parts)]
    assert sorted(step for share in shares for step in share) == list(range(steps))


@EACH_TILE
def test_every_tile_is_sent_to_one_part_and_added_up_once(tile: WinogradTile) -> None:
    """As `send_outputs` computes who sends what where, and the CTA that adds it up its bytes."""
    assert "const int channel = i * BACK_ROWS + row;" in SOURCE
    assert "index = channel * TILE_N + lane, part = index / SHARE;" in SOURCE
    assert "begin = blockIdx.z * SHARE, end = min(begin + SHARE, TILE_M * TILE_N)" in SOURCE
    lanes = 16 if tile.n <= 16 else 32
    rows, total = THREADS // lanes, tile.m * tile.n
    share = -(-total // tile.parts)
    sent = [
        divmod(channel * tile.n + lane, share)
        for lane in range(tile.n)
        for row in range(rows)
        for channel in range(row, tile.m, rows)
    ]
    assert len(sent) == len(set(sent)) == total
    for part in range(tile.parts):
        begin, end = part * share, min((part + 1) * share, total)
        assert sorted(place for other, place in sent if other == part) == list(range(end - begin))
        assert 0 <= (end - begin) * tile.parts * 16 < 2**20  # an mbarrier's count of bytes


def test_a_launch_covers_all_outputs() -> None:
    """2 images of 5 × 4 tiles are two groups of 28; 70 channels are three blocks of 32."""
    problem = conv((2, 20, 9, 7), 70)
    tile = TILES[0]
    (launch,) = with_one_tile(KERNEL, tile, tile.name).launches(problem)
    assert launch.grid == (2, 3, 2)
    assert launch.block == (THREADS, 1, 1)
    assert launch.shared_nbytes == tile.shared_nbytes
    parts = cast(Array, launch.arguments[-1]).view(PARTS)[0]
    assert (parts["rows"]["divisor"], parts["columns"]["divisor"], parts["tiles"]) == (5, 4, 40)
    assert not KERNEL.scratch(problem)


# -- the choice ------------------------------------------------------------------------------------


def test_each_layer_of_resnet18_has_the_tile_of_the_tuning_table() -> None:
    """In the table a variant, or the kernel itself where its own choice is the fastest."""
    table = read_table(TUNED / "nvidia-h200.json")
    for c, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        op = Conv2d(c, c, (3, 3), (1, 1), (1, 1), bias=True, relu=True)
        problem = Problem(op, ((1, c, size, size),))
        timing = table.timing(problem, "fp32")
        assert timing is not None
        own = f"{KERNEL.id}/{KERNEL.tile_for(problem).name}"
        assert timing.kernel in (KERNEL.id, own)


def test_it_refuses_other_windows_and_strides() -> None:
    strided = Problem(Conv2d(8, 8, (3, 3), (2, 2), (1, 1)), ((1, 8, 9, 9),))
    assert KERNEL.refusal(strided) == "Winograd takes 3×3 windows of stride 1"
    assert KERNEL.refusal(conv((1, 8, 9, 9), 8)) is None


@EACH_TILE
def test_extra_problems_fill_the_stages_again_and_leave_parts_empty(tile: WinogradTile) -> None:
    """A part with twice as many steps as stages waits for multipliers in both parities."""
    divided = [divide(problem, tile)[0] for problem in KERNEL.extra_problems]
    assert max(int(parts["part_steps"]) for parts in divided) > 2 * tile.stages
    assert any(int(parts["steps"]) % int(parts["part_steps"]) for parts in divided)
    if tile.parts > 2:
        assert any(int(p["steps"]) <= (tile.parts - 1) * int(p["part_steps"]) for p in divided)
