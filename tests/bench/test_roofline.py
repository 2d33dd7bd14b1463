"""The roofline: work, floors and losses, ceilings and their record, the command. No time counts."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import r18
from r18 import records
from r18.backend import (
    Backend,
    Ceiling,
    CompileOptions,
    DeviceInfo,
    Kernel,
    Pace,
    Plan,
    RoundingContract,
    StepTime,
)
from r18.backend.registry import load_backend
from r18.bench import ceilings as measured
from r18.bench.record import fused_ops
from r18.bench.roofline import (
    BYTES,
    OPERATIONS,
    Ceilings,
    Line,
    algorithm_of,
    largest_losses,
    limit,
    limits,
    lines,
    moved_nbytes,
    multiplying_less,
    own_operations,
)
from r18.bench.roofline_run import measure, text
from r18.bench.rows import Row
from r18.cpu import model_slug
from r18.errors import BackendUnavailable, R18Error, ShapeError, UsageError
from r18.graph.ops import (
    Add,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
    parts_of,
)
from r18.graph.passes import fuse
from r18.graph.precision import BF16, FP16, FP16X3, FP32, INT8
from r18.graph.quantized import QuantizedConv2d, QuantizedConvMaxPool, QuantizePixels
from r18.graph.resnet import resnet18, tiny
from r18.records.kinds import CeilingsRecord
from r18.runtime.plan import make_plan
from whole_records import ceilings_of, whole

CPU = DeviceInfo("cpu", "a CPU")
CEILINGS = Ceilings("a CPU", {"fp32": 1e9, "fp16": 4e9}, 1e8, 2, "2026-11-20T10:00:00+00:00")
RECORD: dict[str, Any] = {
    "record": "ceilings",
    "format": 1,
    "device": "a CPU",
    "date": "2026-11-20T10:00:00+00:00",
    "threads": 2,
    "rates": {"fp32": {"operations_per_second": 1e9}},
    "copy": {"bytes_per_second": 1e8},
}
CONV = Problem(Conv2d(64, 128, (3, 3), (1, 1), (1, 1), bias=True), ((2, 64, 28, 28),))


def planned(batch: int = 2) -> Plan:
    return make_plan(load_backend("numpy"), tiny(), CompileOptions(batch=batch))


def times(plan: Plan, milliseconds: float = 1.0) -> list[StepTime]:
    return [StepTime(step.name, step.kernel.id, milliseconds) for step in plan.steps]


# -- work --------------------------------------------------------------------------------------


def test_operations_are_two_a_multiply_accumulate() -> None:
    assert limit(CONV, FP32, CEILINGS).operations == 2 * 2 * 128 * 28 * 28 * 64 * 9
    linear = Problem(Linear(512, 1000), ((4, 512),))
    assert limit(linear, FP32, CEILINGS).operations == 2 * 4 * 512 * 1000
    assert limit(Problem(GlobalAvgPool(), ((1, 8, 7, 7),)), FP32, CEILINGS).operations == 0


def test_the_network_s_work_is_known() -> None:
    """The network has 1.814 GMAC an image, and reads each of its 11.69 M parameters once."""
    found = limits(resnet18(), "fp32", "all", 1, CEILINGS)
    assert sum(one.operations for one in found.values()) == 2 * 1_814_073_344
    grown = limits(resnet18(), "fp32", "all", 2, CEILINGS)
    moved = sum(one.nbytes for one in found.values())
    weights = 2 * moved - sum(one.nbytes for one in grown.values())
    folded = sum(math.prod(spec.shape) for spec in resnet18().weight_specs.values())
    assert weights == 4 * (folded - 3 * 4800)  # four numbers a channel of BatchNorm are one bias


def test_bytes_are_inputs_weights_and_output_in_storage() -> None:
    pixels, weights, out = 2 * 64 * 28 * 28, 128 * 64 * 9, 2 * 128 * 28 * 28
    assert moved_nbytes(CONV, FP32) == 4 * (pixels + weights + out + 128)
    assert moved_nbytes(CONV, BF16) == 2 * (pixels + weights + out) + 4 * 128
    assert moved_nbytes(CONV, INT8) == pixels + weights + out + 4 * 128
    add = Problem(Add(), ((2, 3, 4, 4), (2, 3, 4, 4)))
    assert moved_nbytes(add, FP16) == 2 * 3 * 2 * 3 * 16


@given(
    extents=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_what_no_window_covers_is_not_read(
    extents: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    try:
        problem = Problem(Conv2d(3, 5, kernel, stride, padding), ((2, 3, *extents),))
    except ShapeError:
        return
    seen = np.zeros([e + 2 * p for e, p in zip(extents, padding, strict=True)], bool)
    out = problem.output
    for i in range(out[2]):
        for j in range(out[3]):
            top, left = i * stride[0], j * stride[1]
            seen[top : top + kernel[0], left : left + kernel[1]] = True
    inside = seen[padding[0] :, padding[1] :][: extents[0], : extents[1]]
    elements = 2 * 3 * int(inside.sum()) + math.prod(out) + 5 * 3 * math.prod(kernel)
    assert moved_nbytes(problem, FP32) == 4 * elements


def test_a_pooling_window_reads_all_that_it_covers() -> None:
    problem = Problem(MaxPool2d((2, 2), (2, 2)), ((1, 4, 7, 7),))  # the last row is in no window
    assert moved_nbytes(problem, FP32) == 4 * 4 * (6 * 6 + 3 * 3)


STEM = ConvMaxPool(
    Conv2d(3, 5, (3, 3), (2, 2), (1, 1), bias=True, relu=True), MaxPool2d((3, 3), (2, 2), (1, 1))
)


def test_between_a_convolution_and_its_pooling_nothing_is_stored() -> None:
    problem = Problem(STEM, ((2, 3, 16, 16),))
    assert moved_nbytes(problem, FP32) == 4 * (2 * 3 * 16 * 16 + 5 * 3 * 9 + 5 + 2 * 5 * 4 * 4)
    assert own_operations(problem, "sum") == 2 * problem.macs == 2 * 2 * 5 * 8 * 8 * 27
    apart = [moved_nbytes(part, FP32) for part in parts_of(problem)]
    assert sum(apart) - moved_nbytes(problem, FP32) == 4 * 2 * (2 * 5 * 8 * 8)


def test_between_a_projection_and_its_convolution_nothing_is_stored() -> None:
    """Of the second image only the pixels under a window are read, a quarter of them."""
    conv = Conv2d(4, 6, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True)
    op = ConvProjection(conv, Conv2d(3, 6, (1, 1), (2, 2), bias=True))
    problem = Problem(op, ((2, 4, 5, 7), (2, 3, 10, 14)))
    read, made = 2 * 4 * 5 * 7 + 2 * 3 * 5 * 7, 2 * 6 * 5 * 7
    weights = 6 * 4 * 9 + 6 + 6 * 3 + 6
    assert moved_nbytes(problem, FP32) == 4 * (read + weights + made)
    assert own_operations(problem, "sum") == 2 * problem.macs == 2 * made * (4 * 9 + 3)
    apart = sum(moved_nbytes(part, FP32) for part in parts_of(problem))
    assert apart - moved_nbytes(problem, FP32) == 4 * 2 * made


def test_a_quantised_stem_of_pixels_reads_bytes_and_a_table() -> None:
    conv = QuantizedConv2d(STEM.conv, ("int8",))
    of_pixels = QuantizePixels(Normalize((0.5,) * 3, (0.25,) * 3))
    plain = Problem(QuantizedConvMaxPool(conv, STEM.pool), ((2, 3, 16, 16),))
    whole = Problem(QuantizedConvMaxPool(conv, STEM.pool, of_pixels), ((2, 3, 16, 16),))
    weights = 5 * 3 * 9 + 4 * 5 + 4 * 5  # in int8; bias and multipliers
    assert moved_nbytes(plain, INT8) == 2 * 3 * 16 * 16 + weights + 2 * 5 * 4 * 4
    assert moved_nbytes(whole, INT8) == moved_nbytes(plain, INT8) + 3 * 256
    assert own_operations(whole, "integer") == 2 * whole.macs == 2 * 2 * 5 * 8 * 8 * 27
    apart = sum(moved_nbytes(part, INT8) for part in parts_of(whole))
    image, made = 2 * 3 * 16 * 16, 2 * 5 * 8 * 8
    assert apart - moved_nbytes(whole, INT8) == 2 * image + 2 * made


def test_what_no_pooled_window_needs_is_not_read() -> None:
    """Only pixels that pooled windows need are read: two rows, and columns 0, 1, 3, 4, 6 and 7."""
    op = ConvMaxPool(Conv2d(3, 5, (3, 1)), MaxPool2d((1, 2), (5, 3)))
    problem = Problem(op, ((1, 3, 10, 8),))
    assert moved_nbytes(problem, FP32) == 4 * (3 * (6 * 6) + 5 * 9 + 5 * 2 * 3)


def test_winograd_with_its_pooling_multiplies_as_without() -> None:
    conv = Conv2d(3, 5, (3, 3), (1, 1), (1, 1))
    fused = Problem(ConvMaxPool(conv, MaxPool2d((2, 2), (2, 2))), ((2, 3, 8, 8),))
    alone = Problem(conv, ((2, 3, 8, 8),))
    for algorithm in ("winograd_f2x2", "winograd_f4x4"):
        assert own_operations(fused, algorithm) == own_operations(alone, algorithm)


def test_the_floor_of_a_network_whose_pooling_is_fused() -> None:
    plain = limits(resnet18(), "fp32", "all", 2, CEILINGS)
    fused = limits(resnet18(), "fp32", "all", 2, CEILINGS, fused=["conv2d_maxpool2d"])
    assert set(plain) - set(fused) == {"maxpool"}
    assert {name for name in fused if fused[name] != plain[name]} == {"conv1"}
    stored = 2 * 64 * 112 * 112 * 4  # written once, and read once
    before = plain["conv1"].nbytes + plain["maxpool"].nbytes
    assert fused["conv1"].nbytes == before - 2 * stored
    assert fused["conv1"].operations == plain["conv1"].operations
    both = limits(resnet18(), "fp32", "all", 2, CEILINGS, fused=["conv2d_maxpool2d", "gap_linear"])
    assert set(fused) - set(both) == {"avgpool"}
    assert {name for name in both if both[name] != fused[name]} == {"fc"}
    means = 2 * 512 * 4
    before = plain["avgpool"].nbytes + plain["fc"].nbytes
    assert both["fc"].nbytes == before - 2 * means
    assert both["fc"].operations == plain["fc"].operations


def test_the_floor_of_a_network_whose_projections_are_fused() -> None:
    plain = limits(resnet18(), "fp32", "all", 2, CEILINGS)
    fused = limits(resnet18(), "fp32", "all", 2, CEILINGS, fused=["conv2d_projection"])
    shortcuts = {f"layer{n}.0.conv2": f"layer{n}.0.downsample.0" for n in (2, 3, 4)}
    assert set(plain) - set(fused) == set(shortcuts.values())
    assert {name for name in fused if fused[name] != plain[name]} == set(shortcuts)
    for (name, other), made in zip(
        shortcuts.items(), (128 * 28 * 28, 256 * 14 * 14, 512 * 7 * 7), strict=True
    ):
        stored = 2 * made * 4  # written once, and read once
        before = plain[name].nbytes + plain[other].nbytes
        assert fused[name].nbytes == before - 2 * stored
        assert fused[name].operations == plain[name].operations + plain[other].operations


def test_which_ops_a_recorded_program_fuses() -> None:
    """A record's kernel ids tell which ops it fuses, by float names as floors are of floats."""
    for kernels, expected in (
        ({}, set()),
        ({"cupy/gap/tree/fp16/nhwc": 1, "cupy/linear/warp_dot/fp16": 1}, set()),
        ({"cupy/gap_linear/warp_dot/fp16/nhwc": 1}, {"gap_linear"}),
        ({"numpy/conv2d_projection/im2col/fp32": 3}, {"conv2d_projection"}),
        ({"cupy/qgap_linear/warp_dot/int8/nhwc": 1}, {"gap_linear"}),
        ({"cupy/sgap_linear/warp_dot/fp8/nhwc": 1}, {"gap_linear"}),
        (
            {
                "cupy/qgap_linear/warp_dot/int8/nhwc": 1,
                "cupy/qconv2d_maxpool2d/few_channels_wgmma/int8/nhwc": 1,
            },
            {"conv2d_maxpool2d", "gap_linear"},
        ),
    ):
        assert fused_ops({"kernels": kernels}) == expected
    assert fused_ops({"kernels": None}) == fused_ops({}) == frozenset()


