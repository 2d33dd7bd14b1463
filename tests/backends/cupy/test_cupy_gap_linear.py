"""Pooling and classifier in one launch: tiles, launches and refusals, without a device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compiled import compiled
from r18.backend import CompileOptions
from r18.graph.ops import AvgPoolLinear, Layout, Linear, Problem
from r18.graph.passes import fuse, fuse_classifier
from r18.graph.precision import E4M3, FP16, FP32, TF32
from r18.graph.quantize import quantized as in_integers
from r18.graph.quantized import STORAGES
from r18.graph.resnet import resnet18
from r18.graph.scaling import scaled as in_e4m3
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan
from r18_cupy import FUSED_CLASSIFIER, Backend
from r18_cupy.choices import variants_of
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.float8 import gap_linear as float8
from r18_cupy.float8.gap_linear import ScaledGapLinear, scaled
from r18_cupy.integers.gap_linear import (
    MOST_CHANNELS,
    MOST_PIXELS,
    TILES,
    QuantizedGapLinear,
    quantized,
)
from r18_cupy.ops.gap_linear import CLUSTER, GapLinear, gap_linear_kernels

ByteKernel = QuantizedGapLinear | ScaledGapLinear
INTEGERS, NUMBERS = QuantizedGapLinear(), ScaledGapLinear()
BYTES = pytest.mark.parametrize("kernel", [INTEGERS, NUMBERS], ids=lambda kernel: kernel.id)
FOLDED = fuse(resnet18(), "all")
EXACT_PIXELS = 73
"""The largest number of pixels with exact sums, as in kernels/float8/gap_linear.cu."""


def schedule_of(kernel: ByteKernel) -> Schedule:
    return in_integers(FOLDED) if kernel is INTEGERS else in_e4m3(FOLDED)


def of_bytes(
    kernel: ByteKernel,
    batch: int,
    channels: int = 512,
    outputs: int = 1000,
    area: tuple[int, int] = (7, 7),
) -> Problem:
    op = quantized(channels, outputs, "uint8") if kernel is INTEGERS else scaled(channels, outputs)
    return Problem(op, ((batch, channels, *area),))


def of_floats(
    batch: int, channels: int = 512, outputs: int = 1000, area: tuple[int, int] = (7, 7)
) -> Problem:
    return Problem(AvgPoolLinear(Linear(channels, outputs)), ((batch, channels, *area),))


# -- int8 and fp8 ------------------------------------------------------------------------------


@BYTES
@pytest.mark.parametrize(
    ("batch", "features", "blocks"), [(1, 8, 125), (2, 16, 126), (4, 32, 128), (8, 64, 128)]
)
def test_the_blocks_of_small_batches_of_the_network_run_all_at_once(
    batch: int, features: int, blocks: int, kernel: ByteKernel
) -> None:
    problem = fuse_classifier(schedule_of(kernel)).problems(batch)["fc"]
    (launch,) = kernel.launches(problem)
    assert kernel.tile_for(problem).n == features
    assert launch.grid == (blocks // batch, batch, 1)
    assert blocks <= MULTIPROCESSORS
    assert launch.block == (256, 1, 1)
    assert launch.overlaps


@BYTES
def test_every_tile_is_verified_by_itself(kernel: ByteKernel) -> None:
    variants = variants_of(kernel)
    assert kernel.id in (
        "cupy/qgap_linear/warp_dot/int8/nhwc",
        "cupy/sgap_linear/warp_dot/fp8/nhwc",
    )
    assert kernel.tiles == TILES
    assert [one.id for one in variants] == [f"{kernel.id}/{tile.name}" for tile in TILES]
    problem = of_bytes(kernel, 1, outputs=9)
    for one, tile in zip(variants, TILES, strict=True):
        assert one.variant_of == kernel.id
        assert one.refusal(problem) is None
        (launch,) = one.launches(problem)
        assert ("TILE_N", tile.n) in launch.entry.defines
    assert {entry for one in variants for entry in one.entries()} == set(kernel.entries())


@BYTES
def test_what_it_is_given_is_what_the_function_reads(kernel: ByteKernel) -> None:
    """A launch passes the weights in the op's order and the linear layer's shape."""
    problem = of_bytes(kernel, 3, 48, 10, (5, 2))
    (launch,) = kernel.launches(problem)
    *pointers, shape, pixels = launch.arguments
    weights = range(len(problem.op.weights()))
    assert [getattr(one, "index", None) for one in pointers] == [0, *weights, 0]
    assert shape.tobytes() == np.array([3, 48, 10], np.int32).tobytes()  # type: ignore[union-attr]
    assert pixels == 10


@BYTES
def test_refusals_of_bytes(kernel: ByteKernel) -> None:
    assert kernel.refusal(of_bytes(kernel, 16)) is None
    for problem, words in (
        (of_bytes(kernel, 17), "takes batches of at most 16, not 17"),
        (of_bytes(kernel, 1, 24), "reads 16 channels at a time, and 24 is no multiple"),
        (of_bytes(kernel, 1, MOST_CHANNELS + 16), "so at most 4096, not 4112"),
        (of_bytes(kernel, 1, 4096, 2**19), "the weights have too many elements"),
    ):
        assert words in str(kernel.refusal(problem))
    assert kernel.refusal(of_bytes(kernel, 1, MOST_CHANNELS, 4, (MOST_PIXELS, 1))) is None
    assert float8.MOST_CHANNELS == MOST_CHANNELS


def test_only_sums_of_integers_have_a_limit() -> None:
    """Only integers have a limit on pixels: those of e4m3 are added in float32."""
    area = (MOST_PIXELS + 1, 1)
    said = INTEGERS.refusal(of_bytes(INTEGERS, 1, 16, 4, area))
    assert "takes at most 257 of them, not 258" in str(said)
    assert NUMBERS.refusal(of_bytes(NUMBERS, 1, 16, 4, area)) is None


def test_the_further_problems_are_taken_by_every_tile() -> None:
    assert {p.op.gap.stored for p in INTEGERS.extra_problems} == set(STORAGES)  # type: ignore[attr-defined]
    for kernel, count in ((INTEGERS, 6), (NUMBERS, 4)):
        for one in variants_of(kernel):
            assert [one.refusal(problem) for problem in one.extra_problems] == [None] * count


@BYTES
def test_a_plan_of_bytes_ends_with_it_at_small_batches(kernel: ByteKernel) -> None:
    for batch, fuses in ((1, True), (8, True), (16, True), (32, False)):
        options = CompileOptions(precision=kernel.precision.name, batch=batch)
        plan = make_plan(Backend(), schedule_of(kernel), options)
        last = plan.steps[-1]
        assert isinstance(last.problem.op, kernel.op) == fuses
        assert (last.kernel.id == kernel.id) == fuses
        assert last.kernel.layout is (Layout.NHWC if fuses else Layout.NCHW)


def test_means_of_e4m3_stay_in_float32() -> None:
    contract = NUMBERS.contract
    assert (contract.algorithm, contract.accumulate) == ("mean_sum", contract.output)
    assert contract.output == "float32"


def test_sums_of_that_many_e4m3_numbers_are_exact_in_float32() -> None:
    """Sums of `EXACT_PIXELS` e4m3 numbers are exact: multiples of the smallest, up to 2²⁴."""
    numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
    least, most = numbers[1], numbers[-1]
    assert (numbers % least == 0).all()
    assert EXACT_PIXELS * most / least <= 2**24 < (EXACT_PIXELS + 1) * most / least


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90"])
def test_no_tile_of_e4m3_spills(target: str) -> None:
    for entry in NUMBERS.entries():
        found = compiled(entry, target)
        assert (found.threads, found.spill_nbytes) == (256, 0)
        assert found.registers <= 128  # two blocks a multiprocessor


# -- floats ------------------------------------------------------------------------------------


def test_every_precision_of_floats_has_one_in_the_layout_of_its_convolutions() -> None:
    assert [kernel.id for kernel in gap_linear_kernels()] == [
        "cupy/gap_linear/warp_dot/fp32",
        "cupy/gap_linear/warp_dot/fp16/nhwc",
        "cupy/gap_linear/warp_dot/bf16/nhwc",
        "cupy/gap_linear/warp_dot/tf32/nhwc",
        "cupy/gap_linear/warp_dot/fp16x3/nhwc",
    ]
    assert {kernel.contract.algorithm for kernel in gap_linear_kernels()} == {"mean_sum"}


@pytest.mark.parametrize(
    ("batch", "features", "blocks"), [(1, 16, 63), (2, 16, 126), (4, 32, 128), (8, 64, 128)]
)
def test_blocks_of_floats_run_all_at_once_in_whole_clusters(
    batch: int, features: int, blocks: int
) -> None:
    half, single = GapLinear(FP16), GapLinear(TF32)
    for kernel in (half, single):
        (launch,) = kernel.launches(of_floats(batch))
        across = -(-blocks // batch // kernel.cluster) * kernel.cluster
        assert kernel.tile_for(of_floats(batch)).n == features
        assert launch.grid == (across, batch, 1)
        assert ("TILE_CLUSTER", kernel.cluster) in launch.entry.defines
    assert (half.cluster, single.cluster) == (1, CLUSTER)


@pytest.mark.parametrize("kernel", gap_linear_kernels(), ids=lambda kernel: kernel.id)
def test_tiles_of_floats(kernel: GapLinear) -> None:
    """Every tile takes every problem, and none changes the order of a sum."""
    variants = variants_of(kernel)
    assert len(variants) == 3
    assert len({tile.cluster for tile in kernel.tiles}) == 1
    for one in variants:
        assert [one.refusal(problem) for problem in one.extra_problems] == [None] * 5
        for problem in one.extra_problems:
            (launch,) = one.launches(problem)
            assert launch.grid[0] % kernel.cluster == 0
    assert {entry for one in variants for entry in one.entries()} == set(kernel.entries())


def test_only_clusters_need_hopper() -> None:
    assert GapLinear(FP16).minimum_capability == (7, 5)
    assert GapLinear(FP32, Layout.NCHW).minimum_capability == (9, 0)
    assert GapLinear(FP16).runs_on((8, 0))
    assert not GapLinear(TF32).runs_on((8, 0))


def test_refusals_of_floats() -> None:
    half, single = GapLinear(FP16), GapLinear(FP32, Layout.NCHW)
    assert half.refusal(of_floats(16)) is None
    assert single.refusal(of_floats(1, 4)) is None
    for kernel, problem, words in (
        (half, of_floats(17), "takes batches of at most 16, not 17"),
        (half, of_floats(1, 20), "reads 8 channels at a time, and 20 is no multiple"),
        (single, of_floats(1, 6), "reads 4 channels at a time, and 6 is no multiple"),
        (single, of_floats(1, 4100), "keeps the means of at most 4096 channels, not 4100"),
        (half, of_floats(1, 4096, 2**19), "the weights have too many elements"),
    ):
        assert words in str(kernel.refusal(problem))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32", "fp16x3"])
def test_plans_of_floats_end_with_it_at_small_batches(precision: str) -> None:
    """Plans end with the fused op at small batches, and add no relayout before it."""
    for batch in (1, 8, 32):
        fuses = batch <= min(16, FUSED_CLASSIFIER.get(precision, 16))
        options = CompileOptions(precision=precision, batch=batch)
        plan = make_plan(Backend(), resnet18(), options)
        apart = make_plan(Backend(), resnet18(), replace(options, taps=("gap",)))
        assert isinstance(plan.steps[-1].problem.op, AvgPoolLinear) == fuses
        assert len(plan.steps) == len(apart.steps) - fuses
