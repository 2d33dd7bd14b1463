"""Contenders and their measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from r18.backend import Array, DeviceInfo, StepTime
from r18.bench.baselines import PEER, PEERS
from r18.bench.error import Error
from r18.bench.inputs.cold import Cold, Flush
from r18.bench.inputs.from_host import Feeding, FromHost
from r18.graph.ops import Shape

RATIO = f"time / {PEER}"
"""The meaning of a row's `ratio`; below 1 is faster than the peer."""
BEST_RATIO = "time / best peer"
"""The meaning of a row's `best_ratio`."""
ERROR_RATIO = f"error / {PEER}"
"""The meaning of a row's `error_ratio`; above 1 is less exact than the peer."""


@dataclass(frozen=True)
class Pace:
    """How a turn goes on a kind of device.

    runs:   timed runs.
    settle: seconds of untimed runs before them, and at least one run.
    reload: load another input after settling. Not where copies overlap with computing: the first
            timed run would wait for its batch.
    """

    runs: int
    settle: float
    reload: bool


PACES = {"cpu": Pace(1, 0.05, True), "cuda": Pace(10, 0.1, False)}
"""By kind of device; other kinds run at the CPU's pace. A GPU at its power limit lowers its clock
within 0.1 s, and is timed at the clock that a loop of launches finds (docs/performance-log.md)."""


class Runner(Protocol):
    """A contender made ready to run."""

    @property
    def arena_nbytes(self) -> int | None:
        """Bytes of activations and workspace, where they are planned."""
        ...

    @property
    def weight_nbytes(self) -> int | None:
        """Bytes of weights as they are kept for running."""
        ...

    @property
    def kernels(self) -> Mapping[str, int]:
        """How many steps each kernel runs, by its id; empty where there are none to see."""
        ...

    def load(self, images: Array) -> None:
        """Bring (N, C, H, W) float32 to the device."""
        ...

    def run(self) -> None:
        """One run over the loaded batch, complete when this returns."""
        ...

    def fetch(self) -> Array:
        """The output of the last run: a copy on the host, in a floating-point format of NumPy's."""
        ...

    def time(self, clock: Callable[[], float]) -> float:
        """Milliseconds of one run, by the device's events, or by a clock of seconds."""
        ...

    def steps(self) -> list[StepTime]:
        """One run, step by step; empty where there are no steps to see."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Contender:
    """A program to time: its description, and how to make it.

    shape:    of its input, (N, C, H, W).
    fusion:   the fusion level, or how it runs instead.
    required: an error if it cannot be made; otherwise it is left out and reported.
    algorithm: the algorithm it uses wherever it can, as `conv2d=direct`; empty for its own choice.
    twin:     the very same thing in another precision's rows: made and timed once, for both.
    feed:     makes a runner that takes pixels from host memory; None if it cannot.
    flush:    maps a number of bytes to a function that overwrites as many of its device's memory;
              None if it cannot. A CPU's contender needs none.
    """

    name: str
    device: DeviceInfo
    precision: str
    fusion: str
    shape: Shape
    make: Callable[[], Runner]
    required: bool = True
    algorithm: str = ""
    twin: Contender | None = None
    feed: Callable[[], Feeding] | None = None
    flush: Callable[[int], Flush] | None = None


@dataclass(frozen=True)
class Row:
    """The measurements of one contender. Times are milliseconds of a whole batch.

    samples_ms: one a timed run, in order. repeat: of them, in each of `series`.
    ratio:      median / median of `PEER` of the same device kind, precision and batch; None
                without one.
    best_ratio: the same to the fastest of `PEERS`, which `best_peer` names.
    arena_nbytes, weight_nbytes: as planned; None where the contender does not say.
    peak_rss_nbytes: growth of the process from before it was made to the peak of its first run;
                Linux and CPU only, else None. A library's allocations on its first use count
                for the contender that is first to use it.
    steps:      median milliseconds of each step, if asked for.
    algorithm:  as its contender says. kernels: the steps that each kernel runs, by its id.
    loss:       its output's error against float64, as a fraction of the allowed: above 1 it is
                wrong. None if it was not compared.
    from_host:  the same network fed with pixels from host memory, if that was asked for.
    error:      its output's error; None where it was not measured, and `no_error` says why.
    error_ratio: error / error of `PEER`, of the same device kind, precision and batch; None without
                one, in integers, and where that error is 0.
    cold:       times with the device's caches overwritten before each run, if that was asked for.
    """

    backend: str
    device: str
    device_kind: str
    precision: str
    fusion: str
    batch: int
    warmup: int
    repeat: int
    samples_ms: tuple[float, ...]
    ratio: float | None = None
    arena_nbytes: int | None = None
    weight_nbytes: int | None = None
    peak_rss_nbytes: int | None = None
    steps: tuple[StepTime, ...] = ()
    algorithm: str = ""
    kernels: Mapping[str, int] = field(default_factory=dict)
    best_ratio: float | None = None
    best_peer: str = ""
    loss: float | None = None
    series: int = 1
    from_host: FromHost | None = None
    error: Error | None = None
    no_error: str = ""
    error_ratio: float | None = None
    cold: Cold | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def series_ms(self) -> tuple[float, ...]:
        """The median of each series."""
        size = len(self.samples_ms) // self.series
        return tuple(
            statistics.median(self.samples_ms[begin : begin + size])
            for begin in range(0, size * self.series, size)
        )

    @property
    def p10_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 10))

    @property
    def p90_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 90))

    @property
    def ms_per_image(self) -> float:
        return self.median_ms / self.batch

    @property
    def images_per_second(self) -> float:
        return 1e3 / self.ms_per_image

    def to_json(self) -> dict[str, Any]:
        """Every field, and statistics of the samples."""
        times = ("median_ms", "p10_ms", "p90_ms", "series_ms")
        rates = ("ms_per_image", "images_per_second")
        fed = self.from_host and self.from_host.to_json(self.batch, self.median_ms)
        derived = {name: getattr(self, name) for name in (*times, *rates)}
        parts = {
            "from_host": fed,
            "error": self.error and self.error.to_json(),
            "cold": self.cold and self.cold.to_json(),
        }
        return asdict(self) | derived | parts


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratios to peers of the same device kind, precision and batch.

    The ratios are of times, and of errors.
    """

    def key(row: Row) -> tuple[str, str, int]:
        return (row.device_kind, row.precision, row.batch)

    peers: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.backend in PEERS:
            peers.setdefault(key(row), []).append(row)

    def rated(row: Row) -> Row:
        eager = [peer for peer in peers.get(key(row), ()) if peer.backend == PEER]
        best = min(peers.get(key(row), ()), key=lambda peer: peer.median_ms, default=None)
        return replace(
            row,
            ratio=row.median_ms / eager[0].median_ms if eager else None,
            best_ratio=row.median_ms / best.median_ms if best else None,
            best_peer=best.backend if best else "",
            error_ratio=_over(row.error, eager[0].error if eager else None),
        )

    return [rated(row) for row in rows]


def _over(error: Error | None, peer: Error | None) -> float | None:
    return error.over(peer) if error and peer else None
