"""`r18 mutate`: change a backend's kernels a little, and see whether the oracle notices."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
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


def mutate(
    backend: BackendName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="A fair sample of so many, the same for a seed.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample and of the oracle.")] = 0,
    kernels: Annotated[str, typer.Option(metavar="GLOB", help="Kernel ids to examine.")] = "*",
    files: Annotated[
        str, typer.Option(metavar="GLOB", help="Files to change, such as kernels/*.")
    ] = "*",
    profile: Annotated[str, typer.Option(help="How long the oracle looks at a kernel.")] = "quick",
    network_name: Annotated[
        str, typer.Option("--network", help="Whose problems to include, or none.")
    ] = "resnet18",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. [one a core]")] = None,
    require: Annotated[float, typer.Option(help="The least score, in percent.")] = 97.0,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many; what is left is left.")
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Run again, of what is recorded: survived, or all."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the mutants; run none.")] = False,
    show: Annotated[
        str | None, typer.Option(metavar="ID", help="Show one mutant; run none.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the device's record, and go on from it.")
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Mutation-test the oracle on a backend: make many small changes to its kernels' sources, one
    at a time, and count those that the oracle catches.

    The unchanged kernels must pass first. Mutants judged equivalent by hand are listed with their
    reasons and not run. A change of device code that does not compile does not count, and one that
    compiles to the same machine code is equivalent. score = killed / (all - equivalent - invalid).

    With --record each mutant is recorded as soon as it is judged. What the record holds of sources
    that are still the same is not run, so the same command goes on where it stopped.

    Exit codes: 0 the score is reached, 1 it is not, or mutants are left, 2 nothing was run.
    """
    from r18_oracle.mutation.plan import Plan
    from r18_oracle.mutation.run import run

    name = asked_backend(backend)
    if name == "auto":
        raise UsageError(f"say whose kernels to mutate: --backend NAME or {VARIABLE}=NAME")
    if again is not None and not record:
        raise UsageError("--again is about what is recorded: it needs --record")
    if show_list or show is not None:
        _look(Plan.of(name), show, files, as_json)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("starting", total=None)
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
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=what
            ),
        )
    typer.echo(json.dumps(score.to_json(), indent=1) if as_json else score.text())
    if record:
        path = path_of(records, "mutate", load_backend(name).probe())
        typer.echo(f"recorded in {path}", err=True)
    if score.left or score.percent < require:
        raise typer.Exit(FOUND)


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
    """Why it is equivalent, or the entry that would say so once it has a reason."""
    from r18_oracle.mutation.equivalents import FILE, entry_of

    if reason := plan.reasons.get(mutant.id):
        return f"equivalent: {reason}"
    entry = json.dumps(entry_of(mutant), indent=1, ensure_ascii=False)
    return f'If no input can tell: an entry for "{plan.target.backend}" in {FILE}\n{entry}'
