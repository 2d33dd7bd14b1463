"""`r18 report`: one page of all measurements, and pictures for a README."""

from __future__ import annotations

from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import typer

from r18 import records
from r18.atomic import check_folder, check_output, write_text
from r18.cli.options import RecordFolder, checked_place, is_given
from r18.errors import UsageError
from r18.graph.resnet import NETWORKS

PAGE = b"<!doctype html"
"""What a page begins with."""

Pictures = Annotated[
    Path | None,
    typer.Option(
        help="Also write pictures for a README to this folder.",
        callback=checked_place(check_folder, "--svg"),
    ),
]


def report(
    context: typer.Context,
    record_folder: RecordFolder = records.FOLDER,
    evaluation: Annotated[
        Path | None, typer.Option(help="A .csv or .parquet file from r18 evaluate.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="The evaluated folder; shows its photographs.")
    ] = None,
    network_name: Annotated[
        str | None,
        typer.Option(
            "--network",
            help=f"The evaluated network, where the file does not say: {', '.join(NETWORKS)}.",
        ),
    ] = None,
    dumps: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two dumps, EXPECTED and GOT, compared as r18 diff does."),
    ] = None,
    atol: Annotated[float, typer.Option(help="Largest difference allowed between --dumps.")] = 1e-4,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("exports/report.html"),
    svg: Pictures = None,
) -> None:
    """Write one self-contained page of records, an evaluation and dumps.

    Throughput and latency with the roofline, time per layer, error over bound, mutants, agreement
    with the hardest photographs, and checkpoints. The page loads nothing. Missing evidence is
    listed with the command that makes it.

    A Parquet file says which network was evaluated. A CSV does not: without --network its classes
    are numbers.
    """
    from r18.report import gather, page, pictures

    check_page(out, "--out")
    diff = None
    if dumps is not None:
        try:
            from r18_oracle.dumps.dumps import diff_dumps
        except ModuleNotFoundError as error:
            raise UsageError(
                f"--dumps needs the oracle, which does not import: {error}\n"
                "  pip install 'r18[oracle]'"
            ) from None
        diff = diff_dumps(*dumps, atol=atol).to_json()
    found = gather(record_folder, evaluation, images, network_name, diff)
    _warn_of_no_records(context, record_folder)
    drawn = pictures(found) if svg is not None else {}
    if svg is not None and not drawn:
        raise UsageError(
            f"--svg: '{record_folder}' holds no times of resnet18, fusion all\n"
            "  r18 bench --record writes them"
        )
    _write(out, page(found))
    for name, text in drawn.items():
        assert svg is not None
        _write(svg / name, text)


def _warn_of_no_records(context: typer.Context, folder: Path) -> None:
    """Say that a folder of records was named and does not exist.

    The default folder may be missing: a page of an evaluation or of dumps needs none.
    """
    if is_given(context, "record_folder") and not folder.is_dir():
        typer.echo(
            f"warning: --records '{folder}': no such folder, so the page has no records\n"
            "  name the folder that --record wrote to, or leave out --records: the default is "
            f"'{records.FOLDER}'",
            err=True,
        )


def _is_page(file: BufferedReader) -> bool:
    return file.read(len(PAGE)).lower() == PAGE


check_page = partial(check_output, kind="page", known=_is_page)
"""Raises `UsageError` for a place where no page can be written, or a file that is none."""


def _write(path: Path, text: str) -> None:
    write_text(path, text)
    typer.echo(f"wrote {path}", err=True)
