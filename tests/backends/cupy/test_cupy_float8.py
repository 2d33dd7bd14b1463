"""The e4m3 kernels without a GPU: packed weights and keys in NumPy, tiles, launches, PTX, plans."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from compiled import compiled, label
from cuda_support import On, parameters
from r18.backend import CompileOptions
from r18.errors import NoKernel
from r18.graph.ops import Conv2d, Layout, Linear, MaxPool2d, Problem, Relayout
from r18.graph.passes import fuse, fuse_image, fuse_pool
from r18.graph.precision import E4M3, FP8, as_stored
from r18.graph.resnet import resnet18, tiny
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18.graph.scaling import scaled
from r18.runtime.plan import make_plan
from r18_cupy.bytes.implicit_gemm_wgmma import blocks_at_once
from r18_cupy.bytes.wgmma import ROW_ORDER, ByteTile, packed_depth
from r18_cupy.bytes.wgmma_halo import RESIDENT_TILES, blocking_of
from r18_cupy.cuda.compiler import capability, compile_ptx
from r18_cupy.cuda.h200 import MULTIPROCESSOR_NBYTES, RESERVED_NBYTES, SHARED_NBYTES
from r18_cupy.cuda.launch import DEFAULT_SHARED, MAX_GRID, NULL, Pointer, Role
from r18_cupy.float8 import few_channels_mma as few
from r18_cupy.float8.catalogue import float8_kernels
from r18_cupy.float8.direct import ScaledDirect
from r18_cupy.float8.few_channels_mma import ScaledFewChannelsMma
from r18_cupy.float8.implicit_gemm_wgmma import TILES, ScaledImplicitGemmWgmma
from r18_cupy.float8.kernel import FRACTION
from r18_cupy.float8.stem_wgmma import ScaledStemWgmma
from r18_cupy.float8.wgmma import PROMOTED, ScaledWgmmaConv
from r18_cupy.float8.wgmma_halo import (
    HALO_TILES,
    ScaledHaloConv,
    ScaledImplicitGemmWgmmaHalo,
    ScaledImplicitGemmWgmmaResident,
)
from r18_oracle.judge.declared import FRACTIONS, objection

KERNELS = float8_kernels()
GEMM, STEM = ScaledImplicitGemmWgmma(), ScaledFewChannelsMma()
RESIDENT, HALO = ScaledImplicitGemmWgmmaResident(), ScaledImplicitGemmWgmmaHalo()
CHOOSING: tuple[ScaledWgmmaConv, ...] = (RESIDENT, GEMM, HALO)
REGISTERS = 65_536  # of a multiprocessor
NUMBERS = np.arange(256, dtype=np.uint8).view(E4M3)


def problem_of(conv: Conv2d, n: int, h: int, w: int) -> Problem:
    op, image = replace(conv, bias=True), (n, conv.in_channels, h, w)
    made = replace(op, residual=False).infer(image)
    return Problem(ScaledConv2d(op), (image, made) if op.residual else (image,))


def problems() -> Iterator[Problem]:
    """Problems of every op: small ones, the kernels' own, and the network's."""
    yield problem_of(Conv2d(16, 48, (3, 3), (1, 1), (1, 1), residual=True), 2, 5, 6)
    yield problem_of(Conv2d(3, 16, (7, 7), (2, 2), (3, 3), relu=True), 1, 16, 13)
    for c in (1, 33, 512):
        yield Problem(ScaledGlobalAvgPool(), ((3, c, 7, 7),))
        yield Problem(MaxPool2d((3, 3), (2, 2), (1, 1)), ((3, c, 5, 7),))
    for n in (1, 16, 17):
        yield Problem(ScaledLinear(Linear(37, 10)), ((n, 37),))
        yield Problem(ScaledAvgPoolLinear(ScaledLinear(Linear(37, 10))), ((n, 37, 3, 3),))
    for shape in ((2, 3, 8, 8), (2, 3, 5, 5), (1, 20, 4, 4), (3, 1, 9, 9)):
        yield Problem(Scale(), (shape,))
        yield Problem(Relayout(Layout.NCHW, Layout.NHWC), (shape,))
    for batch in (1, 8, 256):
        plain = scaled(fuse(resnet18(), "all"))
        for schedule in (plain, fuse_image(fuse_pool(plain))):
            yield from schedule.problems(batch).values()
    for kernel in KERNELS:
        yield from kernel.extra_problems


# -- packed weights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        Conv2d(3, 64, (7, 7), (2, 2), (3, 3)),
        Conv2d(4, 80, (8, 8), (1, 3), (4, 4)),
        Conv2d(1, 16, (1, 5), (3, 1), (0, 2)),
    ],
)
def test_the_stem_s_fragments_are_the_convolution(op: Conv2d) -> None:
    """The stem's packed words, multiplied row by row as lanes read them, give the convolution."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (1, op.in_channels, 11, 29)).astype(np.float64)
    weight = rng.integers(-3, 4, op.weights()[0].shape).astype(np.float64)
    packed = few.pack_weight(weight)
    tiles, kh = packed.shape[:2]
    assert packed.shape == (tiles, kh, 2, few.CHANNELS, few.TAPS // 2, few.WORD)
    _, _, oh, ow = op.infer(x.shape)
    (sh, sw), (ph, pw) = op.stride, op.padding
    expected = F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), None, op.stride, op.padding)
    words = np.zeros((x.shape[2] + 32, x.shape[3] + 64, few.WORD))  # pixels, with zeros around
    words[ph : ph + x.shape[2], pw : pw + x.shape[3], : op.in_channels] = x[0].transpose(1, 2, 0)
    found = np.zeros((op.out_channels, oh, ow))
    for channel in range(op.out_channels):
        tile, at = divmod(channel, few.CHANNELS)
        for i, j in np.ndindex(oh, ow):
            for r in range(kh):
                for quarter, half in np.ndindex(4, 2):  # of a lane, and its register
                    pixel = words[i * sh + r, j * sw + quarter + 4 * half]
                    found[channel, i, j] += pixel @ packed[tile, r, half, at, quarter]
    np.testing.assert_array_equal(found, expected[0].numpy())


