"""The CUDA kernels of quantised ops without a GPU: packed weights, launches, refusals, plans.

The tests read their arithmetic in PTX: each rounding of the specification is an instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest

from cuda_support import On
from r18.backend import Array, CompileOptions, input_layout
from r18.errors import NoKernel, WeightsError
from r18.graph.ops import (
    Conv2d,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
)
from r18.graph.passes import fuse, fuse_classifier
from r18.graph.precision import INT8
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    LIMITS,
    QUANTIZED_OPS,
    STORAGES,
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.runtime.plan import make_plan
from r18_cupy.cuda.compiler import Entry, capability, compile_ptx
from r18_cupy.cuda.launch import DEFAULT_SHARED, MAX_GRID, NULL, GridLaunch, Pointer, Role
from r18_cupy.integers.catalogue import integer_kernels
from r18_cupy.integers.direct import QuantizedDirect
from r18_cupy.integers.gap import QuantizedGap
from r18_cupy.integers.implicit_gemm_mma import (
    CHUNK,
    GATHER_TILE,
    STEP,
    TILES,
    ChosenQuantizedMma,
    FixedQuantizedMma,
    IntegerMmaTile,
    choose,
    estimate,
    pack_narrow,
    pack_weight,
    packed_depth,
    packed_row,
)
from r18_cupy.integers.linear import QuantizedTiledLinear, QuantizedWarpDot
from r18_cupy.integers.maxpool2d import QuantizedMaxPool
from r18_cupy.integers.quantize import QuantizeKernel, QuantizePixelsKernel
from r18_cupy.integers.relayout import QuantizedTranspose

NCHW, NHWC = Layout.NCHW, Layout.NHWC
KERNELS = integer_kernels()
SHARED_NBYTES = 99 * 1024  # a block's on sm_86, sm_89 and sm_120, the least from sm_80 on
SHARED_NBYTES_SM_90 = 227 * 1024
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
EACH_BITS = pytest.mark.parametrize("bits", LIMITS)


def problem_of(conv: Conv2d, n: int, h: int, w: int, *stored: str, bits: int = 8) -> Problem:
    """A problem without a residual, unless a second storage format gives it one."""
    conv = replace(conv, bias=True)
    image = (n, conv.in_channels, h, w)
    added = (conv.infer(image),) if len(stored) > 1 else ()
    op = QuantizedConv2d(replace(conv, residual=bool(added)), stored or ("uint8",), bits)
    return Problem(op, (image, *added))


def conv_of(problem: Problem) -> Conv2d:
    return cast(QuantizedConv2d, problem.op).conv


def convolutions(batch: int, bits: int = 8) -> Iterator[Problem]:
    found = quantized(fuse(resnet18(), "all"), bits).problems(batch)
    return (p for p in found.values() if isinstance(p.op, QuantizedConv2d))


def unpacked(packed: Array, bits: int) -> Array:
    """Rows [O][depth] as kernels/integers/narrow_weights.cuh unpacks them, divided by the scale.

    Of sixteen weights in bits / 2 words, word i of the bytes has bits i % (8 / bits) · bits on of
    each byte of word i / (8 / bits), shifted to the top.
    """
    per_word = 8 // bits
    words = packed.view(np.uint32).reshape(len(packed), -1, bits // 2)
    mask = np.uint32((0xFF << (8 - bits) & 0xFF) * 0x01010101)
    made = [
        words[..., i // per_word] << np.uint32(8 - bits - i % per_word * bits) & mask
        for i in range(4)
    ]
    rows = np.ascontiguousarray(np.stack(made, axis=-1)).reshape(len(packed), -1).view(np.int8)
    found: Array = rows.astype(np.int64) / 2 ** (8 - bits)
    return found


# -- weights -----------------------------------------------------------------------------------


@EACH_BITS
def test_narrow_weights_are_what_the_device_unpacks(bits: int) -> None:
    limit = LIMITS[bits]
    rows = np.random.default_rng(1).integers(-limit, limit + 1, (3, 256)).astype(np.int8)
    packed = pack_narrow(rows, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (3, 256 * bits // 8)
    np.testing.assert_array_equal(unpacked(packed, bits), rows)


@EACH_BITS
def test_a_sum_of_shifted_weights_stays_in_int32(bits: int) -> None:
    """Sums stay in int32 although weights are shifted by 8 − bits while they are multiplied."""
    assert LIMITS[bits] << (8 - bits) <= LIMITS[8]


def gathered_row(x: Array, op: Conv2d, i: int, j: int) -> Array:
    """The row of A of output pixel (i, j) of an image x (H,W,C), as the device code finds it."""
    h, w, c = x.shape
    row, depth = packed_row(op), packed_depth(op)
    top, left = i * op.stride[0] - op.padding[0], (j * op.stride[1] - op.padding[1]) * c
    found = np.zeros(depth, np.int64)
    for k in range(depth):
        r, e = divmod(k, row)
        in_window = r < op.kernel_size[0] and e < op.kernel_size[1] * c
        if in_window and 0 <= top + r < h and 0 <= left + e < w * c:
            found[k] = x.reshape(-1)[(top + r) * w * c + left + e]
    return found


@EACH_BITS
@pytest.mark.parametrize(
    "op",
    [
        Conv2d(3, 16, (7, 7), (2, 2), (3, 3)),
        Conv2d(16, 16, (3, 3), (1, 1), (1, 1)),
        Conv2d(5, 32, (1, 4), (1, 3), (0, 2)),
        Conv2d(144, 16, (1, 1)),
    ],
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}",
)
def test_gathered_pixels_times_packed_weights_are_the_convolution(op: Conv2d, bits: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (op.in_channels, 5, 6))
    limit = LIMITS[bits]
    weight = rng.integers(-limit, limit + 1, (op.out_channels, op.in_channels, *op.kernel_size))
    rows = unpacked(pack_weight(weight.astype(np.int8), op, bits), bits)
    padded = np.pad(x, ((0, 0), *((p, p) for p in op.padding)))
    _, _, oh, ow = op.infer((1, *x.shape))
    kh, kw = op.kernel_size
    image = np.ascontiguousarray(x.transpose(1, 2, 0))
    for i, j in np.ndindex(oh, ow):
        top, left = i * op.stride[0], j * op.stride[1]
        window = padded[:, top : top + kh, left : left + kw]
        expected = np.einsum("ocrs,crs->o", weight, window)
        np.testing.assert_array_equal(rows @ gathered_row(image, op, i, j), expected)


def test_packed_weights_are_whole_chunks_and_steps() -> None:
    for op in (Conv2d(3, 16, (7, 7)), Conv2d(64, 16, (3, 3)), Conv2d(16, 16, (1, 1))):
        assert packed_row(op) % CHUNK == 0
        assert packed_depth(op) % STEP == 0
        weight = np.ones((op.out_channels, op.in_channels, *op.kernel_size), np.int8)
        # The weights themselves, and nothing but zeros next to them.
        assert unpacked(pack_weight(weight, op, 2), 2).sum() == weight.size


def test_the_direct_convolution_of_nhwc_has_adjacent_outputs_adjacent() -> None:
    problem = problem_of(Conv2d(3, 5, (2, 2)), 1, 4, 4)
    weight = np.arange(60).reshape(5, 3, 2, 2) - 30
    weights = (weight, np.zeros(5), np.ones(5))
    plain, *_ = QuantizedDirect(layout=NCHW).pack(problem, weights)
    np.testing.assert_array_equal(plain, weight)
    moved, *_ = QuantizedDirect(layout=NHWC).pack(problem, weights)
    assert moved.flags.c_contiguous
    np.testing.assert_array_equal(moved, weight.transpose(2, 3, 1, 0))


def test_rows_of_a_linear_weight_are_padded_to_whole_chunks() -> None:
    problem = Problem(QuantizedLinear(Linear(37, 3)), ((2, 37),))
    weight = np.arange(111).reshape(3, 37) - 50
    packed, bias, multiplier = QuantizedWarpDot().pack(problem, (weight, np.arange(3), np.ones(3)))
    assert packed.shape == (3, 48)
    np.testing.assert_array_equal(packed[:, :37], weight)
    assert not packed[:, 37:].any()
    assert (bias.dtype, multiplier.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("kernel", [QuantizedDirect(), ChosenQuantizedMma()], ids=lambda k: k.id)
def test_weights_beyond_their_bits_are_refused(
    kernel: QuantizedDirect | ChosenQuantizedMma,
) -> None:
    problem = problem_of(Conv2d(16, 16, (1, 1)), 1, 2, 2, bits=4)
    weights = (np.full((16, 16, 1, 1), 8), np.zeros(16), np.ones(16))
    with pytest.raises(WeightsError, match="its integers are −7 … 7"):
        kernel.pack(problem, weights)


# -- tiles -------------------------------------------------------------------------------------


@EACH_TILE
def test_tiles_fit_every_architecture(tile: IntegerMmaTile) -> None:
    assert tile.k == STEP
    assert tile.shared_nbytes <= SHARED_NBYTES
    assert tile.threads * tile.blocks <= 1024
    # Accumulators, with eight columns of padding, reuse the memory of the stages.
    assert 4 * tile.m * (tile.n + 8) <= tile.shared_nbytes


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_the_choice_has_the_least_estimate(batch: int) -> None:
    for problem in convolutions(batch):
        chosen = choose(problem)
        if conv_of(problem).in_channels % CHUNK:
            assert chosen == GATHER_TILE
        else:
            least = min(estimate(problem, tile) for tile in TILES)
            assert estimate(problem, chosen) == least


def test_a_single_image_has_small_tiles_and_many_images_large_ones() -> None:
    problem = problem_of(Conv2d(512, 512, (3, 3), (1, 1), (1, 1)), 1, 7, 7)
    assert choose(problem) == TILES[-1]
    many = problem_of(conv_of(problem), 256, 7, 7)
    assert choose(many) == TILES[0]
    assert all(choose(p).n == 64 for p in convolutions(256) if p.output[1] == 64)


# -- launches ----------------------------------------------------------------------------------


def problems() -> Iterator[Problem]:
    """Problems of every op: small ones, and those of the network."""
    for stored, bits in product(STORAGES, LIMITS):
        yield problem_of(Conv2d(16, 48, (3, 3), (1, 1), (1, 1)), 2, 5, 6, stored, "int8", bits=bits)
        yield problem_of(Conv2d(3, 16, (7, 7), (2, 2), (3, 3)), 1, 16, 13, stored, bits=bits)
    for stored in STORAGES:
        for c in (1, 33, 512):
            yield Problem(QuantizedGlobalAvgPool(stored), ((3, c, 7, 7),))
            yield Problem(
                QuantizedMaxPool2d(MaxPool2d((3, 3), (2, 2), (1, 1)), stored), ((3, c, 5, 7),)
            )
        for n in (1, 64, 65):
            yield Problem(QuantizedLinear(Linear(37, 10), stored), ((n, 37),))
    for batch in (1, 256):
        for bits in LIMITS:
            yield from quantized(fuse(resnet18(), "all"), bits).problems(batch).values()
    yield fuse_classifier(quantized(fuse(resnet18(), "all"))).problems(8)["fc"]
    for shape in ((2, 3, 8, 8), (2, 3, 5, 5), (1, 20, 4, 4), (3, 1, 9, 9)):
        yield Problem(Quantize(), (shape,))
        normalize = Normalize((0.5,) * shape[1], (0.2,) * shape[1])
        yield Problem(QuantizePixels(normalize), (shape,))
        for stored, a, b in product(("uint8", "int8", "float32"), Layout, Layout):
            yield Problem(QuantizedRelayout(a, b, stored), (shape,))


def test_launches_are_within_limits_and_cover_their_outputs() -> None:
    """Launches fit the device's limits, cover their outputs, and name functions of their kernel."""
    taken = dict.fromkeys((kernel.id for kernel in KERNELS), 0)
    for problem in problems():
        for kernel in KERNELS:
            if kernel.refusal(problem) is not None:
                continue
            taken[kernel.id] += 1
            (launch,) = kernel.launches(problem)
            assert launch.entry in kernel.entries()
            assert all(g <= most for g, most in zip(launch.grid, MAX_GRID, strict=True))
            most = SHARED_NBYTES_SM_90 if kernel.family == "sm_90a" else SHARED_NBYTES
            assert launch.shared_nbytes <= most
            assert kernel.workspace(problem) == 0
    assert all(taken.values()), taken


