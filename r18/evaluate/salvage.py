"""The intact rows of a damaged journal.

A file that was cut off, or has bad pages, is still read page by page: SQLite gives rows until it
meets the damage, from either end. Every row has a digest, so that a damaged one is left out.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from r18.errors import UsageError
from r18.evaluate.journal import (
    DamagedJournal,
    damaged,
    open_journal,
    read_heading,
    read_image,
    read_times,
)
from r18.evaluate.rows import BatchRows

T = TypeVar("T")


def salvage_journal(path: Path, identity: Mapping[str, Any]) -> tuple[int, Path] | None:
    """Put a journal of the intact rows in the place of a damaged one, which is renamed.

    Returns the number of rows and the damaged file's new path; None if nothing is damaged. Raises
    `UsageError` if there is no journal, if its heading is not intact or names another evaluation,
    and if another damaged file is at the new path; nothing is changed then.
    """
    if not path.exists() or not path.stat().st_size:
        raise UsageError(f"there is no journal '{path}' to salvage")
    try:
        with open_journal(path, identity, dict):
            return None
    except DamagedJournal:
        pass
    aside = path.with_name(f"{path.name}.damaged")
    if aside.exists():
        raise UsageError(f"'{aside}' is there already: move it away, or choose another --out")
    facts, batch, times = _intact(path, identity)
    new = path.with_name(f"{path.name}.salvaged")
    with open_journal(new, identity, lambda: facts, restart=True) as journal:
        journal.append(batch)
        journal.append_times(times)
    os.rename(path, aside)
    os.rename(new, path)
    return len(batch.rows), aside


def _intact(path: Path, identity: Mapping[str, Any]) -> tuple[dict[str, Any], BatchRows, list[Any]]:
    """Facts, rows and times that can be read; raises `UsageError` without a heading."""
    name = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
    with closing(sqlite3.connect(name, uri=True)) as database:
        # Without this, SQLite reads nothing of a file that is shorter than its heading says.
        database.execute("PRAGMA writable_schema = ON")
        try:
            facts = read_heading(database, path, identity)
        except (sqlite3.Error, KeyError, TypeError, ValueError, RecursionError) as error:
            raise damaged(path, error) from None
        rows = _read(database, "file, image FROM images NOT INDEXED", read_image)
        times = _read(database, "backend_ms, reference_ms FROM times", read_times)
        return facts, BatchRows(tuple({row.file: row for row in rows}.values()), None), times


def _read(database: sqlite3.Connection, what: str, read: Callable[..., T]) -> list[T]:
    """The intact rows, in the order of `place`."""
    found: dict[int, T] = {}
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error, UnicodeDecodeError):  # the damage: the rest is out of reach
            for place, *values in database.execute(f"SELECT place, {what} ORDER BY place {order}"):
                with suppress(KeyError, TypeError, ValueError, RecursionError):
                    found[place] = read(*values)
    return [found[place] for place in sorted(found)]


__all__ = ["salvage_journal"]
