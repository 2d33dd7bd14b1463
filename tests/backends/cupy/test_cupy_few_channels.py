"""Kernels for images of few channels, without a GPU: operands, geometry, choice, refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from r18.backend import Array, CompileOptions
from r18.graph.ops import Conv2d, ConvMaxPool, Layout, MaxPool2d, Problem
from r18.graph.passes import fuse, fuse_pool
from r18.graph.precision import BF16, FP16, FP16X3, FP32, TF32, Precision
from r18.graph.resnet import resnet18
from r18.runtime.plan import make_plan
from r18_cupy import Backend
from r18_cupy.catalogue import kernels_for
from r18_cupy.conv.implicit_gemm_mma import chunk_of
from r18_cupy.conv.operands import split
from r18_cupy.stem.few_channels import (
    LANES,
    FewChannelsConv,
    FewChannelsConvMaxPool,
    FewChannelsFp32Tile,
    few_channels_kernels,
)
from r18_cupy.stem.few_channels import TILES as FP32_TILES
from r18_cupy.stem.few_channels import pack_weight as pack_fp32_weight
from r18_cupy.stem.few_channels_mma import (
    STEP_BYTES,
    TAPS,
    FewChannelsMmaConv,
    FewChannelsMmaConvMaxPool,
    FewChannelsMmaTile,
    few_channels_mma_kernels,
    operand_dtype,
    pack_weight,
    skipped_taps,
    steps_of,
    tiles_of,
)
from r18_cupy.stem.strips import (
    MAX_REACH,
    MAX_SHARED_NBYTES,
    POOL,
    STRIDE,
    FewChannels,
    FewChannelsTile,
    conv_of,
    estimate,
    possible_blockings,
    turns_of,
)

MMA = (FP16, BF16, TF32, FP16X3)
EACH_MMA = pytest.mark.parametrize("precision", MMA, ids=str)
EACH_PRECISION = pytest.mark.parametrize("precision", [*MMA, FP32], ids=str)
POOLED_OR_NOT = pytest.mark.parametrize("pooled", [False, True])

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
) -> FewChannels:
    if precision is FP32:
        return (FewChannelsConvMaxPool if pooled else FewChannelsConv)(config=config)
    made = FewChannelsMmaConvMaxPool if pooled else FewChannelsMmaConv
    return made(precision, config=config)


def of_width(columns: int, pooled: bool, pw: int = 1, op: Conv2d = STEM) -> Problem:
    """A problem whose result has `columns` columns."""
    pool = MaxPool2d((3, 3), (2, 2), (1, pw))
    made = 2 * columns - 1 + 2 * (1 - pw) if pooled else columns
    width = (made - 1) * 2 + op.kernel_size[1] - 2 * op.padding[1]
    found = Problem(ConvMaxPool(op, pool) if pooled else op, ((1, op.in_channels, 40, width),))
    assert found.output[3] == columns
    return found


# -- operands ----------------------------------------------------------------------------------


def channel_of(column: int, tile: int, chunk: int) -> int:
    """The channel of a column of an mma tile: a lane's channels over several tiles are adjacent."""
    tiles = chunk // 2
    return tile // tiles * 4 * chunk + column // 2 * chunk + tile % tiles * 2 + column % 2


def operand_nbytes(precision: Precision) -> int:
    return operand_dtype(precision).itemsize


