"""The time of a command by named parts, for `--timings`.

`part` may be anywhere; without a `Stopwatch` that runs it costs next to nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import psutil
from tabulate import tabulate

OTHER = "other"
"""The name of the time in no part."""
STAT, STARTED = Path("/proc/self/stat"), 19
"""proc_pid_stat(5): the place, after the name, of the ticks at which the process began."""


class Stopwatch:
    """Seconds of parts, in the order of their beginnings.

    Time in a part within a part counts for the inner one only.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()
        self._open: list[str] = []

    def switch(self, name: str | None) -> None:
        """Begin a part, or end the one that began last."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now
        if name is None:
            self._open.pop()
        else:
            self._open.append(name)
            self.seconds.setdefault(name, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """Time before the stopwatch began."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._begin -= seconds

    def rows(self) -> list[tuple[str, float]]:
        """(part, seconds), then the time in no part, then the total."""
        total = time.perf_counter() - self._begin
        rest = total - sum(self.seconds.values())
        return [*self.seconds.items(), (OTHER, rest), ("total", total)]

    def text(self) -> str:
        """A line a part."""
        lines = [(name, f"{seconds:.3f}") for name, seconds in self.rows()]
        return tabulate(
            lines, ("part", "seconds"), disable_numparse=True, colalign=("left", "right")
        )


_RUNNING: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def stopwatch(since_start: str = "") -> Iterator[Stopwatch]:
    """Time the parts of this thread inside.

    since_start: the name of the time since the process began; "" leaves it out.
    """
    watch = Stopwatch()
    if since_start:
        watch.add(since_start, _since_start())
    token = _RUNNING.set(watch)
    try:
        yield watch
    finally:
        _RUNNING.reset(token)


def _since_start() -> float:
    """Seconds since this process began."""
    with suppress(OSError, AttributeError, ValueError):  # Linux has both
        ticks = int(STAT.read_text().rpartition(")")[2].split()[STARTED])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()  # of whole seconds on some systems


@contextmanager
def part(name: str) -> Iterator[None]:
    """Time the block, if a stopwatch runs."""
    watch = _RUNNING.get()
    if watch is None:
        yield
        return
    watch.switch(name)
    try:
        yield
    finally:
        watch.switch(None)


__all__ = ["Stopwatch", "part", "stopwatch"]