def test_every_quantised_op_has_a_kernel_and_activations_one_in_each_layout() -> None:
    """Every quantised op has a kernel, activations in both layouts; the fused stem and classifier
    have tests of their own."""
    ops = set(QUANTIZED_OPS) - {QuantizedConvMaxPool}
    found = {(kernel.op, kernel.layout) for kernel in KERNELS}
    assert {op for op, _ in found} == ops
    for op in ops - {QuantizedLinear, QuantizedRelayout, QuantizedAvgPoolLinear}:
        assert {layout for kind, layout in found if kind is op} == set(Layout)


def test_ids() -> None:
    assert [kernel.id for kernel in KERNELS] == [
        "cupy/qconv2d/implicit_gemm_wgmma/int8/nhwc",
        "cupy/qconv2d/implicit_gemm_wgmma_resident/int8/nhwc",
        "cupy/qconv2d/implicit_gemm_wgmma_halo/int8/nhwc",
        "cupy/qconv2d/implicit_gemm_mma/int8/nhwc",
        "cupy/qconv2d/implicit_gemm_mma/int8/nhwc/m128n128k128",
        "cupy/qconv2d/implicit_gemm_mma/int8/nhwc/m128n64k128",
        "cupy/qconv2d/implicit_gemm_mma/int8/nhwc/m64n64k128",
        "cupy/qconv2d/implicit_gemm_mma/int8/nhwc/m32n32k128",
        "cupy/qconv2d/direct/int8/nhwc",
        "cupy/qconv2d/direct/int8",
        "cupy/qmaxpool2d/direct/int8/nhwc",
        "cupy/qmaxpool2d/direct/int8",
        "cupy/qgap/tree/int8/nhwc",
        "cupy/qgap/tree/int8",
        "cupy/quantize/divide/int8/nhwc",
        "cupy/quantize/divide/int8",
        "cupy/quantize_pixels/table/int8/nhwc",
        "cupy/quantize_pixels/table/int8",
        "cupy/qconv2d/direct_grouped/int8/nhwc",
        "cupy/qlinear/warp_dot/int8",
        "cupy/qlinear/tiled/int8",
        "cupy/qgap_linear/warp_dot/int8/nhwc",
        "cupy/qrelayout/transpose/int8",
    ]
    assert all(kernel.precision is INT8 for kernel in KERNELS)


