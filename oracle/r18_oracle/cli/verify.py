"""`r18 verify`: every kernel against its derived bound, then the network against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND, REFUSED
from r18.cli.options import RecordFolder, backend_names, listed
from r18.graph.passes import FUSION_LEVELS
from r18.graph.schedule import NETWORKS
from r18.records import FOLDER
from r18.weights import SOURCES


def verify(
    backend: Annotated[
        str,
        typer.Option(
            help="Names or module:attr, separated by commas; or all.",
            envvar="R18_BACKEND",
            autocompletion=backend_names,
        ),
    ] = "all",
    kernels: Annotated[
        str, typer.Option(help="Only kernels whose id matches this glob; no network then.")
    ] = "*",
    stale: Annotated[
        bool,
        typer.Option(
            "--stale", help="Only kernels that the device's record does not hold as they stand."
        ),
    ] = False,
    profile: Annotated[
        str,
        typer.Option(
            help="How long to look: quick, ci, thorough or nightly. [quick; thorough to record]"
        ),
    ] = "",
    network_name: Annotated[
        str, typer.Option("--network", help=f"One of: {', '.join(NETWORKS)}.")
    ] = "resnet18",
    weights: Annotated[str, typer.Option(help=f"One of: {', '.join(SOURCES)}.")] = "synthetic",
    precision: Annotated[
        str, typer.Option(help="Of the network, separated by commas; default all it can run.")
    ] = "",
    fusion: Annotated[str, typer.Option(help=f"One of: {', '.join(FUSION_LEVELS)}.")] = "all",
    seed: Annotated[int, typer.Option(help="Of problems, inputs and images.", min=0)] = 0,
    workers: Annotated[int, typer.Option(help="Processes at once; 0 is one a core.", min=0)] = 0,
    findings: Annotated[
        Path, typer.Option(help="Folder for a file of each finding, to replay.")
    ] = Path("exports/findings"),
    record: Annotated[
        bool,
        typer.Option("--record", help="Also write what was shown to the device's record."),
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page to this file; it loads nothing.")
    ] = None,
) -> None:
    """Prove backends right: kernels by derived bounds, the network checkpoint by checkpoint.

    Draws problems that chase each kernel's edges, includes every problem of the network, and
    judges against float64. Each finding is shrunk, explained, and saved for `r18 replay`.
    Of a simulated device, `all` compares the network alone.

    Exit codes: 0 no finding, 1 findings, 2 a wrong request or nothing was executed.
    """
    from r18.atomic import write_text
    from r18.backend.registry import get_backend, load_backend, survey
    from r18.cli.progress import progress_bar
    from r18.report.render import check_libraries
    from r18_oracle.findings import save
    from r18_oracle.search import records as evidence
    from r18_oracle.search import verify_text
    from r18_oracle.search.profiles import profile as profile_of
    from r18_oracle.search.verify import Request
    from r18_oracle.search.verify import verify as run
    from r18_oracle.search.verify_page import page

    if html is not None:
        check_libraries()
    profile = profile or ("thorough" if record else "quick")
    if record:
        evidence.check_profile(profile)
    if backend == "all":
        chosen = {}
        for line in survey():
            if line.device is None:
                typer.echo(f"{line.name} is not available: {line.cause}", err=True)
            else:
                chosen[line.name] = load_backend(line.name)
    else:
        found = {name: get_backend(name) for name in listed(backend, "--backend")}
        chosen = {(b.name if name == "auto" else name): b for name, b in found.items()}
    request = Request(
        profile_of(profile),
        kernels,
        network_name,
        weights,
        tuple(listed(precision, "--precision")) if precision else (),
        fusion,
        seed,
        workers or None,
        simulated_kernels=backend != "all" or kernels != "*",
        settled=evidence.settled(chosen, records) if stale else frozenset(),
    )
    with progress_bar() as bar:
        verification = run(
            chosen, request, on_start=bar.start, on_progress=bar.show, on_done=bar.advance
        )
    if as_json:
        typer.echo(json.dumps(verify_text.to_json(verification), indent=2, allow_nan=False))
    else:
        typer.echo(verify_text.text(verification))
    for finding in verification.findings:
        path = save(finding, findings)
        typer.echo(f"\n{finding.describe(path)}", err=as_json)
    if junit is not None:
        write_text(junit, verify_text.junit(verification))
    if html is not None:
        write_text(html, page(verification, findings=findings))
    if record:
        for said in evidence.save(verification, chosen, records):
            typer.echo(f"\n{said}", err=as_json)
    if verification.findings:
        raise typer.Exit(FOUND)
    if not verification.executed:
        raise typer.Exit(REFUSED)