def test_shared_memory_of_the_stem_is_what_the_device_lays_out() -> None:
    op = Conv2d(3, 64, (7, 7), (2, 2), (3, 3), bias=True)
    weights, pixels = 7 * 64 * 8 * 4, (3 * 2 + 7) * (31 * 2 + 8) * 4
    assert few.shared_nbytes(op) == weights + pixels
    assert few.shared_nbytes(Conv2d(1, 16, (1, 1))) == 4 * 32 * 64  # the outputs take more


def test_a_gemm_s_weights_are_bytes_in_the_integers_order() -> None:
    conv = Conv2d(144, 48, (3, 1), bias=True)
    problem = problem_of(conv, 1, 5, 5)
    weight = np.random.default_rng(1).standard_normal(problem.op.weights()[0].shape)
    rest = [np.ones(spec.shape) for spec in problem.op.weights()[1:]]
    packed, *_ = GEMM.pack(problem, (weight, *rest))
    assert packed.dtype == np.int8
    assert packed.shape == (48, packed_depth(conv, 128)) == (48, 3 * 256)
    rows = np.empty_like(packed)
    rows.reshape(3, 16, -1)[:, ROW_ORDER] = packed.reshape(3, 16, -1)
    found = rows.view(E4M3).reshape(48, 3, 1, 256)[..., :144].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(found.astype(np.float64), as_stored(weight, E4M3).astype(float))
    assert not rows.reshape(48, 3, 256)[..., 144:].any()


# -- max-pooling -------------------------------------------------------------------------------


def key_of(byte: int) -> int:
    """The key of an e4m3 byte, as kernels/float8/maxpool2d.cu makes it."""
    if byte & 0x7F == 0x7F:
        byte &= 0x7F
    return byte ^ (0xFF if byte > 0x7F else 0x80)


def number_of(key: int) -> int:
    return key ^ (0x80 if key > 0x7F else 0xFF)


def test_keys_have_the_order_of_the_numbers() -> None:
    bytes_ = list(range(256))
    wide = NUMBERS.astype(np.float64)
    for byte in bytes_:
        back = number_of(key_of(byte))
        assert back == (0x7F if byte == 0xFF else byte)
        assert key_of(byte) > 0  # which never wins
    for a in bytes_:
        for b in bytes_:
            if np.isnan(wide[a]) or np.isnan(wide[b]):
                assert max(key_of(a), key_of(b)) == key_of(0x7F)
            elif wide[a] < wide[b]:
                assert key_of(a) < key_of(b)


