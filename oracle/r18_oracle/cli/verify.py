"""`r18 verify`: every kernel against its derived bound, then the network against float64."""

from __future__ import annotations

import json
import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from r18.atomic import check_output
from r18.backend.registry import VARIABLE
from r18.cli.app import FOUND, REFUSED
from r18.cli.options import (
    AsJson,
    FusionLevel,
    NetworkName,
    RecordFolder,
    WeightsSource,
    backend_names,
    checked_place,
    listed,
    recording,
)
from r18.cli.report import check_page
from r18.errors import UsageError, counted
from r18.records import FOLDER
from r18_oracle.cli.options import FINDINGS, FindingsFolder, Minutes

if TYPE_CHECKING:
    from r18.backend import Backend
    from r18_oracle.findings import Finding
    from r18_oracle.search.verify import Request, Verification
    from r18_oracle.xfails import ExpectedFailure

Backends = Annotated[
    str,
    typer.Option(
        help="Names or module:attr, separated by commas; or all.",
        envvar=VARIABLE,
        autocompletion=backend_names,
    ),
]
KernelGlob = Annotated[
    str, typer.Option(help="Only kernels whose id matches this glob, and no network.")
]
OnlyStale = Annotated[
    bool,
    typer.Option(
        "--stale", help="Only kernels whose present sources the record has not as verified."
    ),
]
ProfileName = Annotated[
    str,
    typer.Option(
        help="Effort: brief, quick, ci, thorough or nightly. [quick; thorough with --record]"
    ),
]
Precisions = Annotated[
    str, typer.Option(help="Of the network, separated by commas. [all that it can run in]")
]
Seed = Annotated[int, typer.Option(help="Seed of problems, inputs and images.", min=0)]
Workers = Annotated[int, typer.Option(help="Worker processes; 0 for one per core.", min=0)]
ExpectedFailures = Annotated[
    Path | None,
    typer.Option(
        "--xfails", help="TOML file of strict expected failures, as the conformance suite takes it."
    ),
]
Recorded = Annotated[
    bool, typer.Option("--record", help="Also write the result to the device's record.")
]

JUNIT = re.compile(rb"\s*(?:(?:<\?[^>]*\?>|<!--(?:(?!-->).)*-->)\s*)*<testsuites?[\s/>]", re.DOTALL)
"""What a JUnit file begins with: its root, after instructions and comments."""
MOST_BEGINNING = 1 << 16
"""The bytes in which a JUnit file's root must begin."""


def _is_junit(file: BufferedReader) -> bool:
    return JUNIT.match(file.read(MOST_BEGINNING).removeprefix(BOM_UTF8)) is not None


_check_junit = partial(check_output, kind="JUnit file", known=_is_junit)
JunitFile = Annotated[
    Path | None,
    typer.Option(
        help="Also write JUnit XML to this file.", callback=checked_place(_check_junit, "--junit")
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        help="Also write a self-contained page to this file.",
        callback=checked_place(check_page, "--html"),
    ),
]


def verify(
    backend: Backends = "all",
    kernels: KernelGlob = "*",
    stale: OnlyStale = False,
    profile: ProfileName = "",
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    precision: Precisions = "",
    fusion: FusionLevel = "all",
    seed: Seed = 0,
    workers: Workers = 0,
    minutes: Minutes = None,
    findings: FindingsFolder = FINDINGS,
    xfails: ExpectedFailures = None,
    record: Recorded = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
    junit: JunitFile = None,
    html: HtmlFile = None,
) -> None:
    """Verify backends: kernels against derived bounds, networks checkpoint by checkpoint.

    Problems are drawn at each kernel's edges and taken from the network, and judged against
    float64. Each finding is shrunk, explained, and saved for `r18 replay`. On a simulated device,
    `all` runs only the network.

    Exit codes: 0 no finding but expected ones, 1 findings, an expected failure that passes, or
    kernels that are left, 2 a wrong request or nothing was executed.
    """
    profile = profile or ("thorough" if record else "quick")
    expected = _expected(xfails)
    _check_outputs(html, record, profile, expected)
    with _prints_on_stderr() if as_json else nullcontext():
        chosen = _backends(backend, workers)
        from r18_oracle.search import records as evidence
        from r18_oracle.search.profiles import profile as profile_of
        from r18_oracle.search.verify import Request

        request = Request(
            profile_of(profile),
            kernels,
            network_name,
            weights,
            tuple(listed(precision, "--precision")) if precision else (),
            fusion,
            seed,
            workers or None,
            minutes,
            simulated_kernels=backend != "all" or kernels != "*",
            settled=evidence.settled(chosen, records) if stale else frozenset(),
            expected=expected,
        )
        verification = _verified(chosen, request, recording(record, records))
    _print(verification, findings, as_json)
    _write_reports(verification, findings, junit, html)
    if record:
        for said in evidence.save(verification, chosen, records):
            typer.echo(f"\n{said}", err=as_json)
    _exit_by(verification)


