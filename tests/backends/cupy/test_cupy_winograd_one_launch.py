"""Winograd in one launch, without a GPU: packed filters, parts, and who has which sums."""

from __future__ import annotations

import itertools
import re
from typing import Any, cast

import numpy as np
import pytest

from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.precision import FP32
from r18.graph.resnet import resnet18
from r18_cupy.conv.base import CONV_SHAPE
from r18_cupy.conv.winograd import WinogradF4x4
from r18_cupy.cuda import h200
from r18_cupy.cuda.compiler import KERNELS
from r18_cupy.hopper.winograd_one_launch import (
    BUFFER_UNITS,
    DIVISOR,
    MULTIPLIER_WARPS,
    PART_CHANNELS,
    PART_TILES,
    PARTS,
    POSITIONS,
    PRODUCER_WARPS,
    SHARED_NBYTES,
    SIDE,
    STAGES,
    STEP_CHANNELS,
    THREADS,
    WIDTHS,
    WinogradOneLaunch,
    divisor,
    width_of,
)
from r18_oracle.judge.winograd import MATRICES

Array = np.ndarray[Any, np.dtype[Any]]
KERNEL = WinogradOneLaunch(FP32)
SOURCE = (KERNELS / "hopper/winograd_one_launch.cu").read_text()
ROUNDS = (range(3), range(3, 5), range(5, 8))  # the units of each: channels i of all threads


def conv(shape: tuple[int, int, int, int], o: int, padding: tuple[int, int] = (1, 1)) -> Problem:
    return Problem(Conv2d(shape[1], o, (3, 3), (1, 1), padding), (shape,))


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)[,;]", SOURCE)
    assert found, name
    return int(found[1])


# -- the host's side -----------------------------------------------------------------------------


