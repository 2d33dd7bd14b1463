"""How fast: contenders timed side by side in one run, next to their baselines.

Contenders of one device and batch take turns: a round is each of them once, and the next round
begins with the next one, so that a machine that slows down slows all of them. A turn begins with
untimed runs, so that the traces of the previous contender (its data in the caches, its idle
threads still spinning) are not charged to the next. Inputs are random and rotate among a few sets.
Medians and percentiles are reported, never means. A series is all rounds once; the spread of the
medians of several series shows what the percentiles of one cannot.

A time is of one run over a batch that is already on the device, complete when the clock stops. On
a GPU the clock is the device's: events around the run, which begins on an idle device, so that the
host's launch time counts. `r18.bench.contenders` makes the contenders.

Times are warm: a run reads the batch, the weights and the activations' memory of the run before, so
the caches hold as much of them as fits. Contenders can also be timed with overwritten caches
(`r18.bench.inputs.cold`), and those that accept batches from host memory that way
(`r18.bench.inputs.from_host`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from r18.backend import Array, StepTime
from r18.bench.error import Error
from r18.bench.inputs import cold as cold_inputs
from r18.bench.inputs.cold import Cold, Flush, flushed_nbytes, host_flush
from r18.bench.inputs.from_host import STRETCHES, Feed, FromHost
from r18.bench.rows import PACES, Contender, Pace, Row, Runner, with_ratios
from r18.cpu import cpu
from r18.errors import R18Error, UsageError
from r18.graph.ops import Shape
from r18.machine import peak_nbytes, reset_peak, resident_nbytes

PROFILES = 100
"""The most runs that are profiled step by step; as many as are timed, if those are fewer."""

Progress = Callable[[str, int, int], None]
"""A function of the present activity, the runs that are finished, and all runs."""
OnSkip = Callable[[Contender, Exception], None]
"""A function of a contender that is not `required` and could not be made, and of the error."""
Judge = Callable[[Contender, Runner], float]
"""The loss of a contender's output; see `Row.loss`."""
ErrorOf = Callable[[Contender, Runner], Error]
"""The error of a contender's output. Raises `R18Error` where it cannot be measured."""