def test_an_epilogue_is_told_of_its_residual_and_where_the_output_saturates() -> None:
    kernel = ChosenQuantizedMma()
    conv = Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
    (plain,) = kernel.launches(problem_of(conv, 1, 4, 4, "uint8"))
    bias, multiplier, residual, factor, is_signed = plain.arguments[2:7]
    assert (bias, multiplier) == (Pointer(Role.WEIGHT, 1), Pointer(Role.WEIGHT, 2))
    assert (residual, factor, is_signed) == (NULL, NULL, 0)
    assert plain.arguments[9:11] == (-128, 127)
    for stored in STORAGES:
        activated = replace(conv, relu=True)
        (added,) = kernel.launches(problem_of(activated, 1, 4, 4, "uint8", stored))
        expected = (Pointer(Role.INPUT, 1), Pointer(Role.WEIGHT, 3), stored == "int8")
        assert added.arguments[4:7] == expected
        assert added.arguments[9:11] == (0, 255)


@EACH_BITS
@pytest.mark.parametrize("stored", STORAGES)
def test_the_function_follows_from_storage_bits_and_channels(stored: str, bits: int) -> None:
    kernel = ChosenQuantizedMma()
    image = {"uint8": "unsigned char", "int8": "signed char"}[stored]
    for channels, gather in ((16, 0), (3, 1), (24, 1)):
        problem = problem_of(Conv2d(channels, 16, (3, 3)), 1, 9, 9, stored, bits=bits)
        (launch,) = kernel.launches(problem)
        macros = {("IMAGE", image), ("BITS", bits), ("GATHER", gather)}
        assert macros <= set(launch.entry.defines)