# -- tiles and launches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [(kernel, tile) for kernel in CHOOSING for tile in kernel.tiles],
    ids=lambda one: one.name if isinstance(one, ByteTile) else one.algorithm,
)
def test_tiles_are_legal(kernel: ScaledWgmmaConv, tile: ByteTile) -> None:
    assert tile.m == 64 * tile.groups_m
    assert tile.groups_m * tile.groups_n <= 2
    assert PROMOTED % tile.k == 0
    assert tile.parts in (1, 2, 4, 8)
    if kernel is GEMM:
        assert tile.shared_nbytes <= SHARED_NBYTES
        assert tile.blocks * (tile.shared_nbytes + RESERVED_NBYTES) <= MULTIPROCESSOR_NBYTES
    found = compiled(kernel.entry(tile), "sm_90a")
    assert found.threads == tile.threads
    assert found.registers * tile.threads * tile.blocks <= REGISTERS, label(kernel.entry(tile))
    assert not found.spill_nbytes
    assert not found.serialized
    assert len({one.name for one in kernel.tiles}) == len(kernel.tiles)


def test_sums_are_promoted_as_the_contract_says() -> None:
    """With `PROMOTED` products a run, no product passes through more additions that round than the
    bound has promoted sums; or runs are so short that less is cut off than the bound allows."""
    checked = 0
    for problem in problems():
        for kernel in CHOOSING:
            if kernel.refusal(problem) is not None:
                continue
            tile = kernel.tile_for(problem)
            assert tile is not None
            op = cast(ScaledConv2d, problem.op).conv
            if kernel is RESIDENT:
                assert kernel.contract.promoted == 0
                continue
            assert kernel.contract.promoted == PROMOTED
            run, k_tiles = PROMOTED // tile.k, packed_depth(op, tile.k) // tile.k
            longest = -(-k_tiles // tile.parts)  # of a CTA
            additions = -(-(longest + run // 2) // run) - 1 + min(tile.parts, k_tiles) - 1
            allowed = math.prod(op.kernel_size) * -(-op.in_channels // PROMOTED)
            products = min(op.in_channels, tile.k) * min(run, longest)
            assert additions <= allowed or products <= min(op.depth, PROMOTED) / 2
            checked += 1
    assert checked > 50


def test_contracts_say_what_a_unit_keeps() -> None:
    assert FRACTIONS[FP8.multiply] == FRACTION
    for kernel in KERNELS:
        assert objection(kernel) is None, kernel.id
        kinds = ScaledWgmmaConv | ScaledFewChannelsMma | ScaledStemWgmma
        on_tensor_cores = isinstance(kernel, kinds)
        assert bool(kernel.contract.fraction) == on_tensor_cores


def test_launches_are_within_limits_and_take_what_the_function_reads() -> None:
    taken = dict.fromkeys((kernel.id for kernel in KERNELS), 0)
    for problem in problems():
        for kernel in KERNELS:
            if kernel.refusal(problem) is not None:
                continue
            taken[kernel.id] += 1
            (launch,) = kernel.launches(problem)
            assert launch.entry in kernel.entries()
            assert all(0 < g <= most for g, most in zip(launch.grid, MAX_GRID, strict=True))
            most = SHARED_NBYTES if kernel.family else DEFAULT_SHARED
            assert launch.shared_nbytes <= most
            kinds = parameters(launch.entry)
            assert len(kinds) == len(launch.arguments)
            for kind, argument in zip(kinds, launch.arguments, strict=True):
                assert (kind == "pointer") == (isinstance(argument, Pointer) or argument is NULL)
                if isinstance(argument, np.int32 | np.uint32):
                    assert kind is type(argument)
    assert all(taken.values()), taken


def test_k_is_split_for_few_images_alone() -> None:
    last = Conv2d(512, 512, (3, 3), (1, 1), (1, 1))
    assert GEMM.tile_for(problem_of(last, 1, 7, 7)).parts > 1
    assert GEMM.tile_for(problem_of(last, 256, 7, 7)).parts == 1
    assert not GEMM.batch_invariant


def test_a_block_for_each_tile_that_is_resident_and_a_cluster_for_each_tile() -> None:
    for problem in problems():
        if GEMM.refusal(problem) is None:
            tile, (launch,) = GEMM.tile_for(problem), GEMM.launches(problem)
            n, o, oh, ow = problem.output
            tiles = -(-o // tile.m) * -(-n * oh * ow // tile.n)
            blocks = tiles if tile.parts > 1 else min(tiles, blocks_at_once(tile))
            assert launch.grid == (blocks, tile.parts, 1)
            *_, passed, k_tiles = launch.arguments
            op = cast(ScaledConv2d, problem.op).conv
            assert (passed, k_tiles) == (tiles, packed_depth(op, tile.k) // tile.k)


def test_a_convolution_without_a_residual_has_null_for_its_multiplier() -> None:
    plain = problem_of(Conv2d(16, 16, (1, 1)), 1, 3, 3)
    added = problem_of(Conv2d(16, 16, (1, 1), residual=True), 1, 3, 3)
    for kernel in (GEMM, ScaledDirect()):
        (without,), (with_one,) = kernel.launches(plain), kernel.launches(added)
        assert any(one is NULL for one in without.arguments)
        pointers = [one for one in with_one.arguments if isinstance(one, Pointer)]
        assert Pointer(Role.WEIGHT, 3) in pointers
        assert not any(one is NULL for one in with_one.arguments)


@pytest.mark.parametrize(
    ("kernel", "conv", "said"),
    [
        (GEMM, Conv2d(16, 8, (1, 1)), "writes 16 channels at a time, and 8 is not a multiple"),
        (GEMM, Conv2d(8, 16, (1, 1)), "copies 16 channels at a time, and 8 is not a multiple"),
        (GEMM, Conv2d(16, 16, (1, 1), (9, 9)), "TMA takes"),
        (GEMM, Conv2d(32, 32, (1, 1), groups=2), "computes no sconv2d with groups=2"),
        (STEM, Conv2d(5, 16, (1, 1)), "takes at most 4 channels, not 5"),
        (STEM, Conv2d(3, 16, (9, 1)), "takes windows of at most 8 × 8"),
        (STEM, Conv2d(3, 8, (1, 1)), "writes 16 channels at a time"),
        (STEM, Conv2d(3, 16, (1, 1), residual=True), "adds no residual"),
        (STEM, Conv2d(3, 16, (8, 8), (30, 30)), "strides of (30, 30) take"),
    ],
)
def test_refusals(kernel: ScaledImplicitGemmWgmma, conv: Conv2d, said: str) -> None:
    reason = kernel.refusal(problem_of(conv, 1, 40, 40))
    assert reason is not None
    assert reason.startswith(said)


@pytest.mark.parametrize(
    ("kernel", "conv", "said"),
    [
        (
            HALO,
            Conv2d(16, 16, (3, 3), (2, 2)),
            "reads its windows from whole rows, one pixel apart",
        ),
        (HALO, Conv2d(16, 8, (1, 1)), "writes 16 channels at a time, and 8 is not a multiple"),
        (RESIDENT, Conv2d(16, 16, (1, 1)), "has unrolled a window of (3, 3), got (1, 1)"),
        (RESIDENT, Conv2d(144, 16, (3, 3)), "keeps 64 channels of all weights, got 144"),
    ],
)
def test_refusals_of_whole_rows(kernel: ScaledHaloConv, conv: Conv2d, said: str) -> None:
    reason = kernel.refusal(problem_of(conv, 1, 40, 40))
    assert reason is not None
    assert reason.startswith(said)


@pytest.mark.parametrize("kernel", [RESIDENT, HALO], ids=lambda kernel: kernel.algorithm)
def test_whole_rows_are_blocked_as_the_integers_are(kernel: ScaledHaloConv) -> None:
    taken = 0
    for problem in problems():
        if kernel.refusal(problem) is None:
            tile, (launch,) = kernel.tile_for(problem), kernel.launches(problem)
            assert tile is not None
            blocking = blocking_of(problem, tile)
            if problem.inputs[0][1] <= 64:
                assert tile.k == 64  # whatever the batch is
            assert launch.grid == (kernel.blocks(problem, blocking), 1, 1)
            assert launch.shared_nbytes == kernel.shared_nbytes(blocking)
            taken += 1
    assert taken > 10


# -- instructions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "tile", "products"),
    [(GEMM, TILES[0], 4), (HALO, HALO_TILES[0], 4), (RESIDENT, RESIDENT_TILES[0], 18)],
    ids=["gemm", "halo", "resident"],
)
def test_tiles_multiply_e4m3(kernel: ScaledWgmmaConv, tile: ByteTile, products: int) -> None:
    ptx = compile_ptx(kernel.entry(tile), "sm_90a")
    found = re.findall(r"wgmma\.mma_async[.\w]*", ptx)
    assert set(found) == {f"wgmma.mma_async.sync.aligned.m64n{tile.group_n}k32.f32.e4m3.e4m3"}
    assert len(found) == products
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


def test_the_stem_multiplies_e4m3() -> None:
    ptx = compile_ptx(STEM.entry, "sm_90")
    found = set(re.findall(r"mma\.sync[.\w]*", ptx))
    assert found == {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"}


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", ["sm_75", "sm_89", "sm_90", "sm_120"])
def test_a_whole_network_is_planned_in_nhwc(sm: str) -> None:
    gemm = "implicit_gemm_wgmma"
    rows = {1: f"{gemm}_halo", 256: f"{gemm}_resident"}
    stem = "direct" if sm == "sm_75" else "few_channels_mma"
    if sm == "sm_90":
        stem = "few_channels_wgmma"
    for batch in (1, 256):
        wide = [*[rows[batch]] * 4, gemm] if sm == "sm_90" else ["direct"]
        options = CompileOptions(precision="fp8", batch=batch)
        plan = make_plan(On(capability(sm)), scaled(fuse(resnet18(), "all")), options)
        ops = [step.problem.op for step in plan.steps]
        assert not [op for op in ops if isinstance(op, Relayout)]
        images = [step.kernel for step in plan.steps if len(step.problem.output) == 4]
        assert {kernel.layout for kernel in images} == {Layout.NHWC}
        kinds = ScaledConv2d | ScaledConvMaxPool
        convs = [s.kernel.algorithm for s in plan.steps if isinstance(s.problem.op, kinds)]
        assert convs[0] == stem
        assert convs[1 : 1 + len(wide)] == wide
        assert set(convs[1:]) == set(wide)
        assert plan.steps[-1].kernel.algorithm == ("warp_dot" if batch == 1 else "tiled")


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_downsampling_runs_beside_the_first_convolution_of_its_block(batch: int) -> None:
    """Downsampling of any size runs in parallel; in 16 bits only if it has few outputs."""
    options = CompileOptions(precision="fp8", batch=batch)
    plan = make_plan(On((9, 0)), scaled(fuse(resnet18(), "all")), options)
    seconds = [step for step in plan.steps if step.beside]
    assert [step.name for step in seconds] == [f"layer{n}.0.downsample.0" for n in (2, 3, 4)]
    largest = seconds[0].problem
    assert On((9, 0)).beside(largest, largest, "fp16") is (batch == 1)


def test_the_tiny_network_has_a_plan_too() -> None:
    options = CompileOptions(precision="fp8")
    plan = make_plan(On((9, 0)), scaled(fuse(tiny(), "all")), options)
    convs = {s.kernel.algorithm for s in plan.steps if isinstance(s.problem.op, ScaledConv2d)}
    assert convs >= {"direct", "implicit_gemm_wgmma"}
    kernels = {"conv1": "cupy/sconv2d/implicit_gemm_wgmma/*"}
    with pytest.raises(NoKernel, match="writes 16 channels at a time, and 8 is not a multiple"):
        make_plan(On((9, 0)), scaled(fuse(tiny(), "all")), replace(options, kernels=kernels))


@pytest.mark.parametrize("kernel", CHOOSING, ids=lambda kernel: kernel.algorithm)
def test_every_tile_is_a_variant_of_its_own(kernel: ScaledWgmmaConv) -> None:
    variants = On((9, 0)).variants(kernel)
    assert len(variants) == len(kernel.tiles)
    for one in variants:
        assert objection(one) is None
        assert one.contract == kernel.contract
