"""`r18 branches`: branches of host code and device functions that no problem took."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, NetworkName, print_result
from r18_oracle.cli.options import BackendToCheck, ProfileName, Seed

ReasonsFile = Annotated[
    Path | None,
    typer.Option(
        "--reasons", help="JSON file of reasons by the backend's name, instead of r18's own list."
    ),
]


def branches(
    backend: BackendToCheck,
    profile: ProfileName = "quick",
    network_name: NetworkName = "resnet18",
    seed: Seed = 0,
    reasons: ReasonsFile = None,
    as_json: AsJson = False,
) -> None:
    """Report what the problems of `r18 verify` leave out of a backend's kernels.

    A branch that no problem took was not verified. Kernels run as in `r18 verify`, in this process,
    under coverage.py. If their device is not here, kernels with a digest are asked what they decide
    on the host, and are not run. Host code is what that digest counts, or else the functions that a
    kernel reaches; code that Numba compiles is not followed. Declared device functions that no
    problem launches are reported too.

    Exit codes: 0 nothing left out without a reason, 1 a branch or a function was left out, or a
    kernel failed, 2 a wrong request, or a reason whose line no longer exists.
    """
    from r18.cli.progress import progress_bar
    from r18_oracle.branches import branches as report

    with progress_bar() as bar:
        found = report(
            backend,
            profile_name=profile,
            network=network_name,
            seed=seed,
            reasons=reasons,
            on_kernel=lambda kernel: bar.show(kernel, None),
        )
    print_result(found, as_json)
    if not found.clean:
        raise typer.Exit(FOUND)
