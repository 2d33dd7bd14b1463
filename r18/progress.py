"""A progress bar on stderr: the present activity, and how much is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
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
    """A bar over jobs."""
    text = TextColumn("{task.description}")
    with _shown(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), text) as progress:
        yield Bar(progress)


@contextmanager
def run_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar over runs; call it with the present activity, the runs that are done, and all runs."""
    with _shown(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("")

        def update(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield update


def _shown(*columns: ProgressColumn) -> Progress:
    """A bar that disappears when it is done, and draws nothing if stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
