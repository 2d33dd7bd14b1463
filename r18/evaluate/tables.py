"""The results as a table, a row an image: CSV, or Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader, StringIO
from pathlib import Path
from typing import Any

from r18.atomic import check_file, output_file
from r18.errors import R18Error, UsageError, plain
from r18.evaluate.rows import OK, STATUSES, TOP, Row
from r18.evaluate.summary import near_tie
from r18.files import MOST_ROWS, TEXT_LIMIT, read_bytes, read_text

FORMATS = (".csv", ".parquet")
MOST_HEADING = 1 << 12
"""The most bytes of a CSV's heading; ours has 200."""

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
    check_suffix(path, "--out")
    check_file(path, "--out")
    if path.suffix.lower() == ".parquet":
        _arrow()


def is_table(path: Path, file: BufferedReader) -> bool:
    """Whether a file is a table of `write_table`, by its columns or metadata; no row is read.

    file: `path`, opened for reading. Raises `UsageError` where a Parquet file needs pyarrow.
    """
    if path.suffix.lower() == ".csv":
        line = file.readline(MOST_HEADING).decode("utf-8", "replace")
        try:
            return next(csv.reader([line], strict=True), []) == list(COLUMNS)
        except csv.Error:
            return False
    _, parquet = _arrow()
    try:
        schema = parquet.read_schema(file)
    except Exception:  # as in `_read_parquet`
        return False
    return b"r18" in (schema.metadata or {}) or schema.names == list(COLUMNS)


def check_suffix(path: Path, what: str) -> None:
    """Raise `UsageError` for a file that is no table by its name."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"{what} '{path}': nothing is known about '{path.suffix or path.name}'; known are "
            f"{' and '.join(FORMATS)}"
        )


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
        with output_file(path) as draft:
            write(draft, records, about)
    except OSError as error:
        raise R18Error(f"cannot write '{path}': {error}") from error


def read_table(path: Path) -> tuple[list[tuple[Row, bool | None]], dict[str, Any]]:
    """Read a table of `write_table`: each row and whether it is a near tie, and `about`.

    A CSV tells nothing about itself: `about` is empty. Raises `UsageError` for a file that is
    damaged or no such table.
    """
    check_suffix(path, "the evaluation")
    read = _read_csv if path.suffix.lower() == ".csv" else _read_parquet
    try:
        records, about = read(path)
        return [_row(found) for found in records], about
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise UsageError(
            f"the evaluation '{path}' cannot be read: {plain(error)}\n"
            "  r18 evaluate --out writes it"
        ) from None


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
    """The text with the bytes of a file's name that are no UTF-8 written out."""
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


def _read_csv(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    stream = StringIO(read_text(path, TEXT_LIMIT), newline="")
    reader = csv.DictReader(stream, strict=True)
    if tuple(reader.fieldnames or ()) != tuple(COLUMNS):
        raise ValueError("its heading is not that of an evaluation")
    found: list[dict[str, Any]] = []
    for line in reader:
        if None in line or None in line.values():
            raise ValueError(f"line {reader.line_num} has not {len(COLUMNS)} columns")
        if len(found) == MOST_ROWS:
            raise ValueError(f"it has more than {MOST_ROWS:,} rows")
        found.append({name: _value(COLUMNS[name], line[name]) for name in COLUMNS})
    return found, {}


def _value(kind: str, cell: str) -> Any:
    if kind == "string":
        return cell
    if not cell:
        return None
    if kind == "bool":
        return {"true": True, "false": False}[cell]
    if kind != "float64":
        if not re.fullmatch(r"[0-9]{1,9}", cell):
            raise ValueError(f"'{cell}' is no class")
        return int(cell)
    if not math.isfinite(number := float(cell)):
        raise ValueError(f"'{cell}' is no finite number")
    return number


def _read_parquet(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    arrow, parquet = _arrow()
    data = read_bytes(path, TEXT_LIMIT)
    try:
        file = parquet.ParquetFile(arrow.BufferReader(data))
        if file.metadata.num_rows > MOST_ROWS:
            raise ValueError(f"it has more than {MOST_ROWS:,} rows")
        schema = file.schema_arrow
        if [(n, str(t)) for n, t in zip(schema.names, schema.types, strict=True)] != [
            (name, {"float64": "double"}.get(kind, kind)) for name, kind in COLUMNS.items()
        ]:
            raise ValueError("its columns are not those of an evaluation")
        about = json.loads((schema.metadata or {}).get(b"r18", b"{}"))
        if not isinstance(about, dict):
            raise ValueError("its metadata is no object")
        return file.read().to_pylist(), about
    except Exception as error:  # pyarrow raises nearly anything on hostile bytes
        raise ValueError(str(error)) from None


def _row(found: Mapping[str, Any]) -> tuple[Row, bool | None]:
    if found["status"] not in STATUSES:
        raise ValueError(f"'{found['status']}' is no status")
    classes = {
        who: tuple(found[name] for name, of, _ in _CLASSES if of == who and found[name] is not None)
        for who in ("backend", "reference")
    }
    row = Row(
        found["file"],
        found["label"],
        found["status"],
        classes["backend"],
        classes["reference"],
        found["margin"],
        found["error"],
    )
    return row, found["near_tie"]


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


__all__ = [
    "COLUMNS",
    "FORMATS",
    "check_target",
    "is_table",
    "printable",
    "read_table",
    "record",
    "write_table",
]
