"""An evaluation from start to end: run the missing batches, keep each one, sum them up.

An engine runs the batches: `Here` in this process, `r18.evaluate.distributed.Cluster` on
workers. Results are kept in one place, the journal, and each only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r18.atomic import check_replaceable, holds_something
from r18.errors import R18Error, UsageError, plain
from r18.evaluate.decode import Batch, decoded, readable, same
from r18.evaluate.journal import Journal, open_journal
from r18.evaluate.pair import SAMPLE, Pair, Running
from r18.evaluate.request import Request
from r18.evaluate.rows import UNREADABLE, BatchRows, Row
from r18.evaluate.salvage import salvage_journal
from r18.evaluate.sources import ImageSet, Item
from r18.evaluate.summary import Summary, summarise
from r18.evaluate.tables import check_target, is_table, write_table
from r18.images.preprocess import NOT_THERE
from r18.machine import cpus
from r18.weights import Weights


class Engine(Protocol):
    """Runs batches. workers: how many there are; None is this process."""

    @property
    def workers(self) -> int | None: ...

    def running(self) -> tuple[Running, ...]:
        """The backends that it runs on: the one evaluated and, where there is one, the
        reference."""
        ...

    def bound(self, items: Batch) -> float:
        """As `Pair.bound`, measured on these images, which can all be read."""
        ...

    def results(self, batches: Sequence[Batch]) -> Iterator[BatchRows]:
        """The rows of each batch, in any order."""
        ...


class Here:
    """Batches in this process, decoded in threads.

    On a GPU the next batch is decoded while one runs. On the CPU it is not: decoding would take
    the cores that the program is timed on.
    """

    workers: int | None = None

    def __init__(
        self, request: Request, weights: Weights, folder: Path, threads: int | None = None
    ) -> None:
        self._folder = folder
        self._threads = threads or cpus()
        self._pair = Pair(request, weights)

    def running(self) -> tuple[Running, ...]:
        return self._pair.running()

    def bound(self, items: Batch) -> float:
        return bound_of(self._pair, self._folder, items)

    def results(self, batches: Sequence[Batch]) -> Iterator[BatchRows]:
        ahead = int(all(found.kind != "cpu" for found in self._pair.running()))
        config = self._pair.weights.preprocess
        for batch, images in decoded(batches, self._folder, config, self._threads, ahead):
            yield self._pair.evaluate(batch, images)

    def close(self) -> None:
        self._pair.close()


def bound_of(pair: Pair, folder: Path, items: Batch) -> float:
    """`Pair.bound` on images of a folder."""
    found = readable(items, folder, pair.weights.preprocess, len(items))
    return pair.bound(np.stack([pixels for _, pixels in found]))


@dataclass(frozen=True)
class Progress:
    """How far a run is. resumed: images that were done before it began. compared: images that
    both programs classified; 0 without a reference.
    """

    images: int
    done: int
    resumed: int
    compared: int
    agree_top1: int


@dataclass(frozen=True)
class Evaluation:
    """A finished run: its numbers and its devices.

    resumed: images that were done before it began. seconds: from when the programs were compiled
    to the last result, reading and decoding included.
    """

    summary: Summary
    running: tuple[Running, ...]
    out: Path
    resumed: int
    seconds: float


def journal_of(out: Path) -> Path:
    """The path of the journal while results are made."""
    return out.with_name(f"{out.name}.journal")


def evaluate(
    engine: Engine,
    images: ImageSet,
    request: Request,
    weights: Weights,
    out: Path,
    *,
    restart: bool = False,
    salvage: bool = False,
    tell: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Evaluate the images that are not in the journal, and write the table when all are.

    out:     the table; the journal is next to it until then.
    restart: start over, and replace the table of an earlier run.
    salvage: of a damaged journal, continue with the rows that are intact.
    tell:    called with a line about salvaged rows.

    An image that cannot be read is a row like the others. Raises `UsageError` for a file that is
    there already or cannot be written, for a journal of something else (see `open_journal`), and
    for an image that was replaced since; `R18Error` for images that vanish or change while it runs;
    what the engine raises. After any error, and when the process is killed, the journal holds
    every finished batch, and the same call continues from there.
    """
    check_ready(out, restart)
    running = engine.running()
    identity = request.identity() | {
        "images_sha256": images.sha256,
        "kernels_sha256": running[0].kernels,
        "against_kernels_sha256": running[1].kernels if len(running) > 1 else None,
    }

    def facts() -> dict[str, Any]:
        return {
            "bound": None if request.against is None else _bound(engine, images, weights),
            "running": [asdict(found) for found in running],
        }

    if salvage and (salvaged := salvage_journal(journal_of(out), identity)) and tell is not None:
        count, aside = salvaged
        tell(f"salvaged {count} results; the damaged journal is kept at {aside}")
    with ExitStack() as stack:
        journal = stack.enter_context(
            open_journal(journal_of(out), identity, facts, restart=restart)
        )
        if journal.new and holds_something(out) and not restart:  # another run has ended just now
            journal.discard()
            check_ready(out, restart, journal=False)
        _check_images(images, journal.rows.values(), UsageError)
        vanished: list[Row] = []
        tally = _Tally(journal, len(images.items), request.against is not None, on_progress)
        left = [item for item in images.items if item.file not in journal.rows]
        begin = time.monotonic()
        for batch in engine.results(in_batches(left, request.batch)):
            gone = [row for row in batch.rows if _vanished(row, images)]
            vanished += gone
            kept = tuple(row for row in batch.rows if row not in gone)
            tally.add(journal.append(replace(batch, rows=kept)))
        seconds = time.monotonic() - begin
        if vanished:
            raise _lost(vanished)
        _check_images(images, journal.rows.values(), R18Error)
        bound = journal.facts["bound"]
        rows = [journal.rows[item.file] for item in images.items]
        write_table(out, rows, bound, {"identity": identity, "facts": journal.facts})
        journal.discard()
        summary = summarise(rows, journal.times, bound)
    return Evaluation(summary, running, out, len(images.items) - len(left), seconds)


