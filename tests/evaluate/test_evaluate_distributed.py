"""The same evaluation on Dask workers: results, the command, and a worker that is killed."""

from __future__ import annotations

import csv
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import dask
import distributed
import psutil
import pytest

from commands import r18
from evaluate_support import image_set, numbered, photographs, request, run, weights
from r18.errors import R18Error, UsageError
from r18.evaluate.distributed import (
    THREAD_VARIABLES,
    Cluster,
    connected,
    local_cluster,
    visible_gpus,
    worker_places,
)
from r18.evaluate.pair import Running
from r18.evaluate.request import Request
from r18.evaluate.run import Progress, evaluate, journal_of

COUNT = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = photographs(tmp_path_factory.mktemp("images"), numbered(COUNT))
    (path / numbered(COUNT)[7]).write_bytes(b"no image")
    return path


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A cluster of two workers on this machine."""
    before = [os.environ.get(name) for name in THREAD_VARIABLES]
    with local_cluster(2, "cpu") as found:
        yield found
    assert [os.environ.get(name) for name in THREAD_VARIABLES] == before


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The table of a run in this process."""
    out = tmp_path_factory.mktemp("expected") / "t.csv"
    run(folder, out)
    return out.read_text()


def check_same(table: Path, expected: str) -> None:
    """The same images in the same order, with the same answers.

    A margin may differ in its last bits: a worker has one thread, and BLAS sums in another order
    on several. The reference's sums are float64, and end at classes that are not close.
    """
    rows = list(csv.DictReader(table.read_text().splitlines()))
    wanted = list(csv.DictReader(expected.splitlines()))
    assert len(rows) == len(wanted) == COUNT
    for row, other in zip(rows, wanted, strict=True):
        ours, theirs = row.pop("margin"), other.pop("margin")
        assert row == other
        assert (ours == "") == (theirs == "")
        if ours:
            assert float(ours) == pytest.approx(float(theirs), rel=1e-9)


