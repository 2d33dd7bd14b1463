"""Tuning: tables as data, and plans that follow them."""

from __future__ import annotations

from pathlib import Path

import pytest

import r18_numpy
from commands import r18
from r18.backend import CompileOptions, DeviceInfo
from r18.errors import UsageError
from r18.executor import make_plan
from r18.ops import Conv2d, Problem
from r18.schedule import tiny
from r18.tuning import Table, Timing, find_table, read_table, tune, users_table

SCHEDULE = tiny()
DEVICE = DeviceInfo("cuda", "Some GPU 7 (sm_90)")


def conv(batch: int) -> Problem:
    return Problem(Conv2d(3, 4, (3, 3)), ((batch, 3, 8, 8),))


def table(**choices: dict[str, dict[int, Timing]]) -> Table:
    return Table("a device", choices)


KEY = str(conv(1))
SMALL, LARGE = Timing("small", 1.0), Timing("large", 2.0)


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, "small"), (2, "small"), (7, "small"), (9, "large"), (500, "large")]
)
def test_the_nearest_measured_batch_decides(batch: int, expected: str) -> None:
    found = table(fp32={KEY: {1: SMALL, 64: LARGE}})
    assert found.best(conv(batch), "fp32") == expected
    assert found.best(conv(batch), "fp16") is None


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


def test_the_users_table_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R18_CACHE", str(tmp_path / "cache"))
    assert find_table("cupy", DEVICE, tmp_path) is None
    table(fp32={KEY: {1: LARGE}}).write(tmp_path / "some-gpu-7.json")
    found = find_table("cupy", DEVICE, tmp_path)
    assert found is not None
    assert found.best(conv(1), "fp32") == "large"
    table(fp32={KEY: {1: SMALL}}).write(users_table("cupy", DEVICE))
    found = find_table("cupy", DEVICE, tmp_path)
    assert found is not None
    assert found.best(conv(1), "fp32") == "small"


class TunedNumpy(r18_numpy.Backend):
    """Prefers its direct convolution, as no measurement would."""

    def fastest(self, problem: Problem, precision: str) -> str | None:
        return f"numpy/conv2d/direct/{precision}" if isinstance(problem.op, Conv2d) else None


def test_plans_follow_the_table_and_overrides_come_first() -> None:
    convolutions = {step.name for step in SCHEDULE.steps if isinstance(step.op, Conv2d)}
    ids = make_plan(TunedNumpy(), SCHEDULE, CompileOptions()).kernel_ids()
    assert {ids[name] for name in convolutions} == {"numpy/conv2d/direct/fp32"}
    override = {"conv2d": "numpy/conv2d/im2col/fp32"}
    ids = make_plan(TunedNumpy(), SCHEDULE, CompileOptions(kernels=override)).kernel_ids()
    assert {ids[name] for name in convolutions} == {"numpy/conv2d/im2col/fp32"}


def test_tuning_measures_every_kernel_that_takes_a_problem() -> None:
    told: list[str] = []
    found = tune(r18_numpy.Backend(), [conv(1), conv(2), conv(1)], ["fp32", "fp64"], told.append)
    assert len(told) == 4
    for precision in ("fp32", "fp64"):
        assert set(found.choices[precision][KEY]) == {1, 2}
        for timing in found.choices[precision][KEY].values():
            assert timing.kernel in {
                f"numpy/conv2d/{name}/{precision}" for name in ("im2col", "direct")
            }
            assert timing.microseconds > 0


def test_the_command_writes_a_table_and_keeps_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for batch in (1, 2):
        options = ("--backend", "numpy", "--network", "tiny", "--batch", batch, "--out", path)
        done = r18("tune", *options)
        assert done.code == 0, done.err
        assert "fastest kernel" in done.out
    batches = {size for found in read_table(path).choices["fp32"].values() for size in found}
    assert batches == {1, 2}
