"""`r18 mutate`: change a backend's kernels a little, and see whether the oracle notices."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate

from r18.cli.app import FOUND
from r18.cli.options import AsJson, BackendName, asked_backend
from r18.errors import UsageError
from r18.records import FOLDER
from r18.registry import VARIABLE, load_backend

if TYPE_CHECKING:
    from r18_oracle.mutation.score import Plan


def mutate(
    backend: BackendName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="A sample of so many, spread over the operators.")
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
    show_list: Annotated[bool, typer.Option("--list", help="List the mutants; run none.")] = False,
    show: Annotated[
        str | None, typer.Option(metavar="ID", help="Show one mutant's diff; run none.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the score to the device's record.")
    ] = False,
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Mutation-test the oracle on a backend: make many small changes to its kernels' sources, one
    at a time, and count those that the oracle catches.

    The unchanged kernels must pass first. Mutants judged equivalent by hand are listed with their
    reasons and not run. A change of device code that does not compile does not count, and one that
    compiles to the same machine code is equivalent. score = killed / (all - equivalent - invalid).

    Exit codes: 0 the score is reached, 1 it is not, 2 nothing was run.
    """
    from r18_oracle.mutation.score import Plan, run
    from r18_oracle.records import save_score

    name = asked_backend(backend)
    if name == "auto":
        raise UsageError(f"say whose kernels to mutate: --backend NAME or {VARIABLE}=NAME")
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
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=what
            ),
        )
    typer.echo(json.dumps(score.to_json(), indent=1) if as_json else score.text())
    if record:
        path = save_score(score, load_backend(name).probe(), records)
        typer.echo(f"recorded in {path}", err=True)
    if score.percent < require:
        raise typer.Exit(FOUND)


def _look(plan: Plan, show: str | None, files: str, as_json: bool) -> None:
    """Print mutants without running any."""
    if show is not None:
        mutant = plan.find(show)
        reason = plan.reasons.get(mutant.id)
        typer.echo(plan.diff(mutant) + (f"equivalent: {reason}" if reason else ""))
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