@dataclass(frozen=True)
class Rounds:
    """How often each contender runs.

    warmup:     untimed runs of each before the first round of a series.
    repeat:     timed runs of each in a series, in rounds of as many as the device's pace says.
    series:     how often all rounds are repeated.
    input_sets: random inputs that rotate. seed: of these.
    per_step:   also profile each, step by step, after the rounds.
    from_host:  also feed those that can be from host memory, in turns of their own.
    cold:       also time each with overwritten caches, in turns of their own.

    Raises `UsageError` for counts below 1, or below 0 of `warmup`.
    """

    warmup: int = 3
    repeat: int = 20
    series: int = 1
    input_sets: int = 3
    seed: int = 0
    per_step: bool = False
    from_host: bool = False
    cold: bool = False

    def __post_init__(self) -> None:
        if self.warmup < 0 or min(self.repeat, self.series, self.input_sets) < 1:
            raise UsageError(
                "warmup must be at least 0, repeat, series and input sets at least 1: got "
                f"{self.warmup}, {self.repeat}, {self.series}, {self.input_sets}"
            )

    def runs(self, contender: Contender) -> int:
        """How many runs of a contender progress counts, its first one included."""
        fed = self.from_host and contender.feed is not None
        warm = 1 + self.series * (self.warmup + self.repeat)
        return warm + self.cold_runs + (STRETCHES if fed else 0)

    @property
    def cold_runs(self) -> int:
        """The runs of each with overwritten caches."""
        return min(cold_inputs.RUNS, self.repeat) if self.cold else 0


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
    cold: bool = False,
    judge: Judge | None = None,
    error_of: ErrorOf | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
    on_skip: OnSkip | None = None,
    on_group: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Time the contenders; rows in their order.

    warmup to cold: see `Rounds`.
    judge:    gives the loss of each row. It runs after the rounds, so that what it loads changes
              no time and no memory of its group.
    error_of: gives the error of each row, at the same time.
    clock:    seconds; only for devices without a clock of their own.
    on_group: called with the rows of contenders that took turns, in order, as soon as all of them
              are finished.

    Raises `UsageError` for counts below 1, and what making a required contender raises.
    """
    rounds = Rounds(warmup, repeat, series, input_sets, seed, per_step, from_host, cold)
    session = _Session(contenders, rounds, clock, progress, on_skip)
    for key, group in session.groups().items():
        session.time_group(group, judge, error_of)
        if on_group is not None:
            on_group(session.rows(key))
    return session.rows()


@dataclass
class _Entry:
    """A contender on its way to a row."""

    contender: Contender
    runner: Runner = field(init=False)
    peak_rss_nbytes: int | None = None
    samples_ms: list[float] = field(default_factory=list)
    from_host: FromHost | None = None
    cold: Cold | None = None
    row: Row | None = None

    @property
    def group(self) -> tuple[str, Shape]:
        """Contenders with the same take turns: one kind of device, one batch."""
        return self.contender.device.kind, self.contender.shape


class _Session:
    """One call of `bench`."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        rounds: Rounds,
        clock: Callable[[], float],
        progress: Progress | None,
        on_skip: OnSkip | None,
    ) -> None:
        self.rounds, self.clock = rounds, clock
        self._progress, self._on_skip = progress, on_skip
        self._entries = [_Entry(contender) for contender in contenders]
        self._made = [entry for entry in self._entries if entry.contender.twin is None]
        self._total = sum(rounds.runs(entry.contender) for entry in self._made)
        self._done = 0

    def groups(self) -> dict[tuple[str, Shape], list[_Entry]]:
        """The contenders to make, by group: those of one group take turns."""
        found: dict[tuple[str, Shape], list[_Entry]] = {}
        for entry in self._made:
            found.setdefault(entry.group, []).append(entry)
        return found

    def rows(self, group: tuple[str, Shape] | None = None) -> list[Row]:
        """The finished rows of a group, or of all, with their ratios."""
        chosen = [entry for entry in self._entries if group in (None, entry.group)]
        return with_ratios([entry.row for entry in chosen if entry.row is not None])

    def time_group(
        self, group: Sequence[_Entry], judge: Judge | None, error_of: ErrorOf | None
    ) -> None:
        """Make the contenders of a group, time them in turns, and write their rows."""
        kind, shape = group[0].group
        images = random_images(shape, self.rounds.input_sets, self.rounds.seed)
        with ExitStack() as runners:
            entered = []
            for entry in group:
                if self._enter(entry, images[0]):
                    runners.callback(entry.runner.close)
                    entered.append(entry)
            for _ in range(self.rounds.series):
                self._warm_up(entered, images)
                self._time_rounds(entered, images, PACES.get(kind, PACES["cpu"]))
            if self.rounds.cold:
                self._time_cold(entered, images, PACES.get(kind, PACES["cpu"]))
            if self.rounds.from_host:
                self._feed(entered)
            for entry in entered:
                self._write_rows(entry, judge, error_of)
        for entry in entered:
            del entry.runner  # with what it holds, before the next group is made

    def _enter(self, entry: _Entry, images: Array) -> bool:
        """Make the runner and run it once, measuring memory; False if it has to be left out."""
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
            self._skip(contender, error, self.rounds.runs(contender))
            return False
        peak = peak_nbytes() if measured else None
        entry.runner = runner
        entry.peak_rss_nbytes = None if before is None or peak is None else peak - before
        self._tell("made", contender)
        return True

    def _warm_up(self, entries: Sequence[_Entry], images: Sequence[Array]) -> None:
        for entry in entries:
            for run in range(self.rounds.warmup):
                entry.runner.load(images[run % len(images)])
                entry.runner.run()
                self._tell("warming up", entry.contender)

    def _time_rounds(self, entries: Sequence[_Entry], images: Sequence[Array], pace: Pace) -> None:
        for round_ in range(-(-self.rounds.repeat // pace.runs)):
            runs = min(pace.runs, self.rounds.repeat - round_ * pace.runs)
            for turn in rotated(len(entries), round_):
                entry = entries[turn]
                entry.samples_ms += _turn(entry.runner, images, round_, pace, runs, self.clock)
                self._tell("timing", entry.contender, runs)

    def _time_cold(self, entries: Sequence[_Entry], images: Sequence[Array], pace: Pace) -> None:
        """Time all with overwritten caches, in turns; leave all out if nothing overwrites them."""
        runs = self.rounds.cold_runs
        try:
            nbytes, flush = _flush(entries)
        except Exception as error:  # the device may have no room left for the buffer
            for entry in entries:
                name = f"{entry.contender.name} with overwritten caches"
                self._skip(replace(entry.contender, name=name), error, runs)
            return
        samples: list[list[float]] = [[] for _ in entries]
        for round_ in range(-(-runs // pace.runs)):
            count = min(pace.runs, runs - round_ * pace.runs)
            for turn in rotated(len(entries), round_):
                runner = entries[turn].runner
                runner.load(images[round_ % len(images)])
                runner.run()  # an arriving batch and idle threads delay no timed run
                for _ in range(count):
                    flush()
                    samples[turn].append(runner.time(self.clock))
                self._tell("with overwritten caches", entries[turn].contender, count)
        for entry, times in zip(entries, samples, strict=True):
            entry.cold = Cold(nbytes, tuple(times))

    def _feed(self, entries: Sequence[_Entry]) -> None:
        """Time those that can be fed from host memory, stretch by stretch in turns."""
        with ExitStack() as opened:
            fed: list[tuple[_Entry, Feed]] = []
            for entry in entries:
                if entry.contender.feed is None:
                    continue
                try:
                    program = entry.contender.feed()
                except R18Error as error:  # no kernel for pixels: its other times stand
                    name = f"{entry.contender.name} from host"
                    self._skip(replace(entry.contender, name=name), error, STRETCHES)
                    continue
                expected = statistics.median(entry.samples_ms)
                feed = Feed(program, expected, self.rounds.seed, self.clock)
                opened.callback(feed.close)
                fed.append((entry, feed))
            for round_ in range(STRETCHES):
                for turn in rotated(len(fed), round_):
                    entry, feed = fed[turn]
                    feed.stretch()
                    self._tell("from host memory", entry.contender)
            for entry, feed in fed:
                entry.from_host = feed.result()

    def _write_rows(self, entry: _Entry, judge: Judge | None, error_of: ErrorOf | None) -> None:
        """The row of a contender, and of those that are the same in another precision."""
        rounds = self.rounds
        steps = _profile(entry.runner, min(rounds.repeat, PROFILES)) if rounds.per_step else ()
        own = _row(entry, rounds, steps)
        for other in self._entries:
            if other is entry or other.contender.twin is entry.contender:
                loss = None if judge is None else judge(other.contender, entry.runner)
                error, why = _error(error_of, other.contender, entry.runner)
                other.row = replace(
                    own,
                    precision=other.contender.precision,
                    loss=loss,
                    error=error,
                    no_error=why,
                )

    def _skip(self, contender: Contender, error: Exception, runs: int) -> None:
        if self._on_skip is not None:
            self._on_skip(contender, error)
        self._tell("left out", contender, runs)

    def _tell(self, what: str, contender: Contender, runs: int = 1) -> None:
        self._done += runs
        if self._progress is not None:
            batch = f"{contender.precision}, batch {contender.shape[0]}"
            self._progress(f"{what} {contender.name}, {batch}", self._done, self._total)


# -- one turn ----------------------------------------------------------------------------------


def rotated(count: int, round_: int) -> list[int]:
    """The order of `count` contenders in a round: each round begins one further."""
    return [(round_ + turn) % count for turn in range(count)]


def random_images(shape: Shape, sets: int, seed: int = 0) -> list[Array]:
    """Standard normal float32 input sets, as preprocessed photographs spread; never zeros."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(sets)]


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


def _flush(entries: Sequence[_Entry]) -> tuple[int, Flush]:
    """The bytes that overwrite the caches of the contenders' device, and a function that does it.

    Raises `UsageError` where the caches are unknown, or none of them writes to that device.
    """
    kinds = {entry.contender.device.kind for entry in entries}
    if kinds <= {"cpu"}:
        nbytes = flushed_nbytes("cpu", dict(cpu().caches))
        return nbytes, host_flush(nbytes)
    nbytes = flushed_nbytes("cuda", {})
    for entry in entries:
        if entry.contender.flush is not None:
            return nbytes, entry.contender.flush(nbytes)
    raise UsageError("no contender can overwrite the device's caches")


def _error(
    error_of: ErrorOf | None, contender: Contender, runner: Runner
) -> tuple[Error | None, str]:
    """The error of a contender's output, or why there is none."""
    if error_of is None:
        return None, ""
    try:
        return error_of(contender, runner), ""
    except R18Error as error:  # the times stand
        return None, str(error).splitlines()[0]


def _row(entry: _Entry, rounds: Rounds, steps: tuple[StepTime, ...]) -> Row:
    contender, runner = entry.contender, entry.runner
    return Row(
        backend=contender.name,
        device=contender.device.name,
        device_kind=contender.device.kind,
        precision=contender.precision,
        fusion=contender.fusion,
        batch=contender.shape[0],
        warmup=rounds.warmup,
        repeat=len(entry.samples_ms) // rounds.series,
        samples_ms=tuple(entry.samples_ms),
        arena_nbytes=runner.arena_nbytes,
        weight_nbytes=runner.weight_nbytes,
        peak_rss_nbytes=entry.peak_rss_nbytes,
        steps=steps,
        algorithm=contender.algorithm,
        kernels=runner.kernels,
        series=rounds.series,
        from_host=entry.from_host,
        cold=entry.cold,
    )


def _profile(runner: Runner, repeat: int) -> tuple[StepTime, ...]:
    """Each step's median time over `repeat` runs."""
    runs = [runner.steps() for _ in range(repeat)]
    return tuple(
        replace(same[0], milliseconds=statistics.median(step.milliseconds for step in same))
        for same in zip(*runs, strict=True)
    )


__all__ = ["Rounds", "bench", "random_images", "rotated"]
