"""`r18 evaluate`: a backend and a reference over a folder of photographs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from r18.cli.app import FOUND, REFUSED
from r18.cli.options import (
    AsJson,
    BackendName,
    FusionLevel,
    NetworkName,
    PrecisionName,
    RecordFolder,
    WeightsSource,
    asked_backend,
    chosen_backend,
)
from r18.errors import UsageError
from r18.evaluate import distributed, run
from r18.evaluate import record as evaluation_record
from r18.evaluate.request import Request
from r18.evaluate.rows import Row
from r18.evaluate.sources import LISTS, NO_LABELS, ImageSet, find_images
from r18.evaluate.summary import Summary, share
from r18.evaluate.tables import FORMATS, printable
from r18.graph.schedule import network
from r18.images.classify import even_batch
from r18.machine import cpus, machine
from r18.records import FOLDER
from r18.weights import Weights, load_weights

NO_REFERENCE = "none"
SHOWN = 10
"""Images of another class, and such that cannot be read, that are named; the table has all."""


def evaluate(
    images: Annotated[
        Path,
        typer.Option(
            help=f"Folder: a flat one with {' or '.join(LISTS)}, one folder per class, or images."
        ),
    ],
    labels: Annotated[
        str | None,
        typer.Option(help=f"A CSV or list of FILE CLASS to use instead; or {NO_LABELS}."),
    ] = None,
    weights: WeightsSource = "imagenet",
    backend: BackendName = None,
    against: Annotated[
        str, typer.Option(help=f"The reference: a name as of --backend, or {NO_REFERENCE}.")
    ] = "torch",
    precision: PrecisionName = "fp32",
    against_precision: Annotated[str, typer.Option(help="Of the reference.")] = "fp32",
    fusion: FusionLevel = "all",
    network_name: NetworkName = "resnet18",
    batch: Annotated[int, typer.Option(help="Images at once, at most.", min=1)] = 32,
    threads: Annotated[int, typer.Option(help="Decoding images; 0 is one a core.", min=0)] = 0,
    out: Annotated[
        Path, typer.Option(help=f"The result of every image: a file in {' or '.join(FORMATS)}.")
    ] = Path("exports/evaluation.csv"),
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, and replace what is at --out.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes of a Dask cluster on this machine; 0 is one a GPU, or one a core.",
            min=0,
        ),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler whose workers do it.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the numbers to the device's record.")
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Classify a folder of photographs with a backend and a reference, and compare.

    What is done is kept after every batch. Interrupted or killed, the same command goes on where
    it was; results of other weights, images or kernels are never mixed. An image that cannot be
    read is recorded and left out.

    A near tie is an image whose first two logits in the reference are closer than rounding can
    move them, by the margin rule of `r18 verify`. Times are medians of milliseconds an image over
    the batches, on which both take turns, of computing alone; `r18 bench` measures more carefully.

    Exit codes: 0 every class agrees but for near ties, 1 another class, or logits that are not
    finite, 2 a wrong request, or nothing could be compared.
    """
    if workers is not None and scheduler is not None:
        raise UsageError("--workers starts a cluster, --scheduler uses one: give one of the two")
    run.check_ready(out, restart)
    reference = None if against == NO_REFERENCE else against
    name, kind = _chosen(backend, scheduler)
    schedule = network(network_name)
    found = find_images(images, schedule.shapes(1)[schedule.output][1], labels)
    host = machine()
    typer.echo(f"images: {len(found.items)} in {images}, {found.layout}", err=True)
    loaded = load_weights(weights, schedule)
    request = Request.of(
        network_name,
        loaded,
        name,
        against=reference,
        precision=precision,
        against_precision=against_precision,
        fusion=fusion,
        batch=even_batch(len(found.items), batch),
    )
    try:
        with _engine(request, loaded, found, threads, workers, scheduler, kind) as engine:
            for what, where in zip(("backend", "against"), engine.running(), strict=False):
                if what == "against" or scheduler is not None:
                    typer.echo(f"{what}: {where.name}, {where.device}", err=True)
            with _progress() as on_progress:
                done = run.evaluate(
                    engine, found, request, loaded, out, restart=restart, on_progress=on_progress
                )
            crew = engine.workers
    except KeyboardInterrupt:
        if run.journal_of(out).exists():
            typer.echo("interrupted; the same command without --restart goes on", err=True)
        raise
    summary = done.summary
    if record:
        facts = {"machine": host}
        path = evaluation_record.save(done, request, found, facts, records, workers=crew)
        typer.echo(f"recorded in {path}", err=True)
    if as_json:
        head: dict[str, Any] = {
            "request": asdict(request),
            "running": [asdict(line) for line in done.running],
            "layout": found.layout,
            "out": str(out),
        }
        typer.echo(json.dumps(head | summary.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(text(summary, done.running[1].name if len(done.running) > 1 else None))
    typer.echo(f"results in {out}", err=True)
    if summary.changed:
        raise typer.Exit(FOUND)
    if summary.unreadable == summary.images:
        typer.echo("no image could be read", err=True)
        raise typer.Exit(REFUSED)
    if reference is not None and not summary.decided:
        typer.echo("every image is a near tie: this comparison shows nothing", err=True)
        raise typer.Exit(REFUSED)


def text(summary: Summary, reference: str | None) -> str:
    """The summary in lines `name = value`, then images whose class changed or that are broken."""
    lines = [("images", str(summary.images))]
    if summary.unreadable:
        lines.append(("unreadable", str(summary.unreadable)))
    if reference is not None and summary.compared:
        assert summary.bound is not None
        for name in ("agree_top1", "agree_top5"):
            count: int = getattr(summary, name)
            lines.append((name, f"{count} ({share(count, summary.compared)})"))
        margin = f"a margin of at most {2 * summary.bound:.3g}"
        lines.append(("near_ties", f"{summary.near_ties} with {margin}"))
    if summary.accuracy is not None:
        lines.append(("accuracy", f"{summary.accuracy} of {summary.accuracy.images}"))
    if summary.reference_accuracy is not None:
        lines.append((f"{reference}_accuracy", str(summary.reference_accuracy)))
    if summary.reference_ms is not None:
        lines.append((f"{reference}_ms", f"{summary.reference_ms:.4g}"))
    if summary.backend_ms is not None:
        lines.append(("backend_ms", f"{summary.backend_ms:.4g}"))
    if summary.speedup is not None:
        lines.append(("speedup", f"{summary.speedup:.2f}"))
    parts = [f"{name} = {value}" for name, value in lines]
    for rows, line in ((summary.changed, _changed), (summary.not_read, _not_read)):
        parts += [line(row) for row in rows[:SHOWN]]
        if len(rows) > SHOWN:
            parts.append(f"and {len(rows) - SHOWN} more")
    return "\n".join(parts)


def _not_read(row: Row) -> str:
    return f"UNREADABLE: {printable(row.file)}: {row.error}"


def _changed(row: Row) -> str:
    if row.error:
        return f"WRONG: {printable(row.file)}: {row.error}"
    return (
        f"WRONG: {printable(row.file)}: class {row.backend[0]}, the reference has "
        f"{row.reference[0]} by a margin of {row.margin:.3g}"
    )


def _chosen(backend: str | None, scheduler: str | None) -> tuple[str, str]:
    """What `get_backend` takes wherever it runs, and the kind of device here.

    The workers of a scheduler may have what is not here: they are asked for it by name.
    """
    name = asked_backend(backend)
    if scheduler is not None:
        if name == "auto":
            raise UsageError("--scheduler needs --backend NAME: auto would choose for this machine")
        return name, ""
    runner, device = chosen_backend(backend)
    return (runner.name if name == "auto" else name), device.kind


@contextmanager
def _engine(
    request: Request,
    weights: Weights,
    images: ImageSet,
    threads: int,
    workers: int | None,
    scheduler: str | None,
    kind: str,
) -> Iterator[run.Engine]:
    """What runs the batches: this process, or workers."""
    if scheduler is not None:
        with distributed.connected(scheduler) as client:
            yield distributed.Cluster(client, request, images.folder, threads or 1)
    elif workers is not None:
        with distributed.local_cluster(workers, kind) as client:
            share_of_cores = max(1, cpus() // len(client.nthreads()))
            yield distributed.Cluster(client, request, images.folder, threads or share_of_cores)
    else:
        here = run.Here(request, weights, images.folder, threads or None)
        try:
            yield here
        finally:
            here.close()


@contextmanager
def _progress() -> Iterator[Callable[[run.Progress], None]]:
    """A bar on stderr with images, images a second and the agreement so far."""
    console = Console(stderr=True)
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[agreement]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task("", total=None, speed="", agreement="")
        begin = time.monotonic()

        def show(progress: run.Progress) -> None:
            new, seconds = progress.done - progress.resumed, time.monotonic() - begin
            if progress.resumed and not new:
                console.print(
                    f"going on: {progress.resumed} of {progress.images} images are done",
                    highlight=False,
                )
            agreement = ""
            if progress.compared:
                agreement = f"agree {share(progress.agree_top1, progress.compared)}"
            p.update(
                task,
                completed=progress.done,
                total=progress.images,
                speed=f"{new / seconds:.1f} images/s" if new else "",
                agreement=agreement,
            )

        yield show