@pytest.mark.parametrize(("o", "c"), [(1, 1), (64, 4), (65, 9), (70, 5)])
def test_filters_are_transformed_in_float64_and_packed_by_steps(o: int, c: int) -> None:
    problem = conv((1, c, 8, 8), o)
    weight = np.random.default_rng(o).standard_normal((o, c, 3, 3)).astype(np.float32)
    (packed,) = KERNEL.pack(problem, (weight,))
    blocks, steps = -(-o // PART_CHANNELS), -(-c // STEP_CHANNELS)
    assert packed.dtype == np.float32
    assert packed.shape == (blocks, steps, POSITIONS, STEP_CHANNELS, PART_CHANNELS)
    assert packed.flags.c_contiguous
    g = MATRICES[4][1]
    exact = np.einsum("ir,ocrs,js->ijco", g, weight.astype(np.float64), g).reshape(POSITIONS, c, o)
    got = packed.transpose(2, 1, 3, 0, 4).reshape(POSITIONS, steps * STEP_CHANNELS, -1)
    error = np.abs(got[:, :c, :o] - exact)
    # A product of three may differ in float64's last bits, and so fall on the other side of a half.
    assert (error <= 2.0**-24 * np.abs(exact) * (1 + 2.0**-20) + 2.0**-50).all()
    assert not got[:, c:].any()
    assert not got[..., o:].any()


def test_the_filters_are_those_of_three_launches() -> None:
    problem = conv((1, 9, 8, 8), 40)
    weight = np.random.default_rng(1).standard_normal((40, 9, 3, 3)).astype(np.float32)
    (ours,), (others,) = (
        KERNEL.pack(problem, (weight,)),
        WinogradF4x4(FP32).pack(problem, (weight,)),
    )
    rows = others.transpose(0, 2, 1, 3).reshape(POSITIONS, others.shape[2], -1)
    got = ours.transpose(2, 1, 3, 0, 4).reshape(POSITIONS, 12, 64)
    np.testing.assert_array_equal(got[:, :9, :40], rows[:, :9, :40])


@pytest.mark.parametrize(("structure", "dtype"), [("Divisor", DIVISOR), ("WinogradParts", PARTS)])
def test_structures_are_the_device_s(structure: str, dtype: np.dtype[Any]) -> None:
    body = re.search(rf"struct {structure} {{(.*?)}};", SOURCE, re.DOTALL)
    assert body
    code = re.sub(r"//.*", "", body[1])
    names = [name for line in re.findall(r"\w+ ([^;]+);", code) for name in line.split(", ")]
    assert tuple(names) == dtype.names


def test_a_reciprocal_divides_whatever_is_below_2_to_the_31() -> None:
    numbers = {*range(1, 200), *(2**i + j for i in range(8, 31) for j in (-1, 0, 1)), 2**31 - 1}
    for number in numbers:
        same, reciprocal, shift = divisor(number)
        assert same == number
        assert reciprocal < 2**32
        last = (2**31 - 1) // number * number  # of the multiples, where the quotient grows
        dividends = {0, number - 1, number, last - 1, last, 2**31 - 1}
        assert all(i * reciprocal >> shift == i // number for i in dividends)


@pytest.mark.parametrize(
    ("shape", "o", "fields", "grid"),
    [
        ((64, 64, 56, 56), 64, (14, 14, 1, 12544, 16, 784), 132),
        ((64, 512, 7, 7), 512, (2, 2, 8, 256, 128, 128), 128),
        ((1, 3, 1, 1), 1, (1, 1, 1, 1, 1, 1), 1),
        ((3, 5, 13, 9), 65, (4, 3, 2, 36, 2, 6), 6),
    ],
)
def test_parts_cover_the_problem(
    shape: tuple[int, int, int, int], o: int, fields: tuple[int, ...], grid: int
) -> None:
    (launch,) = KERNEL.launches(conv(shape, o))
    arguments = cast(Array, launch.arguments[-1]).view(PARTS)
    numbers = [arguments[name]["number"] for name in ("rows", "columns", "blocks")]
    assert (*numbers, *(arguments[name] for name in ("tiles", "steps", "parts"))) == fields
    assert launch.grid == (grid, 1, 1)
    assert grid <= h200.MULTIPROCESSORS
    assert tuple(cast(Array, launch.arguments[-2]).view(CONV_SHAPE)[0])[:4] == shape


@pytest.mark.parametrize(
    ("w", "padding", "width"),
    [(56, 1, 4), (28, 1, 4), (14, 1, 2), (7, 1, 1), (8, 0, 1), (8, 2, 1), (16, 5, 4), (10, 3, 2)],
)
def test_vectors_are_aligned_and_end_with_the_row(w: int, padding: int, width: int) -> None:
    problem = conv((1, 2, 9, w), 2, (1, padding))
    assert width_of(problem) == width
    assert KERNEL.launches(problem)[0].entry == KERNEL.entry(width)
    # A tile begins at a multiple of 4 pixels, less the padding; vectors begin at its second pixel.
    assert (1 - padding) % width == w % width == problem.output[3] % width == 0


def test_the_extra_problems_have_every_width() -> None:
    assert {width_of(one) for one in KERNEL.extra_problems} == set(WIDTHS)
    assert all(KERNEL.refusal(one) is None for one in KERNEL.extra_problems)


def test_it_takes_the_network_s_convolutions_of_stride_1_and_no_workspace() -> None:
    taken = [
        problem
        for problem in fuse(resnet18(), "all").problems(2).values()
        if isinstance(problem.op, Conv2d) and KERNEL.refusal(problem) is None
    ]
    assert len({problem.inputs[0][1] for problem in taken}) == 4
    assert all(KERNEL.workspace(problem) == 0 for problem in taken)
    strided = Problem(Conv2d(4, 4, (3, 3), (2, 1), (1, 1)), ((1, 4, 8, 8),))
    assert KERNEL.refusal(strided) == "Winograd takes 3×3 windows of stride 1"
    assert KERNEL.contract == WinogradF4x4(FP32).contract


# -- the device's side, in its constants and index maps --------------------------------------------


def test_the_constants_are_the_device_s() -> None:
    assert constant("PRODUCERS") == 32 * PRODUCER_WARPS
    assert constant("PART_CHANNELS") == PART_CHANNELS
    assert constant("PART_TILES") == PART_TILES
    assert constant("STEP_CHANNELS") == STEP_CHANNELS
    assert constant("STAGES") == STAGES
    assert constant("BUFFER_UNITS") == BUFFER_UNITS


def test_shared_memory_and_registers_suffice() -> None:
    assert SHARED_NBYTES <= h200.SHARED_NBYTES
    assert THREADS == 512
    producers, multipliers = constant("PRODUCER_REGISTERS"), constant("MULTIPLIER_REGISTERS")
    # The launch gives each thread 128; what one warpgroup releases another acquires.
    assert producers % 8 == multipliers % 8 == 0
    assert producers < 128 < multipliers
    assert 32 * (MULTIPLIER_WARPS * multipliers + PRODUCER_WARPS * producers) <= 65536


def lanes() -> tuple[Array, Array, Array]:
    """Half of the warp, channel and tile of each lane, as `Lane` has them."""
    lane = np.arange(32)
    return lane // 16, lane % 2 + lane // 4 % 4 * 2, lane // 2 % 2


def places(lane: Array, extent: int) -> Array:
    """A thread's channels or tiles in the part."""
    i = np.arange(SIDE)
    found: Array = 4 * lane[:, None] + i // 4 * (extent // 2) + i % 4
    return found


def column_of(channel: Array, column: Array) -> Array:
    found: Array = column ^ channel // 2 % 2 * (PART_TILES // 2)
    return found


def test_every_sum_has_one_thread() -> None:
    hits = np.zeros((POSITIONS, PART_CHANNELS, PART_TILES), int)
    half, channel, column = lanes()
    own = places(column, PART_TILES)
    common = PART_TILES // 2 * half[:, None] + 4 * column[:, None] + np.arange(4)
    rows = places(channel, PART_CHANNELS)
    for warp in range(MULTIPLIER_WARPS):
        np.add.at(hits, ((3 * warp + half)[:, None, None], rows[:, :, None], own[:, None]), 1)
        np.add.at(hits, (np.array(3 * warp + 2), rows[:, :, None], common[:, None]), 1)
    assert (hits == 1).all()


def test_reads_of_operands_take_two_cycles() -> None:
    """Of 16 lanes' quads, those of neighbours (bit 0) or of lanes two apart (bit 1) are one, and
    the distinct ones touch each bank at most once."""
    half, channel, column = lanes()
    lane = np.arange(32)
    assert (column == column[lane ^ 1]).all()
    assert (channel == channel[lane ^ 2]).all()
    for of_lane in (column, channel):
        for which in range(2):
            assert len(set(of_lane[half == which])) <= 8


def test_producers_have_every_tile_of_every_channel_once() -> None:
    rows, team = 32 // PART_TILES, STEP_CHANNELS * PART_TILES // 32
    assert 2 * team == PRODUCER_WARPS
    found = [
        (warp % team * rows + lane // PART_TILES, lane % PART_TILES)
        for warp in range(team)
        for lane in range(32)
    ]
    assert sorted(found) == [(k, n) for k in range(STEP_CHANNELS) for n in range(PART_TILES)]


def test_rounds_write_and_read_every_sum_once() -> None:
    _, lane_channel, _ = lanes()
    channels = places(lane_channel, PART_CHANNELS)
    unit_warps = PART_CHANNELS // SIDE * PART_TILES // 32
    found = []
    for units in ROUNDS:
        written = {(int(lane_channel[j]), i): int(channels[j, i]) for i in units for j in range(32)}
        for warp in range(MULTIPLIER_WARPS):  # `Share`
            i = units[0] + warp // unit_warps
            if i not in units:
                continue
            for lane in range(32):
                row = warp % unit_warps * (32 // PART_TILES) + lane // PART_TILES
                channel = row * 4 + i // 4 * (PART_CHANNELS // 2) + i % 4
                assert written[row, i] == channel
                found.append((channel, lane % PART_TILES))
    assert sorted(found) == [(o, n) for o in range(PART_CHANNELS) for n in range(PART_TILES)]


def test_the_buffers_of_two_rounds_are_apart() -> None:
    for before, after in itertools.pairwise(ROUNDS):
        assert not {i % BUFFER_UNITS for i in before} & {i % BUFFER_UNITS for i in after}


def test_writes_of_sums_touch_each_bank_once() -> None:
    """Eight lanes write 16 bytes at a time."""
    half, channel, column = lanes()
    places_of = PART_TILES * channel + column_of(channel, 4 * column)
    for first in range(0, 32, 8):
        assert len({int(place) % 32 for place in places_of[first : first + 8]}) == 8
        assert len(set(half[first : first + 8])) == 1
