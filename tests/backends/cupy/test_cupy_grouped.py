"""Grouped and dilated convolutions on CUDA: slots, packed weights, the grid, and whole plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional as F

from r18.backend import CompileOptions
from r18.graph.ops import Conv2d, Layout, Problem
from r18.graph.passes import fuse
from r18.graph.precision import FP16
from r18.graph.quantize import quantized
from r18.graph.quantized import QuantizedConv2d
from r18.graph.resnet import FAMILY, network
from r18.runtime.plan import make_plan
from r18_cupy import Backend
from r18_cupy.conv.direct_grouped import DirectGrouped, direct_grouped_kernels
from r18_cupy.conv.grouped_mma import WIDTHS, GroupedMma, depth_of
from r18_cupy.conv.groups import GROUPS, PIXELS, SLOT, THREADS, Slots, groups_struct, pixels_of
from r18_cupy.integers.direct import QuantizedDirectGrouped

Array = npt.NDArray[Any]

OPS = {
    "groups of four": Conv2d(8, 8, (3, 3), (1, 1), (1, 1), groups=2),
    "groups of three and five": Conv2d(6, 10, (3, 2), (2, 1), (1, 0), groups=2),
    "one channel each": Conv2d(5, 5, (3, 3), padding=(1, 1), groups=5),
    "dilated alone": Conv2d(3, 6, (3, 3), (1, 2), (2, 3), dilation=(2, 3)),
    "both": Conv2d(8, 12, (2, 3), (1, 1), (2, 2), groups=4, dilation=(3, 2)),
}
EACH_OP = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
IMAGE = (7, 9)


def random(shape: tuple[int, ...]) -> Array:
    """Small integers, whose sums are exact in float32."""
    return np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32)


def by_slots(op: Conv2d, x: Array, weight: Array) -> Array:
    """The output as threads compute it. weight: (kh, kw, C/groups, slots, 4), as packed."""
    slots = Slots.of(op)
    result = op.infer(x.shape)
    (sh, sw), (dh, dw) = op.stride, op.dilation
    pads = ((0, 0), (0, 0), *((p, p) for p in op.padding))
    image = np.pad(x, pads)
    sums = np.zeros((result[0], slots.count, SLOT, *result[2:]), np.float32)
    for r, s, c, slot in np.ndindex(*weight.shape[:4]):
        channel = slot // slots.of_group * op.group_channels + c
        rows = image[:, channel, r * dh :: sh][:, : result[2]]
        pixels = rows[:, :, s * dw :: sw][:, :, : result[3]]
        sums[:, slot] += weight[r, s, c, slot][None, :, None, None] * pixels[:, None]
    by_group = sums.reshape(result[0], slots.groups, -1, *result[2:])
    return by_group[:, :, : slots.outputs].reshape(result)


def expected(op: Conv2d, x: Array, weight: Array) -> Array:
    around = (op.stride, op.padding, op.dilation, op.groups)
    found = F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), None, *around)
    return found.numpy()


@EACH_OP
def test_packed_weights_give_the_convolution(op: Conv2d) -> None:
    x, weight = random((2, op.in_channels, *IMAGE)), random(op.weights()[0].shape)
    (packed,) = DirectGrouped(FP16, Layout.NHWC).pack(Problem(op, (x.shape,)), (weight,))
    assert packed.dtype == np.float32
    np.testing.assert_array_equal(by_slots(op, x, packed), expected(op, x, weight))


@EACH_OP
def test_packed_bytes_give_the_convolution(op: Conv2d) -> None:
    biased = Conv2d(**{**vars(op), "bias": True})
    problem = Problem(QuantizedConv2d(biased, ("int8",)), ((2, op.in_channels, *IMAGE),))
    x, weight = random(problem.inputs[0]), random(op.weights()[0].shape)
    zeros = np.zeros(op.out_channels, np.float32)
    packed, *_ = QuantizedDirectGrouped().pack(problem, (weight, zeros, zeros + 1))
    assert packed.dtype == np.int8
    # (kh, kw, words, slots, 4, 4 channels) with the channels of a word side by side.
    apart = packed.transpose(0, 1, 2, 5, 3, 4).reshape(*op.kernel_size, -1, *packed.shape[3:5])
    assert not apart[:, :, op.group_channels :].any()
    taps = apart[:, :, : op.group_channels].astype(np.float32)
    np.testing.assert_array_equal(by_slots(op, x, taps), expected(op, x, weight))


def test_weights_are_rounded_to_storage_before_they_are_float32() -> None:
    op = Conv2d(4, 4, (1, 1), groups=2)
    weight = np.full(op.weights()[0].shape, 1 + 2.0**-12, np.float32)
    (packed,) = DirectGrouped(FP16, Layout.NHWC).pack(Problem(op, ((1, 4, 2, 2),)), (weight,))
    assert set(packed.ravel()) == {0.0, 1.0}


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("batch", [1, 3, 200])
@EACH_OP
def test_every_slot_of_every_pixel_is_one_thread_s(op: Conv2d, batch: int, layout: Layout) -> None:
    """Every slot of every pixel belongs to one thread, by `Share` of kernels/conv/groups.cuh."""
    problem = Problem(op, ((batch, op.in_channels, *IMAGE),))
    (launch,) = DirectGrouped(FP16, layout).launches(problem)
    assert (launch.grid[1:], launch.block) == ((1, 1), (THREADS, 1, 1))
    each = pixels_of(op, problem.output)
    pixels = problem.output[0] * problem.output[2] * problem.output[3]
    slots = Slots.of(op).count
    block, thread = np.divmod(np.arange(launch.grid[0] * THREADS), THREADS)
    if layout is Layout.NHWC:
        number = block * THREADS + thread
        slot, first, step = number % slots, number // slots * each, 1
    else:
        slot, step = block % slots, THREADS
        first = block // slots * (each * THREADS) + thread
    taken = np.zeros((slots, pixels), int)
    for k in range(each):
        here = first + k * step < pixels
        np.add.at(taken, (slot[here], (first + k * step)[here]), 1)
    assert (taken == 1).all()


def test_own_problems_take_what_drawn_ones_do_not() -> None:
    """The kernels' own problems reach the functions that drawn problems, with few pixels, miss."""
    for kernel in (*direct_grouped_kernels(), QuantizedDirectGrouped()):
        taken = {launch.entry for path in kernel.extra_problems for launch in kernel.launches(path)}
        left = [dict(entry.defines) for entry in set(kernel.entries()) - taken]
        assert {(one["CHANNELS"], one["PIXELS"]) for one in left} <= {(1, min(PIXELS))}