@pytest.mark.parametrize(
    ("algorithm", "size", "products"),
    [
        ("sum", 8, 9 * 64),
        ("winograd_f2x2", 8, 16 * 16),
        ("winograd_f2x2_avx2", 8, 16 * 16),
        ("winograd_f4x4", 8, 36 * 4),
        ("winograd_f4x4", 7, 36 * 4),  # a whole tile where a part of it is needed
    ],
)
def test_winograd_multiplies_less(algorithm: str, size: int, products: int) -> None:
    conv = Conv2d(3, 5, (3, 3), (1, 1), (1, 1), bias=True)
    for op in (conv, QuantizedConv2d(conv, ("int8",))):
        problem = Problem(op, ((2, 3, size, size),))
        assert own_operations(problem, algorithm) == 2 * 2 * 3 * 5 * products


# -- floors ------------------------------------------------------------------------------------


def test_the_floor_is_the_larger_time_and_says_what_binds() -> None:
    found = limit(CONV, FP32, CEILINGS)
    assert found.operations_ms == found.operations / 1e6
    assert found.bytes_ms == found.nbytes / 1e5
    assert (found.floor_ms, found.binds) == (found.operations_ms, OPERATIONS)
    narrow = limit(CONV, FP32, replace(CEILINGS, bandwidth=1e5))
    assert (narrow.floor_ms, narrow.binds) == (narrow.bytes_ms, BYTES)
    assert limit(CONV, FP16, CEILINGS).operations_ms == found.operations_ms / 4


