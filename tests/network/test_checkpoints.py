"""Whole networks against float64: correct ones pass, and a fault is located at the right step."""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from faults import summations
from faulty_backends import right
from pooling_backends import Pooling, Tuned
from r18.backend import (
    Array,
    CompileOptions,
    Launch,
    PlannedStep,
    Program,
    RoundingContract,
)
from r18.backend.host import HostBuffer, HostKernel
from r18.backend.registry import get_backend
from r18.errors import NoKernel, R18Error, ShapeError, UnknownName, UsageError
from r18.evaluate.margins import (
    ALGORITHM_MULTIPLE,
    CUT_OFF_MULTIPLE,
    END_TO_END_MULTIPLE,
    Allowance,
    multiple,
)
from r18.graph.ops import ConvMaxPool
from r18.graph.precision import FP16X3, FP32, PRECISIONS, TF32
from r18.graph.resnet import resnet, tiny
from r18.graph.schedule import CANONICAL
from r18.runtime.plan import make_plan
from r18.weights import Weights, load_weights
from r18_oracle.findings import Finding
from r18_oracle.judge.reference import KernelRunning, reference
from r18_oracle.judge.winograd import MATRICES, growth
from r18_oracle.network import reference_runs
from r18_oracle.network.checkpoints import (
    UNTAPPED,
    CheckpointReport,
    Shared,
    compare_checkpoints,
    seeded_images,
    text,
)
from r18_oracle.network.images import Images
from r18_oracle.network.losses import LossSums
from spoiled_kernels import Altered, kernel, spoiled
from tiled_backend import TILE, Tiled

SMALL = resnet("small", blocks=(1, 2), width=16, classes=7, image_size=40)
NETWORKS = {"tiny": tiny(), "small": SMALL}


@cache
def weights_of(name: str) -> Weights:
    return load_weights("synthetic", NETWORKS[name])


def compare(backend: Any, count: int = 2, **options: Any) -> CheckpointReport:
    """The tiny network with seeded images."""
    schedule = NETWORKS["tiny"]
    given = options.pop("weights", None) or weights_of("tiny")
    return compare_checkpoints(backend, schedule, given, seeded_images(schedule, count), **options)


def rows(report: CheckpointReport) -> dict[str, Any]:
    return {row.name: row for row in report.checkpoints}


# -- backends that are wrong in one place ------------------------------------------------------


