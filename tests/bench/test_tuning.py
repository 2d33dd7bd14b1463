"""Tuning: tables as data, and plans that follow them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import r18_numpy
from commands import r18
from faulty_backends import right
from pooling_backends import Pooling
from r18.backend import (
    Apart,
    CompileOptions,
    DeviceInfo,
    Fastest,
    Kernel,
    Preferred,
    RoundingContract,
    Table,
    Timing,
    find_table,
)
from r18.backend.host import HostBuffer, HostKernel
from r18.backend.registry import load_backend
from r18.backend.tuned import APART, at_batch_1, read_table, users_table
from r18.bench.tuning import Range, tune, tuned_schedules
from r18.cli.app import REFUSED
from r18.errors import UsageError
from r18.graph.ops import (
    AvgPoolLinear,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    parts_of,
)
from r18.graph.passes import fuse
from r18.graph.precision import FP32, INT8
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedLinear,
    QuantizePixels,
)
from r18.graph.resnet import tiny
from r18.graph.scaled import ScaledAvgPoolLinear, ScaledConv2d
from r18.runtime.plan import make_plan
from support import Array, compute

SCHEDULE = tiny()
Arrays = tuple[Array, ...]
DEVICE = DeviceInfo("cuda", "Some GPU 7 (sm_90)")


def conv(batch: int, channels: int = 3) -> Problem:
    return Problem(Conv2d(channels, 4, (3, 3)), ((batch, channels, 8, 8),))


def table(**choices: dict[str, dict[int, Timing]]) -> Table:
    return Table("a device", choices)


KEY = str(conv(1))
SMALL, LARGE = Timing("small", 1.0), Timing("large", 2.0)


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, "small"), (2, "small"), (7, "small"), (9, "large"), (500, "large")]
)
def test_the_nearest_measured_batch_decides(batch: int, expected: str) -> None:
    found = table(fp32={KEY: {1: SMALL, 64: LARGE}})
    assert found.best(conv(batch), "fp32") == Preferred(expected, measured=batch == 1)
    assert found.best(conv(batch), "fp16") is None


def test_a_time_is_of_the_very_batch() -> None:
    found = table(fp32={KEY: {1: SMALL, 64: LARGE}})
    assert found.timing(conv(64), "fp32") == LARGE
    assert found.timing(conv(8), "fp32") is None
    assert found.timing(conv(64), "fp16") is None


def test_what_was_not_measured_is_not_chosen() -> None:
    other = Problem(Conv2d(3, 4, (3, 3), (2, 2)), ((1, 3, 8, 8),))
    assert table(fp32={KEY: {1: SMALL}}).best(other, "fp32") is None


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "t.json"
    table(fp32={KEY: {1: SMALL}}).merged(table(fp32={KEY: {8: LARGE}}, fp16={})).write(path)
    assert read_table(path) == table(fp32={KEY: {1: SMALL, 8: LARGE}}, fp16={})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "device": 3}'])
def test_a_damaged_table_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no tuning table"):
        read_table(path)


def test_the_users_table_updates_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R18_CACHE", str(tmp_path / "cache"))
    assert find_table("cupy", DEVICE, tmp_path) is None
    other = str(conv(1, 7))
    assert other != KEY
    table(fp32={KEY: {1: LARGE, 8: LARGE}, other: {1: LARGE}}).write(tmp_path / "some-gpu-7.json")
    found = find_table("cupy", DEVICE, tmp_path)
    assert found is not None
    assert found.best(conv(1), "fp32") == Preferred("large")
    table(fp32={KEY: {1: SMALL}}).write(users_table("cupy", DEVICE))
    found = find_table("cupy", DEVICE, tmp_path)
    assert found is not None
    assert found.best(conv(1), "fp32") == Preferred("small")
    # One step that is tuned again does not hide what was measured of everything else.
    assert found.best(conv(8), "fp32") == Preferred("large")
    assert found.best(conv(1, 7), "fp32") == Preferred("large")


class TunedNumpy(r18_numpy.Backend):
    """A backend that prefers its direct convolution, which no measurement would choose."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        if isinstance(problem.op, Conv2d):
            return Preferred(f"numpy/conv2d/direct/{precision}")
        return super().fastest(problem, precision)


