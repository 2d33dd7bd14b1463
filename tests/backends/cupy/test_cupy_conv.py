"""The float32 convolutions' host side: tiles, splits, packed weights, divisors, chunks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.precision import FP16, FP32
from r18.graph.resnet import resnet18
from r18_cupy.conv import im2col as conv_im2col
from r18_cupy.conv.direct_tiled import (
    MAX_SHARED_NBYTES,
    TILE_O,
    DirectTiled,
    Staging,
    choose_staging,
)
from r18_cupy.conv.im2col import Im2col, chunk_pixels, padded_depth
from r18_cupy.conv.implicit_gemm import (
    MAX_PARTIAL_NBYTES,
    REDUCE,
    TILES,
    ChosenImplicitGemm,
    GatherTile,
    TiledImplicitGemm,
    Tiling,
    choose_tile,
    cycles,
    implicit_gemm_kernels,
)
from r18_cupy.conv.sgemm import FAST_DIVISOR, GEMM_SHAPE, fast_divisor, gemm_shape
from r18_cupy.cuda.launch import NULL, WORKSPACE
from r18_cupy.cuda.tile import TileConfig

Array = npt.NDArray[Any]
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)


def conv(
    shape: tuple[int, int, int, int], o: int, kernel: tuple[int, int], stride: int = 1, pad: int = 0
) -> Problem:
    op = Conv2d(shape[1], o, kernel, (stride, stride), (pad, pad))
    return Problem(op, (shape,))


def resnet_convolutions(batch: int) -> list[Problem]:
    problems = fuse(resnet18(), "all").problems(batch).values()
    return [p for p in problems if isinstance(p.op, Conv2d)]


def reference(problem: Problem, x: Array, weight: Array) -> Array:
    """The convolution by its definition, in float64."""
    op = problem.op
    assert isinstance(op, Conv2d)
    (sh, sw), (ph, pw) = op.stride, op.padding
    image = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = np.lib.stride_tricks.sliding_window_view(image, op.kernel_size, axis=(2, 3))
    windows = windows[:, :, ::sh, ::sw]
    return np.einsum("ncijrs,ocrs->noij", windows, weight.astype(np.float64))


# -- tiles -------------------------------------------------------------------------------------


def test_a_tile_renders_its_macros_and_its_name() -> None:
    tile = GatherTile(64, 128, 8, tm=8, tn=8, stages=3, blocked=False)
    assert tile.name == "m64n128k8dense"
    assert tile.edges == (8, 64, 128)
    assert dict(tile.defines) == {
        "TILE_M": 64,
        "TILE_N": 128,
        "TILE_K": 8,
        "TILE_TM": 8,
        "TILE_TN": 8,
        "TILE_STAGES": 3,
        "TILE_BLOCKED": 0,
    }


def test_a_tile_has_no_extent_below_one() -> None:
    with pytest.raises(ValueError, match="a tile's n must be at least 1"):
        TileConfig(8, 0, 8)


def test_ids_are_distinct() -> None:
    ids = [kernel.id for kernel in implicit_gemm_kernels()]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "cupy/conv2d/implicit_gemm/fp32"
    assert "cupy/conv2d/implicit_gemm/fp32/m128n128k16" in ids
    assert "cupy/conv2d/implicit_gemm/fp32/m64n64k16split8" in ids


# -- packing -----------------------------------------------------------------------------------


def gathered(problem: Problem, tile: GatherTile, x: Array) -> Array:
    """The N side as the kernel gathers it, (K, pixels): row by row, in the order of its K."""
    op = problem.op
    assert isinstance(op, Conv2d)
    (kh, kw), (sh, sw), (ph, pw) = op.kernel_size, op.stride, op.padding
    n, c, _, _ = x.shape
    _, _, oh, ow = problem.output
    image = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows = np.zeros((tile.k_tiles(op) * tile.k, n * oh * ow))
    for k in range(len(rows)):
        if tile.blocked:
            step, channel = divmod(k, tile.k)
            block, position = divmod(step, kh * kw)
            channel += block * tile.k
        else:
            channel, position = divmod(k, kh * kw)
        r, s = divmod(position, kw)
        if channel < c:
            seen = image[:, channel, r : r + oh * sh : sh, s : s + ow * sw : sw]
            rows[k] = seen[:, :oh, :ow].reshape(-1)
    return rows


PACKED = [
    conv((2, 3, 9, 8), 5, (7, 7), 2, 3),
    conv((1, 16, 5, 6), 64, (3, 3), 1, 1),
    conv((3, 17, 4, 5), 65, (1, 1)),
    conv((1, 9, 1, 2), 129, (3, 2), 2, 1),
]


@EACH_TILE
@pytest.mark.parametrize("problem", PACKED, ids=str)
def test_packed_weights_times_gathered_pixels_is_the_convolution(
    tile: GatherTile, problem: Problem
) -> None:
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, problem.inputs[0]).astype(np.float32)
    weight = random.integers(-4, 5, problem.op.weights()[0].shape).astype(np.float32)
    (packed,) = TiledImplicitGemm(fixed=Tiling(tile)).pack(problem, (weight,))
    assert packed.dtype == np.float32
    assert packed.shape[0] * packed.shape[2] >= len(weight)
    assert packed.shape[2] == tile.m
    columns = gathered(problem, tile, x)
    product = np.einsum("tkm,kp->tmp", packed.astype(np.float64), columns)
    n, o, oh, ow = problem.output
    rows = product.reshape(-1, columns.shape[1])
    assert not rows[o:].any()
    got = rows[:o].reshape(o, n, oh, ow).transpose(1, 0, 2, 3)
    np.testing.assert_array_equal(got, reference(problem, x, weight))


def test_direct_weights_are_packed_by_tiles_of_channels() -> None:
    problem = conv((1, 3, 5, 5), TILE_O + 1, (2, 3))
    weight = np.random.default_rng(1).standard_normal((TILE_O + 1, 3, 2, 3))
    (packed,) = DirectTiled(FP16).pack(problem, (weight,))
    assert packed.shape == (2, 3, 2, 3, TILE_O)
    assert packed.dtype == np.float16
    np.testing.assert_array_equal(packed[1, 2, 1, 0, 0], weight[TILE_O, 2, 1, 0].astype(np.float16))
    np.testing.assert_array_equal(packed[0, ..., 7], weight[7].astype(np.float16))
    assert not packed[1, ..., 1:].any()


# -- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 64])
def test_the_chosen_tiling_is_the_cheapest_and_fits(batch: int) -> None:
    for problem in resnet_convolutions(batch):
        chosen = choose_tile(problem)
        assert cycles(problem, chosen) <= min(cycles(problem, Tiling(tile)) for tile in TILES)
        assert ChosenImplicitGemm().workspace(problem) <= MAX_PARTIAL_NBYTES


def test_a_single_image_fills_the_gpu_and_a_large_batch_does_not_split() -> None:
    for problem in resnet_convolutions(1):
        blocks = math.prod(ChosenImplicitGemm().launches(problem)[0].grid)
        if isinstance(problem.op, Conv2d) and problem.op.depth >= 1152:
            assert blocks >= 132, problem
    for problem in resnet_convolutions(64):
        op = problem.op
        assert isinstance(op, Conv2d)
        if math.prod(problem.output[2:]) >= 784:
            assert choose_tile(problem).parts(op) == 1, problem


def test_few_channels_are_not_padded_to_blocks() -> None:
    stem = next(p for p in resnet_convolutions(64) if p.inputs[0][1] == 3)
    assert not choose_tile(stem).tile.blocked


@EACH_TILE
@pytest.mark.parametrize("depth", [1, 7, 8, 16, 17, 100, 4608])
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 64])
def test_every_part_of_k_has_a_step_and_none_is_missed(
    tile: GatherTile, depth: int, splits: int
) -> None:
    op, tiling = Conv2d(depth, 4, (1, 1)), Tiling(tile, splits)
    total, each, parts = tile.k_tiles(op), tiling.split_tiles(op), tiling.parts(op)
    assert parts <= splits
    assert (parts - 1) * each < total <= parts * each


# -- launches ----------------------------------------------------------------------------------


def test_the_epilogue_of_a_split_waits_for_the_reduction() -> None:
    op = Conv2d(512, 64, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True)
    problem = Problem(op, ((2, 512, 7, 7), (2, 64, 7, 7)))
    kernel = TiledImplicitGemm(fixed=Tiling(TILES[-2], splits=8))
    gemm, reduce = kernel.launches(problem)
    assert (gemm.phase, reduce.phase) == ("gemm", "reduce")
    assert gemm.grid[2] == 8
    assert gemm.arguments[2:5] == (NULL, NULL, WORKSPACE)
    assert reduce.entry == REDUCE
    assert kernel.workspace(problem) == 8 * 2 * 64 * 49 * 4
    parts = [
        TiledImplicitGemm(fixed=kernel.fixed).launches(conv((n, 512, 7, 7), 64, (3, 3)))[0]
        for n in (1, 16)
    ]
    assert parts[0].grid[2] == parts[1].grid[2]


def test_the_column_matrix_is_bounded_and_covers_every_pixel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = conv((3, 5, 20, 20), 7, (3, 3), 1, 1)
    monkeypatch.setattr(conv_im2col, "MAX_MATRIX_NBYTES", 500_000)
    kernel = Im2col()
    assert kernel.workspace(problem) <= 500_000
    launches = kernel.launches(problem)
    assert [launch.phase for launch in launches] == ["im2col", "gemm"] * (len(launches) // 2)
    starts = [int(im2col.arguments[5]) for im2col in launches[::2]]  # type: ignore[call-overload]
    columns = [int(im2col.arguments[6]) for im2col in launches[::2]]  # type: ignore[call-overload]
    assert starts == list(range(0, 1200, chunk_pixels(problem)))
    assert all(c % conv_im2col.TILE.n == 0 for c in columns)
    assert starts[-1] + columns[-1] >= 1200
    assert max(columns) * padded_depth(problem.op) * 4 == kernel.workspace(problem)  # type: ignore[arg-type]


def test_staging_prefers_whole_windows_and_refuses_what_cannot_fit() -> None:
    small = Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
    assert choose_staging(small) == Staging(channels=8, window_rows=3)
    tall = Conv2d(4, 4, (40, 20), (1, 1), (20, 10))
    assert choose_staging(tall) == Staging(channels=1, window_rows=1)
    assert DirectTiled(FP32).refusal(Problem(tall, ((1, 4, 8, 8),))) is None
    sparse = conv((1, 1, 400, 400), 1, (1, 1), 40)
    needed = Staging(1, 1).nbytes(sparse.op)  # type: ignore[arg-type]
    assert needed > MAX_SHARED_NBYTES
    assert DirectTiled(FP32).refusal(sparse) == (
        f"one row of its windows takes {needed} bytes of shared memory; a block has 49152"
    )


# -- structs -----------------------------------------------------------------------------------


def test_structs_lie_as_the_device_reads_them() -> None:
    assert FAST_DIVISOR.itemsize == 12
    fields = GEMM_SHAPE.fields
    assert fields is not None
    assert [fields[name][1] for name in GEMM_SHAPE.names or ()] == [
        *range(0, 24, 4),
        24,
        *range(32, 80, 12),
    ]
    assert GEMM_SHAPE.itemsize == 80
    shape = gemm_shape(conv((2, 3, 8, 8), 70, (3, 3)), TILES[1], 4).view(GEMM_SHAPE)
    assert shape["pixels"] == 72
    assert shape["depth"] == 27
    assert shape["m_tiles"] == 2
    assert shape["split_tiles"] == 4


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 9, 49, 64, 12544, 65535, 2**30 + 1, 2**31 - 1])
def test_fast_division_is_exact_below_two_to_the_31(divisor: int) -> None:
    _, multiplier, shift = fast_divisor(divisor)
    assert multiplier < 2**32
    last = (2**31 - 1) // divisor * divisor
    for n in {0, 1, divisor - 1, divisor, divisor + 1, last - 1, last, 2**31 - 1}:
        if 0 <= n < 2**31:
            got = n * multiplier >> 32 >> shift if multiplier else n
            assert got == n // divisor, (n, divisor)