def test_split_products_have_a_third_of_the_rate_of_float16() -> None:
    assert CEILINGS.rate("fp16x3") == CEILINGS.rate("fp16") / 3
    assert [CEILINGS.has(name) for name in ("fp32", "fp16x3", "fp64")] == [True, True, False]
    found, plain = limit(CONV, FP16X3, CEILINGS), limit(CONV, FP32, CEILINGS)
    assert found.operations_ms == pytest.approx(3 * limit(CONV, FP16, CEILINGS).operations_ms)
    assert found.nbytes == plain.nbytes
    with pytest.raises(UsageError, match=r"no rate of fp16 \(of whose products fp16x3 takes 3"):
        replace(CEILINGS, rates={"fp32": 1e9}).rate("fp16x3")


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(UsageError, match="no rate of bf16 was measured on a CPU; measured: fp32"):
        limit(CONV, BF16, CEILINGS)


def test_a_line_a_step_with_its_phases_together() -> None:
    plan = planned()
    phases = [replace(t, phase=p) for t in times(plan) for p in ("first", "second")]
    found = lines(plan, phases, CEILINGS)
    assert [line.step for line in found] == [step.name for step in plan.steps]
    for line, step in zip(found, plan.steps, strict=True):
        assert line.measured_ms == 2.0
        assert line.limit == limit(step.problem, FP32, CEILINGS)
        assert line.ratio == line.limit.floor_ms / 2.0
        assert line.lost_ms == 2.0 - line.limit.floor_ms
        assert line.kernel == step.kernel.id


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_profile_of_another_plan_is_an_error(change: str) -> None:
    plan = planned()
    other = times(plan)
    name = other[3].step if change == "less" else "layer9"
    other = [t for t in other if t.step != name] + [StepTime("layer9", "k", 1)] * (change == "more")
    with pytest.raises(R18Error, match=f"not of the steps of its plan: {name}"):
        lines(plan, other, CEILINGS)