def test_plans_follow_the_table_and_overrides_come_first() -> None:
    convolutions = {step.name for step in SCHEDULE.steps if isinstance(step.op, Conv2d)}
    ids = make_plan(TunedNumpy(), SCHEDULE, CompileOptions()).kernel_ids()
    assert {ids[name] for name in convolutions} == {"numpy/conv2d/direct/fp32"}
    override = {"conv2d": "numpy/conv2d/im2col/fp32"}
    ids = make_plan(TunedNumpy(), SCHEDULE, CompileOptions(kernels=override)).kernel_ids()
    assert {ids[name] for name in convolutions} == {"numpy/conv2d/im2col/fp32"}


def test_tuning_measures_every_kernel_that_takes_a_problem() -> None:
    lines: list[str] = []
    found = tune(r18_numpy.Backend(), [conv(1), conv(2), conv(1)], ["fp32", "fp64"], lines.append)
    assert len(lines) == 4
    for precision in ("fp32", "fp64"):
        assert set(found.choices[precision][KEY]) == {1, 2}
        for timing in found.choices[precision][KEY].values():
            assert timing.kernel in {
                f"numpy/conv2d/{name}/{precision}" for name in ("im2col", "direct")
            }
            assert timing.microseconds > 0


@pytest.mark.parametrize(
    ("precision", "op"), [("int8", QuantizedAvgPoolLinear), ("fp8", ScaledAvgPoolLinear)]
)
def test_bytes_are_tuned_with_the_ops_that_fuse_two(precision: str, op: type[Op]) -> None:
    schedules = tuned_schedules(r18_numpy.Backend(), SCHEDULE, ["all"], [precision])
    problems = [p for one in schedules for p in one.problems(1).values()]
    fused = [p for p in problems if isinstance(p.op, op)]
    assert fused
    found = tune(r18_numpy.Backend(), fused, [precision])
    (timings,) = found.choices[precision].values()
    assert timings[1].kernel in {f"numpy/{op.name}/parts/{precision}", APART}


def test_a_network_in_fp8_is_measured_as_scaled_ops() -> None:
    one, _ = tuned_schedules(r18_numpy.Backend(), SCHEDULE, ["all"], ["fp8"])
    problems = [p for p in one.problems(1).values() if isinstance(p.op, ScaledConv2d)]
    found = tune(r18_numpy.Backend(), problems[:1], ["fp8"])
    (timings,) = found.choices["fp8"].values()
    assert timings[1].kernel == "numpy/sconv2d/im2col/fp8"


# -- two ops, or one ---------------------------------------------------------------------------

STEM = Problem(
    ConvMaxPool(Conv2d(3, 4, (3, 3), bias=True, relu=True), MaxPool2d((2, 2), (2, 2))),
    ((2, 3, 9, 9),),
)


def host(op: type, algorithm: str, layout: Layout, run: object = right) -> HostKernel:
    contract = RoundingContract("exact", "float32", "float32")
    return HostKernel("two", op, algorithm, FP32, contract, run, layout)  # type: ignore[arg-type]


class TwoLayouts(Pooling):
    """A backend whose fused kernel reads NCHW, its only convolution NHWC, and poolings both."""

    def kernels(self) -> tuple[HostKernel, ...]:
        nhwc = [host(op, "plain", Layout.NHWC) for op in (Conv2d, MaxPool2d)]
        there = [host(op, "there", Layout.NCHW) for op in (ConvMaxPool, MaxPool2d)]
        return (*nhwc, *there, host(Relayout, "transpose", Layout.NCHW))


def measured(monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]) -> list[list[str]]:
    """Have kernels cost `costs[op]`; returns the chains that are measured, as ids."""
    seen: list[list[str]] = []

    def cost(self: Range, places: object, count: int, repeat: int) -> float:
        one, *_ = places  # type: ignore[misc]
        launches = getattr(one, "launches", (one,))
        assert len(set(map(id, places))) == 3  # type: ignore[call-overload]
        seen.append([launch.kernel.id for launch in launches])
        for launch in launches:
            assert launch.output.nbytes == 4 * np.prod(launch.problem.output)
        for before, after in pairwise(launches):
            assert after.inputs[-1:] == (before.output,)
        return sum(costs[launch.kernel.op.name] for launch in launches)

    monkeypatch.setattr(Range, "measure", cost)
    return seen


