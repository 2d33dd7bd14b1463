"""`r18 perturb`: a backend's kernels and programs with their schedules perturbed."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, RecordFolder, listed, recording
from r18.records import FOLDER
from r18_oracle.cli.options import (
    FINDINGS,
    Again,
    BackendToCheck,
    Continued,
    FindingsFolder,
    Jobs,
    Minutes,
    NetworkOrNone,
    ProfileName,
    Seed,
    network_or_none,
)
from r18_oracle.cli.session import print_session, show_result, show_start

KernelGlob = Annotated[
    str, typer.Option(metavar="GLOB", help="Only kernels whose id matches, and no programs.")
]
Seeds = Annotated[int, typer.Option(min=1, max=1 << 16, help="Number of seeds of delays.")]
Kinds = Annotated[str, typer.Option(help="Kinds of site to delay, such as wait,copy,host; or all.")]


def perturb(
    backend: BackendToCheck = "cupy",
    kernels: KernelGlob = "*",
    seeds: Seeds = 8,
    kinds: Kinds = "all",
    profile: ProfileName = "quick",
    network_name: NetworkOrNone = "resnet18",
    seed: Seed = 0,
    jobs: Jobs = None,
    minutes: Minutes = None,
    again: Again = False,
    findings: FindingsFolder = FINDINGS,
    record: Continued = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Run kernels with delays at their waits, arrivals and copies, chosen by seeds.

    Kernels are compiled with delays, the host's copies are delayed, and each problem of `r18
    verify` runs with every seed: the result must have the same bits each time. A race that a quiet
    device shows once in a million runs is likely to show. Findings are saved for `r18 replay`.

    With --record each kernel is recorded when it is done. Results that the record holds for the
    same sources are not computed again, so the same command continues where it stopped.

    Exit codes: 0 nothing failed, 1 something failed or was not run, 2 a wrong request, or a backend
    that cannot perturb its schedule.
    """
    from r18.progress import progress_bar
    from r18_oracle.findings import save
    from r18_oracle.perturb.session import perturb as run

    with progress_bar() as bar:
        done = run(
            backend,
            kernels=kernels,
            profile_name=profile,
            network=network_or_none(network_name),
            seed=seed,
            seeds=seeds,
            kinds=None if kinds == "all" else listed(kinds, "--kinds"),
            jobs=jobs,
            minutes=minutes,
            records_folder=recording(record, records),
            again=again,
            on_start=partial(show_start, bar),
            on_result=lambda result: show_result(bar, result.name),
        )
    print_session(done, as_json)
    for finding in done.findings:
        typer.echo(f"\n{finding.describe(save(finding, findings))}", err=as_json)
    if not done.ok:
        raise typer.Exit(FOUND)