def test_a_killed_worker_loses_and_repeats_nothing(
    client: Any, folder: Path, expected: str, tmp_path: Path
) -> None:
    """Killing a worker that holds batches and unfetched answers loses and repeats nothing."""
    images, asked, out = image_set(folder), request(), tmp_path / "t.csv"
    workers = client.run(os.getpid)
    assert len(set(workers.values())) == 2
    victim = min(workers.values())
    seen: list[Progress] = []

    def kill(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 4:  # three batches of twelve are done
            os.kill(victim, signal.SIGKILL)

    engine = Cluster(client, asked, images.folder)
    summary = evaluate(engine, images, asked, weights(), out, on_progress=kill).summary
    check_same(out, expected)
    assert [progress.done for progress in seen] == [*range(0, COUNT + 1, 3)]
    assert (summary.images, summary.unreadable, summary.agree_top1) == (COUNT, 1, COUNT - 1)
    assert victim not in client.run(os.getpid).values()


def test_the_command_with_a_scheduler(
    client: Any, folder: Path, expected: str, tmp_path: Path
) -> None:
    """With a scheduler the command continues an interrupted run without repeating its work.

    The certificate comes from Dask's configuration, as for any cluster.
    """
    images, asked, out = image_set(folder), request(), tmp_path / "t.csv"

    def stop(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    engine = Cluster(client, asked, images.folder)
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, images, asked, weights(), out, on_progress=stop)
    assert journal_of(out).exists()
    key = client.security
    tls = {"client.key": key.tls_client_key, "client.cert": key.tls_client_cert}
    tls |= {"ca-file": key.tls_ca_file}
    with dask.config.set({f"distributed.comm.tls.{name}": pem for name, pem in tls.items()}):
        done = r18(
            *("evaluate", "--images", folder, "--network", "tiny", "--weights", "synthetic"),
            *("--backend", "numpy", "--against", "numpy", "--against-precision", "fp64"),
            *("--batch", 3, "--out", out, "--scheduler", client.scheduler.address),
        )
    assert done.code == 0, done.err
    assert f"agree_top1 = {COUNT - 1} (100.00 %)" in done.out
    assert f"going on: 3 of {COUNT} images are done" in done.err
    assert "backend: numpy, CPU" in done.err
    check_same(out, expected)


def test_nobody_else_can_connect(client: Any) -> None:
    """No other client can connect, and no port of the cluster's processes serves a page."""
    address = client.scheduler.address
    assert address.startswith("tls://127.0.0.1:")
    with pytest.raises(OSError, match="TLS certificate does not match"):
        distributed.Client(address, timeout=5, security=distributed.Security.temporary())
    with pytest.raises(OSError, match=r"Timed out|closed|connect"):
        distributed.Client(address.replace("tls:", "tcp:"), timeout=2)
    for port in sorted(open_ports()):
        with pytest.raises((OSError, HTTPException)):  # HTTPError is an OSError
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def open_ports() -> set[int]:
    """The ports at which this process and its children listen, all of them the cluster's."""
    me = psutil.Process()
    return {
        connection.laddr.port
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_workers_keep_their_files_in_a_folder_of_the_run(client: Any) -> None:
    folder = Path(dask.config.get("temporary-directory"))
    assert folder.name.startswith("r18-")
    assert folder.stat().st_mode & 0o777 == 0o700
    found = client.run(lambda dask_worker: dask_worker.local_directory)
    assert all(Path(path).is_relative_to(folder) for path in found.values())


def test_without_encryption_there_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with (
        pytest.raises(UsageError, match=r"--workers encrypts .*\n.*r18\[evaluate\]"),
        local_cluster(1, "cpu"),
    ):
        pass


def test_what_a_task_raises_is_raised_here(client: Any, folder: Path) -> None:
    with pytest.raises(R18Error, match=r"the request is of r18 0\.0"):
        Cluster(client, request(version="0.0"), folder).running()


def test_every_worker_is_ready_before_the_first_batch(client: Any, folder: Path) -> None:
    def requests() -> list[Any]:
        from r18.evaluate import distributed

        return list(distributed._pairs)

    client.wait_for_workers(2)  # another test killed one
    asked = request(batch=5)
    (running, reference) = Cluster(client, asked, folder).running()
    assert (running.name, reference.name) == ("numpy", "numpy")
    assert list(client.run(requests).values()) == [[asked], [asked]]


def test_workers_with_different_kernels_are_refused(
    client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers with different kernels are refused; here each reports its process's id."""
    client.wait_for_workers(2)

    def different(request: Request) -> tuple[Running, ...]:
        return (Running("numpy", "a CPU", "cpu", str(os.getpid())),)

    monkeypatch.setattr("r18.evaluate.distributed.running_task", different)
    with pytest.raises(R18Error, match="do not compute with the same kernels: a CPU; a CPU"):
        Cluster(client, request(), folder).running()


def test_a_worker_keeps_its_programs(client: Any, folder: Path) -> None:
    images = image_set(folder)
    engine = Cluster(client, request(), images.folder)
    assert {found.name for found in engine.running()} == {"numpy"}

    def programs() -> list[int]:
        from r18.evaluate import distributed

        return [id(pair) for pair in distributed._pairs.values()]

    list(engine.results([[item] for item in images.items[:6]]))
    before = client.run(programs)
    list(engine.results([[item] for item in images.items[:6]]))
    assert client.run(programs) == before
    assert all(len(found) <= 1 for found in before.values())


def test_no_scheduler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.evaluate.distributed.WAIT_FOR_WORKERS", 0.5)
    with (
        pytest.raises(R18Error, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:1'"),
        connected("tcp://127.0.0.1:1"),
    ):
        pass


def test_places_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_places(3, "cpu", ()) == [{}, {}, {}]
    both = [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]
    assert worker_places(0, "cuda", ["GPU-a", "GPU-b"]) == both
    assert worker_places(1, "cuda", ["GPU-a", "GPU-b"]) == both[:1]
    with pytest.raises(UsageError, match="3 workers need a GPU each, and 2 are to be seen"):
        worker_places(3, "cuda", ["GPU-a", "GPU-b"])
    with pytest.raises(UsageError, match="and 0 are to be seen"):
        worker_places(0, "cuda", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-x")
    assert visible_gpus() == ["1", "GPU-x"]
