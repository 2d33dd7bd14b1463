"""`r18 sanitize`: a backend's CUDA kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, RecordFolder, listed, recording
from r18.records import FOLDER
from r18_oracle.cli.options import (
    Again,
    BackendToCheck,
    Continued,
    Jobs,
    KernelGlob,
    Minutes,
    NetworkOrNone,
    ProfileName,
    Seed,
    network_or_none,
)
from r18_oracle.cli.session import print_session, show_result, show_start

Tools = Annotated[
    str, typer.Option(help="Some of memcheck, racecheck, initcheck, synccheck; or all.")
]
Seconds = Annotated[
    float, typer.Option(min=1, help="The longest that one kernel may take under a tool.")
]
Sanitizer = Annotated[
    str | None, typer.Option(metavar="PATH", help="compute-sanitizer, if it is not found.")
]


def sanitize(
    backend: BackendToCheck = "cupy",
    kernels: KernelGlob = "*",
    tools: Tools = "all",
    profile: ProfileName = "quick",
    network_name: NetworkOrNone = "resnet18",
    seed: Seed = 0,
    jobs: Jobs = None,
    minutes: Minutes = None,
    again: Again = False,
    seconds: Seconds = 3600.0,
    sanitizer: Sanitizer = None,
    record: Continued = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Run a backend's kernels under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    Each kernel runs on the problems of `r18 verify`, with an allocation for every buffer. Values
    are not judged.

    With --record the kernels of each process are recorded when it ends. What the record holds for
    the same sources is not run, so the same command continues where it stopped.

    Exit codes: 0 every tool is clean, 1 an error, a kernel that did not finish, or kernels that are
    left, 2 a wrong request, or no compute-sanitizer.
    """
    from r18.progress import progress_bar
    from r18_oracle.sanitize.run import TOOLS
    from r18_oracle.sanitize.session import sanitize as run

    with progress_bar() as bar:
        done = run(
            backend,
            list(TOOLS) if tools == "all" else listed(tools, "--tools"),
            kernels=kernels,
            profile_name=profile,
            network=network_or_none(network_name),
            seed=seed,
            seconds=seconds,
            jobs=jobs,
            minutes=minutes,
            sanitizer=sanitizer,
            records_folder=recording(record, records),
            again=again,
            on_start=partial(show_start, bar),
            on_result=lambda result: show_result(bar, f"{result.tool} {result.kernel}"),
        )
    print_session(done, as_json)
    if not done.clean:
        raise typer.Exit(FOUND)