class Winograd:
    """A kernel with another algorithm, with only the attributes that a line reads."""

    id, contract = "toy/conv2d/winograd", RoundingContract("winograd_f4x4", "float32", "float32")


def test_a_winograd_step_has_a_floor_of_its_own() -> None:
    plan = planned()
    index, step = next((i, s) for i, s in enumerate(plan.steps) if s.name == "layer1.0.conv1")
    swapped = replace(step, kernel=Winograd())  # type: ignore[arg-type]
    plan = replace(plan, steps=(*plan.steps[:index], swapped, *plan.steps[index + 1 :]))
    direct = limit(step.problem, FP32, CEILINGS)
    line = lines(plan, times(plan, 0.9 * direct.floor_ms), CEILINGS)[index]
    assert line.direct == direct
    assert line.limit == limit(step.problem, FP32, CEILINGS, "winograd_f4x4")
    assert line.limit.operations < direct.operations
    assert line.limit.nbytes == direct.nbytes
    assert line.ratio == line.limit.floor_ms / line.measured_ms < 1
    assert line.lost_ms == line.measured_ms - line.limit.floor_ms > 0
    data = line.to_json()
    assert (data["floor_ms"], data["direct_floor_ms"]) == (line.limit.floor_ms, direct.floor_ms)


def test_a_network_has_the_lowest_floor_of_its_algorithms() -> None:
    """Winograd lowers the floor of the 3×3 convolutions with stride 1, and of no other step."""
    direct = limits(resnet18(), "fp32", "all", 2, CEILINGS)
    problems = fuse(resnet18(), "all").problems(2)
    both = ("winograd_f2x2", "winograd_f4x4")
    found = limits(resnet18(), "fp32", "all", 2, CEILINGS, algorithms=both)
    lower = {name for name in found if found[name] != direct[name]}
    assert lower == {
        name
        for name, problem in problems.items()
        if isinstance(problem.op, Conv2d)
        and (problem.op.kernel_size, problem.op.stride) == ((3, 3), (1, 1))
    }
    for name in lower:
        each = [own_operations(problems[name], algorithm) for algorithm in both]
        assert found[name].operations == min(each) < direct[name].operations
        assert found[name].nbytes == direct[name].nbytes


