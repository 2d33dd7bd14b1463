"""Peak rates of a device, per instruction and memory, as a backend measures them.

Kernels cannot be faster than the instructions that they consist of. A backend that can issue one
instruction and nothing else measures its rate; `r18.bench.roofline` derives floors from it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COPY = "copy"
"""The copy in device memory, in bytes read and written together. Other names are the backend's."""


@dataclass(frozen=True)
class Pace:
    """Operations or bytes a second: the median and the best of several timed runs."""

    per_second: float
    best: float
    runs: int


@dataclass(frozen=True)
class Ceiling:
    """The rate of an instruction, or the bandwidth of a memory.

    what:      the instruction (`wgmma`), or what moves bytes (`copy`).
    precision: in which it multiplies, such as `fp16`, or another format (`e4m3`); a
               multiply-accumulate is two operations. "" for bytes.
    sustained: launches back to back, for at least a second.
    burst:     launches of a few milliseconds, each after a pause, while the device is cool.
    how:       the measurement, in words.
    """

    what: str
    precision: str
    sustained: Pace
    burst: Pace
    how: str


# -- measuring ---------------------------------------------------------------------------------

BURST = 5e-3
"""Seconds of a launch."""
BURSTS, PAUSE = 7, 0.1
"""Single launches, and the seconds of idleness before each."""
WARM, SUSTAINED = 0.25, 1.0
"""Seconds of launches back to back: warm-up, then timed."""

Timed = Callable[[int, int], Sequence[float]]
"""Seconds of each launch, from a number of repeats and of launches in a row."""


def measure(timed: Timed, work: float) -> tuple[Pace, Pace]:
    """The sustained pace and the pace in bursts; `work`: operations or bytes of one repeat of the
    whole device.

    Bursts come first, so that the device is cool.
    """
    repeats = _repeats(timed)
    burst: list[float] = []
    for _ in range(BURSTS):
        time.sleep(PAUSE)
        burst += timed(repeats, 1)
    seconds = statistics.median(burst)
    warm, count = (max(1, -int(-length // seconds)) for length in (WARM, SUSTAINED))
    sustained = timed(repeats, warm + count)[warm:]
    while sum(sustained) < SUSTAINED:  # the bursts were not as fast as what followed
        sustained = [*sustained, *timed(repeats, count)]
    return _pace(work * repeats, sustained), _pace(work * repeats, burst)


def _repeats(timed: Timed) -> int:
    """The repeats that take about `BURST` seconds; untimed work warms up, too.

    By the shortest of a few launches: one may have waited for something else.
    """
    repeats = 1
    timed(repeats, 1)
    while (seconds := min(timed(repeats, 1)[0] for _ in range(3))) < BURST / 4:
        repeats *= 4
    return max(1, round(repeats * BURST / seconds))


def _pace(work: float, seconds: Sequence[float]) -> Pace:
    return Pace(work / statistics.median(seconds), work / min(seconds), len(seconds))


__all__ = ["COPY", "Ceiling", "Pace", "Timed", "measure"]
