"""An evaluation as a user asks for it: find the images, load the weights, run, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r18.errors import UsageError
from r18.evaluate import distributed, record
from r18.evaluate.request import Request
from r18.evaluate.run import Engine, Evaluation, Here, Progress, check_ready, evaluate
from r18.evaluate.sources import LISTS, ImageSet, find_images
from r18.graph.quantization import Quantization
from r18.graph.resnet import network
from r18.images.classify import even_batch
from r18.machine import cpus, machine
from r18.weights import Weights, load_weights


@dataclass(frozen=True)
class Job:
    """Two programs, a folder of images, where they run and where the results go.

    labels:    as `find_images` takes them. batch: the most images of a run.
    backend:   as `get_backend` takes it. kind: of its device here, which `workers` have, too.
    against:   the reference; None for none.
    threads:   decoding images; 0 is one for each core.
    workers:   processes of a Dask cluster on this machine; 0 is one for each GPU or core; None is
               this process. scheduler: the address of a Dask scheduler instead.
    """

    images: Path
    labels: str | None
    weights: str
    network: str
    backend: str
    kind: str
    against: str | None
    precision: str
    against_precision: str
    fusion: str
    batch: int
    threads: int
    out: Path
    restart: bool
    salvage: bool
    workers: int | None
    scheduler: str | None


@dataclass(frozen=True)
class Finished:
    """A job that has run. workers: how many there were in the end; None is this process."""

    job: Job
    evaluation: Evaluation
    request: Request
    images: ImageSet
    host: dict[str, Any]
    workers: int | None
    quantization: Quantization | None = None

    def record(self, folder: Path) -> Path:
        """Write the numbers to the device's record; returns the file. Raises `UsageError`."""
        about = {"machine": self.host}
        return record.save(
            self.evaluation,
            self.request,
            self.images,
            about,
            folder,
            workers=self.workers,
            quantization=self.quantization,
        )

    def to_json(self) -> dict[str, Any]:
        head: dict[str, Any] = {
            "request": asdict(self.request),
            "running": [asdict(line) for line in self.evaluation.running],
            "layout": self.images.layout,
            "out": str(self.job.out),
        }
        return head | self.evaluation.summary.to_json()


def check_job(
    out: Path, restart: bool, salvage: bool, workers: int | None, scheduler: str | None
) -> None:
    """Raise `UsageError` for a request that is refused before anything is looked for."""
    if restart and salvage:
        raise UsageError("--restart drops results, --salvage keeps them: give one of the two")
    if workers is not None and scheduler is not None:
        raise UsageError("--workers starts a cluster, --scheduler uses one: give one of the two")
    check_ready(out, restart)


def run_job(
    job: Job, tell: Callable[[str], None], on_progress: Callable[[Progress], None]
) -> Finished:
    """Run an evaluation; finished batches are not repeated.

    tell: called with lines about the images and devices. Raises what `evaluate` raises.
    """
    _check_lists(job)
    schedule = network(job.network)
    found = find_images(job.images, schedule.shapes(1)[schedule.output][1], job.labels)
    host = machine()
    tell(f"images: {len(found.items)} in {job.images}, {found.layout}")
    if found.left_out:
        several = f"{found.left_out} images of {job.images} are"
        some = f"1 image of {job.images} is" if found.left_out == 1 else several
        tell(f"{some} not in {found.labels}: left out")
    weights = load_weights(job.weights, schedule, job.precision)
    request = Request.of(
        job.network,
        weights,
        job.backend,
        against=job.against,
        precision=job.precision,
        against_precision=job.against_precision,
        fusion=job.fusion,
        batch=even_batch(len(found.items), job.batch),
    )
    with engine(job, request, weights, found) as runner:
        for what, where in zip(("backend", "against"), runner.running(), strict=False):
            if what == "against" or job.scheduler is not None:
                tell(f"{what}: {where.name}, {where.device}")
        done = evaluate(
            runner,
            found,
            request,
            weights,
            job.out,
            restart=job.restart,
            salvage=job.salvage,
            tell=tell,
            on_progress=on_progress,
        )
        return Finished(job, done, request, found, host, runner.workers, weights.quantization)


def _check_lists(job: Job) -> None:
    """Raise `UsageError` for an --out that is a list of labels, which --restart would replace."""
    lists = [job.images / name for name in LISTS]
    if job.labels is not None:
        lists.append(Path(job.labels))
    if job.out.exists() and any(one.exists() and job.out.samefile(one) for one in lists):
        raise UsageError(f"--out '{job.out}' is a list of labels: name another file")


@contextmanager
def engine(job: Job, request: Request, weights: Weights, images: ImageSet) -> Iterator[Engine]:
    """The engine that runs the batches: this process, or workers."""
    if job.scheduler is not None:
        with distributed.connected(job.scheduler) as client:
            yield distributed.Cluster(client, request, images.folder, job.threads or 1)
    elif job.workers is not None:
        with distributed.local_cluster(job.workers, job.kind) as client:
            share = max(1, cpus() // len(client.nthreads()))
            yield distributed.Cluster(client, request, images.folder, job.threads or share)
    else:
        here = Here(request, weights, images.folder, job.threads or None)
        try:
            yield here
        finally:
            here.close()


__all__ = ["Finished", "Job", "check_job", "run_job"]
