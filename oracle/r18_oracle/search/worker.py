"""Isolation: device work in processes of their own, with a time limit.

A kernel may take its process down (a segmentation fault, an illegal address, the kernel of the
operating system running out of memory) or never come back. Each is a finding like any other: the
worker announces what it is about to run, so its parent knows what it died of, and goes on with a
new worker.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from tempfile import TemporaryDirectory
from typing import Any

from r18.errors import R18Error
from r18.graph.ops import Problem
from r18_oracle.findings import Finding

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


STARTUP_SECONDS = 120.0
"""How long a worker may take to start and import what its job needs, on a busy machine."""


@dataclass(frozen=True)
class Job:
    """One piece of work for a worker.

    task: a function `task(announce=…, **arguments)` at the top of a module; its result is pickled
    back, and ends the worker if it has an attribute `spent` that is true. backend, kernel: what a
    finding is laid to if the worker dies. silence_seconds: how long it may go without announcing
    anything before it counts as hung. kin: jobs of one kin profit from what a worker remembers of
    them, and go to the same one while others have other work.
    """

    task: Callable[..., Any]
    arguments: dict[str, Any]
    backend: str
    kernel: str
    silence_seconds: float = 60.0
    kin: str = ""


@dataclass(frozen=True)
class Outcome:
    """A job's result, or the finding that its worker left behind when it died."""

    job: Job
    result: Any = None
    finding: Finding | None = None
    seconds: float = 0.0


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    kin: str = ""
    begun: bool = False
    started: float = 0.0
    heard: float = 0.0
    doing: tuple[Problem | None, str, int] = field(default=(None, "none", 0))


class Pool:
    """Worker processes, started when there is work for them, kept until `close`.

    workers: the most at once; default one a core. A worker that died is replaced. threads: of
    each, where the environment does not say; default its share of the cores, but two at least:
    kernels cut their work by the number of threads, and would never do so with one.

    What libraries keep between runs, as Hypothesis does, goes to a folder that `close` removes:
    nothing is written where the workers were started.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        self._most = max(1, workers or os.cpu_count() or 1)
        self._threads = threads or max(2, (os.cpu_count() or 1) // self._most)
        self._workers: list[_Worker] = []
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, jobs: Sequence[Job], on_progress: Callable[[Job, Problem | None], None] | None = None
    ) -> Iterator[Outcome]:
        """Every job's one outcome, as they come; closing the iterator early ends the workers."""
        waiting = list(jobs)
        try:
            while waiting or any(w.job for w in self._workers):
                self._staff(len(waiting))
                for worker in self._workers:
                    if worker.job is None and waiting:
                        job = self._next(worker, waiting)
                        if _give(worker, job):
                            waiting.remove(job)
                yield from _listen(self._workers, on_progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every worker, whatever it does."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _next(self, worker: _Worker, waiting: list[Job]) -> Job:
        """Of the kin that it did last; else of one that no other worker does; else the first."""
        others = {w.kin for w in self._workers if w is not worker and w.job is not None}
        kindred = (job for job in waiting if job.kin == worker.kin)
        free = (job for job in waiting if job.kin not in others)
        return next(chain(kindred, free, waiting))

    def _staff(self, waiting: int) -> None:
        """Forget the dead and start as many as there is work for."""
        # One that died at work stays until `_listen` has told of it.
        self._workers = [w for w in self._workers if w.job is not None or w.process.is_alive()]
        busy = sum(w.job is not None for w in self._workers)
        while len(self._workers) < min(self._most, waiting + busy):
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="r18-", ignore_cleanup_errors=True)
            self._workers.append(_start(_variables(self._threads, self._folder.name)))


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    on_progress: Callable[[Job, Problem | None], None] | None = None,
) -> Iterator[Outcome]:
    """Run every job in a pool of its own; see `Pool.run`."""
    with Pool(workers) as pool:
        yield from pool.run(jobs, on_progress)


def _variables(threads: int, folder: str) -> dict[str, str]:
    """The environment of a worker, where the user's does not say otherwise."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of nested levels the first
    if limit.isdecimal() and int(limit):
        threads = min(threads, int(limit))  # MKL and OpenBLAS would not stop at what OpenMP may
    return {name: str(threads) for name in THREAD_VARIABLES} | {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the time of those that work
        "HYPOTHESIS_STORAGE_DIRECTORY": folder,
    }


def _start(variables: dict[str, str]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _environment(variables):
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for the processes started inside; what the user has set stays."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def _give(worker: _Worker, job: Job) -> bool:
    """Hand over a job; False to a worker that died while it was idle."""
    try:
        worker.pipe.send(job)
    except OSError:
        worker.process.join()
        return False
    worker.job, worker.kin = job, job.kin
    worker.begun = False
    worker.started = worker.heard = time.monotonic()
    worker.doing = (None, "none", 0)
    return True


def _listen(
    pool: list[_Worker], on_progress: Callable[[Job, Problem | None], None] | None
) -> Iterator[Outcome]:
    """Take what the workers have said, for a moment; end those that died or fell silent."""
    busy = {w.pipe: w for w in pool if w.job is not None}
    for ready in wait(list(busy), timeout=0.2):
        worker = busy[ready]  # type: ignore[index]
        job = worker.job
        assert job is not None
        try:
            said, content = worker.pipe.recv()
        except (EOFError, OSError):
            yield _lost(worker, "crash", _cause_of_death(worker))
            continue
        worker.heard = time.monotonic()
        worker.begun = True
        if said == "begun":
            continue
        if said == "at":
            worker.doing = content
            if on_progress is not None:
                on_progress(job, content[0])
        else:
            worker.job = None
            if getattr(content, "spent", False):
                _end(worker)
            yield Outcome(job, result=content, seconds=worker.heard - worker.started)
    now = time.monotonic()
    for worker in pool:
        if worker.job is None:
            continue
        limit = worker.job.silence_seconds if worker.begun else STARTUP_SECONDS
        if now - worker.heard > limit:
            yield _lost(worker, "hang", f"gave no sign of life for {limit:g} s and was ended")


def _lost(worker: _Worker, check: str, cause: str) -> Outcome:
    job = worker.job
    assert job is not None
    worker.job = None
    seconds = time.monotonic() - worker.started
    _end(worker)
    problem, kind, seed = worker.doing
    finding = Finding(
        check=check,
        backend=job.backend,
        kernel=job.kernel,
        problem=problem,
        kind=kind,
        seed=seed,
        message=f"the worker process {cause}",
    )
    return Outcome(job, finding=finding, seconds=seconds)


def _cause_of_death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    if code is None:
        return "closed its pipe"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
        return f"died of {name}{hint}"
    return f"exited with code {code}"


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _serve(pipe: Connection) -> None:
    """The worker: jobs in, announcements and results out, until the pipe closes."""
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(("begun", None))
        try:
            result = job.task(
                announce=lambda problem, kind, seed: pipe.send(("at", (problem, kind, seed))),
                **job.arguments,
            )
        except Exception as error:  # the oracle's own failure must reach the user, not vanish
            result = _portable(error)
        pipe.send(("done", result))


def _portable(error: Exception) -> Exception:
    """The exception, or one that says the same, if it does not survive the way to the parent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return R18Error(f"{type(error).__name__}: {error}")
    return error
