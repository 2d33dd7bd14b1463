"""Batches on workers of Dask distributed, on this machine or on others.

Why Dask: it is pure Python, installs everywhere, and runs the tasks of a worker that died on
another one.

A task is a pure function of a request and a batch of paths; a worker keeps the compiled programs
between tasks. Results go to one place, the process that asked, which keeps each image once: a task
that ran twice, because its worker died before the answer was fetched, changes nothing. Workers see
the same files under the same paths.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from r18.ends import deferred
from r18.errors import R18Error, UsageError, plain
from r18.evaluate.decode import Batch, decoded
from r18.evaluate.pair import Pair, Running
from r18.evaluate.request import Request
from r18.evaluate.rows import BatchRows
from r18.evaluate.run import bound_of
from r18.machine import cpus

Client = Any
"""`distributed.Client`; Dask is imported only where it is used."""
WAIT_FOR_WORKERS = 60
"""Seconds until the first worker must be there, or another one when none is left."""
AHEAD = 2
"""Batches that wait for each thread of a worker, so that none is idle between two."""
LOCALHOST = "127.0.0.1"
SERVERS = ("scheduler", "worker", "nanny")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that keeps a worker from looking for the standard library in the current folder
first."""


# -- on a worker -------------------------------------------------------------------------------

_pairs: dict[Request, Pair] = {}
_making = threading.Lock()


def _pair(request: Request) -> Pair:
    """This process's programs for a request; those of another request make way."""
    with _making:
        if request not in _pairs:
            _pairs.clear()  # not closed: a task of the other request may be running still
            _pairs[request] = Pair(request, request.load())
        return _pairs[request]


def dask_setup(worker: object) -> None:
    """Dask calls this as a worker of `local_cluster` starts: Ctrl-C is for who started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def running_task(request: Request) -> tuple[Running, ...]:
    """The backends that a worker runs on."""
    return _pair(request).running()


def bound_task(request: Request, folder: Path, items: Batch) -> float:
    """As `Pair.bound`."""
    return bound_of(_pair(request), folder, items)


def batch_task(request: Request, folder: Path, items: Batch, threads: int) -> BatchRows:
    """Decode a batch in `threads` threads, and run it."""
    pair = _pair(request)
    ((batch, images),) = decoded([items], folder, pair.weights.preprocess, threads)
    return pair.evaluate(batch, images)


# -- where the results are kept ----------------------------------------------------------------


class Cluster:
    """The engine that sends batches to workers. See `r18.evaluate.run.Engine`.

    threads: decoding a batch, on each worker.

    Its methods raise what a task raises; `R18Error` when no worker is left, and when a batch has
    brought down every worker that it was tried on.
    """

    def __init__(self, client: Client, request: Request, folder: Path, threads: int = 1) -> None:
        self._client = client
        self._request = request
        self._folder = folder
        self._threads = threads

    @property
    def workers(self) -> int:
        """The number of workers that are connected now."""
        return len(self._client.nthreads())

    def running(self) -> tuple[Running, ...]:
        """The backends that the workers run on; this also compiles the programs on each of them.

        Raises `R18Error` where they would not compute with the same kernels: results would mix.
        """
        workers = list(self._client.nthreads())
        calls = [(self._request,)] * max(1, len(workers))
        found: list[tuple[Running, ...]] = [*self._all(running_task, calls, workers)]
        kinds = {tuple(one.kernels for one in running): running for running in found}
        if len(kinds) > 1:
            devices = [" and ".join(one.device for one in running) for running in kinds.values()]
            raise R18Error(
                f"the workers do not compute with the same kernels: {'; '.join(devices)}\n"
                "  an evaluation is of one program: use workers on devices of one kind"
            )
        return found[0]

    def bound(self, items: Batch) -> float:
        (found,) = self._all(bound_task, [(self._request, self._folder, items)])
        return float(found)

    def results(self, batches: Sequence[Batch]) -> Iterator[BatchRows]:
        calls = [(self._request, self._folder, batch, self._threads) for batch in batches]
        return self._all(batch_task, calls)

    def _all(
        self, task: Any, calls: Sequence[tuple[Any, ...]], places: Sequence[str] = ()
    ) -> Iterator[Any]:
        """The task's results, as they come; few calls at a time are in the scheduler's hands.

        places: the workers for the first calls, as long as they live.
        """
        waiting = zip(calls, chain(places, repeat(None)))  # noqa: B905 - the places have no end
        pending: set[Any] = set()
        try:
            while True:
                room = AHEAD * max(1, self._worker_threads()) - len(pending)
                for call, place in islice(waiting, max(0, room)):
                    # Not by their arguments: the same call of an earlier run may have failed.
                    future = self._client.submit(
                        task,
                        *call,
                        pure=False,
                        workers=None if place is None else [place],
                        allow_other_workers=place is not None,  # it may die before it starts
                    )
                    pending.add(future)
                if not pending:
                    return
                for future in self._done(pending):
                    yield _result(future)
                    pending.remove(future)
        except _distributed().comm.CommClosedError as error:
            raise _scheduler_lost(error) from None
        finally:
            for future in pending:
                future.release()

    def _done(self, pending: set[Any]) -> set[Any]:
        """The futures that are done, once there is one; none after a while."""
        try:
            found: set[Any] = _distributed().wait(pending, WAIT_FOR_WORKERS, "FIRST_COMPLETED").done
        except TimeoutError:
            self._check_workers()
            return set()
        return found

    def _worker_threads(self) -> int:
        """Threads of all workers; raises `R18Error` if the scheduler does not answer."""
        try:
            return sum(self._client.nthreads().values())
        except OSError as error:
            raise _scheduler_lost(error) from None

    def _check_workers(self) -> None:
        if not self._worker_threads():
            raise R18Error(
                f"no worker has been there for {WAIT_FOR_WORKERS} s\n"
                "  what is done is kept: start workers, and the same command goes on from there"
            )


def _result(future: Any) -> Any:
    dask = _distributed()
    try:
        return future.result()
    except dask.KilledWorker as error:
        raise R18Error(
            f"a batch brought down every worker that it was tried on: {error}\n"
            "  what is done is kept; run it in one process to see why, or see the workers' logs"
        ) from None
    except dask.CancelledError as error:
        raise _scheduler_lost(error) from None


def _scheduler_lost(error: Exception) -> R18Error:
    return R18Error(
        f"the scheduler is lost: {plain(error)}\n"
        "  what is done is kept: the same command goes on from there"
    )


# -- clusters ----------------------------------------------------------------------------------


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client of a scheduler that runs already. Raises `R18Error` when there is none, or it has
    no worker.
    """
    distributed = _distributed()
    try:
        client = distributed.Client(address, timeout=WAIT_FOR_WORKERS / 2)
    except (OSError, ValueError) as error:
        raise R18Error(
            f"no Dask scheduler answers at '{address}': {error}\n"
            "  `dask scheduler` starts one and says its address, `dask worker ADDRESS` a worker"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WAIT_FOR_WORKERS)
        except TimeoutError:
            raise R18Error(
                f"the scheduler at '{address}' has no worker; start one with "
                f"`dask worker {address}`"
            ) from None
        yield client