def _vanished(row: Row, images: ImageSet) -> bool:
    """Whether an image was there when the run began, and was not when it was its turn."""
    missing = row.seen is None and row.error.startswith(NOT_THERE)
    return missing and images.sizes[row.file] >= 0


def _lost(rows: Sequence[Row]) -> R18Error:
    count = f"{len(rows)} photographs" if len(rows) > 1 else "one photograph"
    return R18Error(
        f"{count} vanished while the run went on, such as '{plain(rows[0].file)}'\n"
        "  the results of the others are kept: put them back, and the same command goes on"
    )


def _check_images(images: ImageSet, rows: Iterable[Row], error: type[R18Error]) -> None:
    """Raise `error` for an image that has changed since its row was made."""
    changed, gone = [], []
    for row in rows:
        try:
            if row.seen is not None and not same(images.folder / row.file, row.seen):
                changed.append(row)
        except OSError:
            gone.append(row)
    if gone:
        raise _lost(gone)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise error(
            f"'{plain(changed[0].file)}'{more}: replaced by another image since it was evaluated\n"
            "  results of both do not mix: put it back, or start over with --restart"
        )


def check_ready(out: Path, restart: bool, *, journal: bool = True) -> None:
    """Raise `UsageError` where the results could not be written, or would destroy another file.

    journal: whether one next to an earlier table means that it is to be continued.

    A file that is no table of ours is refused; with `restart`, only a Parquet file is.
    """
    check_target(out)
    csv = out.suffix.lower() == ".csv"
    if not holds_something(out) or (restart and csv):  # NOTE: --restart replaces any CSV
        return
    hint = (
        "\n  it does not hold the results of an earlier evaluation"
        "\n  --restart would replace it all the same, if it is no list of labels"
    )
    known = partial(is_table, out)
    check_replaceable(out, "table of r18 evaluate", known, hint=hint if csv else "")
    if not restart and not (journal and journal_of(out).exists()):
        raise UsageError(
            f"'{out}' holds the results of an earlier evaluation\n"
            "  choose another --out, or replace it with --restart"
        )


def _bound(engine: Engine, images: ImageSet, weights: Weights) -> float:
    sample = readable(images.items, images.folder, weights.preprocess, SAMPLE)
    return engine.bound([item for item, _ in sample]) if sample else 0.0


class _Tally:
    """Counts while a run goes on."""

    def __init__(
        self,
        journal: Journal,
        images: int,
        comparing: bool,
        tell: Callable[[Progress], None] | None,
    ) -> None:
        self._images, self._resumed = images, len(journal.rows)
        self._comparing = comparing
        self._tell = tell or (lambda progress: None)
        self._done = self._compared = self._agree = 0
        self.add(tuple(journal.rows.values()))

    def add(self, rows: Sequence[Row]) -> None:
        compared = [row for row in rows if self._comparing and row.status != UNREADABLE]
        self._done += len(rows)
        self._compared += len(compared)
        self._agree += sum(row.agree_top1 for row in compared)
        self._tell(Progress(self._images, self._done, self._resumed, self._compared, self._agree))


def in_batches(items: Sequence[Item], size: int) -> list[Batch]:
    """Items in groups of `size`, the last with the rest."""
    return [items[first : first + size] for first in range(0, len(items), size)]


__all__ = [
    "Engine",
    "Evaluation",
    "Here",
    "Progress",
    "check_ready",
    "evaluate",
    "journal_of",
]
