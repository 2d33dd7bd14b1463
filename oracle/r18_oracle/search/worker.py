"""Worker processes: jobs run isolated from the oracle, with a time limit.

A kernel may crash its process (a segmentation fault, an illegal address, too much memory) or hang.
Either is a finding. A worker announces each call on its slate (`slate`) before it makes it, so its
parent knows the problem that caused a crash, and continues with a new worker. Before it ends a
worker that hangs, it asks for the stacks of its threads (`stacks`). `isolation` says what else
separates the two.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from r18.ends import deaf, end_group, signal_name
from r18.errors import MOST_TEXT, R18Error, described
from r18.graph.ops import Problem
from r18.machine import keep_freed_memory
from r18_oracle import stacks
from r18_oracle.findings import STACKS, Finding
from r18_oracle.search import isolation
from r18_oracle.slate import Slate

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


TASKS = "r18_oracle.search.tasks"
"""The module of most jobs. It imports what judges a kernel, and no backend."""
READ_ON_IMPORT = (
    *("PYTHON", "LD_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_"),
    *("ATEN_", "DNNL_", "ONEDNN_", "TORCH", "PYTORCH"),
)
"""How the names of variables begin that Python and libraries read once, when they are loaded."""
STARTUP_SECONDS = 120.0
"""Time limit for a worker to start and to import what its job needs, on a busy machine."""


MOST_MESSAGE = 2**24
"""Bytes of a message between a worker and its parent. A report has some thousand."""
WATCH_SECONDS = 0.2
"""The time between two looks at the workers, and at their memory."""


@dataclass(frozen=True)
class Job:
    """One job for a worker.

    task: a function `task(announce=…, **arguments)` at the top level of a module. Its result is
    pickled, and ends the worker if it has a true attribute `spent`.
    backend, kernel: what the finding of a crash or a hang names.
    silence_seconds: a worker that announces nothing for this long counts as hung.
    kin: jobs of one kin share what a worker caches, so they go to one worker if there are others.
    """

    task: Callable[..., Any]
    arguments: dict[str, Any]
    backend: str
    kernel: str
    silence_seconds: float = 60.0
    kin: str = ""


@dataclass(frozen=True)
class Outcome:
    """A job's result, or the finding of its crash or hang."""

    job: Job
    result: Any = None
    finding: Finding | None = None
    seconds: float = 0.0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    folder: str
    slate: Slate
    announced: int = 0  # the number of its last announcement that was read
    job: Job | None = None
    kin: str = ""
    begun: bool = False
    started: float = 0.0
    heard: float = 0.0
    doing: tuple[Problem | None, str, int] = field(default=(None, "none", 0))


class Pool:
    """Worker processes, started when there is work for them and kept until `close`.

    workers: the largest number; by default one per core. A worker that died is replaced.
    threads: of each worker, if the environment does not say; by default its share of the cores,
    and at least two, since kernels do not split their work for one thread.

    Files that libraries such as Hypothesis keep between runs go to a folder that `close` removes.
    When the workers and what they have started use more memory than `isolation.memory_limit`, the
    largest one is ended; that is a crash. Raises `UsageError` for a limit that is no number.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        self._memory = isolation.memory_limit()
        self._watched = 0.0
        self._most = processes(workers)
        self._threads = threads or _share_of_cores(self._most)
        self._workers: list[_Worker] = []
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        jobs: Sequence[Job],
        on_progress: Callable[[Job, Problem | None], None] | None = None,
        deadline: float = math.inf,
        wanted: Callable[[Job], bool] = lambda job: True,
    ) -> Iterator[Outcome]:
        """One outcome for each job, as they finish; closing the iterator early ends the workers.

        So does the deadline, on the clock of `time.monotonic`; the jobs that are left have no
        outcome then. wanted: whether to begin a job at all; else it has no outcome either.
        """
        waiting = list(jobs)
        try:
            while waiting or any(w.job for w in self._workers):
                waiting = [job for job in waiting if wanted(job)]
                if time.monotonic() >= deadline:
                    self.close()
                    return
                self._staff(len(waiting))
                for worker in self._workers:
                    if worker.job is None and waiting:
                        job = self._next(worker, waiting)
                        if _give(worker, job):
                            waiting.remove(job)
                yield from _listen(self._workers, on_progress)
                yield from self._limit_memory()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every worker, busy or not."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _limit_memory(self) -> Iterator[Outcome]:
        """End the largest worker if all of them together use more memory than they may."""
        if time.monotonic() - self._watched < WATCH_SECONDS:
            return
        self._watched = time.monotonic()
        held = isolation.memory_of(w.process.pid or 0 for w in self._workers)
        if sum(held.values()) <= self._memory:
            return
        largest = max(self._workers, key=lambda w: held[w.process.pid or 0])
        used = held[largest.process.pid or 0] / isolation.GIB
        if largest.job is None:
            _end(largest)
            return
        limit = self._memory / isolation.GIB
        yield _lost(
            largest,
            "crash",
            f"used {used:.3g} GiB of memory and was ended: all workers together may use "
            f"{limit:.3g} GiB ({isolation.MEMORY} sets another limit)",
        )

    def _next(self, worker: _Worker, waiting: list[Job]) -> Job:
        """A job of the worker's last kin, else of a kin no other worker has, else the first."""
        others = {w.kin for w in self._workers if w is not worker and w.job is not None}
        kindred = (job for job in waiting if job.kin == worker.kin)
        free = (job for job in waiting if job.kin not in others)
        return next(chain(kindred, free, waiting))

    def _staff(self, waiting: int) -> None:
        """Remove dead workers and start as many as there is work for."""
        # A worker that died at work stays until `_listen` has reported it.
        self._workers = [w for w in self._workers if w.job is not None or w.process.is_alive()]
        busy = sum(w.job is not None for w in self._workers)
        while len(self._workers) < min(self._most, waiting + busy):
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="r18-", ignore_cleanup_errors=True)
            folder = self._folder.name
            self._workers.append(_start(_variables(self._threads, folder), folder))


