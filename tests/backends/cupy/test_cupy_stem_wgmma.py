"""The quantised stem on integer wgmma, without a GPU: a block's steps in NumPy, and refusals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import r18_numpy
from r18.backend import Array, CompileOptions
from r18.graph.ops import Conv2d, Layout, MaxPool2d, Problem
from r18.graph.passes import from_pixels, fuse, fuse_image, fuse_pool
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizePixels,
)
from r18.graph.resnet import resnet18
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_cupy.bytes.stem_wgmma import (
    CHANNELS,
    CHUNK_BYTES,
    CORE_ROWS,
    GROUP_CHUNKS,
    PIXEL,
    PIXELS,
    POOL,
    STAGE_LINES,
    STAGES,
    WARP_CHANNELS,
    WARPS,
    of_floats,
    pack_weight,
)
from r18_cupy.cuda import compiler
from r18_cupy.cuda.h200 import SHARED_NBYTES
from r18_cupy.integers.stem_wgmma import TILES, Image, StemTile, StemWgmma
from r18_oracle.ops.normalize import normalization
from r18_oracle.search.choices import Share
from r18_oracle.search.profiles import profile

NUMPY = r18_numpy.Backend()
PARTS = next(k for k in NUMPY.kernels() if k.op is QuantizedConvMaxPool)
NORMALIZE = Preprocess().normalize
STEM = Conv2d(3, 64, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
KERNEL = StemWgmma()
LEAST = -(2**31)
OF_INTEGERS = [tile for tile in TILES if tile.image is Image.INT8]
EACH_IMAGE = pytest.mark.parametrize("image", Image)
EACH_TILE = pytest.mark.parametrize("tile", OF_INTEGERS, ids=lambda tile: tile.name)


def stem(batch: int, image: Image = Image.INT8) -> Problem:
    schedule = fuse_pool(quantized(fuse(resnet18(), "all")))
    if image is Image.PIXELS:
        schedule = from_pixels(schedule, NORMALIZE)
    if image is not Image.INT8:
        schedule = fuse_image(schedule)
    return schedule.problems(batch)["conv1"]


def problem_of(op: Conv2d, shape: tuple[int, ...], image: Image = Image.INT8) -> Problem:
    makers = {
        Image.INT8: None,
        Image.PIXELS: QuantizePixels(normalization(op.in_channels)),
        Image.FLOAT32: Quantize(),
    }
    conv = QuantizedConv2d(op, ("int8",))
    return Problem(QuantizedConvMaxPool(conv, POOL, makers[image]), (shape,))


# -- a block, step by step ---------------------------------------------------------------------


def line_of(pixels: Array, tile: StemTile) -> Array:
    """A line in shared memory. pixels: (quads, 4, PIXEL), from four before the first column on."""
    group, odd = GROUP_CHUNKS * CHUNK_BYTES, tile.line_nbytes // 2
    half, line = tile.columns // 2, np.full(tile.line_nbytes, 99, np.int8)

    def places(chunk: int) -> list[int]:
        own = chunk // CORE_ROWS * group + chunk % CORE_ROWS * CHUNK_BYTES
        found = [own] if 0 <= chunk < half else []
        if 0 < chunk <= half and chunk % CORE_ROWS == 0:
            found.append(own - CHUNK_BYTES)
        return found

    for quad, four in enumerate(pixels):
        whole, second = four.reshape(-1), four[2:].reshape(-1)
        for at in places(quad):
            line[at : at + 16] = whole
            line[odd + at : odd + at + 8] = second
        for at in places(quad - 1):
            line[odd + at + 8 : odd + at + 16] = whole[:8]
    return line


def rows_of_b(line: Array, tile: StemTile) -> Array:
    """The rows (columns, 32 bytes) of B that the descriptor addresses."""
    n = np.arange(tile.columns)
    at = n // CORE_ROWS * GROUP_CHUNKS * CHUNK_BYTES + n % CORE_ROWS * CHUNK_BYTES
    return line[at[:, None] + np.arange(2 * CHUNK_BYTES)]


def rows_of_a(packed: Array) -> Array:
    """A's rows (kh, 64, 32 bytes) from a warpgroup's registers, (kh, threads, registers, bytes)."""
    found = np.empty((len(packed), CHANNELS, 2 * CHUNK_BYTES), np.int8)
    for thread, register, byte in np.ndindex(*packed.shape[1:]):
        warp, lane = divmod(thread, 32)
        row = 16 * warp + lane // 4 + 8 * (register % 2)
        found[:, row, lane % 4 * 4 + register // 2 * 16 + byte] = packed[:, thread, register, byte]
    return found


def registers_of(sums: Array) -> Array:
    """Accumulators (warps, lanes, columns / 2) from (64, columns), in the layout of wgmma.cuh."""
    warp, lane, i = np.ix_(np.arange(WARPS), np.arange(32), np.arange(sums.shape[1] // 2))
    rows = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
    return sums[rows, 8 * (i // 4) + lane % 4 * 2 + i % 2]


def pooled_across(registers: Array, groups: int) -> Array:
    """Maxima across columns: (warps, lanes, groups, channel, window)."""
    lane = np.arange(32)
    quarter, last = lane % 4, np.full((WARPS, 32, 2), LEAST)
    found = np.empty((WARPS, 32, groups, 2, 2), np.int64)
    for j, half in np.ndindex(groups, 2):
        i = 4 * j + 2 * half
        c0, c2 = registers[..., i], registers[..., i + 1]
        c1, c3 = registers[..., i + 4 * groups], registers[..., i + 4 * groups + 1]
        given = np.where(quarter == 3, last[..., half], c3)
        before = given[:, lane - quarter + (quarter + 3) % 4]
        last[..., half] = c3
        found[..., j, half, 0] = np.maximum(np.maximum(before, c0), c1)
        found[..., j, half, 1] = np.maximum(np.maximum(c1, c2), c3)
    return found


def requantised(sums: Array, multiplier: Array, relu: bool) -> Array:
    low, high = (0, 255) if relu else (-128, 127)
    return np.clip(np.rint(sums.astype(np.float32) * multiplier), low, high)


class Block:
    """The computation of one CTA; the image is int8 in NCHW."""

    def __init__(self, problem: Problem, kernel: StemWgmma, x: Array, weights: Any) -> None:
        self.problem, self.x = problem, x
        self.weight, self.bias, self.multiplier = weights
        self.blocking = kernel.blocking(problem)
        tile = self.blocking.tile
        assert isinstance(tile, StemTile)
        self.tile = tile
        self.packed = pack_weight(self.weight)

    def write(self, block: int, out: Array) -> None:
        """out: (N, OH, OW, O); NaN where nothing was written."""
        conv, tile = self.problem.op.conv.conv, self.tile  # type: ignore[attr-defined]
        _, o, rows, columns = self.problem.output
        _, _, height, width = conv.infer(self.x.shape)
        tiles = -(-o // CHANNELS)
        block, channel0 = block // tiles, block % tiles * CHANNELS
        across = tile.column_tiles(self.problem)
        block, column0 = block // across, block % across * (tile.columns - 2)
        strips = -(-rows // self.blocking.strip)
        image, first = block // strips, block % strips * self.blocking.strip
        last = min(first + self.blocking.strip, rows)
        a = rows_of_a(self.packed[channel0 // CHANNELS])
        channels = channel0 + np.arange(CHANNELS).reshape(WARPS, 8, 2)  # of warp, lane / 4
        bias, factor = (
            np.concatenate([v, np.zeros(tiles * CHANNELS - o, v.dtype)])[channels].repeat(4, axis=1)
            for v in (self.bias, self.multiplier)
        )

        def row(y: int) -> Array:
            """A row of the convolution's sums in registers; the least value outside the image."""
            sums = np.zeros((CHANNELS, tile.columns), np.int64)
            for r in range(7):
                line = line_of(self._quads(image, 2 * y - 3 + r, column0), tile)
                sums += a[r].astype(np.int64) @ rows_of_b(line, tile).astype(np.int64).T
            n, half = np.arange(tile.columns), tile.columns // 2
            column = np.where(n < half, 2 * n, 2 * (n - half) + 1)
            found = registers_of(sums)
            i = np.arange(found.shape[2])
            found += bias[..., i // 2 % 2]
            valid = (column0 + column < width) & (y < height)
            masks = registers_of(np.broadcast_to(valid, sums.shape))
            return np.where(masks, found, LEAST)

        groups = tile.groups
        best = np.full((WARPS, 32, groups, 2, 2), LEAST)
        if first > 0:
            best = pooled_across(row(2 * first - 1), groups)
        for turn in range(first, last):
            best = np.maximum(best, pooled_across(row(2 * turn), groups))
            lower = pooled_across(row(2 * turn + 1), groups)
            made = requantised(np.maximum(best, lower), factor[:, :, None, :, None], conv.relu)
            best = lower
            staged = np.empty((WARPS, groups * 8, WARP_CHANNELS))
            for lane, j, half, window in np.ndindex(32, groups, 2, 2):
                at = 8 * j + lane % 4 * 2 + window, lane // 4 * 2 + half
                staged[:, at[0], at[1]] = made[:, lane, j, half, window]
            for warp, window in np.ndindex(WARPS, min(columns - column0 // 2, groups * 8)):
                channel = channel0 + warp * WARP_CHANNELS
                if channel < o and not (column0 and window == 0):
                    there = out[image, turn, column0 // 2 + window, channel:][:WARP_CHANNELS]
                    assert np.isnan(there).all(), "written twice"
                    there[:] = staged[warp, window]

    def _quads(self, image: int, y: int, column0: int) -> Array:
        """The pixels of a line that a block reads: (quads, 4, PIXEL)."""
        _, c, h, w = self.x.shape
        first = 2 * column0 - PIXELS // 2
        quads = np.zeros((self.tile.columns // 2 + 2, 4, PIXEL), np.int8)
        for quad, i in np.ndindex(*quads.shape[:2]):
            column = first + 4 * quad + i
            if 0 <= y < h and 0 <= column < w:
                quads[quad, i, :c] = self.x[image, :, y, column]
        return quads


@EACH_TILE
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (STEM, (1, 3, 9, 228)),
        (replace(STEM, relu=False, out_channels=80), (1, 3, 7, 12)),
        (replace(STEM, in_channels=1, out_channels=16), (2, 1, 14, 131)),
        (replace(STEM, in_channels=4, out_channels=32), (1, 4, 1, 3)),
    ],
    ids=str,
)
def test_a_kernel_s_steps_make_what_the_op_says(
    tile: StemTile, op: Conv2d, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    problem, kernel = problem_of(op, shape), StemWgmma(config=tile)
    assert kernel.refusal(problem) is None
    x = rng.integers(-128, 128, shape).astype(np.int8)
    weights = (
        rng.integers(-127, 128, (op.out_channels, op.in_channels, 7, 7)).astype(np.int8),
        rng.integers(-30_000, 30_000, op.out_channels).astype(np.int32),
        rng.uniform(2e-4, 1e-3, op.out_channels).astype(np.float32),
    )
    expected = run_kernel(NUMPY, PARTS, problem, x, *weights)
    out = np.full(Layout.NHWC.physical(problem.output), np.nan)
    block = Block(problem, kernel, x, weights)
    for index in range(kernel.launches(problem)[0].grid[0]):
        block.write(index, out)
    assert np.unique(expected).size > 10
    np.testing.assert_array_equal(out.transpose(0, 3, 1, 2), expected)


def permuted(a: int, b: int, selector: int) -> int:
    """CUDA's `__byte_perm`."""
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes([both[selector >> 4 * i & 7] for i in range(4)], "little")


def test_bytes_of_four_pixels_are_sorted_by_pixel() -> None:
    """Permutations sort the bytes of four pixels by pixel, as in `ImageReader::convert`."""
    rng = np.random.default_rng(0)
    four = rng.integers(0, 256, (4, PIXEL)).astype(np.uint8)
    expected = [int.from_bytes(pixel.tobytes(), "little") for pixel in four]
    raw = [int.from_bytes(plane.tobytes(), "little") for plane in four.T]
    low, high = permuted(raw[0], raw[1], 0x5140), permuted(raw[0], raw[1], 0x7362)
    more = permuted(raw[2], raw[3], 0x5140), permuted(raw[2], raw[3], 0x7362)
    found = [
        *(permuted(low, more[0], 0x5410), permuted(low, more[0], 0x7632)),
        *(permuted(high, more[1], 0x5410), permuted(high, more[1], 0x7632)),
    ]
    assert found == expected
    packed = four[:, :3].tobytes()
    raw = [int.from_bytes(packed[4 * i : 4 * i + 4], "little") for i in range(3)]
    found = [
        *(raw[0], permuted(raw[0], raw[1], 0x6543)),
        *(permuted(raw[1], raw[2], 0x5432), raw[2] >> 8),
    ]
    assert [pixel & 0xFFFFFF for pixel in found] == [pixel & 0xFFFFFF for pixel in expected]


def test_stages_hold_the_lines_of_a_turn() -> None:
    """Stage s holds lines 4s + 2 to 4s + 5, as `multiply_upper` and `multiply_lower` read them."""
    for turn in range(4):
        held = [[STAGE_LINES * (turn - 2 + s) + 2 + i for i in range(4)] for s in range(3)]
        upper = [held[0][3], *held[1], *held[2][:2]]
        lower = [*held[1][1:], *held[2]]
        assert upper == [2 * (2 * turn) - 3 + r for r in range(7)]
        assert lower == [2 * (2 * turn + 1) - 3 + r for r in range(7)]
    assert STAGES > 3


# -- launches ----------------------------------------------------------------------------------


@EACH_IMAGE
@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_the_stem_is_one_launch_that_fits(batch: int, image: Image) -> None:
    problem = stem(batch, image)
    assert KERNEL.refusal(problem) is None
    (launch,) = KERNEL.launches(problem)
    tile = KERNEL.blocking(problem).tile
    assert launch.grid[0] == KERNEL.blocking(problem).blocks(of_floats(problem))
    assert launch.block[0] == 256
    assert launch.overlaps
    assert launch.shared_nbytes == tile.shared_nbytes(problem) <= SHARED_NBYTES
    assert tile.blocks * (launch.shared_nbytes + 1024) <= 228 * 1024
    assert ("TILE_IMAGE", int(image)) in launch.entry.defines
    assert launch.entry in KERNEL.entries()
    assert len(problem.op.weights()) == (3 if image is Image.INT8 else 4)


def test_functions_spill_nothing() -> None:
    found = KERNEL.resources("sm_90a")
    assert len(found) == len(TILES)
    for used in found.values():
        assert used.registers <= 128
        assert used.spill_nbytes == 0


def test_a_plan_on_hopper_begins_with_the_stem() -> None:
    """A plan begins with the stem, which reads NCHW images or NHWC pixels and writes NHWC."""

    class Stem(r18_numpy.Backend):
        def kernels(self) -> tuple[Any, ...]:
            return (KERNEL, *(k for k in super().kernels() if k.op is not QuantizedConvMaxPool))

        def fastest(self, problem: Problem, precision: str) -> None:
            return None

    schedule = quantized(fuse(resnet18(), "all"))
    for pixels in (None, NORMALIZE):
        plan = make_plan(Stem(), schedule, CompileOptions(precision="int8", pixels=pixels))
        steps = {step.output: step for step in plan.steps}
        assert steps["maxpool"].kernel is KERNEL
        assert plan.tensors["maxpool"].layout is Layout.NHWC
        (given,) = steps["maxpool"].inputs
        assert given == ("image" if pixels is None else "pixels")
        assert plan.steps[0] is steps["maxpool"]


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (replace(STEM, in_channels=5), "at most 4 channels, not 5"),
        (replace(STEM, stride=(1, 2)), "windows of 7×7 with a stride of 2"),
        (replace(STEM, kernel_size=(7, 5)), "windows of 7×7 with a stride of 2"),
        (replace(STEM, padding=(3, 2)), "a padding of 3"),
        (replace(STEM, out_channels=24), "16 channels at a time, and 24 is no multiple"),
    ],
)
def test_refusals(op: Conv2d, reason: str) -> None:
    for image in Image:
        assert reason in str(KERNEL.refusal(problem_of(op, (1, op.in_channels, 40, 40), image)))


def test_other_pooling_and_storage_are_refused() -> None:
    conv = QuantizedConv2d(STEM, ("int8",))
    pool = MaxPool2d((3, 3), (2, 2), (0, 1))
    shape = (1, 3, 40, 40)
    refused = KERNEL.refusal(Problem(QuantizedConvMaxPool(conv, pool), (shape,)))
    assert "a padding of 1 and no others" in str(refused)
    conv = QuantizedConv2d(STEM, ("uint8",))
    refused = KERNEL.refusal(Problem(QuantizedConvMaxPool(conv, POOL), (shape,)))
    assert refused == "reads images of int8, not uint8"


@EACH_IMAGE
def test_a_tile_is_for_one_kind_of_image(image: Image) -> None:
    for tile in TILES:
        refused = StemWgmma(config=tile).refusal(stem(1, image))
        if tile.image is image:
            assert refused is None
        else:
            assert refused == f"this tile takes images of {tile.image.name.lower()}"


@pytest.mark.parametrize("effort", ["brief", "quick"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_tile_is_shown_a_problem_of_its_image(effort: str, seed: int) -> None:
    assert len({tile.name for tile in TILES}) == len(TILES)
    for tile in TILES:
        one = StemWgmma(config=tile)
        shown = Share(one, profile(effort), seed, common=frozenset(one.edges)).known
        assert any(one.refusal(problem) is None for problem in shown), tile.name


def test_macros_of_images_are_those_of_the_device_code() -> None:
    header = (compiler.KERNELS / "integers/stem_image.cuh").read_text()
    found = dict(re.findall(r"#define IMAGE_(\w+) (\d+)", header))
    assert found == {image.name: str(int(image)) for image in Image}


def test_only_hopper_itself_runs_it() -> None:
    assert KERNEL.targets == ("sm_90a",)
    assert KERNEL.runs_on((9, 0))
    assert not KERNEL.runs_on((10, 0))
    assert KERNEL.id == "cupy/qconv2d_maxpool2d/few_channels_wgmma/int8/nhwc"


# -- division ----------------------------------------------------------------------------------


def rounded(number: Fraction) -> Fraction:
    """To float32, to nearest even; for numbers that are neither tiny nor huge."""
    if not number:
        return number
    exponent = math.frexp(float(number))[1]  # may be off by one at a power of two
    unit = Fraction(2) ** (exponent - 24)
    if abs(number) >= unit * 2**24:
        unit *= 2
    elif abs(number) < unit * 2**23:
        unit /= 2
    return round(number / unit) * unit


def corrected_quotient(x: np.float32, scale: np.float32) -> Fraction:
    """`Divisor::quotient`, with every fused multiply-add rounded once."""
    number, divisor = Fraction(float(x)), Fraction(float(scale))
    reciprocal = rounded(1 / divisor)
    found = rounded(number * reciprocal)
    for _ in range(2):
        found = rounded(rounded(number - found * divisor) * reciprocal + found)
    return found


def test_a_corrected_quotient_is_what_a_division_gives() -> None:
    """A corrected quotient is the division's, also for multiples of half a scale and neighbours."""
    rng = np.random.default_rng(0)
    scales = np.exp2(rng.uniform(-80, 80, 400)).astype(np.float32)
    scales[:8] = np.nextafter(np.float32(2.0) ** np.arange(8), np.float32(0))
    for scale in scales:
        halves = (rng.integers(-256, 257, 8) * np.float32(0.5)).astype(np.float32) * scale
        neighbours = np.nextafter(halves, rng.choice([-np.inf, np.inf], 8).astype(np.float32))
        wild = rng.uniform(-256, 256, 8).astype(np.float32) * scale
        for x in np.concatenate([halves, neighbours, wild]):
            if abs(x / scale) >= 0.125:  # below, both round to 0
                assert corrected_quotient(x, scale) == Fraction(float(x / scale)), (x, scale)