@pytest.mark.parametrize(
    ("together", "expected"), [(9.0, "faulty/conv2d_maxpool2d/plain/fp32"), (11.0, APART)]
)
def test_the_two_ops_are_measured_beside_the_kernel_for_both(
    together: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"conv2d_maxpool2d": together, "conv2d": 7.0, "maxpool2d": 3.0}
    seen = measured(monkeypatch, costs)
    found = tune(Pooling(), [STEM], ["fp32"])
    assert found.best(STEM, "fp32") == (Apart() if expected == APART else Preferred(expected))
    (timing,) = found.choices["fp32"][str(Problem(STEM.op, ((1, 3, 9, 9),)))].values()
    assert timing == Timing(expected, min(together, 10.0))
    assert ["faulty/conv2d/plain/fp32", "faulty/maxpool2d/plain/fp32"] in seen


def test_relayouts_between_the_two_are_measured_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"conv2d_maxpool2d": 9.0, "conv2d": 3.0, "maxpool2d": 3.0, "relayout": 2.0}
    seen = measured(monkeypatch, costs)
    assert tune(TwoLayouts(), [STEM], ["fp32"]).best(STEM, "fp32") == Apart()
    moved, conv = "two/relayout/transpose/fp32", "two/conv2d/plain/fp32"
    assert [moved, conv, "two/maxpool2d/plain/fp32"] in seen
    assert [moved, conv, moved, "two/maxpool2d/there/fp32"] in seen
    costs["relayout"] = 4.0
    found = tune(TwoLayouts(), [STEM], ["fp32"])
    assert found.best(STEM, "fp32") == Preferred("two/conv2d_maxpool2d/there/fp32")


def test_without_kernels_of_the_two_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alone(TwoLayouts):
        def kernels(self) -> tuple[HostKernel, ...]:
            return tuple(k for k in super().kernels() if k.op not in self.without)

        without: tuple[type, ...] = ()

    costs = {"conv2d_maxpool2d": 99.0, "conv2d": 1.0, "maxpool2d": 1.0, "relayout": 1.0}
    measured(monkeypatch, costs)
    for without in ((Conv2d,), (MaxPool2d,), (Relayout,)):
        Alone.without = without
        found = tune(Alone(), [STEM], ["fp32"])
        assert found.best(STEM, "fp32") == Preferred("two/conv2d_maxpool2d/there/fp32")
    Alone.without = (ConvMaxPool,)
    assert tune(Alone(), [STEM], ["fp32"]).choices == {"fp32": {}}


def test_inputs_are_the_values_to_the_last() -> None:
    shape = (5, 64, 64, 64)  # a million values, and a part of that
    place = Range(r18_numpy.Backend(), Problem(Conv2d(64, 8, (1, 1)), (shape,)), FP32)
    kernel = next(k for k in r18_numpy.Backend().kernels() if k.op is Conv2d)
    (first,) = place.launches(kernel)[0].inputs
    assert isinstance(first, HostBuffer)
    values = first.as_array(shape, np.dtype(np.float32)).ravel()
    assert values.std() == pytest.approx(1, abs=0.01)
    size = 1 << 20
    assert np.array_equal(values[size:], values[: len(values) - size])


RESIDUAL = Conv2d(3, 4, (3, 3), (1, 1), (1, 1), bias=True, residual=True)


@pytest.mark.parametrize(
    ("problem", "formats"),
    [
        (
            Problem(QuantizedConv2d(RESIDUAL, ("uint8", "int8"), 4), ((2, 3, 5, 7), (2, 4, 5, 7))),
            ["uint8", "int8", "int8"],
        ),
        (Problem(QuantizedLinear(Linear(9, 5)), ((3, 9),)), ["uint8", "float32"]),
        (Problem(Quantize(), ((2, 3, 5, 7),)), ["float32", "int8"]),
        (Problem(QuantizePixels(Normalize((0.5,), (0.2,))), ((2, 1, 5, 7),)), ["uint8", "int8"]),
    ],
)
def test_tensors_are_as_their_op_stores_them(problem: Problem, formats: list[str]) -> None:
    """Buffers have the formats that the op reads and writes, not the precision's storage, int8."""
    backend = r18_numpy.Backend()
    (kernel,) = (k for k in backend.kernels() if k.op is type(problem.op))
    dtypes = [np.dtype(name) for name in formats]
    for launch in Range(backend, problem, INT8).launches(kernel):
        launch.enqueue(backend.stream())
        buffers, shapes = (*launch.inputs, launch.output), (*problem.inputs, problem.output)
        for buffer, shape, dtype in zip(buffers, shapes, dtypes, strict=True):
            assert buffer.nbytes == np.prod(shape) * dtype.itemsize
            assert isinstance(buffer, HostBuffer)
            assert len(np.unique(buffer.as_array(shape, dtype))) > 2
    (timing,) = (
        tune(backend, [problem], ["int8"]).choices["int8"][str(at_batch_one(problem))].values()
    )
    assert timing.kernel == kernel.id


