"""The stem on wgmma, without a GPU: its matrices, how an image is divided, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r18.backend import Array
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.passes import fuse, fuse_pool
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18.graph.resnet import resnet18
from r18_cupy.conv.operands import split
from r18_cupy.cuda.h200 import SHARED_NBYTES
from r18_cupy.stem.few_channels_wgmma import (
    BARRIER_NBYTES,
    CHUNK_BYTES,
    MAX_WINDOW,
    PIXEL,
    FewChannelsWgmma,
    channel_of_row,
    chunks_of,
    few_channels_wgmma_kernels,
    operand_itemsize,
    pack_weight,
    ring_of,
    steps_of,
    tiles_of,
)
from r18_cupy.stem.strips import POOL, ROWS, STRIDE, turns_of

EACH_PRECISION = pytest.mark.parametrize("precision", [FP16, BF16, TF32, FP16X3], ids=str)
STEM = Conv2d(3, 64, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
CONVOLUTIONS = [
    STEM,
    Conv2d(1, 6, (1, 1), (2, 2), (0, 0)),
    Conv2d(4, 70, (2, 8), (2, 2), (1, 4)),
    Conv2d(2, 64, (4, 5), (2, 2), (1, 2), relu=True),
    Conv2d(3, 8, (3, 6), (2, 2), (0, 1)),
]


def stem(batch: int) -> Problem:
    return fuse_pool(fuse(resnet18(), "all")).problems(batch)["conv1"]


def pooled(op: Conv2d, height: int = 20, width: int = 40) -> Problem:
    return Problem(ConvMaxPool(op, POOL), ((1, op.in_channels, height, width),))


# -- matrices ----------------------------------------------------------------------------------


def planes(line: Array, pairs: int, precision: Precision) -> Array:
    """The operand (2, pairs, 16 bytes) that producers write for a line of the image, (W, C) from
    the first window's first pixel on."""
    pixels = np.zeros((2 * pairs, PIXEL), line.dtype)
    pixels[: len(line), : line.shape[1]] = line[: 2 * pairs]
    both = pixels.reshape(pairs, 2, PIXEL)
    if operand_itemsize(precision) == 4:
        return both.transpose(1, 0, 2)
    first = both.copy()
    first[:, 1] = 0
    return np.stack([both, first]).reshape(2, pairs, 2 * PIXEL)


def columns_at(found: Array, chunk: int, op: Conv2d, columns: int, precision: Precision) -> Array:
    """The (columns, 16 bytes) that the descriptor of a chunk of a window's row addresses."""
    if chunk >= chunks_of(op, operand_itemsize(precision)):
        return np.zeros_like(found[0, :columns])
    if operand_itemsize(precision) == 4:
        plane, begin = chunk % 2, chunk // 2
    else:
        plane, begin = int(2 * chunk + 1 == op.kernel_size[1]), chunk
    return found[plane, begin : begin + columns]


@EACH_PRECISION
@pytest.mark.parametrize("op", CONVOLUTIONS, ids=lambda op: f"c{op.in_channels}k{op.kernel_size}")
def test_weights_times_columns_are_a_row_of_the_convolution(
    precision: Precision, op: Conv2d
) -> None:
    """Packed weights times columns are the convolution's row, even next to infinite pixels."""
    rng = np.random.default_rng(0)
    (kh, kw), columns, pairs = op.kernel_size, 5, 5 - 1 + MAX_WINDOW // STRIDE
    used = (columns - 1) * STRIDE + kw
    image = np.full((kh, 2 * pairs, op.in_channels), np.inf)
    image[:, :used] = rng.integers(-3, 4, (kh, used, op.in_channels))
    weight = rng.integers(-3, 4, (op.out_channels, op.in_channels, kh, kw)).astype(np.float64)
    packed = pack_weight(weight, op, precision, 64).astype(np.float64)
    tiles, _, steps, halves, chunks, groups, rows, _ = packed.shape
    assert (halves, groups * rows) == (2 if precision.splits else 1, 64)
    assert not packed[:, :, :, 1:].any(), "small integers have no low half"
    sums = np.zeros((tiles * 64, columns))
    for r in range(kh):
        line = planes(image[r], pairs, precision)
        for step in range(steps):
            for chunk in range(chunks):
                right = columns_at(line, 2 * step + chunk, op, columns, precision)
                left = packed[:, r, step, 0, chunk].reshape(tiles * 64, -1)
                # A non-finite column may be in the window of a later column only.
                with np.errstate(invalid="ignore"):
                    sums += left @ right.T
    found = np.zeros_like(sums)
    found[channel_of_row(np.arange(tiles * 64))] = sums
    for column in range(columns):
        window = image[:, column * STRIDE : column * STRIDE + kw]
        expected = np.einsum("rsc,ocrs->o", window, weight)
        assert np.array_equal(found[: op.out_channels, column], expected)
    assert not found[op.out_channels :].any()


