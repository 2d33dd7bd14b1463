"""Threads that take turns at every line."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from r18_oracle.check import turns
from r18_oracle.check.turns import alternating, together


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for each thread, however busy the machine is."""
    monkeypatch.setattr(turns, "WAIT_SECONDS", 20.0)


def writer(mine: int, written: list[int]) -> Callable[[], None]:
    def write() -> None:
        written.append(mine)
        written.append(mine)
        written.append(mine)

    return write


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Have the garbage collector run at every allocation, calling lines of Python each time."""
    called: list[str] = []

    def callback(phase: str, info: dict[str, Any]) -> None:
        called.append(phase)
        called.append(phase)

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        yield called
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)


def test_threads_take_turns() -> None:
    written: list[int] = []
    assert alternating(*(writer(index, written) for index in range(3))) == [None] * 3
    assert [sorted(written[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_the_garbage_collector_takes_no_turn() -> None:
    boxes: list[list[int]] = []

    def allocate(mine: int) -> None:
        boxes.append([mine])
        boxes.append([mine])
        boxes.append([mine])

    with collecting() as called:
        alternating(lambda: allocate(0), lambda: allocate(1))
        assert gc.isenabled()
        boxes.append([2])
    assert called, "the collector did not run at all"
    assert [sorted(boxes[at] + boxes[at + 1]) for at in (0, 2, 4)] == [[0, 1]] * 3


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        alternating(writer(0, []), writer(1, []))
        assert not gc.isenabled()
    finally:
        gc.enable()


def locked(lock: threading.Lock, mine: int, written: list[int]) -> Callable[[], None]:
    def write() -> None:
        with lock:
            written.append(mine)
            written.append(mine)
        writer(mine, written)()

    return write


@pytest.mark.skipif(sys.platform != "linux", reason="no system call says which threads sleep")
def test_threads_that_wait_for_a_lock_are_passed_over_until_they_have_it() -> None:
    """Threads that wait for a lock are skipped without a timeout, and then take turns again."""
    lock, written = threading.Lock(), list[int]()
    before = time.monotonic()
    assert alternating(*(locked(lock, index, written) for index in range(3))) == [None] * 3
    assert time.monotonic() - before < turns.WAIT_SECONDS
    assert sorted(written) == [0] * 5 + [1] * 5 + [2] * 5
    _, _, third = dict.fromkeys(written)
    with_the_third = written[written.index(third) :]
    assert {*with_the_third} != {third}, "it ran alone after it had waited for the lock"


def test_a_thread_that_sleeps_for_a_while_gets_its_turns() -> None:
    written: list[int] = []

    def late() -> None:
        time.sleep(0.05)
        writer(1, written)()

    alternating(writer(0, written), late)
    assert sorted(written) == [0] * 3 + [1] * 3


def test_a_kernel_that_holds_a_lock_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that holds a lock finishes, even if the system does not say which threads sleep."""
    monkeypatch.setattr(turns, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(turns, "_sleep", lambda id: None)
    lock, written = threading.Lock(), list[int]()

    def hold() -> None:
        with lock:
            written.append(0)
            written.append(0)

    assert alternating(hold, hold) == [None, None]
    assert len(written) == 4


def test_what_a_thread_raises_is_told_of_that_thread() -> None:
    def raising() -> None:
        raise ValueError("mine")

    for run in (alternating, together):
        raised = run(raising, writer(1, []))
        assert isinstance(raised[0], ValueError)
        assert raised[1] is None
