"""The results as a table, a row an image: CSV, or Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from r18.atomic import new_file
from r18.errors import R18Error, UsageError
from r18.evaluation.rows import OK, TOP, Row
from r18.evaluation.summary import near_tie

FORMATS = (".csv", ".parquet")

_PLACES = range(1, 1 + TOP)
_CLASSES = tuple((f"{who}_{n}", who, n) for who in ("backend", "reference") for n in _PLACES)
COLUMNS: dict[str, str] = {
    "file": "string",
    "status": "string",
    "label": "int32",
    **{name: "int32" for name, _, _ in _CLASSES},
    "margin": "float64",
    "agree_top1": "bool",
    "agree_top5": "bool",
    "near_tie": "bool",
    "error": "string",
}
"""The columns and their types; a value that does not exist is null, or empty in CSV.

`backend_1` to `backend_5` are the most probable classes in that order, `reference_1` to
`reference_5` the reference's; `margin` is how far its first logit is above its second.
"""


def check_target(path: Path) -> None:
    """Raise `UsageError` for a file that could not be written in the end, before anything runs."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"--out '{path}': nothing is known about '{path.suffix or path.name}'; known are "
            f"{' and '.join(FORMATS)}"
        )
    if path.is_dir():
        raise UsageError(f"--out '{path}' is a folder; name a file in it")
    if path.suffix.lower() == ".parquet":
        _arrow()


def write_table(
    path: Path, rows: Sequence[Row], bound: float | None, about: Mapping[str, Any]
) -> None:
    """Write the rows, whole or not at all; `about` goes into a Parquet file's metadata as `r18`.

    Raises `UsageError` as `check_target` does, and `R18Error` when it cannot be written.
    """
    check_target(path)
    records = [record(row, bound) for row in rows]
    write = _write_csv if path.suffix.lower() == ".csv" else _write_parquet
    try:
        with new_file(path) as draft:
            write(draft, records, about)
    except OSError as error:
        raise R18Error(f"cannot write '{path}': {error}") from error


def record(row: Row, bound: float | None) -> dict[str, Any]:
    """A row by column; None where a value does not exist."""
    compared = bound is not None and row.status == OK
    classes = {"backend": row.backend, "reference": row.reference}
    return {
        "file": printable(row.file),
        "status": row.status,
        "label": row.label,
        **{
            name: classes[who][place - 1] if place <= len(classes[who]) else None
            for name, who, place in _CLASSES
        },
        "margin": row.margin,
        "agree_top1": row.agree_top1 if compared else None,
        "agree_top5": row.agree_top5 if compared else None,
        "near_tie": near_tie(row, bound) if compared else None,
        "error": printable(row.error),
    }


def printable(text: str) -> str:
    """With the bytes of a file's name that are no UTF-8 written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _write_csv(path: Path, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for found in records:
            writer.writerow([_cell(found[name]) for name in COLUMNS])


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else value


def _write_parquet(
    path: Path, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    arrow, parquet = _arrow()
    types: dict[str, Callable[[], Any]] = {
        "string": arrow.string,
        "int32": arrow.int32,
        "float64": arrow.float64,
        "bool": arrow.bool_,
    }
    schema = arrow.schema(
        [(name, types[kind]()) for name, kind in COLUMNS.items()],
        metadata={"r18": json.dumps(about)},
    )
    columns = [[found[name] for found in records] for name in COLUMNS]
    arrays = [arrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), path)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"a .parquet file needs pyarrow: {error}\n"
            "  pip install 'r18[evaluate]', or choose an --out that ends in .csv"
        ) from None
    return pyarrow, pyarrow.parquet


__all__ = ["COLUMNS", "FORMATS", "check_target", "printable", "record", "write_table"]