def _verified(backends: dict[str, Backend], request: Request, records: Path | None) -> Verification:
    """Verify under a progress bar; records: the folder that keeps sound kernels, if any."""
    from r18.progress import progress_bar
    from r18_oracle.search.records import keeper
    from r18_oracle.search.verify import verify

    with progress_bar() as bar:
        return verify(
            backends,
            request,
            on_start=bar.start,
            on_progress=bar.show,
            on_done=bar.advance,
            on_sound=keeper(request, backends, records),
        )


def _expected(xfails: Path | None) -> tuple[ExpectedFailure, ...]:
    if xfails is None:
        return ()
    from r18_oracle.xfails import load_expected

    return load_expected(xfails)


def _check_outputs(
    html: Path | None, record: bool, profile: str, expected: Sequence[ExpectedFailure]
) -> None:
    """Raise before the run any error that would prevent its page or its record."""
    if html:
        from r18.report.render import check_libraries

        check_libraries()
    if record and expected:
        raise UsageError("--record keeps what was found: run it without --xfails")
    if record:  # imports PyTorch, which `_backends` lets this process and the workers do at once
        from r18_oracle.search.records import check_profile

        check_profile(profile)


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """Send a backend's prints in this process to stderr, as in a worker: stdout holds JSON."""
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        try:
            kept = os.dup(1)
        except OSError:  # there is no stdout
            yield
            return
        try:
            os.dup2(2, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _backends(asked: str, workers: int = 0) -> dict[str, Backend]:
    """The backends to verify, by the names that `load_backend` takes.

    With all of them, workers are prepared: no name can be wrong, so they will be needed.
    """
    from r18.backend.registry import get_backend, load_backend
    from r18.runtime.listing import lines

    if asked != "all":
        found = {name: get_backend(name) for name in listed(asked, "--backend")}
        return {(b.name if name == "auto" else name): b for name, b in found.items()}
    from r18_oracle.search.worker import prepare

    prepare(workers or None)  # PyTorch takes a second to import, there and here
    chosen: dict[str, Backend] = {}
    for line in lines():
        if line.device is None:
            typer.echo(f"{line.name} is not available: {line.cause}", err=True)
        else:
            chosen[line.name] = load_backend(line.name)
    return chosen


def _exit_by(verification: Verification) -> None:
    if not verification.ok:
        found = verification.findings or verification.passed or verification.left
        raise typer.Exit(FOUND if found else REFUSED)


def _print(verification: Verification, folder: Path, as_json: bool) -> None:
    """Print the result and each finding, which is saved in the folder."""
    from r18_oracle.findings import save
    from r18_oracle.search import verify_text

    if as_json:
        typer.echo(json.dumps(verify_text.to_json(verification), indent=2, allow_nan=False))
    else:
        typer.echo(verify_text.text(verification))
    alike: dict[object, list[tuple[Finding, Path]]] = {}
    for finding in verification.findings:
        cause = (finding.check, finding.message, finding.backend, finding.subject)
        alike.setdefault(cause, []).append((finding, save(finding, folder)))
    for (finding, path), *others in alike.values():
        more = [other.kernel for other, _ in others]
        said = f"\n  and {counted(len(more), 'more kernel')}: {', '.join(more)}" if more else ""
        typer.echo(f"\n{finding.describe(path)}{said}", err=as_json)


def _write_reports(
    verification: Verification, findings: Path, junit: Path | None, html: Path | None
) -> None:
    from r18.atomic import write_text
    from r18_oracle.search import verify_text
    from r18_oracle.search.verify_page import page

    if junit is not None:
        write_text(junit, verify_text.junit(verification))
    if html is not None:
        write_text(html, page(verification, findings=findings))
