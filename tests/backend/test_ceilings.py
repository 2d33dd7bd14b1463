"""The timing of a rate: in bursts, then sustained."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from r18.backend import ceilings
from support import own_time


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    own_time(monkeypatch, ceilings, sleep=found.append)
    return found


def test_bursts_come_before_what_is_sustained(pauses: list[float]) -> None:
    """Bursts are timed first, so a device that slows down after 0.1 s shows both rates."""
    calls: list[tuple[int, int]] = []

    def timed(repeats: int, count: int) -> Sequence[float]:
        calls.append((repeats, count))
        fast = 20 if count > 20 else count
        return [repeats * 1e-6] * fast + [repeats * 2e-6] * (count - fast)

    sustained, burst = ceilings.measure(timed, 3e6)
    assert (burst.per_second, burst.best, burst.runs) == (
        pytest.approx(3e12),
        3e12,
        ceilings.BURSTS,
    )
    assert sustained.per_second == pytest.approx(1.5e12)
    assert sustained.runs * 10e-3 >= ceilings.SUSTAINED
    assert pauses == [ceilings.PAUSE] * ceilings.BURSTS
    *_, last = calls
    assert last[0] * 1e-6 == pytest.approx(ceilings.BURST, rel=0.01)
    assert [count for _, count in calls[:-1]] == [1] * (len(calls) - 1)


def test_what_is_sustained_takes_at_least_a_second(pauses: list[float]) -> None:
    """The sustained timing takes a second even if the bursts were slower than what followed."""

    def timed(repeats: int, count: int) -> Sequence[float]:
        return [repeats * (1e-6 if count > 1 else 3e-6)] * count

    sustained, burst = ceilings.measure(timed, 1.0)
    assert sustained.per_second == pytest.approx(3 * burst.per_second)
    assert sustained.runs * ceilings.BURST / 3 >= ceilings.SUSTAINED
