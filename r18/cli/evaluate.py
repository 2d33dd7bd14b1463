"""`r18 evaluate`: a backend and a reference over a folder of photographs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from r18.backend.plugin import hint_for_file
from r18.backend.registry import installed
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
    recording,
)
from r18.errors import UsageError, unknown
from r18.evaluate import run
from r18.evaluate.job import Finished, Job, check_job, run_job
from r18.evaluate.rows import Row
from r18.evaluate.sources import LISTS, NO_LABELS
from r18.evaluate.summary import Summary, share
from r18.evaluate.tables import FORMATS, printable
from r18.records import FOLDER

NO_REFERENCE = "none"
SHOWN = 10
"""The most images with another class, or that cannot be read, that are named; the table has all."""


Images = Annotated[
    Path,
    typer.Option(
        help=f"Folder: a flat one with {' or '.join(LISTS)}, one folder per class, or images."
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(help=f"A CSV or list of FILE CLASS to use instead; or {NO_LABELS}."),
]
Reference = Annotated[
    str, typer.Option(help=f"The reference: a name as of --backend, or {NO_REFERENCE}.")
]
ReferencePrecision = Annotated[str, typer.Option(help="Of the reference.")]
BatchLimit = Annotated[int, typer.Option(help="Images at a time, at most.", min=1)]
Threads = Annotated[int, typer.Option(help="Decoding images; 0 is one per core.", min=0)]
Out = Annotated[
    Path, typer.Option(help=f"The result of every image: a file in {' or '.join(FORMATS)}.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start over, and replace what is at --out.")
]
Salvage = Annotated[
    bool,
    typer.Option("--salvage", help="Of a damaged journal, continue with the results intact."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes of a Dask cluster on this machine; 0 is one per GPU or core.", min=0
    ),
]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler whose workers do it.")
]
Record = Annotated[
    bool, typer.Option("--record", help="Also write the numbers to the device's record.")
]


def _reference(name: str) -> str | None:
    """The reference's backend, or None. Raises `UnknownName`, with `--against` in the hint."""
    known = (*installed(), "auto", NO_REFERENCE)
    if ":" not in name and name not in known:
        hint = hint_for_file(name) or "Give --against one of these, or 'module:attr'."
        raise unknown("reference", name, known, hint=hint)
    return None if name == NO_REFERENCE else name


def evaluate(
    images: Images,
    labels: Labels = None,
    weights: WeightsSource = "imagenet",
    backend: BackendName = None,
    against: Reference = "torch",
    precision: PrecisionName = "fp32",
    against_precision: ReferencePrecision = "fp32",
    fusion: FusionLevel = "all",
    network_name: NetworkName = "resnet18",
    batch: BatchLimit = 32,
    threads: Threads = 0,
    out: Out = Path("exports/evaluation.csv"),
    restart: Restart = False,
    salvage: Salvage = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    record: Record = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Classify a folder of photographs with a backend and a reference, and compare.

    Results are kept after every batch. Interrupted or killed, the same command continues; results
    of other weights, images or kernels are never mixed. An image that cannot be read is recorded
    and left out.

    A near tie is an image whose first two logits in the reference are closer than rounding can
    move them, by the margin rule of `r18 verify`. Times are medians of milliseconds per image of
    computing only, over batches on which both take turns; `r18 bench` measures more carefully.

    Exit codes: 0 every class agrees but for near ties, 1 another class, or logits that are not
    finite, 2 a wrong request, or nothing could be compared.
    """
    check_job(out, restart, salvage, workers, scheduler)
    reference = _reference(against)
    name, kind = _chosen(backend, scheduler, precision)
    made = (images, labels, weights, network_name, name, kind, reference, precision)
    how = (fusion, batch, threads, out, restart, salvage, workers, scheduler)
    job = Job(*made, against_precision, *how)
    recording(record, records)
    try:
        with _progress() as on_progress:
            done = run_job(job, partial(typer.echo, err=True), on_progress)
    except KeyboardInterrupt as error:
        if run.journal_of(out).exists():
            error.args = ("the same command without --restart continues",)
        raise
    if record:
        typer.echo(f"recorded in {done.record(records)}", err=True)
    _print(done, as_json)


def _print(done: Finished, as_json: bool) -> None:
    """Print the results; raises `typer.Exit` with the command's exit code."""
    summary, running = done.evaluation.summary, done.evaluation.running
    if as_json:
        typer.echo(json.dumps(done.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(text(summary, running[1].name if len(running) > 1 else None))
    typer.echo(f"results in {done.job.out}", err=True)
    if summary.changed:
        raise typer.Exit(FOUND)
    if summary.unreadable == summary.images:
        typer.echo("no image could be read", err=True)
        raise typer.Exit(REFUSED)
    if done.job.against is not None and not summary.decided:
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


def _chosen(backend: str | None, scheduler: str | None, precision: str) -> tuple[str, str]:
    """The name for `get_backend`, wherever it is called, and the kind of device here.

    A scheduler's workers may have backends that are not installed here, so only the name is passed.
    """
    name = asked_backend(backend)
    if scheduler is not None:
        if name == "auto":
            raise UsageError("--scheduler needs --backend NAME: auto would choose for this machine")
        return name, ""
    runner, device = chosen_backend(backend, [precision])
    return (runner.name if name == "auto" else name), device.kind


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