def prepare(workers: int | None = None) -> None:
    """Start the process that workers are forked from, where they are, without waiting for it.

    It imports the oracle while this process does. workers: as for the `Pool` that comes next.
    """
    variables = _variables(_share_of_cores(processes(workers)), "")
    with _environment(variables), deaf():
        _context()


def processes(workers: int | None) -> int:
    """The largest number of workers: as asked, or one per core."""
    return max(1, workers or os.cpu_count() or 1)


def _share_of_cores(workers: int) -> int:
    """Threads of each worker."""
    return max(2, (os.cpu_count() or 1) // workers)


def deadline_in(minutes: float | None) -> float:
    """`minutes` from now, on the clock of `time.monotonic`; infinity for None."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    on_progress: Callable[[Job, Problem | None], None] | None = None,
    deadline: float = math.inf,
    wanted: Callable[[Job], bool] = lambda job: True,
) -> Iterator[Outcome]:
    """Run every job in a pool of its own; see `Pool.run`."""
    with Pool(workers) as pool:
        yield from pool.run(jobs, on_progress, deadline, wanted)


def _variables(threads: int, folder: str) -> dict[str, str]:
    """Variables of a worker that the user's environment overrides."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the first of nested levels
    if limit.isdecimal() and int(limit):
        threads = min(threads, int(limit))  # MKL and OpenBLAS ignore the limit of OpenMP
    return {name: str(threads) for name in THREAD_VARIABLES} | {
        # Spinning threads would slow the others down. OpenBLAS's spin for 2^n cycles, n ≥ 4.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OPENBLAS_THREAD_TIMEOUT": "4",
        "HYPOTHESIS_STORAGE_DIRECTORY": folder,
        # Else a worker looks for the standard library in the current folder first.
        "PYTHONSAFEPATH": "1",
    }


def _start(variables: dict[str, str], folder: str) -> _Worker:
    with _environment(variables), deaf():
        context = _context()
        ours, theirs = context.Pipe()
        errors = _stderr()
        file = Path(folder) / f"slate-{next(_numbers)}"
        slate = Slate(file, create=True)
        arguments = (theirs, errors, dict(os.environ), folder, file)
        process = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
    for mine in (theirs, errors):
        if mine is not None:
            mine.close()
    return _Worker(process, ours, folder, slate)


_numbers = count()
"""The numbers of the slates of this process's workers."""


def _stderr() -> Connection | None:
    """Where this process writes errors now; the server has what that was at its own start."""
    with suppress(OSError):  # there may be no stderr
        return Connection(os.dup(2), readable=False)
    return None


def _context() -> BaseContext:
    """How a worker is started: on Linux it is forked from a server, else it is a new interpreter.

    The server has imported the oracle and run nothing, so a worker is as fresh as a new interpreter
    and takes no seconds to import PyTorch. The server keeps the variables of its own start: where
    others are to be read on import, a new interpreter reads them. The same where the path of the
    folder for temporary files is too long for the server's socket.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    now = {n: value for n, value in os.environ.items() if n.startswith(READ_ON_IMPORT)}
    if not _SERVED:
        _SERVED.append(now)
        multiprocessing.get_context("forkserver").set_forkserver_preload([TASKS])
    if _SERVED[0] == now:
        with suppress(OSError):
            forkserver.ensure_running()
            return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


_SERVED: list[dict[str, str]] = []
"""The variables with which the server was started, of those that are read on import."""


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for processes started inside, unless the user has set them."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def _give(worker: _Worker, job: Job) -> bool:
    """Send a job; False if the worker died while it was idle."""
    worker.announced = max(worker.announced, worker.slate.read()[0])  # of the job before
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
    """Wait for a moment, handle what the workers sent, and end those that died or hang."""
    busy = {w.pipe: w for w in pool if w.job is not None}
    finished = wait(list(busy), timeout=WATCH_SECONDS)
    for worker in busy.values():
        if _look(worker) and on_progress is not None and worker.job is not None:
            on_progress(worker.job, worker.doing[0])
    for ready in finished:
        worker = busy[ready]  # type: ignore[index]
        job = worker.job
        assert job is not None
        try:
            message = worker.pipe.recv_bytes(MOST_MESSAGE)
        except (EOFError, OSError):
            yield _lost(worker, "crash", _cause_of_death(worker))
            continue
        try:
            said, content = pickle.loads(message)
        except Exception as error:  # a kernel may have written to the pipe
            yield _lost(worker, "crash", f"sent an unreadable message: {described(error)}")
            continue
        worker.heard = time.monotonic()
        worker.begun = True
        if said == "begun":
            continue
        if said == "at":  # its slate cannot hold it
            number, doing = content
            if number > worker.announced:
                worker.announced, worker.doing = number, doing
                if on_progress is not None:
                    on_progress(job, doing[0])
        elif said == "too long":
            yield _lost(worker, "crash", content)
        else:
            worker.job = None
            if getattr(content, "spent", False):
                _end(worker)
            yield Outcome(job, result=content, seconds=worker.heard - worker.started)
    for worker in pool:
        # Processes that the kernel started may hold the pipe open.
        if worker.job and not worker.process.is_alive() and not worker.pipe.poll():
            yield _lost(worker, "crash", _cause_of_death(worker))
    yield from _silent(pool)


def _look(worker: _Worker) -> bool:
    """Read the worker's slate; whether it has a new entry."""
    number, content = worker.slate.read()
    if number <= worker.announced:
        return False
    worker.announced, worker.heard = number, time.monotonic()
    with suppress(Exception):  # a kernel may have written there: the entry before stays
        worker.doing = pickle.loads(content)
    return True


def _silent(pool: list[_Worker]) -> Iterator[Outcome]:
    """End the workers that hang; the findings say where they stood."""
    now = time.monotonic()
    silent = [
        (worker, limit)
        for worker in pool
        if worker.job is not None
        and now - worker.heard
        > (limit := worker.job.silence_seconds if worker.begun else STARTUP_SECONDS)
    ]
    # All are asked first, so that many that cannot answer take no longer than one.
    untils = [stacks.ask(worker.folder, worker.process.pid) for worker, _ in silent]
    for (worker, limit), until in zip(silent, untils, strict=True):
        stood = stacks.answer(worker.folder, worker.process.pid, until)
        cause = f"gave no sign of life for {limit:g} s and was ended{stacks.place(stood)}"
        yield _lost(worker, "hang", cause, {STACKS: stood} if stood else {})


def _lost(
    worker: _Worker, check: str, cause: str, details: dict[str, Any] | None = None
) -> Outcome:
    job = worker.job
    assert job is not None
    worker.job = None
    seconds = time.monotonic() - worker.started
    _look(worker)
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
        details=details or {},
    )
    return Outcome(job, finding=finding, seconds=seconds)