def scaled(factor: float, kernel_id: str = "numpy/conv2d/im2col/fp32") -> HostKernel:
    def spoil(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        out *= np.float32(factor)

    return spoiled(kernel_id, spoil)


class Corrupting(Program):
    """A program with right launches, in which a buffer is overwritten between two of them.

    The step's output, as an array that shares memory, goes through `corrupt`.
    """

    def __init__(
        self, *args: Any, step: str, corrupt: Callable[[Array], None], tapped: bool | None = None
    ) -> None:
        super().__init__(*args)
        self.at, self.corrupt = step, corrupt
        self.wanted = tapped is None or tapped == bool(self.plan.options.taps)

    def _enqueue(self, launches: Sequence[Launch]) -> None:
        for step, launch in zip(self.plan.steps, launches, strict=True):
            launch.enqueue(self._stream)
            if self.wanted and step.name == self.at:
                tensor = self.plan.tensors[step.output]
                buffer = self._buffer(step.output)
                assert isinstance(buffer, HostBuffer)
                self.corrupt(buffer.as_array(tensor.shape, tensor.dtype))


def corrupting(step: str, corrupt: Callable[[Array], None], tapped: bool | None = None) -> Altered:
    return Altered(program=partial(Corrupting, step=step, corrupt=corrupt, tapped=tapped))


# -- correct backends --------------------------------------------------------------------------

RUNS = [
    ("numpy", "fp32"),
    ("numpy", "fp64"),
    ("torch", "fp32"),
    ("torch", "fp64"),
    ("torch", "fp16"),
    ("torch", "bf16"),
    ("numba-cpu", "fp32"),
    ("numba-cpu", "bf16"),
]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("fusion", ["none", "all"])
@pytest.mark.parametrize(("backend", "precision"), RUNS)
def test_correct_backends_pass(backend: str, precision: str, fusion: str, network: str) -> None:
    schedule = NETWORKS[network]
    loaded = get_backend(backend)
    report = compare_checkpoints(
        loaded,
        schedule,
        weights_of(network),
        seeded_images(schedule, 3, seed=5),
        precision=precision,
        fusion=fusion,
    )
    assert report.ok, text(report)
    assert report.divergence is None
    names = [name for name in CANONICAL if name in schedule.taps]
    assert [row.name for row in report.checkpoints] == [*names, UNTAPPED]
    plan = make_plan(loaded, schedule, CompileOptions(3, precision, fusion))
    assert [(s.step, s.kernel, s.problem) for s in report.steps] == [
        (s.name, s.kernel.id, s.problem) for s in plan.steps
    ]
    assert max(step.ratio for step in report.steps) <= 1
    for row in report.checkpoints:
        # Neither near the limit nor idle.
        assert 0.01 < row.loss.ratio < 0.6, row
        assert row.loss.cosine > 0.999
    # The fc step stands under both names of the value that it makes.
    assert report.checkpoints[-1].steps == report.checkpoints[-2].steps == ("fc",)
    every = [name for row in report.checkpoints[:-1] for name in row.steps]
    assert every == [step.step for step in report.steps]
    assert report.top1 is not None
    assert report.top1.images == 3
    assert not report.top1.wrong
    if precision in ("fp32", "fp64"):
        assert report.top1.decided == 3


@pytest.mark.parametrize(
    ("backend", "kernels"),
    [
        ("numpy", {"conv2d": "numpy/conv2d/direct/fp32"}),
        ("torch", {"conv2d": "torch/conv2d/aten_nhwc/fp32"}),
        ("torch", {"layer2.0.conv1": "torch/conv2d/aten_nhwc/fp32"}),
    ],
)
def test_other_kernels_and_relayouts_are_judged_too(backend: str, kernels: dict[str, str]) -> None:
    report = compare(get_backend(backend), kernels=kernels, taps="all")
    assert report.ok, text(report)
    used = {step.kernel for step in report.steps}
    assert set(kernels.values()) <= used
    assert any("relayout" in step.step for step in report.steps) == (backend == "torch")


@pytest.mark.parametrize("fusion", ["add_relu", "conv_bn_relu"])
def test_the_fusion_levels_between(fusion: str) -> None:
    assert compare(get_backend("numpy"), fusion=fusion, taps="all").ok


INPUT, FILTER, OUTPUT = (matrix.astype(np.float32) for matrix in MATRICES[4])


def winograd(op: Any, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    x = inputs[0]
    h, w = x.shape[2:]
    down, right = -(-h // 4), -(-w // 4)
    x = np.pad(x, ((0, 0), (0, 0), (1, 4 * down + 1 - h), (1, 4 * right + 1 - w)))
    tiles = np.lib.stride_tricks.sliding_window_view(x, (6, 6), axis=(2, 3))[:, :, ::4, ::4]
    mixed = np.einsum(
        "ocij,nctuij->notuij",
        FILTER @ weights[0] @ FILTER.T,
        INPUT @ tiles @ INPUT.T,
        optimize=True,
    )
    y = (OUTPUT @ mixed @ OUTPUT.T).transpose(0, 1, 2, 4, 3, 5)
    y = y.reshape(*out.shape[:2], 4 * down, 4 * right)[:, :, :h, :w] + weights[1][:, None, None]
    if op.residual:
        y = y + inputs[1]
    out[...] = np.maximum(y, 0) if op.relu else y


def test_winograd_may_lose_more_than_a_direct_sum() -> None:
    fast = replace(
        kernel("numpy/conv2d/direct/fp32"),
        algorithm="winograd_f4x4",
        contract=RoundingContract("winograd_f4x4", "float32", "float32"),
        run=winograd,
    )
    steps = [f"layer{i}.0.conv{j}" for i in (1, 2, 3, 4) for j in (1, 2) if (i == 1) or j == 2]
    report = compare(Altered(fast), kernels=dict.fromkeys(steps, fast.id))
    assert report.ok, text(report)
    assert report.multiple == ALGORITHM_MULTIPLE["winograd_f4x4"]
    plain = compare(get_backend("numpy"))
    assert plain.multiple == END_TO_END_MULTIPLE
    # In one layer chance decides as well, by the order in which a CPU's BLAS adds.
    lost = {name: rows(report)[name].loss for name in ("layer1", "layer2", "layer3", "layer4")}
    assert 1.05 < max(loss.rms / loss.own_rms for loss in lost.values()) < 8
    assert 1.05 < max(loss.rms / rows(plain)[name].loss.rms for name, loss in lost.items()) < 8


def test_what_pytorch_loses_is_what_its_backend_loses() -> None:
    report = compare(get_backend("torch"), fusion="none")
    for row in report.checkpoints:
        assert row.loss.ratio == pytest.approx(1 / END_TO_END_MULTIPLE, rel=0.05)
        assert row.loss.own_rms == pytest.approx(row.loss.rms, rel=0.05)


def test_every_tap_and_a_slice_without_logits() -> None:
    report = compare(get_backend("numpy"), fusion="none", taps="all")
    assert report.ok
    assert {row.value for row in report.checkpoints} == {s.output for s in tiny().steps}
    part = tiny().between("stem_pool", "layer2")
    given = {name: weights_of("tiny")[name] for name in part.weight_specs}
    images = seeded_images(part, 2)
    report = compare_checkpoints(get_backend("numpy"), part, given, images)
    assert report.ok, text(report)
    assert report.top1 is None
    behind = tiny().between("gap", "logits")
    report = compare_checkpoints(
        get_backend("numpy"), behind, weights_of("tiny"), seeded_images(behind, 2), batch=1
    )
    assert report.ok, text(report)
    assert report.top1 is not None


def test_the_input_can_be_a_checkpoint() -> None:
    report = compare(get_backend("torch"), precision="fp16", taps=["image", "logits"])
    first = report.checkpoints[0]
    assert (first.name, first.steps, first.forced) == ("image", (), None)
    assert first.loss.own_rms == first.loss.rms > 0
    assert report.ok


def test_batches_and_a_remainder_change_little() -> None:
    whole = rows(compare(get_backend("numpy"), 5, batch=5))
    parts = compare(get_backend("numpy"), 5, batch=2)
    assert (parts.images, parts.batch) == (5, 2)
    assert parts.ok
    assert parts.top1 is not None
    assert parts.top1.images == 5
    for row in parts.checkpoints:
        assert row.loss.rms == pytest.approx(whole[row.name].loss.rms, rel=0.5)
        assert row.loss.own_rms == pytest.approx(whole[row.name].loss.own_rms, rel=0.5)


def test_progress_names_every_step_and_its_problem() -> None:
    seen: list[tuple[str, Any]] = []
    report = compare(get_backend("numpy"), progress=lambda name, what: seen.append((name, what)))
    assert [s for s in seen if s[1] is not None] == [(s.step, s.problem) for s in report.steps]
    assert seen[0] == ("compiling at batch 2", None)


# -- faults in one step ------------------------------------------------------------------------


def drop_tap(op: Any, inputs: Any, weights: Any, out: Array) -> None:
    """Leave out the last product of the first channel."""
    x, w = inputs[0], weights[0].reshape(op.out_channels, op.in_channels, *op.kernel_size)
    sh, sw = op.stride
    oh, ow = out.shape[2:]
    last = np.pad(x[:, -1], ((0, 0), (1, 1), (1, 1)))[:, 2:, 2:]
    taps = last[:, : sh * (oh - 1) + 1 : sh, : sw * (ow - 1) + 1 : sw]
    out[:, 0] -= w[0, -1, -1, -1] * taps


def late_relu(op: Any, inputs: Any, weights: Any, out: Array) -> None:
    out[...] = np.maximum(out, np.float32(1e-3))


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ("conv1", scaled(1.001)),
        ("layer1.0.conv1", scaled(1.001)),
        ("layer3.0.conv1", scaled(0.999)),
        ("layer2.0.downsample.0", scaled(1.001)),
        ("layer2.0.conv1", spoiled("numpy/conv2d/im2col/fp32", drop_tap)),
        ("layer4.0.conv2", spoiled("numpy/conv2d/im2col/fp32", late_relu)),
        ("maxpool", scaled(1 + 2**-20, "numpy/maxpool2d/separable/fp32")),
        ("avgpool", scaled(1.001, "numpy/gap/mean/fp32")),
        ("fc", scaled(1.001, "numpy/linear/matmul/fp32")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_step_is_the_first_divergence(step: str, wrong: HostKernel) -> None:
    report = compare(Altered(wrong), kernels={step: wrong.id}, seed=9, backend_name="mine:x")
    finding = report.divergence
    assert not report.ok
    assert finding is not None
    assert report.findings == (finding,)
    assert finding.check == "checkpoint"
    assert finding.kernel == wrong.id
    assert f"'{step}'" in finding.message
    assert (finding.kind, finding.seed, finding.backend) == ("network", 9, "mine:x")
    assert finding.details["step"] == step
    (bad,) = (s for s in report.steps if not s.ok)
    assert bad.step == step
    assert bad.ratio > 1
    assert finding.problem == bad.problem
    assert finding.coordinate is not None
    assert len(finding.coordinate) == len(bad.problem.output)
    assert abs((finding.got or 0) - (finding.expected or 0)) > (finding.bound or 0)
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    for row in report.checkpoints:  # steps before it are right
        if step in row.steps:
            assert row.forced == bad
            assert "FAIL" in text(report)
            break
        assert row.ok


def test_a_wrong_epsilon_is_found_where_it_is() -> None:
    right = kernel("numpy/batchnorm/scale_shift/fp32")

    def run(op: Any, *rest: Any) -> None:
        right.run(replace(op, eps=1e-3), *rest)

    wrong = replace(right, algorithm="eps", run=run)
    report = compare(Altered(wrong), fusion="none", kernels={"layer2.0.bn2": wrong.id})
    assert report.divergence is not None
    assert report.divergence.details["step"] == "layer2.0.bn2"
    assert report.divergence.kernel == "numpy/batchnorm/eps/fp32"


def test_of_two_wrong_steps_the_first_is_named_and_each_kernel_once() -> None:
    one, other = scaled(1.001), replace(scaled(1.001), algorithm="other")
    chosen = {"layer2.0.conv1": other.id, "layer3.0.conv1": one.id, "layer4.0.conv1": other.id}
    report = compare(Altered(one, other), kernels=chosen)
    assert [f.details["step"] for f in report.findings] == ["layer2.0.conv1", "layer3.0.conv1"]
    assert [s.step for s in report.steps if not s.ok] == list(chosen)


def writes_into_its_input(op: Any, inputs: Any, weights: Any, out: Array) -> None:
    inputs[0][0, 0, 0, 0] += 1


def writes_past_its_end(op: Any, inputs: Any, weights: Any, out: Array) -> None:
    np.lib.stride_tricks.as_strided(out.reshape(-1), (out.size + 1,))[out.size] = 7.0


@pytest.mark.parametrize(
    ("spoil", "check"),
    [(writes_into_its_input, "inputs_unchanged"), (writes_past_its_end, "guard_zones")],
)
def test_a_step_that_writes_where_it_may_not(spoil: Callable[..., None], check: str) -> None:
    wrong = spoiled("numpy/conv2d/im2col/fp32", spoil)
    report = compare(Altered(wrong), kernels={"layer1.0.conv1": wrong.id}, batch=1)
    assert report.divergence is not None
    assert report.divergence.check == check
    assert report.divergence.details["step"] == "layer1.0.conv1"
    (bad,) = (s for s in report.steps if not s.ok)
    assert bad.ratio == np.inf
    json.dumps(report.to_json(), allow_nan=False)


def test_a_step_that_raises_when_called_alone() -> None:
    calls = 0

    def spoil(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:  # after both programs ran
            raise RuntimeError("no such luck")

    wrong = spoiled("numpy/conv2d/im2col/fp32", spoil)
    report = compare(Altered(wrong), kernels={"layer1.0.conv1": wrong.id})
    assert report.divergence is not None
    assert report.divergence.check == "runs"
    assert "RuntimeError: no such luck" in report.divergence.message


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_step_that_is_wrong_in_one_batch_stays_wrong(batch: int) -> None:
    calls = 0

    def spoil(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * batch + 3:  # two programs, then the kernel alone
            out *= np.float32(1.001)

    wrong = spoiled("numpy/conv2d/im2col/fp32", spoil)
    report = compare(Altered(wrong), 3, batch=1, kernels={"layer1.0.conv1": wrong.id})
    assert calls == 9
    assert all(row.ok for row in report.checkpoints)
    assert not report.ok
    assert report.divergence is not None
    assert report.divergence.details["step"] == "layer1.0.conv1"
    assert report.divergence.details["first_image"] == batch


def test_the_worst_image_is_told_whatever_the_batch() -> None:
    def spoil(array: Array) -> None:
        if spoil_at == seen.setdefault("runs", 0) // 2:
            array[0, 3] += 1.0
        seen["runs"] += 1

    seen: dict[str, int] = {}
    spoil_at = 2
    report = compare(corrupting("layer4.0.conv2", spoil), 5, batch=2)
    bad = rows(report)["layer4"]
    assert not bad.ok
    assert bad.loss.coordinate[:2] == (4, 3)
    assert report.divergence is not None
    assert report.divergence.coordinate == bad.loss.coordinate


# -- faults that no step shows -----------------------------------------------------------------


def test_a_loss_below_every_bound_but_systematic_is_found_end_to_end() -> None:
    wrong = scaled(1 + 2e-5)
    chosen = {"layer4.0.conv1": wrong.id}
    report = compare(Altered(wrong), kernels=chosen)
    assert all(step.ok for step in report.steps)
    finding = report.divergence
    assert finding is not None
    assert finding.problem is None
    assert finding.kernel == "numpy/program/all/fp32"
    assert finding.details["checkpoint"] == "layer4"
    assert "layer4.0.conv1" in finding.details["steps"]
    assert rows(report)["layer3"].ok
    # With every value compared it is narrowed down to the one step.
    report = compare(Altered(wrong), kernels=chosen, taps="all")
    assert report.divergence is not None
    assert report.divergence.details["steps"] == ["layer4.0.conv1"]


def test_a_step_above_the_statistical_line_is_suspected() -> None:
    wrong = scaled(1 + 4e-5)
    report = compare(Altered(wrong), kernels={"layer4.0.conv2": wrong.id})
    (step,) = (s for s in report.steps if s.step == "layer4.0.conv2")
    assert step.ok
    assert step.sharp is not None
    assert step.sharp > 1
    assert report.divergence is not None
    suspected = f"above the statistical line: 'layer4.0.conv2' ({wrong.id}"
    assert suspected in report.divergence.message


def scale(array: Array) -> None:
    array *= np.float32(1.01)


def overlap(array: Array) -> None:
    array.reshape(-1)[-8:] = 3.0


@pytest.mark.parametrize("corrupt", [scale, overlap])
def test_right_steps_in_a_wrong_program(corrupt: Callable[[Array], None]) -> None:
    report = compare(corrupting("layer2.0.conv1", corrupt))
    assert all(step.ok and step.ratio < 0.5 for step in report.steps)
    by_name = rows(report)
    assert by_name["stem_pool"].ok
    assert by_name["layer1"].ok
    assert by_name["layer2"].loss.ratio > 100
    (finding,) = report.findings
    assert finding.details["checkpoint"] == "layer2"
    assert "each of the 2 steps since the previous checkpoint keeps its bound" in finding.message
    assert "combined" in finding.message
    assert finding.coordinate == by_name["layer2"].loss.coordinate


def test_a_wrong_program_before_a_wrong_step_is_not_hidden_by_it() -> None:
    wrong = scaled(1.001)
    backend = corrupting("conv1", scale)
    backend.more = (wrong,)
    report = compare(backend, kernels={"layer3.0.conv1": wrong.id})
    assert [f.details.get("step", f.details.get("checkpoint")) for f in report.findings] == [
        "layer3.0.conv1",
        "stem_pool",
    ]


def test_a_fault_that_taps_hide_is_found_without_them() -> None:
    report = compare(corrupting("layer3.0.conv1", scale, tapped=False))
    assert [row.name for row in report.checkpoints if not row.ok] == [UNTAPPED]
    assert report.divergence is not None
    assert report.divergence.details["checkpoint"] == UNTAPPED
    report = compare(corrupting("layer3.0.conv1", scale, tapped=True))
    assert rows(report)[UNTAPPED].ok
    assert not rows(report)["layer3"].ok


def test_weights_folded_wrongly_are_found_end_to_end() -> None:
    class Folding(Altered):
        def compile(self, schedule: Any, weights: Any, options: Any) -> Any:
            wrong = dict(weights)
            wrong["layer1.0.bn2.running_var"] = wrong["layer1.0.bn2.running_var"] + 1e-3
            return super().compile(schedule, wrong, options)

    report = compare(Folding())
    assert report.divergence is not None
    assert report.divergence.details["checkpoint"] == "layer1"


# -- logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_logit_that_is_not_finite_fails(value: float) -> None:
    def corrupt(array: Array) -> None:
        array[1, 4] = value

    report = compare(corrupting("fc", corrupt))
    bad = rows(report)["logits"]
    assert not report.ok
    assert (bad.loss.nonfinite, bad.loss.coordinate) == (1, (1, 4))
    assert bad.loss.ratio == np.inf
    assert rows(report)["gap"].ok
    assert report.divergence is not None
    assert "1 of its values are NaN or infinite" in report.divergence.message
    json.dumps(report.to_json(), allow_nan=False)
    assert "FAIL" in text(report)


def test_a_value_that_is_nan_on_every_image_fails() -> None:
    report = compare(corrupting("fc", lambda array: array.fill(np.nan)))
    assert rows(report)["logits"].loss.nonfinite == 20
    assert not report.ok


def second_best(gap: float) -> tuple[dict[str, Array], int, int]:
    """Weights in which another class is `gap` below image 0's best class; and both classes."""
    given = dict(weights_of("tiny"))
    program = get_backend("numpy").compile(tiny(), given, CompileOptions(1))
    best = int(np.argmax(program(seeded_images(tiny(), 1).values)))
    program.close()
    other = 0 if best else 1
    for name in ("fc.weight", "fc.bias"):
        given[name] = given[name].copy()
        given[name][other] = given[name][best]
    given["fc.bias"][other] -= np.float32(gap)
    return given, best, other


def test_close_calls_are_ties_and_shown() -> None:
    given, best, other = second_best(1e-6)
    report = compare(get_backend("numpy"), 4, weights=given)
    assert report.ok, text(report)
    top = report.top1
    assert top is not None
    ties = {call.image: call for call in top.ties}
    assert all({call.first, call.second} == {best, other} for call in ties.values())
    assert 0 < ties[0].margin <= 2 * top.bound
    assert top.decided == 4 - len(ties) < 4
    assert f"tie: image 0, classes {best} and {other}" in text(report)
    assert rows(report)["logits"].loss.allowed_max == top.bound


@pytest.mark.parametrize(("gap", "ties"), [(0.5, 1), (1.8, 1), (2.2, 0)])
def test_a_margin_of_twice_the_bound_decides(gap: float, ties: int) -> None:
    top = compare(get_backend("numpy"), 1, weights=second_best(0.0)[0]).top1
    assert top is not None
    report = compare(get_backend("numpy"), 1, weights=second_best(gap * top.bound)[0])
    assert report.top1 is not None
    assert report.top1.bound == pytest.approx(top.bound, rel=0.05)
    assert len(report.top1.ties) == ties
    assert report.ok


def test_a_class_that_was_decided_and_came_out_otherwise_is_wrong() -> None:
    given, best, other = second_best(0.0)
    top = compare(get_backend("numpy"), 1, weights=given).top1
    assert top is not None
    given, best, other = second_best(5 * top.bound)

    def corrupt(array: Array) -> None:
        array[0, other] += np.float32(6 * top.bound)

    report = compare(corrupting("fc", corrupt), 1, weights=given)
    assert report.top1 is not None
    (call,) = report.top1.wrong
    assert (call.first, call.second, call.got) == (best, other, other)
    assert "top-1: 0 of 1 agree" in text(report)
    assert f"WRONG: image 0, classes {best} and {other}" in text(report)
    assert not report.ok


def test_another_class_is_wrong() -> None:
    def rolled(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        out[...] = np.roll(out, 1, axis=1)

    wrong = spoiled("numpy/linear/matmul/fp32", rolled)
    report = compare(Altered(wrong), 3, kernels={"fc": wrong.id})
    assert report.top1 is not None
    assert [call.image for call in report.top1.wrong] == [0, 1, 2]
    assert all(call.got == (call.first + 1) % 10 for call in report.top1.wrong)
    assert "top-1: 0 of 3 agree" in text(report)
    assert not report.ok


# -- memory ------------------------------------------------------------------------------------


class Live:
    """The bytes of all seen arrays that are alive, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = self.count = 0

    def see(self, array: Array) -> Array:
        self.now += array.nbytes
        self.count += 1
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._gone, array.nbytes)
        return array

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, Live]]:
    """Watches the reference's values, and values that are fetched from programs."""
    exact, fetched = Live(), Live()
    fetch = Program.fetch
    monkeypatch.setattr(reference_runs, "reference", lambda *args: exact.see(reference(*args)))
    monkeypatch.setattr(Program, "fetch", lambda self, name=None: fetched.see(fetch(self, name)))
    yield exact, fetched
    gc.collect()
    assert exact.now == fetched.now == 0


@pytest.mark.parametrize("fusion", ["none", "all"])
def test_memory_does_not_grow_with_checkpoints_or_images(
    watched: tuple[Live, Live], fusion: str
) -> None:
    exact, fetched = watched
    compare(get_backend("numpy"), 1, batch=1, fusion=fusion, taps=["stem_pool"])
    few = (exact.most, fetched.most, exact.count)
    compare(get_backend("numpy"), 6, batch=1, fusion=fusion, taps="all")
    assert exact.count == 7 * few[2]
    shapes = tiny().shapes(1)
    largest = max(int(np.prod(shapes[s.output])) for s in tiny().steps)
    logits = int(np.prod(shapes["fc"])) * 4
    assert exact.most == few[0] <= 3 * 8 * largest
    # One fetched checkpoint at a time, and the logits of the program without taps.
    assert fetched.most <= 4 * largest + logits


def test_nothing_is_kept_from_batch_to_batch() -> None:
    def peak(count: int) -> int:
        images = seeded_images(tiny(), count)
        tracemalloc.start()
        try:
            compare_checkpoints(
                get_backend("numpy"), tiny(), weights_of("tiny"), images, batch=1, taps="all"
            )
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(5)  # fills what lasts longer than a comparison, such as networks and their fused schedules
    assert peak(5) < 1.05 * peak(1) + 20_000


@pytest.mark.parametrize("precisions", [("fp32", "fp64", "fp32"), ("int8", "fp32", "int8")])
def test_what_comparisons_share_is_computed_once_and_changes_no_figure(
    monkeypatch: pytest.MonkeyPatch, precisions: tuple[str, ...]
) -> None:
    counts = Live()
    monkeypatch.setattr(reference_runs, "reference", lambda *args: counts.see(reference(*args)))
    shared, computed = Shared(), []
    for precision in precisions:
        before = counts.count
        again = compare(get_backend("numpy"), precision=precision, shared=shared)
        computed.append(counts.count - before)
        assert again == compare(get_backend("numpy"), precision=precision)
    assert computed[2] == 0
    assert computed[0] > 0
    if "int8" not in precisions:
        assert computed[1] == 0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_fault_shows_next_to_what_another_backend_has_left(precision: str) -> None:
    conv = f"numpy/{'q' * (precision == 'int8')}conv2d/im2col/{precision}"

    def spoil(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        out[...] = np.roll(out, 1, axis=1)

    shared = Shared()
    assert compare(get_backend("numpy"), precision=precision, shared=shared).ok
    wrong = spoiled(conv, spoil)
    how: dict[str, Any] = {"precision": precision, "kernels": {"layer1.0.conv1": wrong.id}}
    found = compare(Altered(wrong), **how, shared=shared)
    assert not found.ok
    assert found == compare(Altered(wrong), **how)


def test_several_batches_share_nothing() -> None:
    shared = Shared()
    assert compare(get_backend("numpy"), 3, batch=2, shared=shared).ok
    assert not shared.values


# -- what cannot be compared -------------------------------------------------------------------


def test_a_checkpoint_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UnknownName, match=r"layer1\.0\.bn1"):
        compare(get_backend("numpy"), taps=["layer1.0.bn1"])
    with pytest.raises(UnknownName):
        compare(get_backend("numpy"), taps=["nowhere"])
    with pytest.raises(UsageError):
        compare(get_backend("numpy"), taps=[])


def test_precisions_without_a_rule_or_kernels() -> None:
    with pytest.raises(NoKernel):
        compare(get_backend("numpy"), precision="tf32")
    with pytest.raises(UsageError):
        compare(get_backend("numpy"), batch=0)


def test_images_of_another_network() -> None:
    with pytest.raises(ShapeError):
        compare_checkpoints(
            get_backend("numpy"), tiny(), weights_of("tiny"), seeded_images(SMALL, 1)
        )


def test_networks_that_are_not_finite_say_nothing() -> None:
    given = dict(weights_of("tiny"))
    given["layer1.0.conv1.weight"] = given["layer1.0.conv1.weight"] * np.float32(1e30)
    given["layer1.0.conv1.weight"][0] = np.inf
    with pytest.raises(UsageError, match=r"layer1\.0\.conv1.*NaN or infinity in float64"):
        compare(get_backend("numpy"), weights=given)


def test_a_network_that_leaves_float16_is_no_ones_fault() -> None:
    given = dict(weights_of("tiny"))
    given["bn1.weight"] = given["bn1.weight"] * np.float32(1e6)
    with pytest.raises(UsageError, match="leaves the range of float16"):
        compare(get_backend("torch"), weights=given, precision="fp16")
    assert compare(get_backend("torch"), weights=given, precision="bf16").ok


class Unplanned(Program):
    """A program whose plan lacks the last step."""

    @property
    def plan(self) -> Any:
        return replace(self._plan, steps=self._plan.steps[:-1])


class Unlisted(Program):
    """A program whose plan names a kernel that the backend does not list."""

    @property
    def plan(self) -> Any:
        def renamed(step: PlannedStep) -> PlannedStep:
            assert isinstance(step.kernel, HostKernel)
            return replace(step, kernel=replace(step.kernel, algorithm="magic"))

        return replace(self._plan, steps=tuple(renamed(s) for s in self._plan.steps))


class Shapeless(Program):
    def fetch(self, name: str | None = None) -> Array:
        return super().fetch(name)[:1]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Unplanned, r"its plan computes 'fc' by nothing"),
        (Unlisted, r"'numpy/conv2d/magic/fp32', which the backend does not list"),
        (Shapeless, r"returned checkpoint 'stem_pool' with shape \(1, 8, 8, 8\)"),
    ],
)
def test_a_program_that_is_not_what_it_says(program: Any, message: str) -> None:
    with pytest.raises(R18Error, match=message):
        compare(Altered(program=program))


def test_a_plan_may_name_a_tile_that_was_measured() -> None:
    """A plan may name a measured tile, which `kernels()` does not list."""
    report = compare(Tiled())
    assert report.ok, text(report)
    assert report.steps[0].kernel == TILE.id


# -- a fused stem ------------------------------------------------------------------------------


def test_a_program_that_fuses_the_pooling_passes() -> None:
    report = compare(Pooling())
    assert report.ok, text(report)
    assert report.steps[0].kernel == "faulty/conv2d_maxpool2d/plain/fp32"
    assert [row.name for row in report.checkpoints] == [*CANONICAL, UNTAPPED]
    assert rows(report)["stem_pool"].steps == ("conv1",)
    apart = compare(Pooling(), kernels={"maxpool": "*"})
    assert apart.ok
    assert rows(apart)["stem_pool"].steps == ("conv1", "maxpool")
    assert rows(apart)["logits"].loss == rows(report)["logits"].loss


def test_of_all_checkpoints_those_that_a_plan_fused_are_left_out() -> None:
    """With all checkpoints, those that a plan fused are left out; the backend fuses at batch 2
    only, not in the remainder."""
    for backend, count, batch, relu in (
        (get_backend("numpy"), 2, 2, True),
        (Pooling(), 2, 2, False),
        (Tuned(), 1, 1, True),
        (Tuned(), 3, 2, False),
    ):
        report = compare(backend, count, batch=batch, taps="all")
        assert report.ok, text(report)
        assert ("relu" in rows(report)) == relu
    with pytest.raises(UnknownName, match="unknown checkpoint 'relu'"):
        compare(Pooling(), taps=["relu"])
    assert "relu" in rows(compare(Pooling(), taps=["relu"], kernels={"maxpool": "*"}))


def test_a_wrong_fused_stem_is_the_first_divergence() -> None:
    class Wrong(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            def run(op: Any, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
                right(op, inputs, weights, out, workspace)
                out[..., -1] = 0

            return tuple(
                replace(k, run=run) if k.op is ConvMaxPool else k for k in super().kernels()
            )

    report = compare(Wrong())
    assert not report.ok
    (finding,) = (f for f in report.findings if f.check == "checkpoint" and f.problem is not None)
    assert finding.kernel == "faulty/conv2d_maxpool2d/plain/fp32"
    assert isinstance(finding.problem and finding.problem.op, ConvMaxPool)
    assert finding.coordinate is not None
    assert finding.coordinate[-1] == 7
    assert Finding.from_json(finding.to_json()) == finding


@pytest.mark.parametrize("fails", [False, True])
def test_programs_are_closed(fails: bool) -> None:
    made: list[Closing] = []

    class Closing(Program):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def launch(self) -> None:
            if fails:
                raise RuntimeError("no such luck")
            super().launch()

    if fails:
        with pytest.raises(RuntimeError, match="no such luck"):
            compare(Altered(program=Closing))
    else:
        compare(Altered(program=Closing), 3, batch=2)
    assert len(made) == (2 if fails else 4)
    assert all(program._closed for program in made)


def test_a_program_that_asks_the_reference_is_refused() -> None:
    def ask(op: Any, inputs: Any, weights: Any, out: Array) -> None:
        from r18.graph.ops import Problem

        x = inputs[0].astype(np.float64)
        w = tuple(a.astype(np.float64) for a in weights)
        out[...] = reference(Problem(op, (x.shape,)), (x,), w)

    wrong = spoiled("numpy/linear/matmul/fp32", ask)
    with pytest.raises(KernelRunning):
        compare(Altered(wrong), kernels={"fc": wrong.id})


# -- the parts ---------------------------------------------------------------------------------


def test_a_report_is_data() -> None:
    report = compare(get_backend("numpy"), backend_name="numpy", seed=3)
    assert pickle.loads(pickle.dumps(report)) == report
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["ok"] is True
    assert [row["name"] for row in data["checkpoints"]] == [*CANONICAL, UNTAPPED]
    assert data["checkpoints"][1]["forced"] == report.checkpoints[1].forced.step  # type: ignore[union-attr]
    assert data["steps"][0]["problem"] == str(report.steps[0].problem)
    assert data["multiple"] == END_TO_END_MULTIPLE
    table = text(report).splitlines()
    assert len(table) == 2 + 8 + 1
    assert table[-1].startswith("top-1: 2 of 2 agree; 0 closer than")


def test_the_multiple_is_that_of_the_algorithms() -> None:
    plain = multiple(["sum", "winograd_f2x2", "exact"], FP32)
    assert multiple([], FP32) == multiple(["sum"], TF32) == plain == END_TO_END_MULTIPLE
    assert multiple(["sum", "winograd_f4x4"], FP32) > END_TO_END_MULTIPLE
    # Additions one after another; the yardstick has nine times as many, in partial sums.
    added = END_TO_END_MULTIPLE / 3
    assert growth(2).max() * added < END_TO_END_MULTIPLE
    most = multiple(["winograd_f4x4"], FP32)
    assert most - 1 < growth(4).max() * added < most
    assert multiple(["sum"], FP16X3) == CUT_OFF_MULTIPLE * END_TO_END_MULTIPLE


@pytest.mark.parametrize(("block", "guard_bits"), [(16, 2), (16, 0), (8, 1), (4, 0)])
def test_sums_that_are_cut_off_lose_no_more_than_the_multiple_says(
    block: int, guard_bits: int
) -> None:
    """Truncated sums lose less than the multiple: ResNet-18's longest, with terms of either sign,
    compared with float32 in one sum and in 64."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4608, 24)), rng.standard_normal((24, 4608))
    products = summations.Products(x.astype(np.float16).astype(np.float32), w.astype(np.float32))
    exact = products.w.astype(np.float64) @ products.x.astype(np.float64)

    def lost(total: summations.Summation) -> float:
        return float(np.sqrt(np.mean((total(products) - exact) ** 2)))

    cut_off = lost(summations.tensor_core(block, guard_bits))
    assert 1 < cut_off / lost(summations.in_order(summations.forward)) < CUT_OFF_MULTIPLE
    of_lanes = cut_off / lost(summations.interleaved(64))
    assert END_TO_END_MULTIPLE < of_lanes < CUT_OFF_MULTIPLE * END_TO_END_MULTIPLE


def loss(got: Any, own: Any, expected: Any, precision: str = "fp32") -> Any:
    sums = LossSums()
    arrays = [np.asarray(a, np.float64)[None] for a in (got, own, expected)]
    sums.add_own(arrays[1], arrays[2])
    sums.add(arrays[0], arrays[2], 0)
    return sums.loss(Allowance.of(PRECISIONS[precision], 8.0))


def test_losses() -> None:
    found = loss([1.0, 2.0, 3.5], [1.0, 2.1, 3.0], [1.0, 2.0, 3.0])
    assert found.max_abs == 0.5
    assert found.coordinate == (0, 2)
    assert found.ratio == pytest.approx(0.5 / (8 * 0.1))
    assert found.allowed_rms == pytest.approx(8 * 0.1 / 3**0.5)
    zero = loss([0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    assert (zero.ratio, zero.relative, zero.cosine, zero.ok) == (0.0, 0.0, 1.0, True)
    assert not loss([1e-30, 0.0], [0.0, 0.0], [0.0, 0.0]).ok
    # Pure luck on PyTorch's side does not forbid to round.
    assert loss([1 + 2.0**-24], [1.0], [1.0]).ok
    assert not loss([1 + 2.0**-21], [1.0], [1.0]).ok
    assert loss([1 + 2.0**-11], [1.0], [1.0], "fp16").ok
    # Twice the multiple, for the reference rounds to float64 as well.
    assert loss([1 + 2.0**-52], [1 + 2.0**-24], [1.0], "fp64").ratio == pytest.approx(1 / 8)
    assert not loss([np.nan, 1.0], [1.0, 1.0], [1.0, 1.0]).ok


def test_losses_add_up_over_batches() -> None:
    sums = LossSums()
    for first, (got, own) in enumerate([(2.0, 4.0), (3.0, 1.5), (0.5, 0.5)]):
        zero = np.zeros((1, 2))
        sums.add_own(zero + own, zero)
        sums.add(np.array([[0.0, got]]), zero, first)
    found = sums.loss(Allowance.of(PRECISIONS["fp32"], 8.0))
    assert (found.max_abs, found.coordinate, found.own_max) == (3.0, (1, 1), 4.0)
    assert found.rms == pytest.approx(((4 + 9 + 0.25) / 6) ** 0.5)
    assert found.own_rms == pytest.approx(((16 + 2.25 + 0.25) / 3) ** 0.5)


def test_a_loss_in_one_place_and_one_everywhere() -> None:
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(10_000)
    own = expected + 1e-7 * rng.standard_normal(10_000)
    assert loss(own, own, expected).ratio == pytest.approx(1 / END_TO_END_MULTIPLE)
    local = own.copy()
    local[7] += 4e-6
    found = loss(local, own, expected)
    assert not found.ok
    assert found.coordinate == (0, 7)
    assert found.rms < found.allowed_rms / 4
    even = loss(expected + 1e-6, own, expected)
    assert not even.ok
    assert even.max_abs < even.allowed_max / 2


def test_tf32_rounds_to_eleven_bits_ties_to_even() -> None:
    one = 1 + 2.0**-10
    values = [1 + 2.0**-11, one + 2.0**-11, one + 2.0**-12, -one - 2.0**-11, 0.0, 1e-40]
    found = reference_runs._tf32(torch.tensor(values, dtype=torch.float32)).tolist()
    assert found[:5] == [1.0, 1 + 2.0**-9, one, -1 - 2.0**-9, 0.0]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-30, 30, 10_000)).astype(np.float32)
    error = np.abs(reference_runs._tf32(torch.from_numpy(x)).numpy() / x.astype(np.float64) - 1)
    assert 0.99 * 2.0**-11 / (1 + 2.0**-11) < error.max() <= 2.0**-11


def test_tf32_loses_what_eleven_bits_lose() -> None:
    """tf32 loses what eleven bits lose; PyTorch's run stands in, as no CPU backend has it."""
    schedule, given = tiny(), weights_of("tiny")
    images = seeded_images(schedule, 2).values
    exact = reference_runs.reference_run(schedule, given, images, ["fc"]).take("fc")
    lost = {
        name: np.abs(
            reference_runs.pytorch_run(schedule, schedule, given, PRECISIONS[name])(images, ["fc"])
            .take("fc")
            .astype(np.float64)
            - exact
        ).max()
        for name in ("fp32", "fp16x3", "tf32", "fp16", "bf16")
    }
    assert lost["fp16x3"] == lost["fp32"]
    assert lost["fp32"] * 100 < lost["tf32"] < lost["bf16"]
    assert lost["fp32"] * 100 < lost["fp16"] < lost["bf16"]


def test_a_run_keeps_only_what_is_still_read() -> None:
    live = Live()
    schedule = tiny()

    def compute(step: Any, inputs: tuple[Array, ...]) -> Array:
        return live.see(np.zeros(1))

    run = reference_runs.LayerRun(schedule, np.zeros(1), compute, ["layer1.0.relu_1", "fc"])
    run.take("layer1.0.relu_1")
    assert live.count == 11
    assert live.now <= 2 * 8  # what layer2 still reads
    run.take("fc")
    assert live.now == 0
    with pytest.raises(KeyError):
        run.take("fc")


def test_seeded_images_are_the_same_bits_everywhere() -> None:
    images = seeded_images(tiny(), 3, seed=1)
    assert isinstance(images, Images)
    digest = hashlib.sha256(images.values.astype("<f4").tobytes()).hexdigest()
    assert digest == "eab51afb98be919cad3600e861c724a4a5d003b0c1f4acf6f02ef2a6748ff773"
    assert images.values.shape == (3, 3, 32, 32)
    np.testing.assert_array_equal(seeded_images(tiny(), 2, seed=1).values, images.values[:2])
    assert not np.array_equal(seeded_images(tiny(), 1, seed=2).values[0], images.values[0])
    for image in seeded_images(SMALL, 4).values:
        neighbours = np.corrcoef(image[:, :, 1:].ravel(), image[:, :, :-1].ravel())[0, 1]
        assert neighbours > 0.15  # smoother than white noise
        assert 0.2 < image.std() < 2
    for bad in ({"count": 0}, {"count": 1, "seed": -1}):
        with pytest.raises(UsageError):
            seeded_images(tiny(), **bad)