def test_groups_lie_as_the_device_reads_them() -> None:
    op = Conv2d(6, 10, (3, 3), groups=2, dilation=(2, 3))
    (fields,) = groups_struct(op).view(GROUPS)
    assert (GROUPS.itemsize, tuple(fields)) == (24, (3, 5, 4, 2, 2, 3))


@pytest.mark.parametrize("width", WIDTHS)
def test_fragments_give_the_convolution(width: int) -> None:
    """Fragments give the convolution when lanes multiply them: PTX ISA, "Matrix Fragments for
    mma.m16n8k16"."""
    op = Conv2d(64, 64, (3, 3), padding=(1, 1), groups=64 // width)
    x, weight = random((2, 64, 4, 5)), random(op.weights()[0].shape)
    (packed,) = GroupedMma(FP16).pack(Problem(op, (x.shape,)), (weight,))
    depth, halves = depth_of(op), 1 if width <= 8 else 2
    assert packed.dtype == np.float16
    fragments = packed.reshape(4, 9, depth // (8 * halves), 2, 32, 2 * halves)
    taps = np.zeros((64, 64, 9), np.float32)
    for warp, tap, step, eight, lane, v in np.ndindex(*fragments.shape):
        first = warp * 16 + eight * 8
        c = first // depth * depth + step * 16 + lane % 4 * 2 + v % 2 + v // 2 * 8
        taps[first + lane // 4, c, tap] = fragments[warp, tap, step, eight, lane, v]
    dense = taps.reshape(64, 64, 3, 3)
    found = F.conv2d(torch.from_numpy(x), torch.from_numpy(dense), None, padding=(1, 1))
    np.testing.assert_array_equal(found.numpy(), expected(op, x, weight))


def test_tensor_cores_take_narrow_groups_of_3x3_windows_alone() -> None:
    kernel = GroupedMma(FP16)
    op = Conv2d(128, 128, (3, 3), padding=(1, 1), groups=32)
    image = ((2, 128, 9, 9),)
    assert kernel.refusal(Problem(op, image)) is None
    for changes, said in (
        ({"kernel_size": (1, 3)}, "windows of 3×3, not 1×3"),
        ({"out_channels": 256}, "a multiple of 64, not 128 and 256"),
        ({"groups": 2}, "groups of 4, 8, 16 or 32 channels, not 64"),
        ({"stride": (4, 4)}, "take 123008 bytes of shared memory; a block has 49152"),
    ):
        assert said in str(kernel.refusal(Problem(replace(op, **changes), image)))
    for problem in kernel.extra_problems:
        assert kernel.refusal(problem) is None
    widths = {cast(Conv2d, problem.op).group_channels for problem in kernel.extra_problems}
    assert widths == set(WIDTHS)


def test_weights_beyond_31_bits_are_refused() -> None:
    op = Conv2d(2**15, 2**16, (1, 1))
    problem = Problem(op, ((1, 2**15, 1, 1),))
    refusal = DirectGrouped(FP16, Layout.NHWC).refusal(problem)
    assert "packed weights have 2147483648 elements" in str(refusal)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32", "fp16x3", "int8"])
def test_plans_take_it_for_groups_and_dilation_alone(precision: str) -> None:
    dilated = replace(FAMILY["resnet50"], dilate=(False, True, True)).schedule("dilated")
    networks = [network(name) for name in ("resnext50_32x4d", "resnet50", "tiny_resnext")]
    for schedule in (*networks, dilated):
        if precision == "int8":
            schedule = quantized(fuse(schedule, "all"))
        for step in make_plan(Backend(), schedule, CompileOptions(2, precision)).steps:
            taken = step.kernel.algorithm in ("direct_grouped", "grouped_mma")
            assert taken == bool(step.problem.op.extras), (schedule.name, step.kernel.id)
