"""Many damaged files to many parsers, by several processes.

A turn is a chunk of files for one parser. Turns are numbered; the number and the seed decide
the files, so that the same turns are the same files whichever process takes them.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fuzz.runs import Failure, chunk, in_child
from fuzz.targets import Target

CHUNK = 500
"""The number of files in a turn, which one child process reads."""
MEMORY = Path("/dev/shm")
"""A file system in memory: files are written and read again without a disk."""


@dataclass
class Tally:
    """A campaign's counts: files and failures by parser, and processes that ended early."""

    files: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    @property
    def sound(self) -> bool:
        return not self.failed and not self.lost


def missing(target: Target) -> tuple[str, ...]:
    """The libraries that the parser needs and that are not installed."""
    return tuple(name for name in target.needs if importlib.util.find_spec(name) is None)


def campaign(
    targets: Sequence[Target], seed: int, out: Path, *, processes: int, seconds: float, most: int
) -> Tally:
    """Read files until `seconds` are over or there are no turns left within `most` files.

    One file of each kind of failure is kept in `out`, in the folder of its parser.
    """
    tally = Tally()
    keep = _Keeper(out, tally)
    for failure in prepare(targets):
        keep([failure], failure.target, 1)
    context = multiprocessing.get_context("fork")
    turns = context.Value("q", 0)
    end = time.monotonic() + seconds
    with _folder() as folder:
        lanes = []
        pipes: list[Connection] = []
        for place in range(processes):
            receiving, sending = context.Pipe(duplex=False)
            work = (targets, seed, folder / str(place), turns, end, most, sending)
            lane = context.Process(target=_lane, args=work, daemon=True)  # ends with this process
            lane.start()
            sending.close()  # so that a process that ends closes the pipe
            lanes.append(lane)
            pipes.append(receiving)
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    tally.lost += 1
                    answer = None
                if answer is None:
                    pipes.remove(pipe)
                else:
                    name, failures = answer
                    keep(failures, name, CHUNK)
        for lane in lanes:
            lane.join()
    return tally


class _Keeper:
    def __init__(self, out: Path, tally: Tally) -> None:
        self.out, self.tally = out, tally
        self.said: set[tuple[str, str]] = set()

    def __call__(self, failures: Sequence[Failure], name: str, count: int) -> None:
        self.tally.files[name] += count
        for failure in failures:
            self.tally.failed[name] += 1
            key = (name, failure.why[:60])
            if key in self.said:
                continue
            self.said.add(key)
            path = self.out / name / hashlib.sha256(failure.data).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(failure.data)
            print(f"{path}: {failure.why}", flush=True)


@contextmanager
def _folder() -> Iterator[Path]:
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="r18-fuzz-", dir=where) as name:
        yield Path(name)


def prepare(targets: Sequence[Target]) -> list[Failure]:
    """Make the valid files once, and see that each parser accepts them.

    A child makes them: PyTorch starts threads, and a process that has some should not fork. What it
    imports is imported here too, so that no chunk imports it again. A parser that refuses its first
    valid file is a failure, since it may refuse every other for the same reason.
    """

    def make() -> tuple[dict[str, tuple[bytes, ...]], list[Failure], list[str]]:
        before, valid, failures = set(sys.modules), {}, []
        for target in targets:
            valid[target.name] = target.valid
            with _folder() as folder:
                target.put(folder, target.valid[0])
                try:
                    target.read(folder)
                except Exception as error:
                    why = f"a valid file is refused: {error}"
                    failures.append(Failure(target.name, target.valid[0], why))
        return valid, failures, sorted(set(sys.modules) - before)

    answer, status = in_child(make)
    if not answer:
        raise RuntimeError(f"the valid files could not be made: the process ended: {status}")
    valid, failures, modules = pickle.loads(answer)
    for target in targets:
        target.__dict__["valid"] = valid[target.name]  # where `cached_property` keeps it
    for module in modules:
        with suppress(Exception):  # a name in sys.modules need not be one to import
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no child copies the pages of all objects to mark them
    return list(failures)


def _lane(
    targets: Sequence[Target],
    seed: int,
    folder: Path,
    turns: Any,
    end: float,
    most: int,
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while time.monotonic() < end:
        with turns.get_lock():
            turn = turns.value
            turns.value += 1
        if (turn + 1) * CHUNK > most:
            break
        target = targets[turn % len(targets)]
        where = folder / target.name
        where.mkdir(parents=True, exist_ok=True)
        failures = chunk(target, f"{seed} {turn // len(targets)}", CHUNK, where)
        pipe.send((target.name, failures))
    pipe.send(None)
