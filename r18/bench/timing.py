"""How fast: contenders timed side by side in one run, next to their peers.

Contenders of one device and batch take turns: a round is each of them once, and the next round
begins with the next one, so that a machine that slows down slows all of them. A turn begins with
untimed runs: what the one before left (its data in the caches, its idle threads still spinning)
is not charged to the next. Inputs are random and rotate among a few sets; medians and percentiles
are reported, never means. All rounds may be gone through again, in a series of their own: how far
the medians of whole series lie apart is what percentiles of one cannot tell.

A time is of one run over a batch that lies on the device already, complete when the clock stops.
On a GPU the clock is the device's: events around the run, which begins on an idle device, so that
what the host takes to launch it counts. `r18.bench.contenders` says who takes part. A contender
that can be fed from host memory may be timed so besides: see `r18.bench.from_host`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from r18.backend import Array, DeviceInfo, StepTime
from r18.bench.baselines import PEER, PEERS
from r18.bench.from_host import STRETCHES, Feed, Feeding, FromHost
from r18.errors import R18Error, UsageError
from r18.graph.ops import Shape
from r18.machine import peak_nbytes, reset_peak, resident_nbytes

RATIO = f"time / {PEER}"
"""What a row's `ratio` is; below 1 is faster than the peer."""
BEST_RATIO = "time / best peer"
"""What a row's `best_ratio` is."""
PROFILES = 100
"""The most runs that are profiled step by step; as many as are timed, if those are fewer."""


@dataclass(frozen=True)
class Pace:
    """How a turn goes on a kind of device.

    runs:   timed runs.
    settle: seconds of untimed runs before them, and at least one run.
    reload: other input is loaded after settling. Not where copies go beside the computing: the
            first timed run would wait for its batch.
    """

    runs: int
    settle: float
    reload: bool


PACES = {"cpu": Pace(1, 0.05, True), "cuda": Pace(10, 0.002, False)}
"""By kind of device; a kind that is not here goes as the CPU."""


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
        """One run over what was loaded, complete when this returns."""
        ...

    def fetch(self) -> Array:
        """What the last run put out: a copy on the host, in a floating-point format of NumPy's."""
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
    """Something to time: what it is, and how to make it.

    shape:    of its input, (N, C, H, W).
    fusion:   the fusion level, or how it runs instead.
    required: when it cannot be made, that is an error; otherwise it is left out and reported.
    algorithm: what it was told to use where it can, as `conv2d=direct`; empty for its own choice.
    twin:     the very same thing in another precision's rows: made and timed once, for both.
    feed:     makes it anew, to take pixels from host memory; None where it cannot.
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


@dataclass(frozen=True)
class Row:
    """What was measured of one contender. Times are milliseconds of a whole batch.

    samples_ms: one a timed run, in order. repeat: of them, in each of `series`.
    ratio:      median / median of `PEER` of the same device kind, precision and batch; None
                without one.
    best_ratio: the same to the fastest of `PEERS`, which `best_peer` names.
    arena_nbytes, weight_nbytes: as planned; None where the contender does not say.
    peak_rss_nbytes: growth of the process from before it was made to the peak of its first run;
                Linux and CPU only, else None. What a library allocates on its first use counts
                for the contender that is first to use it.
    steps:      median milliseconds of each step, if asked for.
    algorithm:  as its contender says. kernels: the steps that each kernel runs, by its id.
    loss:       what its output lost against float64, in parts of what it may lose: above 1 it is
                wrong. None where nobody looked.
    from_host:  the same network fed with pixels from host memory, if that was asked for.
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
        """Every field, and what is derived from the samples."""
        times = ("median_ms", "p10_ms", "p90_ms", "series_ms")
        rates = ("ms_per_image", "images_per_second")
        fed = self.from_host and self.from_host.to_json(self.batch, self.median_ms)
        derived = {name: getattr(self, name) for name in (*times, *rates)}
        return asdict(self) | derived | {"from_host": fed}


# -- timing ------------------------------------------------------------------------------------


def rotated(count: int, round_: int) -> list[int]:
    """The order of `count` contenders in a round: each round begins one further."""
    return [(round_ + turn) % count for turn in range(count)]