@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(3, 5, (3, 3), (2, 2), (1, 1)),
        Conv2d(3, 5, (1, 1)),
        Conv2d(3, 5, (3, 3), (1, 2), (1, 1)),
    ],
    ids=str,
)
def test_what_winograd_does_not_compute_costs_what_the_definition_says(conv: Conv2d) -> None:
    problem = Problem(conv, ((2, 3, 8, 8),))
    assert own_operations(problem, "winograd_f4x4") == 2 * problem.macs


def test_an_algorithm_is_read_from_a_kernel_s_id() -> None:
    ids = ("a/conv2d/winograd_f4x4/fp32/m64n64k8", "a/conv2d/direct/fp32", "apart", "")
    assert [algorithm_of(one) for one in ids] == ["winograd_f4x4", "direct", "", ""]
    again = (*ids, "b/conv2d/winograd_f2x2/fp32", "b/conv2d/winograd_f4x4/fp32")
    assert multiplying_less(again) == ("winograd_f2x2", "winograd_f4x4")


def test_the_work_list_has_the_largest_loss_first() -> None:
    plan = planned()
    took = {step.name: index + 0.5 for index, step in enumerate(plan.steps)}
    found = lines(plan, [replace(t, milliseconds=took[t.step]) for t in times(plan)], CEILINGS)
    work = largest_losses(found, 3)
    assert [line.lost_ms for line in work] == sorted((x.lost_ms for x in found), reverse=True)[:3]
    assert largest_losses([replace(x, measured_ms=0.0) for x in found], 3) == []


def test_a_step_that_takes_no_time_has_no_ratio() -> None:
    one = limit(CONV, FP32, CEILINGS)
    line = Line("a", "k", one, one, 0.0)
    assert math.isinf(line.ratio)
    assert json.loads(json.dumps(line.to_json(), allow_nan=False))["ratio"] is None


# -- ceilings ----------------------------------------------------------------------------------


def test_ceilings_from_a_record(tmp_path: Path) -> None:
    records.write(tmp_path / f"ceilings-{model_slug()}.json", whole(RECORD))
    assert measured.read(tmp_path, CPU) == replace(CEILINGS, rates={"fp32": 1e9})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rates": {"fp32": {}}}, r"damaged .* field `operations_per_second` - at .*\['fp32'\]"),
        ({"rates": []}, r"damaged .*: Expected `object`, got `array` - at `\$.rates`"),
        ({"copy": None}, r"damaged .*: Expected `object`, got `null` - at `\$.copy`"),
        (
            {"copy": {"bytes_per_second": "fast"}},
            r"Expected .* got `str` - at `\$.copy",
        ),
        ({"copy": {"bytes_per_second": 0}}, "copy must be positive and finite"),
        ({"rates": {}}, "a rate must be positive and finite"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    record = whole(RECORD) | change
    if change.get("copy"):
        record = whole(RECORD | change)
    records.write(tmp_path / f"ceilings-{model_slug()}.json", record)
    with pytest.raises(UsageError, match=words):
        measured.read(tmp_path, CPU)


def test_a_cpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SECONDS", 0.0)
    messages: list[str] = []
    record = measured.measure(CPU, side=48, nbytes=1 << 16, progress=messages.append)
    records.write(records.path_of(tmp_path, "ceilings", CPU), record)
    found = measured.read(tmp_path, CPU)
    assert messages == [*(f"matrix product, {name}" for name in ("fp32", "fp64", "int8")), "copy"]
    assert set(found.rates) == {"fp32", "fp64", "int8"}
    assert found.threads == record.machine.threads
    for one in (*record.rates.values(), record.copy):
        assert one.runs == measured.LEAST
    assert all(r.best >= r.operations_per_second > 0 for r in record.rates.values())
    assert "48³" in record.rates["fp32"].how


def test_what_is_no_hardware_is_not_measured() -> None:
    simulated = DeviceInfo("cuda", "a simulator", simulated=True)
    for device in (simulated, DeviceInfo("tpu", "another")):
        with pytest.raises(UsageError, match="its times say nothing of hardware"):
            measured.measure(device)


def test_a_gpu_that_pytorch_does_not_see_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="sees no GPU"):
        measured.measure(DeviceInfo("cuda", "a GPU"))


