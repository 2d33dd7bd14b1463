"""Fusing max-pooling with its convolution: when a plan does, and that it changes no result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import r18_numpy
from commands import r18
from pooling_backends import Pooling, Tuned, pooled, stem_alone
from r18.backend import Backend, CompileOptions
from r18.backend.host import HostKernel
from r18.errors import NoKernel, UnknownName, UsageError
from r18.graph.ops import ConvMaxPool
from r18.graph.passes import FUSION_LEVELS, fold_weights, fuse, fuse_pool
from r18.graph.resnet import resnet18, tiny
from r18.graph.schedule import CANONICAL
from r18.runtime.fusing import schedule_for
from r18.runtime.plan import make_plan
from support import check_plan, images, random_weights, run_schedule

SCHEDULE = tiny()
FUSED, CONV, POOL = (
    f"faulty/{op}/plain/fp32" for op in ("conv2d_maxpool2d", "conv2d", "maxpool2d")
)


def stem(backend: Backend, **options: object) -> list[str]:
    """The kernels of the plan's first steps, to the pooling's value."""
    plan = make_plan(backend, SCHEDULE, CompileOptions(**options))  # type: ignore[arg-type]
    last = next(i for i, step in enumerate(plan.steps) if step.output == "maxpool")
    return [step.kernel.id for step in plan.steps[: last + 1]]


# -- when it does ------------------------------------------------------------------------------


def test_a_plan_fuses_where_a_kernel_takes_it_at_the_highest_level_alone() -> None:
    assert stem(Pooling()) == [FUSED]
    for level in FUSION_LEVELS[:-1]:
        assert stem(Pooling(), fusion=level)[-1] == POOL


def test_a_backend_without_such_a_kernel_needs_none() -> None:
    plan = make_plan(r18_numpy.Backend(), SCHEDULE, CompileOptions())
    assert plan.schedule == fuse(SCHEDULE, "all")


def test_the_kernel_must_have_the_precision() -> None:
    class Elsewhere(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            return tuple(k for k in super().kernels() if k.id != FUSED)

    assert stem(Elsewhere()) == [CONV, POOL]


def test_the_kernel_must_take_the_problem() -> None:
    class Picky(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            return tuple(
                replace(k, refuses=stem_alone) if k.op is ConvMaxPool else k
                for k in super().kernels()
            )

    assert stem(Picky()) == [FUSED]
    small = replace(SCHEDULE.steps[0], op=replace(SCHEDULE.steps[0].op, kernel_size=(5, 5)))
    other = replace(SCHEDULE, steps=(small, *SCHEDULE.steps[1:]))
    plan = make_plan(Picky(), other, CompileOptions())
    assert [step.kernel.id for step in plan.steps[:2]] == [CONV, POOL]


def test_a_measurement_may_keep_them_apart_at_a_batch() -> None:
    assert stem(Tuned(), batch=1) == [CONV, POOL]
    assert stem(Tuned(), batch=2) == [FUSED]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"conv2d": "*/conv2d/*"}, [CONV, POOL]),
        ({"maxpool2d": "*"}, [CONV, POOL]),
        ({"maxpool": "*"}, [CONV, POOL]),
        ({"conv1": CONV}, [CONV, POOL]),
        ({"conv1": "*/conv2d*"}, [FUSED]),  # names kernels of both
        ({"conv1": FUSED}, [FUSED]),
        ({"conv2d_maxpool2d": FUSED}, [FUSED]),
        ({"conv2d_maxpool2d": "*", "conv2d": CONV}, [FUSED]),  # of the other convolutions
        ({"conv1": CONV, "conv2d_maxpool2d": "*"}, None),  # which then is no op of the plan
        ({"maxpool": POOL, "conv1": FUSED}, None),
        ({"maxpool2d": POOL, "conv1": FUSED}, None),
        ({"layer1.0.conv1": CONV}, [FUSED]),
        ({"fc": "*"}, [FUSED]),
    ],
    ids=str,
)
def test_overrides_are_obeyed(overrides: dict[str, str], expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises((UsageError, NoKernel)):
            stem(Pooling(), kernels=overrides)
        return
    assert stem(Pooling(), kernels=overrides) == expected


def test_an_override_comes_before_a_measurement() -> None:
    assert stem(Tuned(), kernels={"conv1": FUSED}) == [FUSED]
    assert stem(Tuned(), kernels={"conv2d_maxpool2d": "*"}) == [FUSED]
    assert stem(Tuned(), kernels={"conv1": "*"}) == [CONV, POOL]  # says nothing


def test_what_was_asked_for_and_cannot_be_is_an_error() -> None:
    class Refusing(Pooling):
        def kernels(self) -> tuple[HostKernel, ...]:
            return (*super().kernels(), replace(pooled(algorithm="not"), refuses=lambda p: "no"))

    for name in ("conv1", "conv2d_maxpool2d"):
        with pytest.raises(NoKernel, match="conv2d_maxpool2d/not/fp32: no"):
            stem(Refusing(), kernels={name: "faulty/conv2d_maxpool2d/not/*"})
    with pytest.raises(UsageError, match="kernel override 'conv2d_maxpool2d'"):
        stem(Pooling(), kernels={"conv2d_maxpool2d": "*"}, fusion="conv_bn_relu")
    with pytest.raises(UnknownName, match="unknown kernel"):
        stem(r18_numpy.Backend(), kernels={"conv2d_maxpool2d": "numpy/conv2d_maxpool2d/*"})


def test_a_schedule_at_another_level_is_refused() -> None:
    with pytest.raises(UsageError, match="at level 'add_relu', the options ask for 'all'"):
        schedule_for(Pooling(), fuse(SCHEDULE, "add_relu"), CompileOptions())
    at_level = fuse(SCHEDULE, "all")
    expected = fuse_pool(at_level)
    assert schedule_for(Pooling(), at_level, CompileOptions()) == expected
    assert schedule_for(Pooling(), expected, CompileOptions()) == expected
    assert schedule_for(Pooling(), SCHEDULE, CompileOptions()) == expected


# -- what it gives -----------------------------------------------------------------------------


def test_the_results_are_those_of_two_steps() -> None:
    """To the bit: one kernel here does what the two others do."""
    weights, x = random_weights(SCHEDULE), images(SCHEDULE, 2)

    def outputs(**overrides: str) -> dict[str, object]:
        options = CompileOptions(batch=2, taps=CANONICAL, kernels=overrides)
        program = Pooling().compile(SCHEDULE, weights, options)
        program(x)
        return {name: program.fetch(name).tobytes() for name in CANONICAL}

    assert outputs() == outputs(maxpool="*")


def test_the_results_are_near_the_level_none() -> None:
    weights, x = random_weights(SCHEDULE, dtype=np.float64), images(SCHEDULE, 2)
    program = Pooling().compile(SCHEDULE, weights, CompileOptions(batch=2, taps=CANONICAL))
    got = {name: (program(x), program.fetch(name))[1] for name in CANONICAL}
    expected = run_schedule(SCHEDULE, fold_weights(SCHEDULE, weights), x.astype(np.float64))
    for name in CANONICAL:
        value = expected[SCHEDULE.value_of(name)]
        np.testing.assert_allclose(got[name], value, atol=1e-4 * np.abs(value).max())


def test_the_plan_is_sound_and_smaller() -> None:
    schedule = resnet18()
    fused = make_plan(Pooling(), schedule, CompileOptions(taps=CANONICAL))
    apart = make_plan(Pooling(), schedule, CompileOptions(taps=CANONICAL, kernels={"maxpool": "*"}))
    check_plan(fused, Pooling().memory.alignment)
    assert len(fused.steps) == len(apart.steps) - 1
    assert "relu" not in fused.tensors
    assert fused.arena_nbytes < apart.arena_nbytes


def test_a_value_that_was_fused_away_cannot_be_tapped() -> None:
    with pytest.raises(UnknownName) as caught:
        make_plan(Pooling(), SCHEDULE, CompileOptions(taps=("relu",)))
    assert "unknown checkpoint 'relu'" in str(caught.value)
    assert "At fusion level 'all' values inside fused steps do not exist" in str(caught.value)
    kept = CompileOptions(taps=("relu",), kernels={"maxpool": "*"})
    assert "relu" in make_plan(Pooling(), SCHEDULE, kept).tensors


def test_a_plans_schedule_can_be_planned_again() -> None:
    plan = make_plan(Pooling(), SCHEDULE, CompileOptions())
    again = make_plan(Pooling(), plan.schedule, CompileOptions())
    assert again.schedule == plan.schedule
    with pytest.raises(NoKernel, match="precisions with kernels for conv2d_maxpool2d: none"):
        make_plan(r18_numpy.Backend(), plan.schedule, CompileOptions())


# -- verified ----------------------------------------------------------------------------------


def test_verification_runs_the_fused_kernel_alone_and_in_the_network(tmp_path: Path) -> None:
    done = r18(
        *("verify", "--backend", "pooling_backends:Pooling", "--network", "tiny"),
        *("--json", "--findings", tmp_path),
    )
    assert done.code == 0, done.err + done.out
    (result,) = json.loads(done.out)["backends"]
    kernels = {kernel["kernel"]: kernel for kernel in result["kernels"]}
    assert kernels[FUSED]["verdict"] == "ok"
    assert kernels[FUSED]["network_problems"] == 1
    assert kernels[FUSED]["problems"] > 15
    (run,) = result["checkpoints"]
    assert run["steps"][0]["kernel"] == FUSED
    assert run["ok"]