def operands(op: Conv2d, precision: Precision, packed: Array) -> Array:
    """The weights [part] (O rounded up to the tile's channels, K) as mma reads them from registers.

    PTX ISA, "Matrix Fragments for mma.m16n8k16" and "... m16n8k8": lane i has of B column i / 4,
    and of either half of K the elements of one word, at i % 4.
    """
    itemsize, chunk = operand_nbytes(precision), chunk_of(precision)
    word, k = 4 // itemsize, STEP_BYTES // itemsize
    tiles, steps, parts, pairs, lanes, elements = packed.shape
    found = np.zeros((parts, tiles, pairs * 16, steps * k))
    for pair, lane, element in np.ndindex(pairs, lanes, elements):
        register, at = divmod(element, word)
        tile, half = pair * 2 + register // 2, register % 2
        place = half * (k // 2) + lane % 4 * word + at
        channel = channel_of(lane // 4, tile, chunk)
        values = packed[:, :, :, pair, lane, element].transpose(2, 0, 1)
        found[:, :, channel, place::k] = values
    return found.reshape(parts, tiles * pairs * 16, steps * k)


def taps(x: Array, op: Conv2d, precision: Precision, i: int, j: int) -> Array:
    """The pixels of an image (C, H, W) that the device multiplies for output (i, j), by 8 taps."""
    c, h, w = x.shape
    itemsize = operand_nbytes(precision)
    skipped = skipped_taps(op, itemsize)
    lines = steps_of(op, itemsize) * STEP_BYTES // itemsize // TAPS
    found = np.zeros((lines, TAPS))
    for line in range(c * op.kernel_size[0]):
        channel, r = divmod(line, op.kernel_size[0])
        y = i * op.stride[0] - op.padding[0] + r
        for tap in range(TAPS):
            z = j * STRIDE - op.padding[1] - skipped + tap
            inside = 0 <= y < h and 0 <= z < w
            if inside and 0 <= tap - skipped < op.kernel_size[1]:
                found[line, tap] = x[channel, y, z]
    return found.reshape(-1)


@EACH_MMA
@EACH_CONVOLUTION
def test_fragments_times_taps_are_the_convolution(precision: Precision, op: Conv2d) -> None:
    """Small integers: every product and sum is exact, so the results are equal."""
    rng = np.random.default_rng(1)
    shape = (1, op.in_channels, 9, 10)
    x = rng.integers(-4, 5, shape).astype(np.float64)
    weight = rng.integers(-4, 5, op.weights()[0].shape)
    parts = operands(op, precision, pack_weight(weight, op, precision, 64))
    assert not parts[1:].any()  # small integers are float16 numbers
    matrix = parts[0]
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


@EACH_MMA
def test_packed_weights_are_the_weights_and_zeros(precision: Precision) -> None:
    for op in CONVOLUTIONS:
        weight = np.ones(op.weights()[0].shape)
        packed = pack_weight(weight, op, precision, 64)
        assert packed.dtype == operand_dtype(precision)
        assert packed.flags.c_contiguous
        assert packed.shape[1] == steps_of(op, operand_nbytes(precision))
        assert packed[0, 0, 0].nbytes == 64 * STEP_BYTES
        assert packed.shape[2] == (2 if precision.splits else 1)
        assert packed.astype(np.float64).sum() == weight.size


def test_windows_begin_at_even_elements_where_two_make_a_word() -> None:
    for padding in range(5):
        op = Conv2d(3, 1, (7, 7), (2, 2), (0, padding))
        assert skipped_taps(op, 4) == 0
        assert (padding + skipped_taps(op, 2)) % 2 == 0
        assert skipped_taps(op, 2) in (0, 1)


def test_tf32_rounds_weights_and_no_biases() -> None:
    fine = np.float32(1 + 2.0**-20)
    op = Conv2d(1, 1, (1, 1), (2, 2), bias=True)
    weights = (np.full((1, 1, 1, 1), fine), np.array([fine]))
    weight, bias = kernel(TF32, False).pack(Problem(op, ((1, 1, 2, 2),)), weights)
    assert weight.max() == 1
    np.testing.assert_array_equal(bias, [fine])


# A product loses 2⁻²² for each factor, as much for the dropped product, and their cross terms.
SPLIT_BOUND = 3 * 2.0**-22 * (1 + 2.0**-10)


def as_float64(values: Array) -> Array:
    return np.stack(split(values)).astype(np.float64)


def products(x: Array, w: Array) -> Array:
    """The products of split factors [2][...] as the device computes them; exact otherwise."""
    main = x[0] * w[0]
    cross = x[0] * w[1] + x[1] * w[0]
    joined: Array = main + cross * 2.0**-11
    return joined


def test_split_products_are_float32_s() -> None:
    """Split products are float32's, except for bits that factors lose and the low·low product."""
    rng = np.random.default_rng(1)
    x, w = (
        (rng.choice([-1, 1], 20000) * 2.0 ** rng.uniform(-14, 15, 20000)).astype(np.float32)
        for _ in range(2)
    )
    exact = x.astype(np.float64) * w.astype(np.float64)
    got = products(as_float64(x), as_float64(w))
    assert np.abs(got - exact).max() > 0
    assert (np.abs(got - exact) <= SPLIT_BOUND * np.abs(exact)).all()


def test_splitting() -> None:
    values = np.array([1.0, 1 + 2.0**-11, -1 - 2.0**-22, 65504, 2.0**-30, 0.0], np.float32)
    high, low = split(values)
    assert high.dtype == low.dtype == np.float16
    np.testing.assert_array_equal(high, [1, 1, -1, 65504, 0, 0])  # the tie to even
    np.testing.assert_array_equal(low, [0, 1, -(2.0**-11), 0, 2.0**-19, 0])
    beyond = np.stack(split(np.array([65520, -np.inf, np.nan], np.float32)))
    assert not np.isfinite(beyond).any()


def test_a_factor_is_missed_by_its_last_bits_alone() -> None:
    """A split factor loses at most 2⁻²² of itself, or half of the low part's least subnormal."""
    rng = np.random.default_rng(2)
    signs = rng.choice([-1, 1], 20000)
    values = (signs * 2.0 ** rng.uniform(-40, 15.9, 20000)).astype(np.float32)
    high, low = as_float64(values)
    missed = np.abs(high + low * 2.0**-11 - values)
    assert (missed <= np.maximum(2.0**-22 * np.abs(values), 2.0**-36)).all()


@EACH_CONVOLUTION
def test_split_fragments_times_taps_are_the_convolution(op: Conv2d) -> None:
    rng = np.random.default_rng(1)
    shape = (1, op.in_channels, 9, 10)
    x = rng.standard_normal(shape).astype(np.float32)
    weight = rng.standard_normal(op.weights()[0].shape).astype(np.float32)
    padded = np.pad(x[0].astype(np.float64), ((0, 0), *((p, p) for p in op.padding)))
    _, o, oh, ow = op.infer(shape)
    kh, kw = op.kernel_size
    for n in {tile.n for tile in tiles_of(FP16X3)}:
        factors = operands(op, FP16X3, pack_weight(weight, op, FP16X3, n))
        for i, j in ((0, 0), (oh - 1, ow - 1), (oh // 2, ow // 2)):
            top, left = i * op.stride[0], j * op.stride[1]
            window = padded[:, top : top + kh, left : left + kw]
            pixels = as_float64(taps(x[0], op, FP16X3, i, j).astype(np.float32))
            got = products(pixels[:, np.newaxis], factors).sum(axis=-1)
            terms = weight.astype(np.float64) * window
            error = np.abs(got[:o] - terms.sum(axis=(1, 2, 3)))
            assert (error <= SPLIT_BOUND * np.abs(terms).sum(axis=(1, 2, 3)) + 2.0**-33).all()
            assert not got[o:].any()


def test_float32_weights_are_packed_by_tiles_of_channels() -> None:
    weight = np.random.default_rng(1).standard_normal((33, 3, 5, 7)).astype(np.float32)
    packed = pack_fp32_weight(weight, 32)
    assert packed.shape == (2, 15, 7, 32)
    np.testing.assert_array_equal(packed[1, 2 * 5 + 4, :, 0], weight[32, 2, 4])
    np.testing.assert_array_equal(packed[0, :5, 6, 9], weight[9, 0, :, 6])
    assert not packed[1, ..., 1:].any()
    for tile in FP32_TILES:  # as wide as the tile that reads them
        problem = Problem(Conv2d(3, 33, (5, 7), (2, 2)), ((1, 3, 9, 9),))
        (found,) = kernel(FP32, False, tile).pack(problem, (weight,))
        assert found.shape[-1] == tile.n


# -- geometry ----------------------------------------------------------------------------------


def spans(tile: FewChannelsTile, problem: Problem) -> Iterator[tuple[range, int, int]]:
    """The columns of the convolution that each warp computes, in order, as the device counts them.

    Each comes with the first pooling window it keeps, which begins one column earlier, and that
    window's place in the result.
    """
    pooled = isinstance(problem.op, ConvMaxPool)
    pw = problem.op.pool.padding[1] if isinstance(problem.op, ConvMaxPool) else 0
    for block in range(tile.column_tiles(problem)):
        if isinstance(tile, FewChannelsMmaTile):
            for warp in range(tile.warps):
                across = (block * tile.warps + warp) * tile.advance(pooled)
                first = across - (1 + pw if pooled else 0)
                yield range(first, first + tile.warp_columns), 1, across // 2
        else:
            columns = cast(FewChannelsFp32Tile, tile).columns
            first = block * (columns - 2) - (1 - pw) if pooled else block * columns
            kept = 1 if block or not pw else 0
            yield range(first, first + columns), kept, (first + pw - 1) // 2 + kept


@EACH_PRECISION
@pytest.mark.parametrize("columns", [1, 14, 15, 16, 56, 60, 61, 112, 113, 129])
def test_each_output_is_computed_once(precision: Precision, columns: int) -> None:
    problem = of_width(columns, False)
    for tile in kernel(precision, False).all_tiles:
        found = [column for span, *_ in spans(tile, problem) for column in span]
        assert found[:columns] == list(range(columns))
        assert len(set(found)) == len(found)


@EACH_PRECISION
@pytest.mark.parametrize("pw", [0, 1])
@pytest.mark.parametrize("columns", [1, 6, 7, 8, 15, 28, 55, 56, 57, 60, 61, 111, 130])
def test_each_pooled_output_has_its_window_in_one_warp(
    precision: Precision, pw: int, columns: int
) -> None:
    """Each pooled output's window is in one warp; lanes pool column pairs and the one before."""
    problem = of_width(columns, True, pw)
    for tile in kernel(precision, True).all_tiles:
        found: Counter[int] = Counter()
        for span, kept, window in spans(tile, problem):
            for pair in range(kept, len(span) // 2):
                place = window + pair - kept
                first = 2 * place - pw
                assert list(span[2 * pair : 2 * pair + 2]) == [first + 1, first + 2]
                # The column before is the warp's own, or padding.
                assert span[2 * pair - 1] == first if pair else first == -1
                found[place] += 1
        assert [found[place] for place in range(columns)] == [1] * columns


@EACH_MMA
@POOLED_OR_NOT
@pytest.mark.parametrize("pw", [0, 1])
@pytest.mark.parametrize("padding", range(5))
def test_a_line_of_the_patch_has_every_window_of_a_block(
    precision: Precision, pooled: bool, pw: int, padding: int
) -> None:
    op = Conv2d(3, 1, (1, 7), (2, 2), (0, padding))
    problem, chunk = of_width(500, pooled, pw, op), chunk_of(precision)
    lead = padding + skipped_taps(op, operand_nbytes(precision))
    for tile in tiles_of(precision):
        found = list(spans(tile, problem))
        for first in range(0, len(found), tile.warps):
            begins = found[first][0][0] * STRIDE - lead
            left = begins // chunk * chunk
            last = found[first + tile.warps - 1][0][-1] * STRIDE - lead
            assert last + TAPS - left <= tile.pitch(pooled)
            assert tile.pitch(pooled) % chunk == 0


def test_a_float32_line_has_every_lane_s_part() -> None:
    for tile in FP32_TILES:
        own = tile.columns // LANES
        assert own * STRIDE % 4 == 0  # its part of a line begins at 16 bytes
        assert tile.pitch % 4 == 0
        assert tile.pitch >= (tile.columns - 1) * STRIDE + tile.k


@EACH_PRECISION
@POOLED_OR_NOT
@pytest.mark.parametrize("batch", [1, 5, 64, 256])
def test_strips_cover_the_image(precision: Precision, pooled: bool, batch: int) -> None:
    problem = stem(batch, pooled)
    for config in (None, *kernel(precision, pooled).all_tiles):
        blocking = kernel(precision, pooled, config).blocking(problem)
        strips = math.ceil(turns_of(problem) / blocking.strip)
        assert (strips - 1) * blocking.strip < turns_of(problem) <= strips * blocking.strip
        (launch,) = kernel(precision, pooled, config).launches(problem)
        tiles = blocking.tile.column_tiles(problem) * math.ceil(64 / blocking.tile.n)
        assert launch.grid == (batch * strips * tiles, 1, 1)
        assert launch.block == (blocking.tile.threads, 1, 1)
    assert turns_of(problem) == 56
    assert turns_of(Problem(STEM, ((1, 3, 9, 9),))) == 3  # five rows, two a turn


def test_zeros_follow_where_a_step_is_half_empty() -> None:
    """A half-empty step ends with zeros: 21 lines of 16 bits make 10.5 steps; of 32 bits, 21."""
    problem, other = stem(1, True), tiles_of(TF32)[0]
    tile, line = tiles_of(FP16)[0], tiles_of(FP16)[0].pitch(True) * 2
    assert tile.patch_nbytes(problem) == (3 * 9 + 3) * line
    even = of_width(9, True, op=Conv2d(2, 64, (7, 7), (2, 2), (3, 3)))
    assert tile.patch_nbytes(even) == 2 * 9 * line
    assert other.patch_nbytes(problem) == 3 * 9 * other.pitch(True) * 4
    assert (steps_of(STEM, 2), steps_of(STEM, 4)) == (11, 21)


# -- the choice --------------------------------------------------------------------------------


@EACH_PRECISION
@POOLED_OR_NOT
def test_the_choice_has_the_least_estimate_and_fits(precision: Precision, pooled: bool) -> None:
    found = kernel(precision, pooled)
    for batch in (1, 8, 64, 256):
        problem = stem(batch, pooled)
        chosen = found.blocking(problem)
        least = estimate(problem, chosen)
        for blocking in possible_blockings(problem, found.all_tiles):
            assert least <= estimate(problem, blocking)
        assert chosen.tile.shared_nbytes(problem) <= MAX_SHARED_NBYTES


@EACH_PRECISION
def test_one_image_fills_the_device_and_many_take_long_strips(precision: Precision) -> None:
    found = kernel(precision, True)
    large, small = found.all_tiles
    one, many = (found.blocking(stem(batch, True)) for batch in (1, 64))
    assert one.tile == small
    assert one.blocks(stem(1, True)) >= 100
    assert many.tile == large
    # A strip costs a row of the convolution more: few of them, and all at once.
    assert many.strip >= 7
    assert many.blocks(stem(64, True)) <= 2 * 132


@EACH_PRECISION
@POOLED_OR_NOT
def test_every_tile_of_the_stem_fits_twice_in_an_h200(precision: Precision, pooled: bool) -> None:
    for tile in kernel(precision, pooled).all_tiles:
        needed = tile.shared_nbytes(stem(1, pooled))
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
    assert [k.id for k in few_channels_mma_kernels() if k.precision is FP16X3] == [
        f"cupy/{op}/few_channels_mma/fp16x3/nhwc{tile}"
        for op in ("conv2d_maxpool2d", "conv2d")
        for tile in ("", "/m128n64k16", "/m128n32k16")
    ]
    assert [k.id for k in few_channels_kernels()] == [
        f"cupy/{op}/few_channels/fp32{tile}"
        for op in ("conv2d_maxpool2d", "conv2d")
        for tile in ("", "/m224n64k7", "/m224n32k7")
    ]
    for found in (*few_channels_mma_kernels(), *few_channels_kernels()):
        assert found.reads is Layout.NCHW
        assert found.batch_invariant
        assert found.contract.truncates == (found.precision is not FP32)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32", "fp16x3"])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_stem_is_one_launch(precision: str, batch: int) -> None:
    """One launch computes the stem from the given image to the first block, without relayouts."""
    plan = make_plan(Backend(), resnet18(), CompileOptions(batch, precision))
    first, second, *_ = plan.steps
    assert isinstance(first.kernel, FewChannels)
    assert first.kernel.algorithm == (
        "few_channels" if precision == "fp32" else "few_channels_wgmma"
    )
    assert (first.inputs, first.output) == (("image",), "maxpool")
    assert second.inputs == ("maxpool",)
    assert len(first.kernel.launches(first.problem)) == 1


@EACH_MMA
def test_what_is_no_hopper_has_the_stem_in_one_launch_too(precision: Precision) -> None:
    (offered, *_) = (
        k for k in kernels_for((8, 9)) if k.precision == precision and k.op is ConvMaxPool
    )
    assert offered.id == kernel(precision, True).id


def refusal(op: Conv2d, pool: MaxPool2d | None = None, precision: Precision = FP16) -> str | None:
    shape = (1, op.in_channels, 40, 40)
    problem = Problem(ConvMaxPool(op, pool) if pool else op, (shape,))
    return kernel(precision, pool is not None).refusal(problem)


@EACH_PRECISION
def test_refusals(precision: Precision) -> None:
    assert refusal(STEM, precision=precision) is None
    assert refusal(STEM, POOL, precision) is None
    assert refusal(STEM, MaxPool2d((3, 3), (2, 2), (0, 1)), precision) is None
    assert refusal(STEM, MaxPool2d((2, 2), (2, 2)), precision) == (
        "pools windows of 3×3 with a stride of 2 and no others"
    )
    assert refusal(Conv2d(3, 8, (7, 7), (2, 1)), precision=precision) == (
        "takes windows with a horizontal stride of 2, not 1"
    )
    deep = Conv2d(64, 8, (3, 7), (2, 2), (1, 3))
    assert refusal(deep, precision=precision) == (
        "its weights and the image under a turn's windows do not fit in the 101376 bytes of "
        "shared memory that a block has"
    )
    far = Problem(Conv2d(3, 8, (1, 7), (1, 2), (0, MAX_REACH // 2)), ((1, 3, 1, 1),))
    reason = kernel(precision, False).refuses(far)
    assert reason is not None
    assert reason.startswith("indexes with 32 bits; the padded image has over")
    residual = Conv2d(3, 8, (7, 7), (2, 2), (3, 3), residual=True)
    problem = Problem(residual, ((1, 3, 8, 8), (1, 8, 4, 4)))
    assert kernel(precision, False).refusal(problem) == "adds no residual"


def test_windows_that_are_refused() -> None:
    # Eight columns fit if the first is at an even element; of 32 bits it may be at any.
    eight = Conv2d(3, 8, (3, 8), (2, 2), (1, 3))
    assert refusal(eight) == "multiplies rows of windows by 8 elements; this one takes 9"
    assert refusal(eight, precision=TF32) is None
    assert refusal(Conv2d(3, 8, (3, 8), (2, 2), (1, 4))) is None
    assert refusal(Conv2d(3, 8, (1, 9), (2, 2)), precision=TF32) is not None
    assert refusal(eight, precision=FP32) == "takes windows of 7 columns, not 8"


def test_a_tile_that_does_not_fit_is_refused_and_never_chosen() -> None:
    large, small = tiles_of(TF32)
    problem = Problem(Conv2d(4, 8, (5, 7), (2, 2), (2, 3)), ((1, 4, 40, 400),))
    assert large.shared_nbytes(problem) > MAX_SHARED_NBYTES
    assert kernel(TF32, False, large).refusal(problem) is not None
    assert kernel(TF32, False, small).refusal(problem) is None
    assert kernel(TF32, False).blocking(problem).tile == small


def test_a_device_that_is_too_old_is_not_offered_the_kernels() -> None:
    ids = {found.id for found in (*few_channels_mma_kernels(), *few_channels_kernels())}
    turing, ampere = ({found.id for found in kernels_for(c)} for c in ((7, 5), (8, 0)))
    assert ids <= ampere
    assert not ids & turing


def test_the_device_is_told_the_task() -> None:
    problem = stem(64, True)
    for precision in (FP16, FP32):
        found = kernel(precision, True)
        blocking = found.blocking(problem)
        (launch,) = found.launches(problem)
        (plain,) = kernel(precision, False).launches(conv_of(problem))
        task, *sizes = launch.arguments[5:]
        plain_task = plain.arguments[5]
        assert isinstance(task, np.ndarray)
        assert isinstance(plain_task, np.ndarray)
        assert task.view(np.int32).tolist() == [56, 56, 1, 1, blocking.strip]
        assert plain_task.view(np.int32)[:4].tolist() == [112, 112, 0, 0]
        if isinstance(blocking.tile, FewChannelsMmaTile):
            assert sizes == [11, blocking.tile.patch_nbytes(problem)]
        else:
            assert not sizes
