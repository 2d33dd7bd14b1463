"""`r18 mutate`: make small changes to a backend's kernels and count what the oracle catches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate

from r18.backend.registry import VARIABLE, load_backend
from r18.cli.app import FOUND
from r18.cli.options import AsJson, BackendName, RecordFolder, asked_backend
from r18.errors import UsageError
from r18.records import FOLDER, path_of

if TYPE_CHECKING:
    from r18_oracle.mutation.mutants import Mutant
    from r18_oracle.mutation.plan import Plan


Limit = Annotated[
    int | None, typer.Option(min=1, help="A random sample of this size, the same for a seed.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sample and of the oracle.")]
KernelGlob = Annotated[str, typer.Option(metavar="GLOB", help="Kernel ids to examine.")]
FileGlob = Annotated[str, typer.Option(metavar="GLOB", help="Files to change, such as kernels/*.")]
ProfileName = Annotated[str, typer.Option(help="Effort of the oracle: quick, ci, ...")]
Network = Annotated[
    str, typer.Option("--network", help="The network whose problems to include, or none.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. [one per core]")]
Required = Annotated[float, typer.Option(help="The least score, in percent.")]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Stop after this time; the rest is not judged.")
]
Again = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="Run recorded mutants again: survived, or all."),
]
ShowList = Annotated[bool, typer.Option("--list", help="List the mutants; run none.")]
Show = Annotated[str | None, typer.Option(metavar="ID", help="Show one mutant; run none.")]
Recorded = Annotated[
    bool, typer.Option("--record", help="Write the device's record, and continue from it.")
]


def mutate(
    backend: BackendName = None,
    limit: Limit = None,
    seed: Seed = 0,
    kernels: KernelGlob = "*",
    files: FileGlob = "*",
    profile: ProfileName = "quick",
    network_name: Network = "resnet18",
    workers: Workers = None,
    require: Required = 97.0,
    minutes: Minutes = None,
    again: Again = None,
    show_list: ShowList = False,
    show: Show = None,
    record: Recorded = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Mutation-test the oracle: make small changes to kernel sources and count those it catches.

    The unchanged kernels must pass first. Mutants judged equivalent by hand are not run. A change
    of device code that does not compile does not count; one that compiles to the same machine code
    is equivalent. score = killed / (all - equivalent - invalid).

    With --record each mutant is recorded as soon as it is judged. Mutants that the record holds for
    the same sources are not run, so the same command continues where it stopped.

    Exit codes: 0 the score is reached, 1 it is not, or mutants are left, 2 nothing was run.
    """
    from r18_oracle.mutation.plan import Plan
    from r18_oracle.mutation.run import run

    name = asked_backend(backend)
    if name == "auto":
        raise UsageError(f"name the backend to mutate: --backend NAME or {VARIABLE}=NAME")
    if again is not None and not record:
        raise UsageError("--again is about recorded mutants: it needs --record")
    if show_list or show is not None:
        _look(Plan.of(name), show, files, as_json)
        return
    with _progress() as progress:
        score = run(
            name,
            seed=seed,
            limit=limit,
            kernels=kernels,
            files=files,
            profile_name=profile,
            network=None if network_name == "none" else network_name,
            workers=workers,
            minutes=minutes,
            records_folder=records if record else None,
            again=again,
            progress=progress,
        )
    typer.echo(json.dumps(score.to_json(), indent=1) if as_json else score.text())
    if record:
        _say_recorded(name, records)
    if score.left or score.percent < require:
        raise typer.Exit(FOUND)


def _say_recorded(backend: str, records: Path) -> None:
    path = path_of(records, "mutate", load_backend(backend).probe())
    typer.echo(f"recorded in {path}", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr; called with (done, total, what)."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _look(plan: Plan, show: str | None, files: str, as_json: bool) -> None:
    """Print mutants without running any."""
    if show is not None:
        mutant = plan.find(show)
        typer.echo(plan.diff(mutant) + _judgement(plan, mutant))
        return
    chosen = [m for m in plan.mutants if fnmatchcase(m.file, files)]
    rows = [(m.id, m.scope, "equivalent" if m.id in plan.reasons else "") for m in chosen]
    if as_json:
        keys = ("id", "scope", "judged")
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    typer.echo(tabulate(rows, ("mutant", "in", "judged"), disable_numparse=True))
    judged = sum(bool(row[2]) for row in rows)
    typer.echo(f"\n{len(rows)} mutants, {judged} of them equivalent")


def _judgement(plan: Plan, mutant: Mutant) -> str:
    """Why the mutant is equivalent, or the entry to fill in if it is."""
    from r18_oracle.mutation.equivalents import FILE, entry_of

    if reason := plan.reasons.get(mutant.id):
        return f"equivalent: {reason}"
    entry = json.dumps(entry_of(mutant), indent=1, ensure_ascii=False)
    return f'If no input can tell: an entry for "{plan.target.backend}" in {FILE}\n{entry}'
