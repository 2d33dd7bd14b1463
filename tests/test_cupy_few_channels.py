"""Images of few channels on tensor cores, without a GPU: fragments, geometry, choice, refusals."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import numpy as np
import pytest

from r18.backend import Array, CompileOptions
from r18.executor import make_plan
from r18.ops import Conv2d, ConvMaxPool, Layout, MaxPool2d, Problem
from r18.passes import fuse, fuse_pool
from r18.precision import BF16, FP16, TF32, Precision
from r18.schedule import resnet18
from r18_cupy import Backend
from r18_cupy.catalogue import kernels_for
from r18_cupy.conv_few_channels_mma import (
    MAX_REACH,
    MAX_SHARED_NBYTES,
    POOL,
    ROWS,
    STEP_BYTES,
    STRIDE,
    TAPS,
    Blocking,
    FewChannelsConv,
    FewChannelsConvMaxPool,
    FewChannelsMma,
    FewChannelsTile,
    blocks_of,
    choose,
    conv_of,
    estimate,
    few_channels_mma_kernels,
    lead,
    pack_weight,
    patch_nbytes,
    possible_blockings,
    shared_nbytes,
    steps_of,
    tiles_of,
    turns_of,
)
from r18_cupy.conv_implicit_gemm_mma import chunk_of

PRECISIONS = pytest.mark.parametrize("precision", [FP16, BF16, TF32], ids=str)
STEM = Conv2d(3, 64, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
CONVOLUTIONS = [
    STEM,
    Conv2d(3, 70, (5, 4), (2, 2), (2, 2)),
    Conv2d(1, 5, (1, 1), (3, 2), (0, 1), bias=True),
    Conv2d(4, 130, (2, 8), (1, 2), (1, 4)),
    Conv2d(2, 64, (4, 7), (4, 2), (5, 9), relu=True),
]
EACH_CONVOLUTION = pytest.mark.parametrize(
    "op",
    CONVOLUTIONS,
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}p{op.padding[1]}",
)


def stem(batch: int, pooled: bool) -> Problem:
    found = fuse(resnet18(), "all")
    return (fuse_pool(found) if pooled else found).problems(batch)["conv1"]


def kernel(
    precision: Precision, pooled: bool, config: FewChannelsTile | None = None
) -> FewChannelsMma:
    return (FewChannelsConvMaxPool if pooled else FewChannelsConv)(precision, config=config)


# -- fragments ---------------------------------------------------------------------------------


def channel_of(column: int, tile: int, chunk: int) -> int:
    """Which channel a column of an mma tile is: those of a lane of several tiles are adjacent."""
    tiles = chunk // 2
    return tile // tiles * 4 * chunk + column // 2 * chunk + tile % tiles * 2 + column % 2


def operands(op: Conv2d, precision: Precision, packed: Array) -> Array:
    """The weights (O rounded up to 64, K) as mma reads them from the lanes' registers.

    PTX ISA, "Matrix Fragments for mma.m16n8k16" and "... m16n8k8": lane i has of B column i / 4,
    and of either half of K the elements of one word, at i % 4.
    """
    itemsize, chunk = precision.dtype.itemsize, chunk_of(precision)
    word, k = 4 // itemsize, STEP_BYTES // itemsize
    tiles, steps, pairs, lanes, _ = packed.shape
    found = np.zeros((tiles * 64, steps * k))
    for step, pair, lane, element in np.ndindex(steps, pairs, lanes, chunk):
        register, part = divmod(element, word)
        tile, half = pair * 2 + register // 2, register % 2
        place = half * (k // 2) + lane % 4 * word + part
        channel = channel_of(lane // 4, tile, chunk)
        for block in range(tiles):
            value = packed[block, step, pair, lane, element]
            found[block * 64 + channel, step * k + place] = value
    return found


def taps(x: Array, op: Conv2d, precision: Precision, i: int, j: int) -> Array:
    """What the device multiplies of an image (C, H, W) for output (i, j): lines of eight taps."""
    c, h, w = x.shape
    lines = steps_of(op, precision) * STEP_BYTES // precision.dtype.itemsize // TAPS
    found = np.zeros((lines, TAPS))
    for line in range(c * op.kernel_size[0]):
        channel, r = divmod(line, op.kernel_size[0])
        y = i * op.stride[0] - op.padding[0] + r
        for tap in range(TAPS):
            z = j * STRIDE - lead(op, precision) + tap
            inside = 0 <= y < h and 0 <= z < w
            in_window = 0 <= tap - (lead(op, precision) - op.padding[1]) < op.kernel_size[1]
            if inside and in_window:
                found[line, tap] = x[channel, y, z]
    return found.reshape(-1)


@PRECISIONS
@EACH_CONVOLUTION
def test_fragments_times_taps_are_the_convolution(precision: Precision, op: Conv2d) -> None:
    """Small integers: every product and sum is exact, so the results are equal."""
    rng = np.random.default_rng(1)
    shape = (1, op.in_channels, 9, 10)
    x = rng.integers(-4, 5, shape).astype(np.float64)
    weight = rng.integers(-4, 5, op.weights()[0].shape)
    matrix = operands(op, precision, pack_weight(weight, op, precision, 64))
    padded = np.pad(x[0], ((0, 0), *((p, p) for p in op.padding)))
    _, o, oh, ow = op.infer(shape)
    kh, kw = op.kernel_size
    for i in range(oh):
        for j in range(ow):
            top, left = i * op.stride[0], j * op.stride[1]
            window = padded[:, top : top + kh, left : left + kw]
            got = matrix @ taps(x[0], op, precision, i, j)
            np.testing.assert_array_equal(got[:o], np.einsum("ocrs,crs->o", weight, window))
            assert not got[o:].any()


@PRECISIONS
def test_packed_weights_are_the_weights_and_zeros(precision: Precision) -> None:
    for op in CONVOLUTIONS:
        weight = np.ones(op.weights()[0].shape)
        packed = pack_weight(weight, op, precision, 64)
        assert packed.dtype == precision.dtype
        assert packed.flags.c_contiguous
        assert packed.shape[1] == steps_of(op, precision)
        assert packed[0, 0].nbytes == 64 * STEP_BYTES
        assert packed.astype(np.float64).sum() == weight.size


def test_windows_begin_at_even_elements_where_two_make_a_word() -> None:
    for padding in range(5):
        op = Conv2d(3, 1, (7, 7), (2, 2), (0, padding))
        assert lead(op, TF32) == padding
        for precision in (FP16, BF16):
            assert lead(op, precision) % 2 == 0
            assert lead(op, precision) - padding in (0, 1)


def test_tf32_rounds_weights_and_no_biases() -> None:
    fine = np.float32(1 + 2.0**-20)
    op = Conv2d(1, 1, (1, 1), (2, 2), bias=True)
    weights = (np.full((1, 1, 1, 1), fine), np.array([fine]))
    weight, bias = kernel(TF32, False).pack(Problem(op, ((1, 1, 2, 2),)), weights)
    assert weight.max() == 1
    np.testing.assert_array_equal(bias, [fine])


# -- geometry ----------------------------------------------------------------------------------


def columns_of(tile: FewChannelsTile, pooled: bool, block: int, warp: int, pw: int) -> range:
    """The columns of the convolution that a warp computes."""
    first = (block * tile.warps + warp) * tile.advance(pooled) - (1 + pw if pooled else 0)
    return range(first, first + tile.m // (ROWS * tile.warps))


@PRECISIONS
@pytest.mark.parametrize("columns", [1, 14, 15, 16, 56, 60, 61, 112, 129])
def test_each_output_is_computed_by_one_warp(precision: Precision, columns: int) -> None:
    for tile in tiles_of(precision):
        blocks = math.ceil(columns / tile.columns(False))
        found: list[int] = []
        for block in range(blocks):
            for warp in range(tile.warps):
                found += columns_of(tile, False, block, warp, 0)
        assert found[:columns] == list(range(columns))
        assert len(set(found)) == len(found)


@PRECISIONS
@pytest.mark.parametrize("pw", [0, 1])
@pytest.mark.parametrize("columns", [1, 6, 7, 8, 15, 28, 56, 60, 61, 130])
def test_each_pooled_output_has_its_window_in_one_warp(
    precision: Precision, pw: int, columns: int
) -> None:
    """Lanes own pairs of columns; a window is a pair and the column before it, in one warp."""
    for tile in tiles_of(precision):
        found: Counter[int] = Counter()
        for block in range(math.ceil(columns / tile.columns(True))):
            for warp in range(tile.warps):
                mine = columns_of(tile, True, block, warp, pw)
                # The first pair lacks the column before it, and is left to the warp before.
                for pair in range(1, len(mine) // 2):
                    across = warp * tile.advance(True) + 2 * pair
                    output = (block * tile.warps * tile.advance(True) + across) // 2 - 1
                    window = range(2 * output - pw, 2 * output - pw + 3)
                    assert window == mine[2 * pair - 1 : 2 * pair + 2]
                    found[output] += 1
        assert [found[output] for output in range(columns)] == [1] * columns


@PRECISIONS
@pytest.mark.parametrize("pooled", [False, True])
def test_a_line_of_the_patch_has_every_window_of_a_block(
    precision: Precision, pooled: bool
) -> None:
    chunk = chunk_of(precision)
    for tile in tiles_of(precision):
        pitch = tile.pitch(pooled, precision)
        assert pitch % chunk == 0
        for block in range(2 * chunk):
            for pw in (0, 1):
                for padding in range(5):
                    op = Conv2d(3, 1, (1, 7), (2, 2), (0, padding))
                    first = columns_of(tile, pooled, block, 0, pw)[0]
                    last = columns_of(tile, pooled, block, tile.warps - 1, pw)[-1]
                    begins = first * STRIDE - lead(op, precision)
                    left = begins // chunk * chunk
                    assert last * STRIDE - lead(op, precision) + TAPS - left <= pitch


@PRECISIONS
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 64, 256])
def test_strips_cover_the_image(precision: Precision, pooled: bool, batch: int) -> None:
    problem = stem(batch, pooled)
    for config in (None, *tiles_of(precision)):
        blocking = choose(problem, precision, config)
        strips = math.ceil(turns_of(problem) / blocking.strip)
        assert (strips - 1) * blocking.strip < turns_of(problem) <= strips * blocking.strip
        (launch,) = kernel(precision, pooled, config).launches(problem)
        tiles = math.ceil(problem.output[3] / blocking.tile.columns(pooled))
        assert launch.grid == (batch * strips * tiles, 1, 1)
    assert turns_of(problem) == 56
    assert turns_of(Problem(STEM, ((1, 3, 9, 9),))) == 3  # five rows, two a turn


def test_zeros_follow_where_a_step_is_half_empty() -> None:
    """21 lines of 16 bits make ten steps and a half; of 32 bits a line is a step."""
    tile, whole = tiles_of(FP16)[0], tiles_of(TF32)[0]
    line = tile.pitch(True, FP16) * 2
    assert patch_nbytes(STEM, FP16, tile, True) == (3 * 9 + 3) * line
    assert patch_nbytes(Conv2d(2, 64, (7, 7), (2, 2)), FP16, tile, True) == 2 * 9 * line
    assert patch_nbytes(STEM, TF32, whole, True) == 3 * 9 * whole.pitch(True, TF32) * 4
    assert (steps_of(STEM, FP16), steps_of(STEM, TF32)) == (11, 21)


# -- the choice --------------------------------------------------------------------------------


@PRECISIONS
@pytest.mark.parametrize("pooled", [False, True])
def test_the_choice_has_the_least_estimate_and_fits(precision: Precision, pooled: bool) -> None:
    for batch in (1, 8, 64, 256):
        problem = stem(batch, pooled)
        chosen = choose(problem, precision, None)
        least = estimate(problem, precision, chosen)
        for blocking in possible_blockings(problem, precision):
            assert least <= estimate(problem, precision, blocking)
        assert shared_nbytes(STEM, precision, chosen.tile, pooled) <= MAX_SHARED_NBYTES


@PRECISIONS
def test_one_image_fills_the_device_and_many_take_long_strips(precision: Precision) -> None:
    large, small = tiles_of(precision)
    one, many = (choose(stem(batch, True), precision, None) for batch in (1, 64))
    assert one.tile == small
    assert blocks_of(stem(1, True), one) >= 100
    assert many.tile == large
    # A strip costs a row of the convolution more: few of them, and all at once.
    assert many.strip >= 7
    assert blocks_of(stem(64, True), many) <= 2 * 132


@PRECISIONS
def test_every_tile_of_the_stem_fits_twice_in_an_h200(precision: Precision) -> None:
    for pooled in (False, True):
        for tile in tiles_of(precision):
            needed = shared_nbytes(STEM, precision, tile, pooled)
            assert needed <= MAX_SHARED_NBYTES
            assert tile.threads * tile.blocks <= 1024
            assert 2 * (needed + 1024) <= 228 * 1024


# -- kernels -----------------------------------------------------------------------------------


def test_ids() -> None:
    assert [k.id for k in few_channels_mma_kernels() if k.precision is TF32] == [
        f"cupy/{op}/few_channels_mma/tf32/nhwc{tile}"
        for op in ("conv2d_maxpool2d", "conv2d")
        for tile in ("", "/m256n64k8", "/m128n64k8")
    ]
    for found in few_channels_mma_kernels():
        assert (found.reads, found.layout) == (Layout.NCHW, Layout.NHWC)
        assert found.batch_invariant


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_stem_is_one_launch(precision: str, batch: int) -> None:
    """Of the image as it comes to what the first block reads: no relayout, no pooling."""
    plan = make_plan(Backend(), resnet18(), CompileOptions(batch, precision))
    first, second, *_ = plan.steps
    assert first.kernel.id == f"cupy/conv2d_maxpool2d/few_channels_mma/{precision}/nhwc"
    assert (first.inputs, first.output) == (("image",), "maxpool")
    assert second.inputs == ("maxpool",)
    assert len(cast(FewChannelsMma, first.kernel).launches(first.problem)) == 1


def refusal(op: Conv2d, pool: MaxPool2d | None = None, precision: Precision = FP16) -> str | None:
    shape = (1, op.in_channels, 40, 40)
    if pool:
        return kernel(precision, True).refusal(Problem(ConvMaxPool(op, pool), (shape,)))
    return kernel(precision, False).refusal(Problem(op, (shape,)))


def test_refusals() -> None:
    assert refusal(STEM) is None
    assert refusal(STEM, POOL) is None
    assert refusal(STEM, MaxPool2d((3, 3), (2, 2), (0, 1))) is None
    assert refusal(STEM, MaxPool2d((2, 2), (2, 2))) == (
        "pools windows of 3×3 with a stride of 2 and no others"
    )
    assert refusal(Conv2d(3, 8, (7, 7), (2, 1))) == (
        "reads pairs of columns: takes a horizontal stride of 2, not 1"
    )
    # Eight columns fit if the first is at an even element; of 32 bits it may be at any.
    eight = Conv2d(3, 8, (3, 8), (2, 2), (1, 3))
    assert refusal(eight) == "multiplies rows of windows by 8 elements; this one takes 9"
    assert refusal(eight, precision=TF32) is None
    assert refusal(Conv2d(3, 8, (3, 8), (2, 2), (1, 4))) is None
    assert refusal(Conv2d(3, 8, (1, 9), (2, 2)), precision=TF32) is not None

    deep = Conv2d(64, 8, (3, 3), (2, 2), (1, 1))
    needed = min(shared_nbytes(deep, FP16, tile, False) for tile in tiles_of(FP16))
    assert refusal(deep) == (
        f"its weights and parts of the image take {needed} bytes of shared memory; "
        "a block has 101376"
    )
    far = Problem(Conv2d(3, 8, (1, 1), (1, 2), (0, MAX_REACH // 2)), ((1, 3, 1, 1),))
    reason = kernel(FP16, False).refuses(far)
    assert reason is not None
    assert reason.startswith("indexes with 32 bits; the padded image has over")


def test_a_residual_is_refused() -> None:
    op = Conv2d(3, 8, (3, 3), (2, 2), (1, 1), residual=True)
    problem = Problem(op, ((1, 3, 8, 8), (1, 8, 4, 4)))
    assert kernel(FP16, False).refusal(problem) == "adds no residual"


def test_a_tile_that_does_not_fit_is_refused_and_never_chosen() -> None:
    large, small = tiles_of(TF32)
    op = Conv2d(4, 8, (5, 7), (2, 2), (2, 3))
    problem = Problem(op, ((1, 4, 40, 400),))
    assert shared_nbytes(op, TF32, large, False) > MAX_SHARED_NBYTES
    assert kernel(TF32, False, large).refusal(problem) is not None
    assert kernel(TF32, False, small).refusal(problem) is None
    assert choose(problem, TF32, None).tile == small


def test_a_device_that_is_too_old_is_not_offered_the_kernels() -> None:
    ids = {found.id for found in few_channels_mma_kernels()}
    turing, ampere = ({found.id for found in kernels_for(c)} for c in ((7, 5), (8, 0)))
    assert ids <= ampere
    assert not ids & turing


def test_the_device_is_told_the_task() -> None:
    problem = stem(64, True)
    (launch,) = kernel(FP16, True).launches(problem)
    blocking = choose(problem, FP16, None)
    task = launch.arguments[-1]
    assert isinstance(task, np.ndarray)
    expected = (56, 56, 1, 1, blocking.strip, 11, patch_nbytes(STEM, FP16, blocking.tile, True))
    assert task.view(np.int32).tolist() == list(expected)
    plain = kernel(FP16, False).launches(conv_of(problem))[0]
    assert isinstance(plain.arguments[-1], np.ndarray)
    assert plain.arguments[-1].view(np.int32)[:4].tolist() == [112, 112, 0, 0]
    assert Blocking(blocking.tile, 1) in set(possible_blockings(problem, FP16))
