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
        "--reasons", help="JSON file of reasons by backend name, instead of r18's own list."
    ),
]
Workers = Annotated[int, typer.Option(help="Worker processes; 0 for one per core.", min=0)]


def branches(
    backend: BackendToCheck,
    profile: ProfileName = "quick",
    network_name: NetworkName = "resnet18",
    seed: Seed = 0,
    reasons: ReasonsFile = None,
    workers: Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Report what the problems of `r18 verify` leave out of a backend's kernels.

    A branch that no problem took was not verified. Kernels run as in `r18 verify`, in workers under
    coverage.py. If their device is not available, only their host code is called, as far as it
    decides what is refused and what would be launched. Host code is in the modules that a kernel's
    digest counts, or else in the functions that it reaches; code that Numba compiles does not
    count. Declared device functions that no problem launches are reported too.

    Exit codes: 0 nothing was left out without a reason, 1 a branch or a function was, or a kernel
    failed, 2 a wrong request, or a reason whose line no longer exists.
    """
    from r18.progress import progress_bar
    from r18_oracle.branches import branches as report

    with progress_bar() as bar:
        found = report(
            backend,
            profile_name=profile,
            network=network_name,
            seed=seed,
            reasons=reasons,
            workers=workers or None,
            on_kernel=lambda kernel: bar.show(kernel, None),
        )
    print_result(found, as_json)
    if not found.clean:
        raise typer.Exit(FOUND)
