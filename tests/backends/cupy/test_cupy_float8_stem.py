"""The stem in e4m3 on wgmma, without a GPU: NaN in a block, tiles, refusals, PTX, plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiled import compiled
from cuda_support import On, parameters
from r18.backend import Array, CompileOptions
from r18.graph.ops import Conv2d, MaxPool2d, Problem
from r18.graph.passes import fuse, fuse_image, fuse_pool
from r18.graph.precision import E4M3, as_stored
from r18.graph.resnet import resnet18, resnet50, tiny
from r18.graph.scaled import Scale, ScaledConv2d, ScaledConvMaxPool
from r18.graph.scaling import scaled
from r18.runtime.plan import make_plan
from r18_cupy import float8
from r18_cupy.bytes.stem_wgmma import (
    CHUNK_BYTES,
    CORE_ROWS,
    GROUP_CHUNKS,
    POOL,
    STAGE_LINES,
    STAGES,
    WINDOW,
    of_floats,
)
from r18_cupy.cuda.compiler import capability, compile_ptx
from r18_cupy.cuda.h200 import MULTIPROCESSOR_NBYTES, RESERVED_NBYTES, SHARED_NBYTES
from r18_cupy.cuda.launch import NULL, Pointer
from r18_cupy.float8.stem_wgmma import LINE_NANS, TILES, Image, ScaledStemTile, ScaledStemWgmma
from r18_cupy.integers.stem_wgmma import TILES as INTEGER_TILES
from r18_oracle.generate.corners import corners
from r18_oracle.judge.declared import objection
from r18_oracle.search.profiles import profile

KERNEL = ScaledStemWgmma()
STEM = Conv2d(3, 64, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
CODE = Path(float8.__file__).parents[1] / "kernels" / "float8"
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)


def problem_of(op: Conv2d, shape: tuple[int, ...], image: Image = Image.FLOAT32) -> Problem:
    made_by = {Image.E4M3: None, Image.FLOAT32: Scale()}
    return Problem(ScaledConvMaxPool(ScaledConv2d(op), POOL, made_by[image]), (shape,))


def stem(batch: int, image: Image = Image.FLOAT32) -> Problem:
    schedule = fuse_pool(scaled(fuse(resnet18(), "all")))
    if image is Image.FLOAT32:
        schedule = fuse_image(schedule)
    return schedule.problems(batch)["conv1"]


# -- NaN ---------------------------------------------------------------------------------------


def nan_bytes(pixels: Array) -> Array:
    """The NaN bytes of words of pixels, found as in kernels/float8/stem_image.cuh."""
    return ((pixels & np.uint32(0x7F7F7F7F)) + np.uint32(0x01010101)) & np.uint32(0x80808080)


def test_nan_is_found_in_any_byte_of_a_pixel() -> None:
    bytes_ = np.arange(256, dtype=np.uint8)
    expected = np.isnan(bytes_.view(E4M3).astype(np.float64))
    assert expected.sum() == 2
    for place in range(4):
        for others in (0x00, 0x7E, 0x80, 0xFE):  # 448 and −448 are next to NaN
            pixels = np.full((256, 4), others, np.uint8)
            pixels[:, place] = bytes_
            found = nan_bytes(pixels.view(np.uint32).ravel())
            np.testing.assert_array_equal(found != 0, expected)
    text = (CODE / "stem_image.cuh").read_text("utf-8")
    assert "(pixel & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u" in text


def masks() -> tuple[int, int]:
    """The masks of a lane's quads in kernels/float8/stem_wgmma.cu, for even and for odd columns."""
    text = (CODE / "stem_wgmma.cu").read_text("utf-8")
    even, odd = re.findall(r"if \(quads & (0x[0-9A-F]+)u << next\) sums\[", text)
    return int(even, 16), int(odd, 16)


def spoiled(bits: Array, tile: ScaledStemTile) -> Array:
    """The columns whose sums become NaN, as lanes find them. bits: a byte per quad."""
    even, odd = masks()
    pairs = bits[0::2].astype(np.uint32) | bits[1::2].astype(np.uint32) << 8
    found = np.zeros(tile.columns, bool)
    for lane in range(4):
        for j in range(tile.groups):
            at = 4 * j + lane
            quads = int(pairs[at] & 0xFFFF) | int(pairs[at + 1]) << 16
            for parity in range(2):  # of a register
                row = 8 * j + 2 * lane + parity  # of B
                found[2 * row] = bool(quads & even << 8 * parity)
                found[2 * row + 1] = bool(quads & odd << 8 * parity)
    return found