class Torch:
    """PyTorch on the CPU in the place of PyTorch on a GPU; records what is multiplied and how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[tuple[str, bool]] = []
        self.matmul_settings = SimpleNamespace(allow_tf32="as before")
        self.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=self.matmul_settings))
        self.capability = (9, 0)
        self.cuda = SimpleNamespace(
            Event=Event, get_device_capability=lambda: self.capability, is_available=lambda: True
        )
        monkeypatch.setattr(measured, "_torch", lambda: self)
        monkeypatch.setattr(measured, "SECONDS", 0.0)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("randn", "randint", "ones"):
            return found
        return lambda *args, device, generator=None, **named: found(*args, **named)

    def Generator(self, device: str) -> torch.Generator:
        assert device == "cuda"
        return torch.Generator()

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.abs().sum() > 0
        self.products.append((str(a.dtype), bool(self.matmul_settings.allow_tf32)))
        return a @ b

    def _int_mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert b.stride() == (1, b.shape[0])
        self.products.append((str(a.dtype), False))
        return a.int() @ b.int()


class Event:
    """An event of a device on which every piece of work takes 2 milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        assert other is not self
        return 2.0


def test_a_gpu_is_measured_by_pytorch_s_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    record = measured.measure(DeviceInfo("cuda", "a GPU"), side=32, nbytes=1 << 12)
    found = Ceilings.from_record(record)
    assert found.threads is None
    assert set(found.rates) == {"fp32", "tf32", "fp16", "bf16", "fp64", "int8"}
    assert set(found.rates.values()) == {2 * 32**3 / 2e-3}
    assert found.bandwidth == 2 * (1 << 12) / 2e-3
    assert list(dict.fromkeys(fake.products)) == [
        ("torch.float32", False),
        ("torch.float32", True),
        ("torch.float16", False),
        ("torch.bfloat16", False),
        ("torch.float64", False),
        ("torch.int8", False),
    ]
    assert fake.matmul_settings.allow_tf32 == "as before"


def test_a_gpu_that_cannot_multiply_int8_has_no_rate_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch).capability = (7, 0)
    record = measured.measure(DeviceInfo("cuda", "a GPU"), side=8, nbytes=64)
    assert "int8" not in record.rates


def test_a_busy_machine_is_told() -> None:
    busy, idle, unknown = (
        msgspec.convert(
            whole(RECORD | {"machine": {"cpus": 4, "threads": 4, "load_average": load}}),
            CeilingsRecord,
        )
        for load in ((2.0, 9.0, 9.0), (1.0, 9.0, 9.0), None)
    )
    assert "load average of the last minute is 2.0 on 4 CPUs" in measured.warnings(busy)[0]
    assert measured.warnings(idle) == measured.warnings(unknown) == []


# -- instructions ------------------------------------------------------------------------------

GPU = DeviceInfo("cuda", "a GPU")


def ceiling(what: str, precision: str, sustained: float, burst: float) -> Ceiling:
    paces = (Pace(rate, 1.5 * rate, 9) for rate in (sustained, burst))
    return Ceiling(what, precision, *paces, f"{what} and nothing else")


MEASURED = (
    ceiling("wgmma", "fp16", 3e9, 5e9),
    ceiling("mma.sync", "fp16", 2e9, 2.5e9),
    ceiling("mma.sync", "tf32", 1e9, 1e9),
    ceiling("fma", "fp32", 7e8, 6e8),
    ceiling("wgmma", "e4m3", 8e9, 9e9),
    ceiling("copy", "", 1.5e8, 2e8),
    ceiling("L2 reads", "", 3e8, 4e8),
)


