"""`r18 mutate`: make small changes to a backend's kernels and count what the oracle catches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate

from r18.backend.registry import VARIABLE, load_backend
from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BackendName,
    RecordFolder,
    asked_backend,
    print_result,
    recording,
)
from r18.errors import UsageError
from r18.records import FOLDER, path_of
from r18_oracle.cli.options import (
    Continued,
    KernelGlob,
    Minutes,
    NetworkOrNone,
    ProfileName,
    network_or_none,
)

if TYPE_CHECKING:
    from r18_oracle.mutation.mutants import Mutant
    from r18_oracle.mutation.plan import Plan
    from r18_oracle.mutation.score import Score

Limit = Annotated[
    int | None, typer.Option(min=1, help="Run a random sample of this size, fixed by the seed.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sample and of the oracle.")]
FileGlob = Annotated[str, typer.Option(metavar="GLOB", help="Files to change, such as kernels/*.")]
Kind = Annotated[
    str,
    typer.Option(
        help="tokens: mistakes in expressions. state: in what is kept, shared or waited for."
    ),
]
Core = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Mutate the files in this table, for tests to judge."),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. [one per core]")]
Required = Annotated[float, typer.Option(help="The score to reach, in percent.")]
Again = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="Run recorded mutants again: survived, or all."),
]
ShowList = Annotated[bool, typer.Option("--list", help="List the mutants; run none.")]
Show = Annotated[str | None, typer.Option(metavar="ID", help="Show one mutant; run none.")]


def mutate(
    backend: BackendName = None,
    limit: Limit = None,
    seed: Seed = 0,
    kernels: KernelGlob = "*",
    files: FileGlob = "*",
    kind: Kind = "tokens",
    core: Core = None,
    profile: ProfileName = "quick",
    network_name: NetworkOrNone = "resnet18",
    workers: Workers = None,
    require: Required = 97.0,
    minutes: Minutes = None,
    again: Again = None,
    show_list: ShowList = False,
    show: Show = None,
    record: Continued = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Mutation-test the oracle: make small changes to kernel sources and count those it catches.

    --kind state makes structural mistakes: a field dropped from a cache key, a wait moved after a
    read, a shared scratch buffer, a loop that ends early, truncation instead of rounding, a missing
    wait for a store, and a run resumed by count.

    The unchanged kernels must pass first. Mutants judged equivalent by hand are not run. A change
    of device code that does not compile does not count; one that compiles to the same machine code
    is equivalent. score = killed / (all - equivalent - invalid).

    With --record each mutant is recorded as soon as it is judged. Mutants that the record holds for
    the same code are not run, so the same command continues where it stopped. Comments and
    docstrings may change, and lines move.

    --core FILE changes sources that no kernel runs. FILE is a table of these files and of the tests
    that judge the changes.

    Exit codes: 0 the score is reached, 1 it is not, or mutants are left, 2 nothing was run.
    """
    folder = recording(record, records)
    how = _How(seed=seed, limit=limit, files=files, kind=kind, workers=workers, again=again)
    if core is not None:
        if backend is not None or minutes is not None or show is not None:
            raise UsageError("--core cannot be combined with --backend, --minutes or --show")
        if show_list:
            _look_at_core(core, kind, files, as_json)
            return
    name = "" if core is not None else _backend_to_mutate(backend)
    if again is not None and not record:
        raise UsageError("--again runs recorded mutants again, so it needs --record")
    if core is not None:
        _mutate_core(core, how, folder, require, as_json)
        return
    if show_list or show is not None:
        _look(name, show, files, kind, as_json)
        return
    score = _score(name, how, kernels, profile, network_or_none(network_name), minutes, folder)
    path = path_of(records, "mutate", load_backend(name).probe()) if record else None
    _conclude(score, require, as_json, path)


class _How(TypedDict):
    """The arguments that `run` and `run_tested` share."""

    seed: int
    limit: int | None
    files: str
    kind: str
    workers: int | None
    again: str | None


def _score(
    backend: str,
    how: _How,
    kernels: str,
    profile: str,
    network: str | None,
    minutes: float | None,
    records: Path | None,
) -> Score:
    """The score of mutants that the oracle judges."""
    from r18_oracle.mutation.run import run

    with _progress() as progress:
        return run(
            backend,
            kernels=kernels,
            profile_name=profile,
            network=network,
            minutes=minutes,
            records_folder=records,
            progress=progress,
            **how,
        )


def _mutate_core(
    table: Path, how: _How, records: Path | None, require: float, as_json: bool
) -> None:
    """Run the mutants that tests judge."""
    from r18_oracle.mutation.tested import device, run_tested

    with _progress() as progress:
        score = run_tested(table, records_folder=records, progress=progress, **how)
    path = None if records is None else path_of(records, "mutate", device())
    _conclude(score, require, as_json, path)


def _look_at_core(table: Path, kind: str, files: str, as_json: bool) -> None:
    """Print the mutants that tests judge, without running any."""
    from r18_oracle.mutation.tested import mutants_in, parts_of, reasons_in

    parts = parts_of(table)
    chosen = [m for m in mutants_in(parts, kind) if fnmatchcase(m.file, files)]
    _list(chosen, reasons_in(parts), as_json)


def _backend_to_mutate(backend: str | None) -> str:
    """The name that the option or the variable gives."""
    name = asked_backend(backend)
    if name == "auto":
        raise UsageError(f"name the backend to mutate: --backend NAME or {VARIABLE}=NAME")
    return name


def _conclude(score: Score, require: float, as_json: bool, path: Path | None = None) -> None:
    """Print the score and the path of its record; exit with `FOUND` if it is not reached."""
    print_result(score, as_json, indent=1)
    if path is not None:
        typer.echo(f"recorded in {path}", err=True)
    if score.left or score.percent < require:
        raise typer.Exit(FOUND)


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


def _look(backend: str, show: str | None, files: str, kind: str, as_json: bool) -> None:
    """Print mutants without running any."""
    from r18_oracle.mutation.plan import Plan

    plan = Plan.of(backend)
    if show is not None:
        mutant = plan.find(show)
        typer.echo(plan.diff(mutant) + _judgement(plan, mutant))
        return
    chosen = [m for m in plan.mutants if m.kind == kind and fnmatchcase(m.file, files)]
    _list(chosen, plan.reasons, as_json)


def _list(mutants: Sequence[Mutant], reasons: Mapping[str, str], as_json: bool) -> None:
    """Print mutants, and how many there are of each operator."""
    rows = [(m.id, m.scope, "equivalent" if m.id in reasons else "") for m in mutants]
    if as_json:
        keys = ("id", "scope", "judged")
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return
    typer.echo(tabulate(rows, ("mutant", "in", "judged"), disable_numparse=True))
    classes = Counter(m.operator for m in mutants)
    typer.echo("\n" + tabulate(classes.items(), ("operator", "mutants")))
    judged = sum(bool(row[2]) for row in rows)
    typer.echo(f"\n{len(rows)} mutants, {judged} of them equivalent")


def _judgement(plan: Plan, mutant: Mutant) -> str:
    """Why the mutant is equivalent, or the entry to fill in if it is."""
    from r18_oracle.mutation.equivalents import FILE, entry_of

    if reason := plan.reasons.get(mutant.id):
        return f"equivalent: {reason}"
    entry = json.dumps(entry_of(mutant), indent=1, ensure_ascii=False)
    where = f'add this entry under "{plan.target.backend}" in {FILE}'
    return f"If no input shows the change, {where}:\n{entry}"