@EACH_TILE
def test_each_pixel_spoils_the_columns_whose_windows_hold_it(tile: ScaledStemTile) -> None:
    """A NaN pixel spoils the columns whose windows hold it, counted as producers read pixels."""
    for pixel in range(4 * (tile.columns // 2 + 2)):
        bits = np.zeros(LINE_NANS, np.uint8)
        bits[pixel // 4] = 1 << pixel % 4
        first = 2 * np.arange(tile.columns) - 3 + 4
        expected = (first <= pixel) & (pixel < first + WINDOW[1])
        np.testing.assert_array_equal(spoiled(bits, tile), expected, str(pixel))


@EACH_TILE
def test_products_read_no_byte_that_was_not_written(tile: ScaledStemTile) -> None:
    """Products read only written bytes, since stale shared memory may hold NaN, and 0 · NaN is NaN.

    `store_quad` writes quad q to the chunk q of even columns; its halves are in two chunks of odd
    ones. The first chunk of a group is also the last of the group before.
    """
    half, group, odd = tile.columns // 2, GROUP_CHUNKS * CHUNK_BYTES, tile.line_nbytes // 2
    written = np.zeros(tile.line_nbytes, int)

    def places(chunk: int) -> list[int]:
        at = chunk // CORE_ROWS * group + chunk % CORE_ROWS * CHUNK_BYTES
        before = 0 < chunk <= half and chunk % CORE_ROWS == 0
        return [at] * (0 <= chunk < half) + [at - CHUNK_BYTES] * before

    for quad in range(half + 2):
        for at in places(quad):
            written[at : at + 16] += 1
            written[odd + at : odd + at + 8] += 1
        for at in places(quad - 1):
            written[odd + at + 8 : odd + at + 16] += 1
    row = np.arange(tile.columns)
    first = row // CORE_ROWS * group + row % CORE_ROWS * CHUNK_BYTES
    read = first[:, None] + np.arange(2 * CHUNK_BYTES)
    assert (written[read] == 1).all()


# -- tiles and launches ------------------------------------------------------------------------


@EACH_TILE
def test_tiles_are_legal_and_two_blocks_fit(tile: ScaledStemTile) -> None:
    problem = of_floats(stem(1))
    nbytes = tile.shared_nbytes(problem)
    assert nbytes <= SHARED_NBYTES
    assert tile.blocks * (nbytes + RESERVED_NBYTES) <= MULTIPROCESSOR_NBYTES
    assert tile.columns // 2 + 2 + 4 <= LINE_NANS  # quads, and a mark of each producer warp
    found = compiled(KERNEL.entry(tile), "sm_90a")
    assert found.threads == tile.threads == 256
    assert found.registers <= 128
    assert found.spill_nbytes == 0
    assert not found.serialized
    assert objection(replace(KERNEL, config=tile)) is None


def test_a_block_takes_as_much_as_one_of_integers_and_what_marks_nan() -> None:
    problem = of_floats(stem(1))
    for image, of_integers in ((Image.E4M3, "INT8"), (Image.FLOAT32, "FLOAT32")):
        ours = [tile for tile in TILES if tile.image is image]
        theirs = [tile for tile in INTEGER_TILES if tile.image.name == of_integers]
        for one, other in zip(ours, theirs, strict=True):
            assert (one.m, one.n, one.k) == (other.m, other.n, other.k)
            more = one.shared_nbytes(problem) - other.shared_nbytes(problem)
            assert more == STAGES * STAGE_LINES * LINE_NANS


@pytest.mark.parametrize("image", Image)
def test_launches_take_what_the_function_reads(image: Image) -> None:
    for batch in (1, 8, 256):
        problem = stem(batch, image)
        assert KERNEL.refusal(problem) is None
        (launch,) = KERNEL.launches(problem)
        assert launch.entry in KERNEL.entries()
        assert launch.grid[0] % batch == 0
        kinds = parameters(launch.entry)
        assert len(kinds) == len(launch.arguments)
        for kind, argument in zip(kinds, launch.arguments, strict=True):
            assert (kind == "pointer") == (isinstance(argument, Pointer) or argument is NULL)
        assert any(one is NULL for one in launch.arguments) == (image is Image.E4M3)


def test_strips_and_tiles_are_several_for_both_kinds_of_image() -> None:
    quick = profile("quick")
    for image in (None, Scale()):
        taken = [
            problem
            for problem in corners(ScaledConvMaxPool, quick.max_elements, quick.max_macs)
            if KERNEL.refusal(problem) is None and problem.op.settings["image"] == image
        ]
        strips = [(KERNEL.blocking(p).strip, p.output[2]) for p in taken]
        assert any(rows > strip >= STAGES and rows % strip for strip, rows in strips)
        widths = {KERNEL.blocking(p).tile.column_tiles(p) for p in taken}
        assert 1 in widths
        assert max(widths) >= 3


def test_weights_are_bytes_in_the_integers_order() -> None:
    problem = stem(1)
    drawn = np.random.default_rng(0).standard_normal(problem.op.weights()[0].shape)
    rest = [np.ones(spec.shape) for spec in problem.op.weights()[1:]]
    packed, *others = KERNEL.pack(problem, (drawn, *rest))
    assert packed.shape == (1, WINDOW[0], 128, 4, 4)
    assert packed.nbytes == KERNEL.packed_size(STEM)
    bytes_ = as_stored(drawn, E4M3).view(np.int8)
    values, counts = np.unique(packed, return_counts=True)
    zeros = packed.size - bytes_.size
    for value, count in zip(values, counts, strict=True):
        assert count == (bytes_ == value).sum() + (zeros if value == 0 else 0)
    # Lane 0 of warp 0, first row of the window: pixel 0 is outside of it, and then channel 0's.
    np.testing.assert_array_equal(packed[0, 0, 0, 2, :3], bytes_[0, :, 0, 3])
    assert not packed[0, 0, 0, 0].any()
    assert [one.dtype.name for one in others] == ["float32"] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel_size": (3, 3)}, "takes windows of 7×7"),
        ({"stride": (1, 1)}, "takes windows of 7×7"),
        ({"in_channels": 5}, "takes images of at most 4 channels, not 5"),
        ({"out_channels": 24}, "writes 16 channels at a time, and 24 is no multiple"),
    ],
)
def test_refusals(change: dict[str, object], said: str) -> None:
    op = replace(STEM, **change)  # type: ignore[arg-type]
    reason = KERNEL.refusal(problem_of(op, (1, op.in_channels, 40, 40)))
    assert reason is not None
    assert reason.startswith(said)


def test_other_poolings_and_images_are_refused() -> None:
    plain = problem_of(STEM, (1, 3, 40, 40))
    assert isinstance(plain.op, ScaledConvMaxPool)
    other = Problem(replace(plain.op, pool=MaxPool2d((2, 2), (2, 2))), plain.inputs)
    assert str(KERNEL.refusal(other)).startswith("pools windows of 3×3")
    one = replace(KERNEL, config=TILES[0])
    assert one.refusal(plain) == "this tile takes images of e4m3"
    assert one.refusal(problem_of(STEM, (1, 3, 40, 40), Image.E4M3)) is None


# -- instructions ------------------------------------------------------------------------------


@EACH_TILE
def test_a_row_of_the_window_is_one_product(tile: ScaledStemTile) -> None:
    ptx = compile_ptx(KERNEL.entry(tile), "sm_90a")
    found = re.findall(r"wgmma\.mma_async[.\w]*", ptx)
    assert set(found) == {f"wgmma.mma_async.sync.aligned.m64n{tile.columns}k32.f32.e4m3.e4m3"}
    assert len(found) == 3 * WINDOW[0]  # upper rows, lower rows, and the one before a strip
    assert len(re.findall(r"setp\.eq\.u32 add, 0, 1", ptx)) == 3  # D is not read
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "max.NaN.f32" in ptx


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [resnet18, resnet50])
def test_the_stem_is_one_step_on_hopper(network: type[resnet18]) -> None:  # type: ignore[valid-type]
    schedule = scaled(fuse(network(), "all"))
    for batch in (1, 256):
        options = CompileOptions(precision="fp8", batch=batch)
        first, second, *_ = make_plan(On(capability("sm_90")), schedule, options).steps
        assert first.kernel.id == KERNEL.id == "cupy/sconv2d_maxpool2d/few_channels_wgmma/fp8/nhwc"
        assert first.problem.op.input_storage == ("float32",)
        assert second.kernel.algorithm.startswith("implicit_gemm_wgmma")
    apart = make_plan(On(capability("sm_89")), schedule, options).steps
    assert [step.problem.op.name for step in apart[:3]] == ["scale", "sconv2d", "maxpool2d"]


def test_the_tiny_network_keeps_its_stem_apart() -> None:
    """The tiny network has too few channels for the fused stem, so its plan begins with `Scale`."""
    options = CompileOptions(precision="fp8")
    plan = make_plan(On((9, 0)), scaled(fuse(tiny(), "all")), options)
    assert plan.steps[0].problem.op == Scale()
