"""`r18 diff`: compare two dumps, or more by their bounds, or two in integers by reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, RecordFolder, print_result
from r18.errors import UsageError
from r18.records import FOLDER

if TYPE_CHECKING:
    from r18_oracle.dumps.agreement import Agreement
    from r18_oracle.dumps.dumps import Report
    from r18_oracle.network.reasons import Reasons

ATOL = 1e-4


def diff(
    expected: Annotated[Path, typer.Argument(help="The dump that is taken to be right.")],
    got: Annotated[Path, typer.Argument(help="The dump to judge.")],
    others: Annotated[
        list[Path] | None, typer.Argument(help="With --bounds: more dumps, each to each.")
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(help=f"The largest |got − expected| that is fine; {ATOL:g} if not said."),
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds",
            help="By what each dump may lose against float64, instead of one tolerance: none is "
            "taken to be right, and no two may be farther apart than both may lose.",
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say of every element of two dumps in int8 why it differs: which arithmetic gives "
            "it from the dump's own inputs. One that none gives is an error.",
        ),
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            help="With --bounds or --explain: where the weights are, if not where the dumps say."
        ),
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="With --bounds: a backend of the dumps that is not installed, as module:attr. "
            "Its code runs, so a dump's own word is not enough. Repeat it for several.",
        ),
    ] = None,
    allow_different_input: Annotated[
        bool,
        typer.Option(
            "--allow-different-input", help="Compare even if weights or input are not the same."
        ),
    ] = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="With --explain: also write the counts to a record."),
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Compare dumps in network order and name the first bad checkpoint.

    One of two may be a folder of raw float32 files (NAME.bin) without a manifest, written by
    any program; not with --bounds, which depend on precision and kernels. NaN and infinity are
    always bad; a missing checkpoint is an error, never a skip.

    In int8 one integer that differs changes all that reads it. With --explain each step is judged
    from the dump's own inputs, and every element that it computes differently has a class: tie,
    fused or simulated, division or reciprocal, saturation, residual order. Dumps must hold every
    value (`r18 dump --precision int8 --checkpoints all`).

    Exit codes: 0 all agree (or every element is explained), 1 a checkpoint is bad (or an element is
    not explained), 2 the dumps cannot be compared.
    """
    report: Report | Agreement | Reasons
    if record and not explain:
        raise UsageError("--record is for --explain, which was not given")
    if explain:
        given = {
            "--atol": atol is not None,
            "--bounds": bounds,
            "--backend": bool(backends),
            "--allow-different-input": allow_different_input,
            "a third dump": bool(others),
        }
        _refuse_with("--explain", given, "it compares two dumps of the same weights and input")
        report = reasons = _by_reasons(expected, got, weights)
        if record:
            typer.echo(f"recorded in {_recorded(reasons, expected, got, records)}", err=True)
    elif bounds:
        _refuse({"--atol": atol is not None, "--allow-different-input": allow_different_input})
        report = _by_bounds([expected, got, *(others or ())], weights, backends or [])
    else:
        if others or weights is not None or backends:
            what = "--weights is" if weights is not None else "more than two dumps are"
            what = "--backend is" if backends else what
            raise UsageError(f"{what} for --bounds, which was not given")
        report = _by_tolerance(expected, got, ATOL if atol is None else atol, allow_different_input)
    print_result(report, as_json)
    if not report.ok:
        raise typer.Exit(FOUND)


def _refuse(given: dict[str, bool]) -> None:
    why = "what may be lost is derived from the weights and the input that the dumps share"
    _refuse_with("--bounds", given, why)


def _refuse_with(option: str, given: dict[str, bool], why: str) -> None:
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise UsageError(f"{' and '.join(wrong)} cannot be given with {option}: {why}")


def _by_tolerance(expected: Path, got: Path, atol: float, allow_different_input: bool) -> Report:
    from r18_oracle.dumps.dumps import diff_dumps

    return diff_dumps(expected, got, atol=atol, allow_different_input=allow_different_input)


def _by_reasons(expected: Path, got: Path, weights: str | None) -> Reasons:
    from r18_oracle.dumps.explained import explain_dumps

    return explain_dumps(expected, got, weights=weights)


def _recorded(reasons: Reasons, expected: Path, got: Path, folder: Path) -> Path:
    from r18_oracle.dumps import explain_record

    return explain_record.save(reasons, expected, got, folder)


def _by_bounds(dumps: list[Path], weights: str | None, backends: list[str]) -> Agreement:
    from r18_oracle.dumps.agreement import compare_by_bounds

    return compare_by_bounds(dumps, weights=weights, backends=backends)
