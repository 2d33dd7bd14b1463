"""The tensor-core convolution without a GPU: packed weights, the choice of tiles, refusals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from cuda_support import On
from r18.backend import Array, CompileOptions
from r18.errors import NoKernel
from r18.graph.ops import Conv2d, ConvMaxPool, ConvProjection, Layout, Problem
from r18.graph.passes import fuse
from r18.graph.precision import BF16, FP16, FP16X3, TF32, Precision
from r18.graph.resnet import resnet18, tiny
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan
from r18_cupy import Backend
from r18_cupy.catalogue import all_kernels, kernels_for
from r18_cupy.conv.implicit_gemm_mma import (
    MAX_PARTS,
    ROW_BYTES,
    Blocking,
    ChosenMma,
    FixedMma,
    choose,
    chunk_of,
    estimate,
    gathers,
    implicit_gemm_mma_kernels,
    pack_split,
    pack_weight,
    packed_depth,
    packed_row,
    possible_parts,
    round_to_tf32,
    tiles_of,
)
from r18_cupy.conv.operands import split
from r18_cupy.cuda.compiler import compile_ptx
from r18_cupy.cuda.launch import NULL, OUT, WORKSPACE, GridLaunch, Pointer, Role
from r18_cupy.hopper.implicit_gemm_wgmma import ImplicitGemmWgmma
from r18_cupy.hopper.linear_wgmma import LinearWgmma
from r18_cupy.stem.few_channels_mma import operand_dtype
from r18_oracle.search.coverage import uncovered

PRECISIONS = pytest.mark.parametrize("precision", [FP16, BF16, TF32, FP16X3], ids=str)
SHARED_NBYTES = 99 * 1024  # a block's on sm_86, sm_89 and sm_120, the least from sm_80 on


def problem_of(op: Conv2d, n: int, h: int, w: int) -> Problem:
    x = (n, op.in_channels, h, w)
    return Problem(op, (x, replace(op, residual=False).infer(x)) if op.residual else (x,))


def convolutions(batch: int) -> dict[str, Problem]:
    found = fuse(resnet18(), "all").problems(batch)
    return {name: problem for name, problem in found.items() if isinstance(problem.op, Conv2d)}


def pointers(launch: GridLaunch) -> list[Pointer]:
    return [argument for argument in launch.arguments if isinstance(argument, Pointer)]


def gathered_row(x: Array, op: Conv2d, precision: Precision, i: int, j: int) -> Array:
    """The row of A of output pixel (i, j) of an image x (H,W,C), as the device code finds it."""
    h, w, c = x.shape
    row, depth = packed_row(op, precision), packed_depth(op, precision)
    top = i * op.stride[0] - op.padding[0]
    left = (j * op.stride[1] - op.padding[1]) * c
    found = np.zeros(depth)
    for k in range(depth):
        r, e = divmod(k, row)
        in_window = r < op.kernel_size[0] and e < op.kernel_size[1] * c
        if in_window and 0 <= top + r < h and 0 <= left + e < w * c:
            found[k] = x.reshape(-1)[(top + r) * w * c + left + e]
    return found


def registers(rows: Array) -> Array:
    """Rows of 16 float32 elements in the order of mma's operands, after ldmatrix.

    Lane l has 4 of a chunk's 16 bytes, at l % 4; those of two chunks are one register.
    PTX ISA, "Matrix Fragments for mma.m16n8k16": it holds elements 2·(l % 4) and the next one, of
    either half of K.
    """
    found = np.zeros_like(rows)
    for half, lane in np.ndindex(2, 4):
        for chunk in range(2):
            found[:, half * 8 + lane * 2 + chunk] = rows[:, (half * 2 + chunk) * 4 + lane]
    return found


def as_multiplied(packed: Array, precision: Precision) -> Array:
    """Packed weights as [part][O][depth], in the same order for every precision."""
    if not precision.splits:
        return packed[np.newaxis].astype(np.float64)
    parts = packed.transpose(2, 0, 1, 3).astype(np.float64)
    return parts.reshape(2, len(packed), -1)


@PRECISIONS
@pytest.mark.parametrize(
    "op",
    [
        Conv2d(3, 5, (7, 7), (2, 2), (3, 3)),
        Conv2d(8, 4, (3, 3), (1, 1), (1, 1)),
        Conv2d(5, 2, (1, 4), (1, 3), (0, 2)),
        Conv2d(1, 1, (6, 2), (4, 1), (4, 1)),
        Conv2d(72, 3, (1, 1)),
    ],
    ids=lambda op: f"c{op.in_channels}k{op.kernel_size[0]}x{op.kernel_size[1]}",
)
def test_gathered_pixels_times_packed_weights_are_the_convolution(
    precision: Precision, op: Conv2d
) -> None:
    """Small integers: every product and sum is exact, so the results are equal."""
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (1, op.in_channels, 5, 6)).astype(np.float64)
    weight = rng.integers(-4, 5, (op.out_channels, op.in_channels, *op.kernel_size))
    packed, *seconds = as_multiplied(pack_weight(weight * 1.0, op, precision), precision)
    assert not np.any(seconds)  # small integers are float16 numbers
    padded = np.pad(x[0], ((0, 0), *((p, p) for p in op.padding)))
    _, _, oh, ow = op.infer(x.shape)
    kh, kw = op.kernel_size
    for i in range(oh):
        for j in range(ow):
            top, left = i * op.stride[0], j * op.stride[1]
            window = padded[:, top : top + kh, left : left + kw]
            expected = np.einsum("ocrs,crs->o", weight, window)
            image = np.ascontiguousarray(x[0].transpose(1, 2, 0))
            row = gathered_row(image, op, precision, i, j)
            got = packed @ (registers(row.reshape(-1, 16)).ravel() if seconds else row)
            np.testing.assert_array_equal(got, expected)


@PRECISIONS
def test_packed_weights_are_whole_chunks_and_steps(precision: Precision) -> None:
    for op in (Conv2d(3, 5, (7, 7)), Conv2d(64, 2, (3, 3)), Conv2d(1, 1, (1, 1))):
        assert packed_row(op, precision) % chunk_of(precision) == 0
        assert packed_depth(op, precision) * precision.dtype.itemsize % ROW_BYTES == 0
        weight = np.ones((op.out_channels, op.in_channels, *op.kernel_size))
        packed = pack_weight(weight, op, precision)
        assert packed.dtype == operand_dtype(precision)
        assert packed.nbytes == len(packed) * packed_depth(op, precision) * precision.dtype.itemsize
        # The weights themselves, and nothing but zeros next to them.
        assert packed.astype(np.float64).sum() == weight.size


def test_split_weights_have_both_parts_in_a_row_of_a_tile() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    packed = pack_split(rows)
    assert packed.shape == (3, 2, 2, 32)
    for part, expected in enumerate(split(rows)):
        for step in range(4):
            got = packed[:, step // 2, part, step % 2 * 16 :][:, :16]
            np.testing.assert_array_equal(got, registers(expected[:, step * 16 :][:, :16]))


def test_rounding_to_tf32() -> None:
    one = np.float32(1)
    tie = np.float32(1 + 2.0**-11)  # half of the last of 10 fraction bits
    values = np.array(
        [one, tie, -tie, np.nextafter(tie, one), np.inf, -np.inf, np.finfo(np.float32).max, 0.0],
        np.float32,
    )
    up = 1 + 2.0**-10
    expected = np.array([1, up, -up, 1, np.inf, -np.inf, np.inf, 0.0], np.float32)
    np.testing.assert_array_equal(round_to_tf32(values), expected)
    # A NaN with low bits alone stays one when the unit ignores them.
    nan = round_to_tf32(np.array([0x7F800001, 0xFF800FFF], np.uint32).view(np.float32))
    assert np.isnan((nan.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)).all()


def test_convolutions_in_tf32_round_their_outputs_and_nothing_else_does() -> None:
    """Exactly the kernels whose contract has tf32 outputs compile with `TF32_OUTPUT`."""
    for kernel in all_kernels():
        convolves = kernel.precision == TF32 and kernel.op in (Conv2d, ConvMaxPool, ConvProjection)
        assert (kernel.contract.output == "tf32") == convolves, kernel.id
        macros = [dict(entry.defines) for entry in kernel.entries()]
        assert all(("TF32_OUTPUT" in of) == convolves for of in macros), kernel.id


def test_an_output_in_tf32_is_rounded_last() -> None:
    """An output is rounded to tf32 after bias, residual and ReLU, as `round_to_tf32` does."""
    linear = LinearWgmma(TF32)
    for entry, plain in zip(ImplicitGemmWgmma(TF32).entries(), linear.entries(), strict=True):
        assert set(entry.defines) - set(plain.defines) == {("TF32_OUTPUT", 1)}
    assert linear.contract.output == "float32"
    entry = ChosenMma(TF32).reduction
    code = compile_ptx(entry, "sm_80")
    (rounding,) = re.findall(r"cvt\.rna\.tf32\.f32 (%\w+), (%\w+);", code)
    after = code.partition("cvt.rna.tf32.f32")[2]
    assert "st.global" in after
    assert not re.search(r"\b(add|max|selp|fma)\.\w*\.?f32", after)
    assert "cvt.rna" not in compile_ptx(ChosenMma(FP16X3).reduction, "sm_80")
    assert rounding[0] != rounding[1]


def test_tf32_rounds_weights_and_no_biases() -> None:
    op = Conv2d(4, 1, (1, 1), bias=True)
    fine = np.float32(1 + 2.0**-20)
    weights = (np.full((1, 4, 1, 1), fine), np.array([fine]))
    weight, bias = ChosenMma(TF32).pack(problem_of(op, 1, 2, 2), weights)
    np.testing.assert_array_equal(weight[0, :4], np.ones(4))
    np.testing.assert_array_equal(bias, [fine])


# -- tiles and parts ---------------------------------------------------------------------------


@PRECISIONS
def test_tiles_fit_every_architecture(precision: Precision) -> None:
    for tile in tiles_of(precision):
        assert tile.k * precision.dtype.itemsize == ROW_BYTES
        assert tile.shared_nbytes <= SHARED_NBYTES
        assert tile.threads * tile.blocks <= 1024


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 9, 36, 72, 1000])
def test_no_part_is_empty(steps: int) -> None:
    parts = possible_parts(steps)
    assert parts[0] == 1
    assert parts[-1] <= min(steps, MAX_PARTS)
    for count in parts:
        each = math.ceil(steps / count)
        assert (count - 1) * each < steps <= count * each


@PRECISIONS
@pytest.mark.parametrize("batch", [1, 64])
def test_the_choice_has_the_least_estimate_and_fills_the_device(
    precision: Precision, batch: int
) -> None:
    for name, problem in convolutions(batch).items():
        op = cast(Conv2d, problem.op)
        chosen = choose(problem, precision)
        least = estimate(problem, precision, chosen)
        if not gathers(op, precision):
            for tile in tiles_of(precision):
                assert least <= estimate(problem, precision, Blocking(tile)), name
    # The last convolution has 49 pixels an image: its sums are in parts at batch 1; large tiles at
    # batch 64, but where these would leave half of the device idle in the end.
    last = choose(convolutions(batch)["layer4.1.conv2"], precision)
    small = precision.splits
    assert last.parts > 8 if batch == 1 else last.tile == tiles_of(precision)[1 if small else 0]
    # At batch 64 layer1 has tiles enough, none of more channels than there are.
    if batch == 64:
        assert choose(convolutions(batch)["layer1.0.conv2"], precision).parts == 1
        assert choose(convolutions(batch)["layer1.0.conv2"], precision).tile.n == 64


@PRECISIONS
def test_one_part_is_written_out_and_several_are_reduced(precision: Precision) -> None:
    kernel = ChosenMma(precision)
    split = convolutions(1)["layer4.1.conv2"]
    product, reduction = kernel.launches(split)
    parts = choose(split, precision).parts
    assert (product.phase, reduction.phase) == ("gemm", "reduce")
    assert product.grid[1] == parts
    assert OUT not in pointers(product)
    assert WORKSPACE in pointers(product)
    assert kernel.workspace(split) == 4 * parts * math.prod(split.output)
    # Bias and residual belong to the launch that ends the sums.
    residual = Pointer(Role.INPUT, 1)
    assert residual in pointers(reduction)
    assert residual not in pointers(product)

    fixed = FixedMma(precision, config=tiles_of(precision)[0])
    (whole,) = fixed.launches(split)
    assert whole.phase == ""
    assert fixed.workspace(split) == 0
    assert residual in pointers(whole)
    assert whole.arguments[5] is NULL


def test_what_the_choice_depends_on_is_declared() -> None:
    """A kernel whose parts of K vary with the batch is not batch-invariant; a fixed tile is."""
    one, many = (convolutions(batch)["layer4.1.conv2"] for batch in (1, 64))
    assert choose(one, FP16).parts != choose(many, FP16).parts
    assert not ChosenMma(FP16).batch_invariant
    assert FixedMma(FP16, config=tiles_of(FP16)[0]).batch_invariant


# -- kernels -----------------------------------------------------------------------------------


def test_ids() -> None:
    assert [kernel.id for kernel in implicit_gemm_mma_kernels() if kernel.precision is TF32] == [
        "cupy/conv2d/implicit_gemm_mma/tf32/nhwc",
        "cupy/conv2d/implicit_gemm_mma/tf32/nhwc/m128n128k32",
        "cupy/conv2d/implicit_gemm_mma/tf32/nhwc/m128n64k32",
        "cupy/conv2d/implicit_gemm_mma/tf32/nhwc/m64n64k32",
    ]
    assert [kernel.id for kernel in implicit_gemm_mma_kernels() if kernel.precision is FP16X3] == [
        "cupy/conv2d/implicit_gemm_mma/fp16x3/nhwc",
        "cupy/conv2d/implicit_gemm_mma/fp16x3/nhwc/m128n64k32",
        "cupy/conv2d/implicit_gemm_mma/fp16x3/nhwc/m64n64k32",
    ]
    assert all(kernel.layout is Layout.NHWC for kernel in implicit_gemm_mma_kernels())


def test_a_tile_of_another_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match="is no tile of tf32"):
        FixedMma(TF32, config=tiles_of(FP16)[0])


def test_refusals() -> None:
    stem = problem_of(Conv2d(3, 8, (7, 7), (2, 2), (3, 3)), 1, 16, 16)
    large, _, small = (FixedMma(FP16, config=tile) for tile in tiles_of(FP16))
    assert large.refusal(stem) == "copies 8 channels at a time, and 3 is not a multiple"
    assert small.refusal(stem) is None
    assert ChosenMma(FP16).refusal(stem) is None
    # The stem's channels are gathered; 64 are copied whole.
    assert ("GATHER", 1) in small.launches(stem)[0].entry.defines
    whole = problem_of(Conv2d(64, 8, (3, 3)), 1, 16, 16)
    assert ("GATHER", 0) in small.launches(whole)[0].entry.defines

    wide = Conv2d(8, 1, (1, 1), (1, 2**20), (0, 2**28))
    reason = ChosenMma(FP16).refusal(problem_of(wide, 1, 1, 1))
    assert reason is not None
    assert reason.startswith("indexes with 32 bits")


def test_a_device_that_is_too_old_is_not_offered_the_kernels() -> None:
    mma = set(implicit_gemm_mma_kernels())
    turing, ampere = ({kernel.id for kernel in kernels_for(c)} for c in ((7, 5), (8, 0)))
    everything = {kernel.id for kernel in all_kernels()}
    assert {kernel.id for kernel in mma} <= ampere
    assert not {kernel.id for kernel in mma} & turing
    assert {kernel.id for kernel in kernels_for(None)} == everything
    # Nothing is left out before a device is known.
    assert {kernel.id for kernel in Backend().kernels()} == everything


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("schedule", [resnet18(softmax=True), tiny()], ids=lambda s: s.name)
def test_split_products_serve_whole_networks_from_ampere_on(
    capability: tuple[int, int], schedule: Schedule
) -> None:
    missing = uncovered(On(capability), schedule, (1, 100))
    assert not [problem for precision, problem in missing if precision == "fp16x3"]


def test_split_products_are_refused_before_ampere() -> None:
    with pytest.raises(NoKernel, match="precisions with kernels for conv2d: bf16, fp16, fp32"):
        make_plan(On((7, 5)), tiny(), CompileOptions(1, "fp16x3"))