def grid_of(launches: tuple[GridLaunch, ...]) -> tuple[str, int]:
    (launch,) = launches
    return launch.entry.symbol, launch.grid[0]


def test_pooling_takes_whole_vectors_where_pixels_are_aligned() -> None:
    pool = MaxPool2d((3, 3), (2, 2), (1, 1))
    for layout, c, threads in ((NHWC, 64, 4 * 24), (NHWC, 24, 24 * 24), (NCHW, 64, 64 * 24)):
        problem = Problem(QuantizedMaxPool2d(pool), ((2, c, 5, 8),))
        blocks = -(-threads // 256)
        launches = QuantizedMaxPool(layout=layout).launches(problem)
        assert grid_of(launches) == (f"qmaxpool2d_{layout.value}", blocks)
    for c, blocks in ((512, 4), (130, 5), (4, 1), (3, 1)):
        problem = Problem(QuantizedGlobalAvgPool(), ((3, c, 7, 7),))
        assert grid_of(QuantizedGap(layout=NHWC).launches(problem)) == ("qgap_nhwc", 3 * blocks)
        nchw = QuantizedGap(layout=NCHW).launches(problem)
        assert grid_of(nchw) == ("qgap_nchw", -(-3 * c // 8))


def test_images_are_quantised_by_the_vector_where_they_can_be() -> None:
    nhwc, nchw = QuantizeKernel(layout=NHWC), QuantizeKernel(layout=NCHW)
    for shape, symbol, threads in (
        ((2, 3, 8, 6), "quantize_rgb_to_nhwc", 24),
        ((2, 3, 5, 5), "quantize_any_to_nhwc", 150),
        ((2, 4, 8, 6), "quantize_any_to_nhwc", 384),
        ((2, 1, 5, 5), "quantize_elements", 4),
        ((2, 7, 1, 1), "quantize_elements", 1),
        ((2, 19), "quantize_elements", 3),
    ):
        problem = Problem(Quantize(), (shape,))
        assert grid_of(nhwc.launches(problem)) == (symbol, -(-threads // 256))
        assert input_layout(nhwc, problem) is NCHW
        assert grid_of(nchw.launches(problem)) == ("quantize_elements", 1)


def test_pixels_are_looked_up_by_the_vector_where_they_can_be() -> None:
    for layout, c, area, symbol in (
        (NHWC, 3, (5, 5), "quantize_pixels_nhwc"),
        (NHWC, 16, (5, 5), "quantize_pixels_nhwc"),
        (NHWC, 17, (5, 5), "quantize_pixels_any"),
        (NCHW, 3, (4, 4), "quantize_pixels_rgb_to_nchw"),
        (NCHW, 3, (4, 5), "quantize_pixels_any"),
        (NCHW, 4, (4, 4), "quantize_pixels_any"),
    ):
        op = QuantizePixels(Normalize((0.5,) * c, (0.2,) * c))
        kernel = QuantizePixelsKernel(layout=layout)
        assert grid_of(kernel.launches(Problem(op, ((2, c, *area),))))[0] == symbol


def test_a_layout_changes_by_the_size_of_the_values() -> None:
    kernel = QuantizedTranspose()
    for stored, bits in (
        ("uint8", "unsigned char"),
        ("int8", "unsigned char"),
        ("float32", "unsigned"),
    ):
        problem = Problem(QuantizedRelayout(NCHW, NHWC, stored), ((2, 3, 8, 8),))
        (launch,) = kernel.launches(problem)
        assert ("BITS", bits) in launch.entry.defines
        assert launch.grid == (2, 1, 1)


# -- refusals ----------------------------------------------------------------------------------


def test_refusals() -> None:
    stem = problem_of(Conv2d(3, 64, (7, 7), (2, 2), (3, 3)), 1, 16, 16, "int8")
    for tile in TILES:
        reason = FixedQuantizedMma(config=tile).refusal(stem)
        expected = (
            None if tile == GATHER_TILE else "copies 16 channels at a time, and 3 is not a multiple"
        )
        assert reason == expected
    assert ChosenQuantizedMma().refusal(stem) is None
    ragged = problem_of(Conv2d(16, 10, (1, 1)), 1, 4, 4)
    reason = "stores 16 channels at a time, and 10 is not a multiple"
    assert ChosenQuantizedMma().refusal(ragged) == reason
    assert QuantizedDirect(layout=NHWC).refusal(ragged) is None

    wide = problem_of(Conv2d(16, 16, (1, 1), (1, 2**20), (0, 2**28)), 1, 1, 1)
    assert "the padded image reaches over" in str(ChosenQuantizedMma().refusal(wide))

    small, large = (Problem(QuantizedLinear(Linear(512, 1000)), ((n, 512),)) for n in (64, 65))
    assert QuantizedWarpDot().refusal(small) is None
    assert QuantizedWarpDot().refusal(large) == (
        "reads the weights once for every 4 samples, so it takes batches of at most 64, not 65"
    )
    assert QuantizedTiledLinear().refusal(large) is None
    broad = Problem(QuantizedLinear(Linear(2**16, 2**15)), ((1, 2**16),))
    assert str(QuantizedWarpDot().refusal(broad)).startswith("indexes with 32 bits")


# -- arithmetic --------------------------------------------------------------------------------


def network_entries() -> list[Entry]:
    """The functions that a quantised ResNet-18 launches at batch 256."""
    found: dict[Entry, None] = {}
    for kernel, problem in product(
        KERNELS, quantized(fuse(resnet18(), "all")).problems(256).values()
    ):
        if kernel.refusal(problem) is None and kernel.variant_of is None:
            found |= dict.fromkeys(launch.entry for launch in kernel.launches(problem))
    return list(found)


@pytest.mark.parametrize("entry", network_entries(), ids=lambda entry: entry.label)
def test_no_operation_is_fused_flushed_or_approximate(entry: Entry) -> None:
    """No instruction is fused, flushed or approximate: fma rounds once where two are specified."""
    ptx = compile_ptx(entry, "sm_90")
    numbers = re.findall(r"\b(?:fma|mad|add|sub|mul|div|rcp|cvt)[.\w]*\.f32[.\w]*", ptx)
    for instruction in numbers:
        assert not instruction.startswith(("fma", "mad", "rcp")), instruction
        assert not {"ftz", "approx", "full", "rz", "rm", "rp"} & set(instruction.split(".")), (
            instruction
        )
    if entry.symbol.startswith("qconv2d"):
        assert {"mul.rn.f32", "add.rn.f32", "cvt.rn.f32.s32", "cvt.rni.s32.f32"} <= set(numbers)
    if entry.symbol.startswith("quantize_"):
        assert "div.rn.f32" in numbers


@EACH_TILE
def test_tiles_multiply_bytes_by_the_sign_of_the_image(tile: IntegerMmaTile) -> None:
    kernel = FixedQuantizedMma(config=tile)
    for stored, kind in (("uint8", "u8.s8"), ("int8", "s8.s8")):
        ptx = compile_ptx(kernel.entry(tile, stored, 8, False), "sm_80")
        found = set(re.findall(r"mma\.sync[.\w]*", ptx))
        assert found == {f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s32"}


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("bits", LIMITS)
def test_a_whole_network_is_planned_in_nhwc(sm: str, bits: int) -> None:
    """Plans from float images and from pixels change no layout on the way. The fused stem makes the
    integers of either."""
    convolution = {"sm_75": "direct", "sm_90": "implicit_gemm_wgmma"}.get(sm, "implicit_gemm_mma")
    backend = On(capability(sm))
    integers = quantized(fuse(resnet18(), "all"), bits)
    for batch, pixels in product((1, 256), (None, Preprocess().normalize)):
        options = CompileOptions(precision="int8", batch=batch, pixels=pixels)
        plan = make_plan(backend, integers, options)
        ops = [step.problem.op for step in plan.steps]
        assert not [op for op in ops if isinstance(op, QuantizedRelayout)]
        images = [step.kernel for step in plan.steps if len(step.problem.output) == 4]
        assert not [kernel for kernel in images if kernel.layout is NCHW]
        makers = {type(op) for op in ops} & {Quantize, QuantizePixels}
        assert makers == (set() if sm == "sm_90" else {QuantizePixels if pixels else Quantize})
        assert any(isinstance(op, QuantizedConvMaxPool) for op in ops) == (sm == "sm_90")
        convs = {
            s.kernel.algorithm for s in plan.steps if isinstance(s.problem.op, QuantizedConv2d)
        }
        assert convs == {convolution}
        assert plan.steps[-1].kernel.algorithm == ("warp_dot" if batch == 1 else "tiled")


def test_the_tiny_network_has_a_plan_too() -> None:
    """The tiny network has few channels: some convolutions are direct, and some of 8 channels go to
    `mma.sync` on every device."""
    for sm, wide in (((8, 0), set()), ((9, 0), {"implicit_gemm_wgmma"})):
        options = CompileOptions(precision="int8")
        plan = make_plan(On(sm), quantized(fuse(tiny(), "all")), options)
        convs = {
            s.kernel.algorithm for s in plan.steps if isinstance(s.problem.op, QuantizedConv2d)
        }
        assert convs == {"direct", "implicit_gemm_mma"} | wide
    with pytest.raises(NoKernel, match="copies 16 channels at a time, and 3 is not a multiple"):
        make_plan(
            On((9, 0)),
            quantized(fuse(resnet18(), "all")),
            CompileOptions(precision="int8", kernels={"conv1": "cupy/qconv2d/*/m128n64k128"}),
        )


def test_shared_memory_beyond_the_default_is_asked_for() -> None:
    """A launch requests shared memory beyond the default, or the driver would refuse the block."""
    (launch,) = FixedQuantizedMma(config=TILES[0]).launches(
        problem_of(Conv2d(16, 16, (1, 1)), 1, 4, 4)
    )
    assert launch.shared_nbytes == TILES[0].shared_nbytes > DEFAULT_SHARED