def test_split_weights_have_both_halves_side_by_side() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 3, 7, 7)).astype(np.float32)
    packed = pack_weight(weight, STEM, FP16X3, 64)
    assert packed.dtype == np.float16
    high, low = split(weight)
    # (r, s) = (2, 5), channel 1 of output 11, which is row 5 + 8: chunk 2, its second pixel.
    found = packed[0, 2, 1, :, 0, 1, 5, PIXEL + 1]
    assert np.array_equal(found, [high[11, 1, 2, 5], low[11, 1, 2, 5]])


def test_a_lane_s_two_rows_are_adjacent_channels() -> None:
    channels = channel_of_row(np.arange(64))
    assert sorted(channels) == list(range(64))
    for warp in range(4):
        for group in range(8):
            low, high = channels[16 * warp + group], channels[16 * warp + group + 8]
            assert (low, high) == (16 * warp + 2 * group, 16 * warp + 2 * group + 1)


@pytest.mark.parametrize("precision", [FP16, BF16], ids=str)
def test_each_lane_loads_its_fragment_of_the_weights(precision: Precision) -> None:
    """The offsets of `Weights<true>`: rows i / 4 and i / 4 + 8, words i % 4 and i % 4 + 4."""
    weight = np.random.default_rng(0).normal(size=(64, 3, 7, 7))
    words = pack_weight(weight, STEM, precision, 64).view(np.uint32).reshape(-1)
    stored = np.zeros((64, 7, 8, PIXEL), precision.dtype)
    stored[:, :, :7, :3] = np.asarray(weight, precision.dtype).transpose(0, 2, 3, 1)
    rows = stored[channel_of_row(np.arange(64))].reshape(64, 14, 16).view(np.uint32)
    for step in range(14):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            own = step * 2048 + warp * 256 + lane * 4
            found = [words[(own + offset) // 4] for offset in (0, 128, 1024, 1152)]
            row, word = 16 * warp + lane // 4, lane % 4
            assert found == [rows[r, step, w] for w in (word, word + 4) for r in (row, row + 8)]


def test_tf32_rounds_weights() -> None:
    weight = np.full((64, 1, 1, 1), 1 + 2.0**-11 + 2.0**-20, np.float32)
    packed = pack_weight(weight, Conv2d(1, 64, (1, 1), (2, 2), (0, 0)), TF32, 64)
    assert packed.max() == np.float32(1 + 2.0**-10)


# -- the division of an image ------------------------------------------------------------------


@EACH_PRECISION
@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 55, 56, 57, 111, 112, 300])
def test_each_pooled_column_is_written_once(precision: Precision, columns: int) -> None:
    """Each pooled column is written once: a window across two tiles belongs to the left one."""
    problem = pooled(STEM, width=4 * columns)
    assert problem.output[3] == columns
    for tile in tiles_of(precision):
        half = tile.columns // 2
        written: list[int] = []
        for index in range(tile.column_tiles(problem)):
            first = index * (half - 1)
            written += range(first + (index > 0), min(first + half, columns))
        assert written == list(range(columns))


@EACH_PRECISION
def test_a_line_has_the_last_column_s_window(precision: Precision) -> None:
    for tile in tiles_of(precision):
        pairs = tile.line_nbytes // (tile.halves * 2 * CHUNK_BYTES)
        assert 2 * pairs >= (tile.columns - 1) * STRIDE + MAX_WINDOW
        assert pairs <= 128, "a feeder has one pair"


@pytest.mark.parametrize("kh", [1, 2, 3, 7, 9])
def test_lines_of_the_next_turn_take_no_slot_of_this_one(kh: int) -> None:
    op = Conv2d(3, 64, (kh, 7), (2, 2), (0, 3))
    ring, lines, added = ring_of(op), STRIDE + kh, ROWS * STRIDE
    for turn in range(5):
        now = {line % ring for line in range(turn * added, turn * added + lines)}
        known = range(turn * added + lines)
        new = set(range((turn + 1) * added, (turn + 1) * added + lines)) - set(known)
        assert not now & {line % ring for line in new}


