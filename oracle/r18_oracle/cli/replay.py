"""`r18 replay`: run a finding again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND


def replay(
    file: Annotated[Path, typer.Argument(help="A finding that `r18 verify` saved.")],
    backend: Annotated[
        str | None,
        typer.Option(
            help="The finding's backend again, if it is a module:attr: its code runs, so the "
            "file's own word is not enough."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="The finding's weights again, if they are a file.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Silence after which the replay counts as hung. [as when found]", min=1),
    ] = None,
) -> None:
    """Run a saved finding again, in a worker process, and report whether it still fails.

    A finding of the check `state` holds the calls that came before it. It is replayed without them
    and with them, each in a fresh process.

    Exit codes: 0 it is gone, 1 it still fails, perhaps differently, 2 not a finding.
    """
    from r18_oracle.findings import load
    from r18_oracle.search.history import ALONE
    from r18_oracle.search.replay import check_trusted, replayed

    finding = load(file)
    check_trusted(finding, file, backend, weights)
    again = replayed(finding, seconds)
    if again is None:
        what = finding.problem or f"the network, seed {finding.seed}"
        typer.echo(f"gone: {finding.kernel}: no '{finding.check}' finding on {what}")
        return
    typer.echo(again.describe(file))
    if again.details.get(ALONE) == "right":
        typer.echo("right in a fresh process: it takes what the finding says came before it")
    same = again.same_as(finding)
    typer.echo("the same finding, to the bit" if same else "another finding than the one saved")
    raise typer.Exit(FOUND)
