"""`r18 diff`: compare two dumps, or more by their bounds, or two in integers by reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, RecordFolder, print_result, recording
from r18.errors import UsageError
from r18.records import FOLDER

if TYPE_CHECKING:
    from r18_oracle.dumps.agreement import Agreement
    from r18_oracle.dumps.dumps import Report
    from r18_oracle.network.reasons import Reasons

ATOL = 1e-4
SHARED = "what may be lost is derived from the weights and the input that the dumps share"

Others = Annotated[
    list[Path] | None, typer.Argument(help="With --bounds: more dumps, each to each.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(help=f"The largest |got − expected| that is fine; {ATOL:g} if not said."),
]
ByBounds = Annotated[
    bool,
    typer.Option(
        "--bounds",
        help="By what each dump may lose against float64, instead of one tolerance: none is "
        "taken to be right, and no two may be farther apart than both may lose.",
    ),
]
ByReasons = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Say of every element of two dumps in int8 why it differs: which arithmetic gives "
        "it from the dump's own inputs. One that none gives is an error.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="With --bounds or --explain: where the weights are, if not where the dumps say."
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        help="With --bounds: a backend of the dumps that is not installed, as module:attr. "
        "Its code runs, so a dump's own word is not enough. Repeat it for several.",
    ),
]
AnyInput = Annotated[
    bool,
    typer.Option(
        "--allow-different-input", help="Compare even if weights or input are not the same."
    ),
]
RecordCounts = Annotated[
    bool, typer.Option("--record", help="With --explain: also write the counts to a record.")
]


def diff(
    expected: Annotated[Path, typer.Argument(help="The dump that is taken to be right.")],
    got: Annotated[Path, typer.Argument(help="The dump to judge.")],
    others: Others = None,
    atol: Tolerance = None,
    bounds: ByBounds = False,
    explain: ByReasons = False,
    weights: Weights = None,
    backends: Backends = None,
    allow_different_input: AnyInput = False,
    record: RecordCounts = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Compare dumps in network order and name the first bad checkpoint.

    One of two may be a folder of raw float32 files (NAME.bin) without a manifest, written by
    any program; not with --bounds, which depend on precision and kernels. NaN and infinity are
    always bad; a missing checkpoint is an error, never a skip.

    In int8 one integer that differs changes all that reads it. With --explain each step is judged
    from the dump's own inputs, and every element that it computes differently has a class: tie,
    fused or simulated, division or reciprocal, saturation, residual order, pairs in int16 (of a CPU
    without VNNI), quantised again (from an image that is not the dump's). Dumps must hold every
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
        _refuse("--explain", given, "it compares two dumps of the same weights and input")
        report = _by_reasons(expected, got, weights, recording(record, records))
    elif bounds:
        from r18_oracle.dumps.agreement import compare_by_bounds

        given = {"--atol": atol is not None, "--allow-different-input": allow_different_input}
        _refuse("--bounds", given, SHARED)
        dumps = [expected, got, *(others or ())]
        report = compare_by_bounds(dumps, weights=weights, backends=backends or [])
    else:
        from r18_oracle.dumps.dumps import diff_dumps

        _refuse_without_bounds(others, weights, backends)
        tolerance = ATOL if atol is None else atol
        report = diff_dumps(
            expected, got, atol=tolerance, allow_different_input=allow_different_input
        )
    print_result(report, as_json)
    if not report.ok:
        raise typer.Exit(FOUND)


def _refuse(option: str, given: dict[str, bool], why: str) -> None:
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise UsageError(f"{' and '.join(wrong)} cannot be given with {option}: {why}")


def _refuse_without_bounds(
    others: list[Path] | None, weights: str | None, backends: list[str] | None
) -> None:
    if others or weights is not None or backends:
        what = "--weights is" if weights is not None else "more than two dumps are"
        what = "--backend is" if backends else what
        raise UsageError(f"{what} for --bounds, which was not given")


def _by_reasons(expected: Path, got: Path, weights: str | None, records: Path | None) -> Reasons:
    """The reasons, which are also written to a record in the folder if there is one."""
    from r18_oracle.dumps import explain_record
    from r18_oracle.dumps.explained import explain_dumps

    reasons = explain_dumps(expected, got, weights=weights)
    if records is not None:
        path = explain_record.save(reasons, expected, got, records)
        typer.echo(f"recorded in {path}", err=True)
    return reasons
