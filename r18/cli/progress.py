"""A progress bar on stderr: what is under way, how much is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from r18.graph.ops import Problem


class Bar:
    """The bar's three verbs; see `progress_bar`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def start(self, jobs: int) -> None:
        self._progress.update(self._task, total=jobs)

    def show(self, what: str, problem: Problem | None) -> None:
        self._progress.update(self._task, description=what)

    def advance(self, what: str) -> None:
        self._progress.advance(self._task)


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar that disappears when it is done, and draws nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        yield Bar(p)