def random_images(shape: Shape, sets: int, seed: int = 0) -> list[Array]:
    """Standard normal float32 input sets, as preprocessed photographs spread; never zeros."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(sets)]


def bench(
    contenders: Sequence[Contender],
    *,
    warmup: int = 3,
    repeat: int = 20,
    series: int = 1,
    input_sets: int = 3,
    seed: int = 0,
    per_step: bool = False,
    from_host: bool = False,
    judge: Callable[[Contender, Runner], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] | None = None,
    on_skip: Callable[[Contender, Exception], None] | None = None,
    on_group: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Time the contenders; rows in their order.

    warmup:   untimed runs of each before the first round of a series.
    repeat:   timed runs of each in a series, in rounds of as many as the device's pace says.
    series:   how often that is gone through.
    per_step: also profile each, step by step, after the rounds.
    from_host: also feed those that can be from host memory, in turns of their own after the rounds.
    judge:    gives the loss of each row; asked after the rounds, so that what it loads and leaves
              behind changes no time and no memory of its group.
    clock:    seconds; only where the device has no clock of its own.
    progress: told what is being done, and how many of how many runs are.
    on_skip:  told of each contender that is not `required` and could not be made, and why.
    on_group: given the rows of those that took turns, in their order, as soon as all are there.

    Raises `UsageError` for counts below 1, and what making a required contender raises.
    """
    if warmup < 0 or min(repeat, series, input_sets) < 1:
        raise UsageError(
            f"warmup must be at least 0, repeat, series and input sets at least 1: got {warmup}, "
            f"{repeat}, {series}, {input_sets}"
        )
    groups: dict[tuple[str, Shape], list[_Entry]] = {}
    entries = [_Entry(contender) for contender in contenders]
    made = [entry for entry in entries if entry.contender.twin is None]
    for entry in made:
        groups.setdefault(_group_of(entry.contender), []).append(entry)

    def planned(contender: Contender) -> int:
        fed = from_host and contender.feed is not None
        return 1 + series * (warmup + repeat) + (STRETCHES if fed else 0)

    total, done = sum(planned(entry.contender) for entry in made), 0

    def tell(what: str, contender: Contender, runs: int = 1) -> None:
        nonlocal done
        done += runs
        if progress is not None:
            batch = f"{contender.precision}, batch {contender.shape[0]}"
            progress(f"{what} {contender.name}, {batch}", done, total)

    for (kind, shape), group in groups.items():
        pace = PACES.get(kind, PACES["cpu"])
        images = random_images(shape, input_sets, seed)
        with ExitStack() as open_runners:
            entered = []
            for entry in group:
                if not _enter(entry, images[0], on_skip):
                    tell("left out", entry.contender, planned(entry.contender))
                    continue
                open_runners.callback(entry.runner.close)
                entered.append(entry)
                tell("made", entry.contender)
            for _ in range(series):
                for entry in entered:
                    for run in range(warmup):
                        entry.runner.load(images[run % input_sets])
                        entry.runner.run()
                        tell("warming up", entry.contender)
                for round_ in range(-(-repeat // pace.runs)):
                    runs = min(pace.runs, repeat - round_ * pace.runs)
                    for turn in rotated(len(entered), round_):
                        entry = entered[turn]
                        entry.samples_ms += _turn(entry.runner, images, round_, pace, runs, clock)
                        tell("timing", entry.contender, runs)
            if from_host:
                _feed_all(entered, seed, clock, tell, on_skip)
            for entry in entered:
                steps = _profile(entry.runner, min(repeat, PROFILES)) if per_step else ()
                own = _row(entry, warmup, series, steps)
                for other in entries:
                    if other is entry or other.contender.twin is entry.contender:
                        loss = None if judge is None else judge(other.contender, entry.runner)
                        other.row = replace(own, precision=other.contender.precision, loss=loss)
        for entry in entered:
            del entry.runner  # with what it holds, before the next group is made
        if on_group is not None:
            same = (other for other in entries if _group_of(other.contender) == (kind, shape))
            on_group(with_ratios([other.row for other in same if other.row is not None]))
    return with_ratios([entry.row for entry in entries if entry.row is not None])


@dataclass
class _Entry:
    """A contender on its way to a row."""

    contender: Contender
    runner: Runner = field(init=False)
    peak_rss_nbytes: int | None = None
    samples_ms: list[float] = field(default_factory=list)
    from_host: FromHost | None = None
    row: Row | None = None


def _group_of(contender: Contender) -> tuple[str, Shape]:
    """Those with the same take turns: one kind of device, one batch."""
    return contender.device.kind, contender.shape


def _enter(
    entry: _Entry, images: Array, on_skip: Callable[[Contender, Exception], None] | None
) -> bool:
    """Make the runner and run it once, measuring memory; False when it had to be left out."""
    contender = entry.contender
    measured = contender.device.kind == "cpu"
    before = resident_nbytes() if measured else None
    try:
        runner = contender.make()
        try:
            measured = measured and reset_peak()
            runner.load(images)
            runner.run()
        except BaseException:
            runner.close()
            raise
    except Exception as error:  # a plugin may raise anything, and a device run out of memory
        if contender.required:
            raise
        if on_skip is not None:
            on_skip(contender, error)
        return False
    peak = peak_nbytes() if measured else None
    entry.runner = runner
    entry.peak_rss_nbytes = None if before is None or peak is None else peak - before
    return True


def _turn(
    runner: Runner,
    images: Sequence[Array],
    round_: int,
    pace: Pace,
    runs: int,
    clock: Callable[[], float],
) -> list[float]:
    """Settle on an input set, then time some runs, in milliseconds."""
    runner.load(images[round_ % len(images)])
    settled = clock() + pace.settle
    runner.run()
    while clock() < settled:
        runner.run()
    if pace.reload:
        runner.load(images[(round_ + 1) % len(images)])
    return [runner.time(clock) for _ in range(runs)]


def _feed_all(
    entries: Sequence[_Entry],
    seed: int,
    clock: Callable[[], float],
    tell: Callable[[str, Contender, int], None],
    on_skip: Callable[[Contender, Exception], None] | None,
) -> None:
    """Time those that can be fed from host memory, stretch by stretch in turns."""
    with ExitStack() as opened:
        fed: list[tuple[_Entry, Feed]] = []
        for entry in entries:
            if entry.contender.feed is None:
                continue
            try:
                program = entry.contender.feed()
            except R18Error as error:  # no kernel for pixels: its other times stand
                if on_skip is not None:
                    name = f"{entry.contender.name} from host"
                    on_skip(replace(entry.contender, name=name), error)
                tell("left out", entry.contender, STRETCHES)
                continue
            feed = Feed(program, statistics.median(entry.samples_ms), seed, clock)
            opened.callback(feed.close)
            fed.append((entry, feed))
        for round_ in range(STRETCHES):
            for turn in rotated(len(fed), round_):
                entry, feed = fed[turn]
                feed.stretch()
                tell("from host memory", entry.contender, 1)
        for entry, feed in fed:
            entry.from_host = feed.result()


def _row(entry: _Entry, warmup: int, series: int, steps: tuple[StepTime, ...]) -> Row:
    contender, runner = entry.contender, entry.runner
    return Row(
        backend=contender.name,
        device=contender.device.name,
        device_kind=contender.device.kind,
        precision=contender.precision,
        fusion=contender.fusion,
        batch=contender.shape[0],
        warmup=warmup,
        repeat=len(entry.samples_ms) // series,
        samples_ms=tuple(entry.samples_ms),
        arena_nbytes=runner.arena_nbytes,
        weight_nbytes=runner.weight_nbytes,
        peak_rss_nbytes=entry.peak_rss_nbytes,
        steps=steps,
        algorithm=contender.algorithm,
        kernels=runner.kernels,
        series=series,
        from_host=entry.from_host,
    )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratios to peers of the same device kind, precision and batch."""

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
        )

    return [rated(row) for row in rows]


def _profile(runner: Runner, repeat: int) -> tuple[StepTime, ...]:
    """Each step's median time over `repeat` runs."""
    runs = [runner.steps() for _ in range(repeat)]
    return tuple(
        replace(same[0], milliseconds=statistics.median(step.milliseconds for step in same))
        for same in zip(*runs, strict=True)
    )


__all__ = [
    "BEST_RATIO",
    "PACES",
    "RATIO",
    "Contender",
    "Pace",
    "Row",
    "Runner",
    "bench",
    "random_images",
    "rotated",
    "with_ratios",
]