def at_batch_one(problem: Problem) -> Problem:
    return Problem(problem.op, tuple((1, *shape[1:]) for shape in problem.inputs))


class Compiling(r18_numpy.Backend):
    """A backend that records what it prepares."""

    prepared: ClassVar[list[str]] = []

    def prepare(self, calls: Iterable[tuple[Kernel, Problem]]) -> None:
        self.prepared.extend(f"{kernel.id} {problem.batch}" for kernel, problem in calls)


def test_what_is_measured_is_prepared_all_at_once() -> None:
    tune(Compiling(), [conv(1), conv(2), conv(1)], ["fp32"], lambda text: None)
    assert sorted(Compiling.prepared) == [
        f"numpy/conv2d/{name}/fp32 {batch}" for name in ("direct", "im2col") for batch in (1, 2)
    ]


CLASSIFIER = Problem(AvgPoolLinear(Linear(3, 4)), ((2, 3, 5, 5),))


def classifiers(*gaps: Layout) -> type[Pooling]:
    """A backend whose fused kernel reads NHWC, its linear layer any layout, and pools `gaps`."""

    class Classifiers(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            pools = [host(GlobalAvgPool, layout.value, layout) for layout in gaps]
            fused = host(AvgPoolLinear, "whole", Layout.NHWC)
            linears = [host(Linear, name, Layout.NCHW) for name in ("slow", "quick")]
            return (fused, *pools, *linears, host(Relayout, "transpose", Layout.NCHW))

    return Classifiers


@pytest.mark.parametrize(
    ("gaps", "together", "expected"),
    [
        ((Layout.NCHW, Layout.NHWC), 9.0, "two/gap_linear/whole/fp32"),
        ((Layout.NCHW, Layout.NHWC), 11.0, APART),  # 7 + 3, without a relayout
        ((Layout.NCHW,), 11.0, "two/gap_linear/whole/fp32"),  # 7 + 3 + 2
    ],
)
def test_a_classifier_is_measured_beside_each_pooling_and_linear_layer(
    gaps: tuple[Layout, ...], together: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"gap_linear": together, "gap": 3.0, "linear": 7.0, "relayout": 2.0}
    seen = measured(monkeypatch, costs)
    found = tune(classifiers(*gaps)(), [CLASSIFIER], ["fp32"])
    (choice,) = found.choices["fp32"].values()
    assert choice[2].kernel == expected
    chains = [ids for ids in seen if ids[-1].startswith("two/linear/")]
    assert len(chains) == 2 * len(gaps)


def test_a_chain_gives_what_its_launches_give() -> None:
    """A chain of launches computes the same as the fused launch."""
    kernels = {k.op: k for k in Pooling().kernels() if k.precision is FP32}
    place = Range(Pooling(), STEM, FP32)
    parts = parts_of(STEM)
    chains = place.chains([(kernels[Conv2d], parts[0]), (kernels[MaxPool2d], parts[1])])
    whole = place.launches(kernels[ConvMaxPool])
    assert len(chains) == len(whole) == 3
    stream = Pooling().stream()
    for chain, launch in zip(chains, whole, strict=True):
        chain.enqueue(stream)
        launch.enqueue(stream)
        got, expected = chain.launches[-1].output, launch.output
        assert isinstance(got, HostBuffer)
        assert isinstance(expected, HostBuffer)
        assert got.array.tobytes() == expected.array.tobytes()
        assert np.isfinite(got.as_array(STEM.output, np.dtype(np.float32))).all()
    assert place.measure(chains, 3, 1) > 0


BLOCK = Problem(
    ConvProjection(
        Conv2d(4, 6, (3, 3), (1, 1), (1, 1), bias=True, residual=True, relu=True),
        Conv2d(3, 6, (1, 1), (2, 2), bias=True),
    ),
    ((2, 4, 5, 7), (2, 3, 10, 13)),
)


def images_last(op: Op, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Of NHWC, whatever the op."""
    logical = [array.transpose(0, 3, 1, 2) for array in inputs]
    out[...] = compute(op, logical, weights).transpose(0, 2, 3, 1)


def blocks(convolution: Layout, fused: Layout) -> type[Pooling]:
    """One kernel of the op of two in a layout, one of its convolutions in another."""
    runs = {Layout.NCHW: right, Layout.NHWC: images_last}

    class Blocks(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            return (
                host(Conv2d, "plain", convolution, runs[convolution]),
                host(ConvProjection, "whole", fused, runs[fused]),
                host(Relayout, "transpose", Layout.NCHW),
            )

    return Blocks


@pytest.mark.parametrize("layout", Layout)
def test_a_chain_of_two_inputs_gives_what_the_kernel_of_both_does(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projection reads the second image, and the convolution the first and its result."""
    backend = blocks(layout, layout)()
    conv, whole, _ = backend.kernels()
    place, (one, other) = Range(backend, BLOCK, FP32), parts_of(BLOCK)
    of_both = place.launches(whole)
    count = len(other.op.weights())
    drawn = {other.op: place._weights[:count], one.op: place._weights[count:]}
    monkeypatch.setattr(
        "r18.bench.tuning.prepared_at_random",
        lambda kernel, part, rng: kernel.prepare(part, tuple(drawn[part.op])),
    )
    chains = place.chains([(conv, one), (conv, other)])
    assert len(chains) == len(of_both) == 3
    stream = backend.stream()
    for chain, launch in zip(chains, of_both, strict=True):
        chain.enqueue(stream)
        launch.enqueue(stream)
        first, second = chain.launches
        assert first.inputs == launch.inputs[1:]
        assert second.inputs == (launch.inputs[0], first.output)
        got, expected = second.output, launch.output
        assert isinstance(got, HostBuffer)
        assert isinstance(expected, HostBuffer)
        assert got.array.tobytes() == expected.array.tobytes()
        values = got.as_array(layout.physical(BLOCK.output), np.dtype(np.float32))
        assert np.unique(values).size > 100
    assert place.measure(chains, 3, 1) > 0


@pytest.mark.parametrize(
    ("convolution", "fused", "moved"),
    [
        (Layout.NCHW, Layout.NCHW, 0),
        (Layout.NHWC, Layout.NCHW, 1),
        (Layout.NCHW, Layout.NHWC, 1),
    ],
)
def test_a_block_is_measured_beside_its_two_convolutions(
    convolution: Layout, fused: Layout, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an image in the layout that the kernel of both reads; both costs 13 in place of 12."""
    costs = {"conv2d_projection": 13.0, "conv2d": 6.0, "relayout": 2.0}
    seen = measured(monkeypatch, costs)
    found = tune(blocks(convolution, fused)(), [BLOCK], ["fp32"])
    conv = "two/conv2d/plain/fp32"
    assert [*["two/relayout/transpose/fp32"] * moved, conv, conv] in seen
    whole = Preferred("two/conv2d_projection/whole/fp32")
    assert found.best(BLOCK, "fp32") == (whole if moved else Apart())


def test_what_a_projection_makes_is_brought_to_the_convolution_s_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its first image, which nothing in the chain makes, is in that layout already."""

    class TwoConvolutions(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            planes = replace(
                host(Conv2d, "planes", Layout.NCHW),
                refuses=lambda problem: "residual" if len(problem.inputs) == 2 else None,
            )
            last = replace(
                host(Conv2d, "last", Layout.NHWC),
                refuses=lambda problem: "no residual" if len(problem.inputs) == 1 else None,
            )
            whole = host(ConvProjection, "whole", Layout.NCHW)
            return planes, last, whole, host(Relayout, "transpose", Layout.NCHW)

    seen = measured(monkeypatch, {"conv2d_projection": 9.0, "conv2d": 3.0, "relayout": 2.0})
    found = tune(TwoConvolutions(), [BLOCK], ["fp32"])
    assert found.best(BLOCK, "fp32") == Apart()
    planes, moved, last = "conv2d/planes", "relayout/transpose", "conv2d/last"
    assert [f"two/{name}/fp32" for name in (planes, moved, last)] in seen


def test_the_command_measures_projections(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    done = r18(
        *("tune", "--backend", "numpy", "--network", "tiny", "--batch", 2),
        *("--steps", "layer2.0.conv2", "--out", path),
    )
    assert done.code == 0, done.err
    found = read_table(path).choices["fp32"]
    (fused,) = (p for p in found if p.startswith("conv2d+bias+residual+relu+conv2d+bias("))
    assert found[fused][2].kernel in {"numpy/conv2d_projection/im2col/fp32", APART}
    assert len(found) == 2


@pytest.mark.parametrize("more", [(), ("--in-network",)])
def test_another_file_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr("r18.cli.tune._alone", None)
    monkeypatch.setattr("r18.cli.tune._exchanged", None)
    path = tmp_path / "notes.json"
    path.write_text("mine")
    done = r18("tune", "--backend", "numpy", "--network", "tiny", "--out", path, *more)
    assert done.code == 2
    assert "is no tuning table" in done.err
    assert path.read_text() == "mine"


def test_the_command_measures_what_a_plan_may_fuse(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    options = ("--backend", "pooling_backends:Pooling", "--network", "tiny", "--batch", 2)
    assert r18("tune", *options, "--out", path).code == 0
    stems = [p for p in read_table(path).choices["fp32"] if p.startswith("conv2d+bias+relu+max")]
    assert len(stems) == 1
    done = r18("tune", *options, "--fusion", "conv_bn_relu", "--out", tmp_path / "other.json")
    assert done.code == 0
    assert not any("maxpool2d" in p for p in read_table(tmp_path / "other.json").choices["fp32"])


def test_the_command_writes_a_table_and_keeps_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for batch in (1, 2):
        options = ("--backend", "numpy", "--network", "tiny", "--batch", batch, "--out", path)
        done = r18("tune", *options)
        assert done.code == 0, done.err
        assert "fastest kernel" in done.out
    batches = {size for found in read_table(path).choices["fp32"].values() for size in found}
    assert batches == {1, 2}


def test_the_command_measures_only_the_steps_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ("--network", "tiny", "--batch", "1", "--out", path)
    done = r18("tune", "--backend", "numpy", *options, "--steps", "fc")
    assert done.code == 0, done.err
    with_pooling, alone = sorted(read_table(path).choices["fp32"])
    assert alone.startswith("linear(")
    assert with_pooling.startswith("gap+linear(")
    refused = r18("tune", "--backend", "numpy", *options, "--steps", "fd")
    assert refused.code == REFUSED
    assert "fc" in refused.err


@pytest.mark.parametrize("bits", [8, 4])
def test_the_command_measures_the_network_in_integers(tmp_path: Path, bits: int) -> None:
    """Tuning a network in integers measures only int8 kernels, and plans follow the table."""
    path = tmp_path / "t.json"
    done = r18(
        *("tune", "--backend", "numba-cpu", "--network", "tiny", "--precision", "fp32,int8"),
        *("--batch", 2, "--bits", bits, "--steps", "layer1.*", "--out", path),
    )
    assert done.code == 0, done.err
    table = read_table(path)
    found = table.choices["int8"]
    integers = quantized(fuse(tiny(), "all"), bits)
    asked = {n: p for n, p in integers.problems(2).items() if n.startswith("layer1.")}
    assert found.keys() == {at_batch_1(problem) for problem in asked.values()}
    assert all(f"bits={bits}" in problem or bits == 8 for problem in found)
    assert {
        timing.kernel.split("/")[3] for sizes in found.values() for timing in sizes.values()
    } == {"int8"}
    assert not any(problem.startswith("q") for problem in table.choices["fp32"])

    slow = "numba-cpu/qconv2d/implicit_gemm/int8"  # the portable one, after VNNI's in the list
    chosen = {problem: {2: replace(found[problem][2], kernel=slow)} for problem in found}
    backend = copy(load_backend("numba-cpu"))
    vars(backend)["fastest"] = Table(table.device, {"int8": chosen}).best
    plan = make_plan(backend, integers, CompileOptions(2, "int8"))
    assert {step.kernel.id for step in plan.steps if step.name in asked} == {slow}


def test_the_command_says_where_there_are_no_kernels_of_integers(tmp_path: Path) -> None:
    refused = r18(
        *("tune", "--backend", "pooling_backends:Pooling", "--network", "tiny", "--batch", 1),
        *("--precision", "int8", "--out", tmp_path / "t.json"),
    )
    assert refused.code == REFUSED
    assert "has no kernel in int8 for any of the problems" in refused.err


@pytest.mark.parametrize(
    ("batch", "message"),
    [("0", "must be at least 1"), ("two", "takes integers"), ("1,-1", "takes integers")],
)
def test_the_command_takes_batches_from_one(tmp_path: Path, batch: str, message: str) -> None:
    refused = r18("tune", "--backend", "numpy", "--batch", batch, "--out", tmp_path / "t.json")
    assert refused.code == REFUSED
    assert f"--batch {message}" in refused.err
    assert not (tmp_path / "t.json").exists()
