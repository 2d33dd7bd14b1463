"""How a command's time is split into parts, and the rest that belongs to no part."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from r18 import stopwatch
from r18.stopwatch import OTHER, part
from support import output_of, own_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: the time is the first element."""
    now = [100.0]
    own_time(monkeypatch, stopwatch, perf_counter=lambda: now[0])
    return now


def test_a_part_in_a_part_counts_for_the_inner_one(clock: list[float]) -> None:
    with stopwatch.stopwatch() as watch:
        clock[0] += 1
        for _ in range(2):
            with part("outer"):
                clock[0] += 2
                with suppress(KeyError), part("inner"):
                    clock[0] += 4
                    raise KeyError
                clock[0] += 8
        clock[0] += 16
    assert dict(watch.rows()) == {"outer": 20, "inner": 8, OTHER: 17, "total": 45}
    assert [name for name, _ in watch.rows()] == ["outer", "inner", OTHER, "total"]
    assert [line.split() for line in watch.text().splitlines()[2:]] == [
        ["outer", "20.000"], ["inner", "8.000"], [OTHER, "17.000"], ["total", "45.000"]
    ]  # fmt: skip


def test_without_a_stopwatch_nothing_is_timed(clock: list[float]) -> None:
    with stopwatch.stopwatch() as watch:
        pass
    with part("late"):
        clock[0] += 1
    assert [name for name, _ in watch.rows()] == [OTHER, "total"]


def test_time_since_the_process_began() -> None:
    code = """
import time
begin = time.perf_counter()
time.sleep(0.3)
from r18.stopwatch import stopwatch
with stopwatch("start") as watch:
    pass
least = time.perf_counter() - begin
start = dict(watch.rows())["start"]
print(start > 0.3, start - least < 5, abs(dict(watch.rows())["other"]) < 0.05)
"""
    assert output_of(code) == "True True True"


def test_on_other_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    on_linux = stopwatch._since_start()
    monkeypatch.setattr(stopwatch, "STAT", tmp_path)  # a folder, which cannot be read
    assert abs(stopwatch._since_start() - on_linux) < 2
    assert time.time() > stopwatch._since_start() > 0
