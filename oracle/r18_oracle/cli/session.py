"""The output of `r18 perturb` and `r18 sanitize` for a session: a bar, its record and its
results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from r18.cli.options import Result, print_result

if TYPE_CHECKING:
    from r18.progress import Bar


class Session(Result, Protocol):
    """The results of a session. path: of its record, if there is one."""

    @property
    def results(self) -> Sequence[object]: ...

    @property
    def path(self) -> Path | None: ...


def show_start(bar: Bar, todo: int, known: int) -> None:
    """Begin a bar over the results to do; it says how many others are known."""
    bar.start(todo)
    bar.show(f"{known} from the record" if known else "starting", None)


def show_result(bar: Bar, what: str) -> None:
    """Advance the bar by one result. what: its name on the bar."""
    bar.advance(what)
    bar.show(what, None)


def print_session(done: Session, as_json: bool) -> None:
    """Print the results, and on stderr where they are recorded."""
    if done.path is not None and done.results:
        typer.echo(f"recorded in {done.path}", err=True)
    print_result(done, as_json)