@EACH_PRECISION
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_the_stem_is_one_launch_that_fits(precision: Precision, batch: int) -> None:
    kernel = FewChannelsWgmma(precision)
    problem = stem(batch)
    assert kernel.refusal(problem) is None
    (launch,) = kernel.launches(problem)
    blocking = kernel.blocking(problem)
    tile = blocking.tile
    assert launch.grid[0] == blocking.blocks(problem)
    assert launch.block[0] == 256
    assert launch.shared_nbytes == tile.shared_nbytes(problem) <= SHARED_NBYTES
    assert tile.blocks * (launch.shared_nbytes + 1024) <= 228 * 1024
    assert turns_of(problem) == 56
    steps, ring = map(int, kernel.sizes(problem, tile))
    assert (steps, ring) == (steps_of(STEM, operand_itemsize(precision)), 13)


@EACH_PRECISION
def test_products_are_written_out_for_the_stem_alone(precision: Precision) -> None:
    kernel = FewChannelsWgmma(precision)
    unrolled = {tile for tile in tiles_of(precision) if tile.unrolled}
    for batch in (1, 8, 64, 256):
        assert kernel.blocking(stem(batch)).tile in unrolled
    others = [replace(STEM, in_channels=1), replace(STEM, kernel_size=(7, 6)), *CONVOLUTIONS[1:]]
    for op in others:
        assert kernel.blocking(pooled(op)).tile not in unrolled
    for tile in kernel.all_tiles:
        assert ("TILE_UNROLLED", int(tile.unrolled)) in kernel.entry(tile).defines


@EACH_PRECISION
@pytest.mark.parametrize("size", [15, 32, 224, 500])
def test_the_batch_does_not_decide_whether_products_are_unrolled(
    precision: Precision, size: int
) -> None:
    """Unrolled tiles add the bias last in 16 bits, so a mixed choice would change bits."""
    kernel = FewChannelsWgmma(precision)
    unrolled = {tile for tile in tiles_of(precision) if tile.unrolled}
    for batch in (1, 2, 3, 8, 64, 200, 256):
        problem = Problem(ConvMaxPool(STEM, POOL), ((batch, 3, size, size + 9),))
        assert kernel.blocking(problem).tile in unrolled


def test_the_stem_overlaps_the_launch_before() -> None:
    (launch,) = FewChannelsWgmma(FP16).launches(stem(1))
    assert launch.overlaps


def test_shared_memory_is_what_the_device_lays_out() -> None:
    tile = tiles_of(FP16)[0]
    weights, lines, zeros = 7 * 2 * 2048, 13 * 2 * 115 * 16, 112 * 16
    assert tile.shared_nbytes(stem(1)) == BARRIER_NBYTES + weights + lines + zeros


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (replace(STEM, in_channels=5), "at most 4 channels, not 5"),
        (replace(STEM, stride=(1, 2)), "vertical stride of 2, not 1"),
        (replace(STEM, kernel_size=(7, 9)), "at most 8 columns, not 9"),
        (replace(STEM, out_channels=63), "2 channels at a time, and 63"),
    ],
)
def test_refusals(op: Conv2d, reason: str) -> None:
    assert reason in str(FewChannelsWgmma(FP16).refusal(pooled(op)))


def test_windows_are_pooled_with_a_padding_of_one() -> None:
    pool = MaxPool2d((3, 3), (2, 2), (0, 1))
    problem = Problem(ConvMaxPool(STEM, pool), ((1, 3, 40, 40),))
    assert "padding of 1" in str(FewChannelsWgmma(TF32).refusal(problem))


def test_float_refuses_an_odd_count_of_channels_too() -> None:
    refusal = FewChannelsWgmma(TF32).refusal(pooled(replace(STEM, out_channels=63)))
    assert "2 channels at a time, and 63" in str(refusal)


def test_only_hopper_itself_runs_them() -> None:
    for kernel in few_channels_wgmma_kernels():
        assert kernel.targets == ("sm_90a",)
        assert kernel.runs_on((9, 0))
        assert not kernel.runs_on((10, 0))