@contextmanager
def local_cluster(workers: int, kind: str) -> Iterator[Client]:
    """A client of workers on this machine: processes, started again when they die.

    workers: how many; 0 is one a GPU, or one a core.
    kind:    of the devices that they run on. Each has a GPU for itself; on the CPU they share the
             cores evenly.

    A scheduler runs whatever its clients send. Connections therefore use TLS with a certificate
    that is made for this cluster and stays in the memory of its processes: no other user of the
    machine can connect. It has no pages for a browser.

    Raises `UsageError` for more workers than GPUs, and if the package `cryptography` is missing.
    """
    distributed = _distributed()
    import dask

    security = _security()
    places = worker_places(workers, kind, visible_gpus() if kind == "cuda" else ())
    cores = str(max(1, cpus() // len(places)))
    before = {name: os.environ.get(name) for name in (*THREAD_VARIABLES, SAFE_PATH)}
    here = {
        "host": LOCALHOST,
        "protocol": "tls://",
        "security": security,
        "dashboard": False,
        "dashboard_address": f"{LOCALHOST}:0",
    }
    quiet = logging.WARNING  # what is left says that a worker died, and that another one is started
    worker = here | {
        "nthreads": 1 if kind == "cpu" else 2,  # on a GPU one batch is decoded while another runs
        "memory_limit": 0,
        "silence_logs": quiet,
        "preload": [__name__],  # for `dask_setup`
    }
    try:
        # The variables must be there before a worker's libraries are loaded.
        config = {f"distributed.nanny.pre-spawn-environ.{n}": cores for n in THREAD_VARIABLES}
        config[f"distributed.nanny.pre-spawn-environ.{SAFE_PATH}"] = "1"
        routes: dict[str, list[str]] = {f"distributed.{one}.http.routes": [] for one in SERVERS}
        with ExitStack() as stack:
            # Else it would be one that all users share, and it would stay.
            scratch = TemporaryDirectory(prefix="r18-", ignore_cleanup_errors=True)
            config["temporary-directory"] = stack.enter_context(scratch)
            stack.enter_context(dask.config.set(config | routes))
            with deferred():  # a cluster that is half started cannot be closed
                cluster = distributed.SpecCluster(
                    workers={
                        index: {"cls": distributed.Nanny, "options": worker | {"env": place}}
                        for index, place in enumerate(places)
                    },
                    scheduler={"cls": distributed.Scheduler, "options": here | {"port": 0}},
                    security=security,
                    silence_logs=quiet,
                )
                stack.enter_context(cluster)
            yield stack.enter_context(distributed.Client(cluster))
    finally:
        for name, value in before.items():  # a nanny sets them in its own process
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def worker_places(workers: int, kind: str, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The variables of each worker: which GPU is its own; nothing on the CPU. Pure but for `cpus`.

    Raises `UsageError` for more workers than GPUs.
    """
    if kind != "cuda":
        return [{} for _ in range(workers or cpus())]
    if not gpus or workers > len(gpus):
        raise UsageError(
            f"{workers or 1} workers need a GPU each, and {len(gpus)} are to be seen here\n"
            "  nvidia-smi lists them; CUDA_VISIBLE_DEVICES hides those that it does not name"
        )
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: workers or len(gpus)]]


def visible_gpus() -> list[str]:
    """The GPUs of this machine by the names that CUDA_VISIBLE_DEVICES takes; contacts none."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.split()


def _security() -> Any:
    """A key and a certificate for one cluster, which both sides of a connection need."""
    try:
        return _distributed().Security.temporary()
    except ImportError as error:
        raise UsageError(
            f"--workers encrypts what it sends: {error}\n  pip install 'r18[evaluate]'"
        ) from None


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise UsageError(
            f"workers need Dask distributed: {error}\n  pip install 'r18[evaluate]'"
        ) from None
    return distributed


__all__ = ["Cluster", "connected", "local_cluster", "visible_gpus", "worker_places"]