class Measuring(Backend):
    """A backend with given instruction rates, or none."""

    name = "measuring"

    def __init__(self, found: tuple[Ceiling, ...]) -> None:
        self.found = found

    def probe(self) -> DeviceInfo:
        return GPU

    def kernels(self) -> tuple[Kernel, ...]:
        return ()

    def ceilings(self, progress: Callable[[str], None]) -> tuple[Ceiling, ...]:
        progress("instructions")
        return self.found


def test_a_backend_measures_no_instructions_by_default() -> None:
    messages: list[str] = []
    assert load_backend("numpy").ceilings(messages.append) == ()
    assert messages == []


def test_the_highest_rate_on_record_is_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch)
    for name, size in (("CUDA_SIDE", 128), ("CUDA_NBYTES", 1 << 16)):
        monkeypatch.setattr(measured, name, size)
    messages: list[str] = []
    path, _ = measure(Measuring(MEASURED), GPU, tmp_path, messages.append)
    assert (messages[0], messages[-1]) == ("matrix product, fp32", "instructions")
    record = records.load(path, CeilingsRecord)
    assert record is not None
    library = 2 * 128**3 / 2e-3  # 2.1e9
    assert record.instructions["fp16"]["wgmma"].burst.best == 7.5e9  # type: ignore[index]
    assert list(record.memory) == ["copy", "L2 reads"]  # type: ignore[arg-type]
    found = measured.read(tmp_path, GPU)
    others = ("fp32", "tf32", "bf16", "fp64", "int8")
    assert found.rates == dict.fromkeys(others, library) | {"fp16": 5e9, "e4m3": 9e9}
    in_bursts = dict.fromkeys(("fp16", "e4m3"), "by wgmma in bursts")
    assert found.sources == in_bursts | {"copy": "in bursts"}
    assert found.bandwidth == 2e8
    assert found.words("G") == (
        "fp16 5, e4m3 9 GFLOP/s by wgmma in bursts; fp32 2.1, tf32 2.1, bf16 2.1, fp64 2.1, "
        "int8 2.1 GFLOP/s by a library; copy 0.2 GB/s in bursts"
    )
    assert found.words_of("fp16x3") == (
        "fp16 0.005 TFLOP/s by wgmma in bursts, copy 0.0002 TB/s in bursts"
    )
    assert found.words_of("int8").startswith("int8 0.0021 TFLOP/s by a library, ")


def test_what_is_sustained_may_be_the_highest() -> None:
    record = whole(RECORD | {"rates": {}})
    record["instructions"] = {"fp32": {"fma": {"how": "", **paces(sustained=3, burst=2)}}}
    record["memory"] = {"copy": {"how": "", **paces(sustained=6, burst=5)}}
    found = ceilings_of(record | {"copy": {"bytes_per_second": 4}})
    assert (found.rates, found.bandwidth) == ({"fp32": 3}, 6)
    assert found.sources == {"fp32": "by fma sustained", "copy": "sustained"}


def paces(**rates: float) -> dict[str, Any]:
    return {name: {"per_second": rate, "best": rate, "runs": 1} for name, rate in rates.items()}


def test_rates_of_instructions_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch)
    for name, size in (("CUDA_SIDE", 8), ("CUDA_NBYTES", 64)):
        monkeypatch.setattr(measured, name, size)
    path, _ = measure(Measuring(MEASURED), GPU, tmp_path, lambda text: None)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="'measuring' does not measure the instructions of a GPU"):
        measure(Measuring(()), GPU, tmp_path, lambda text: None)
    assert path.read_bytes() == before
    path.unlink()
    measure(Measuring(()), GPU, tmp_path, lambda text: None)
    assert {"instructions", "memory"} & json.loads(path.read_text()).keys() == set()


# -- the command -------------------------------------------------------------------------------