def _cause_of_death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    if code is None:
        return "closed its pipe"
    if code < 0:
        name = signal_name(-code)
        hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
        return f"died of {name}{hint}"
    return f"exited with code {code}"


def _end(worker: _Worker) -> None:
    """Kill the worker and what it has started."""
    worker.pipe.close()
    worker.slate.close()
    if worker.process.pid is not None:
        end_group(worker.process.pid)
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _serve(
    pipe: Connection,
    errors: Connection | None,
    environment: dict[str, str],
    folder: str,
    file: Path,
) -> None:
    """The loop of a worker: receive jobs, announce calls, send results, until the pipe closes.

    file: its slate.
    """
    os.environ.clear()
    os.environ.update(environment)
    if errors is not None:
        os.dup2(errors.fileno(), 2)
        errors.close()
    isolation.leave_parent()
    stacks.listen(folder)
    keep_freed_memory()
    gc.freeze()  # what the server has imported stays: it need not be searched for garbage
    # The start method of an ordinary process. With that of a worker's own start, Numba makes a
    # lock with a name, which whoever kills the worker would leave behind.
    multiprocessing.set_start_method(None, force=True)
    worker = os.getpid()
    numbers = count(1)
    slate: Slate | None = None
    with suppress(OSError):  # the folder may be gone
        slate = Slate(file)

    def announce(problem: Problem | None, kind: str, seed: int) -> None:
        in_worker()
        number, doing = next(numbers), (problem, kind, seed)
        if slate is None or not slate.write(number, pickle.dumps(doing)):
            say("at", (number, doing))

    def in_worker() -> None:
        if os.getpid() != worker:  # a kernel has forked, and this is the child
            os._exit(0)

    def say(what: str, content: Any) -> None:
        in_worker()
        message = pickle.dumps((what, content))
        if len(message) > MOST_MESSAGE:
            size = f"{len(message):,} bytes, more than {MOST_MESSAGE:,}"
            message = pickle.dumps(("too long", f"had an answer of {size}"))
        pipe.send_bytes(message)

    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        say("begun", None)
        try:
            say("done", job.task(announce=announce, **job.arguments))
        except Exception as error:  # a failure of the oracle must reach the user
            say("done", _portable(error))


def _portable(error: Exception) -> Exception:
    """The exception, or an `R18Error` with its text if it cannot be pickled or printed."""
    try:
        str(pickle.loads(pickle.dumps(error)))
        if len(str(error)) <= MOST_TEXT:
            return error
    except Exception:
        pass
    return R18Error(described(error))