ASKED = ("roofline", "--backend", "numpy", "--network", "tiny", "--warmup", 0, "--repeat", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records.write(tmp_path / f"ceilings-{model_slug()}.json", whole(RECORD))
    return tmp_path


def test_the_command_s_numbers_add_up(folder: Path) -> None:
    done = r18(*ASKED, "--batch", "1,3", "--json", "--records", folder)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["ceilings"]["operations_per_second"] == {"fp32": 1e9}
    assert [p["batch"] for p in data["programs"]] == [1, 3]
    for program in data["programs"]:
        plan = planned(program["batch"])
        assert [s["step"] for s in program["steps"]] == [s.name for s in plan.steps]
        for step, mine in zip(program["steps"], plan.steps, strict=True):
            floor = limit(mine.problem, FP32, CEILINGS)
            assert (step["floor_ms"], step["binds"]) == (floor.floor_ms, floor.binds)
            assert step["measured_ms"] > 0
            assert step["ratio"] == step["floor_ms"] / step["measured_ms"]
        for key in ("floor_ms", "measured_ms"):
            assert program[key] == sum(step[key] for step in program["steps"])


def test_the_table_has_every_step_in_the_schedule_s_order(folder: Path) -> None:
    done = r18(*ASKED, "--batch", "2", "--records", folder)
    assert done.code == 0, done.err
    plan = planned()
    body = done.out.splitlines()
    assert body[1] == (
        "ceilings of 2026-11-20, 2 threads: fp32 1 GFLOP/s by a library; copy 0.1 GB/s by a library"
    )
    rows = [line.split()[0] for line in body if "numpy/" in line and "bound by" not in line]
    assert rows == [step.name.split()[0] for step in plan.steps]


def test_a_table_of_known_times_says_where_the_time_is_lost() -> None:
    plan = planned()
    slow = plan.steps[4].name
    taken = [replace(t, milliseconds=500.0 if t.step == slow else 1e-9) for t in times(plan)]
    found = lines(plan, taken, CEILINGS)
    row = Row("numpy", "a CPU", "cpu", "fp32", "all", 2, 0, 1, (12.5,))
    said = text(plan, row, found).splitlines()
    floor, direct = (sum(getattr(f, of).floor_ms for f in found) for of in ("limit", "direct"))
    assert f"12.5000 ms; the floor is {floor:.4f}, by the definition {direct:.4f}" in said[0]
    assert said[-2] == "largest lost time"
    assert said[-1].startswith(f"  1. {slow}: {found[4].lost_ms:.4f} ms of 500.0000, bound by ")
    (above,) = [line for line in said if line.startswith("above 100 %")]
    assert f"{len(plan.steps) - 1} whose tensors were still in a cache" in above


def test_without_a_record_it_says_how_to_make_one(tmp_path: Path) -> None:
    done = r18(*ASKED, "--records", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert f"{tmp_path / f'ceilings-{model_slug()}.json'}" in done.err
    assert "r18 roofline --measure" in done.err


def test_the_command_that_measures_repeats_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kernels = ("--kernel", "conv2d=*/direct/*", "--kernel", "linear=*/gemm/*")
    done = r18("roofline", "--batch", 1, "--backend", "numpy", "--records", "new one", *kernels)
    assert done.code == 2
    (said,) = [line for line in done.err.splitlines() if "measure it there" in line]
    words = shlex.split(said.partition("nothing else runs: ")[2])
    assert words[:3] == ["r18", "roofline", "--measure"]
    given = zip(words[3::2], words[4::2], strict=True)
    asked = [("--backend", "numpy"), ("--batch", "1"), ("--records", "new one")]
    assert sorted(given) == sorted([*asked, *zip(kernels[::2], kernels[1::2], strict=True)])
    done = r18(*ASKED, "--json")
    assert "--measure --backend numpy --warmup 0 --repeat 2 --network tiny --json" in done.err


def test_a_precision_without_a_rate_is_said_before_timing(folder: Path) -> None:
    done = r18(*ASKED, "--precision", "fp64", "--records", folder)
    assert (done.code, done.out) == (2, "")
    assert "no rate of fp64 was measured on a CPU; measured: fp32" in done.err


def test_other_threads_than_the_ceilings_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    done = r18(*ASKED, "--batch", "1", "--records", folder)
    assert done.code == 0, done.err
    assert "measured with 2 threads, this runs with 3" in done.err


def test_measuring_writes_the_record_and_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CPU_SIDE", 32), ("CPU_NBYTES", 1 << 14), ("SECONDS", 0.0)):
        monkeypatch.setattr(measured, name, value)
    done = r18(*ASKED, "--batch", "1", "--measure", "--json", "--records", tmp_path)
    assert done.code == 0, done.err
    record = json.loads((tmp_path / f"ceilings-{model_slug()}.json").read_text())
    used = json.loads(done.out)["ceilings"]
    assert used["bytes_per_second"] == record["copy"]["bytes_per_second"]
    assert f"recorded in {tmp_path / f'ceilings-{model_slug()}.json'}" in done.err
