"""The finished batches of an evaluation, on the disk: a killed run continues from here.

The journal is an SQLite database in one file. A batch is one transaction, flushed to the disk: a
kill leaves all of it or nothing. One process writes at a time: it holds the write lock from the
moment it opens the journal, except for the moment between two transactions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from r18.errors import R18Error, UsageError, plain, show
from r18.evaluate.rows import BatchRows, Row, Times
from r18.files import Refused, open_file

APPLICATION = int.from_bytes(b"r18e", "big")
"""SQLite's application id: says which files are journals."""
FORMAT = 2
LIMIT = 16 << 30
"""The most bytes of a journal; of a million images it has 600 MB."""
_OPEN: set[Path] = set()
"""The journals that this process writes: reading the heading of one would release its lock."""
CHECK = "check"
"""The key of a row's digest, and of the heading's; journals of earlier versions have none."""

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
CREATE TABLE about (identity TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE images (place INTEGER PRIMARY KEY, file TEXT NOT NULL UNIQUE, image TEXT NOT NULL);
CREATE TABLE times (place INTEGER PRIMARY KEY, backend_ms REAL NOT NULL, reference_ms REAL);
"""


class DamagedJournal(UsageError):
    """A journal whose contents have changed since they were written."""


class Journal:
    """An open journal; see `open_journal`.

    facts: found at the beginning; they hold for all results.
    rows:  by file. times: one for each batch. new: it was begun just now.
    """

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        self.times: list[Times] = []
        self.new = False
        self._database = database
        self._discarded = False

    def append(self, batch: BatchRows) -> tuple[Row, ...]:
        """Keep a batch; returns the rows that are new.

        The first row of an image stays: a batch that two workers ran counts once. Raises `R18Error`
        when it cannot be written.
        """
        new = tuple(row for row in batch.rows if row.file not in self.rows)
        if not new:
            return new
        with self._writing():
            # As JSON: names of files may hold lone surrogates, which SQLite does not store.
            self._database.executemany(
                "INSERT INTO images (file, image) VALUES (?, ?)",
                [(json.dumps(row.file), _kept(row)) for row in new],
            )
            self._insert([] if batch.times is None else [batch.times])
        self.rows |= {row.file: row for row in new}
        return new

    def append_times(self, times: Sequence[Times]) -> None:
        """Keep times of batches whose rows are already there. Raises as `append`."""
        with self._writing():
            self._insert(times)

    def _insert(self, times: Sequence[Times]) -> None:
        self._database.executemany(
            "INSERT INTO times (backend_ms, reference_ms) VALUES (?, ?)",
            [(one.backend_ms, one.reference_ms) for one in times],
        )
        self.times.extend(times)

    def discard(self) -> None:
        """Delete the file when it is closed: its results are elsewhere now."""
        self._discarded = True

    def _read(self, identity: Mapping[str, Any]) -> bool:
        """Load the file; False for an empty one. Raises `UsageError`."""
        if not self.path.stat().st_size:
            return False
        try:
            format = self._number("user_version")
            if (self._number("application_id"), format) != (APPLICATION, FORMAT):
                raise _no_journal(self.path)
            if self._database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise ValueError("its pages do not fit together")
            self.facts = read_heading(self._database, self.path, identity)
            images = self._database.execute("SELECT file, image FROM images ORDER BY place")
            self.rows = {row.file: row for row in (read_image(*found) for found in images)}
            times = self._database.execute(
                "SELECT backend_ms, reference_ms FROM times ORDER BY place"
            )
            self.times = [read_times(*found) for found in times]
        except (sqlite3.Error, KeyError, TypeError, ValueError, RecursionError) as error:
            raise damaged(self.path, error) from None
        return True

    def _begin(self, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Replace all contents."""
        self.facts = dict(facts)
        self.new = True
        about = json.dumps(identity)
        sealed = self.facts | {CHECK: _digest(about, json.dumps(self.facts))}
        with self._writing():
            for table in ("about", "images", "times"):
                self._database.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _SCHEMA.split(";"):
                self._database.execute(statement)
            self._database.execute("INSERT INTO about VALUES (?, ?)", (about, json.dumps(sealed)))
        _flush_folder(self.path.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Commit the block's writes; hold the lock again."""
        try:
            yield
            self._database.execute("COMMIT")
            self._database.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise R18Error(
                f"cannot write '{self.path}': {error}\n"
                "  what it holds is kept: the same command continues from there"
            ) from error

    def _number(self, pragma: str) -> int:
        (found,) = self._database.execute(f"PRAGMA {pragma}").fetchone()
        return int(found)


@contextmanager
def open_journal(
    path: Path,
    identity: Mapping[str, Any],
    facts: Callable[[], dict[str, Any]],
    *,
    restart: bool = False,
) -> Iterator[Journal]:
    """The journal at a path, new or continued; folders above it are made.

    identity: the request of the results, as plain data. A journal of another one is not continued.
    facts:    called for a new journal.
    restart:  drop an existing journal.

    Raises `UsageError` for a journal of something else, a damaged one (`DamagedJournal`), a file
    that is no journal, or one that another process is writing; `R18Error` when it cannot be
    written. A file that is refused stays as it was, and what no `r18 evaluate` wrote is refused
    with `restart`, too.
    """
    found: dict[str, Any] | None = None
    place = path.resolve()
    if place in _OPEN:
        raise _busy(path)
    _check_ours(path)
    if restart and not _usable(path):
        found = facts()
        path.unlink()
    with closing(_locked(path)) as database:
        journal = Journal(path, database)
        _OPEN.add(place)
        try:
            if restart or not journal._read(identity):
                journal._begin(identity, facts() if found is None else found)
            yield journal
        finally:
            _OPEN.discard(place)
            empty = path.exists() and not path.stat().st_size
            if (journal._discarded or empty) and os.name != "nt":
                path.unlink()  # while it is still ours
    if (journal._discarded or empty) and os.name == "nt":
        path.unlink()


def _usable(path: Path) -> bool:
    """Whether a journal can begin in this file: there is none, it is empty, or a sound journal."""
    if not path.exists() or not path.stat().st_size:
        return True
    try:
        with closing(sqlite3.connect(path, timeout=0)) as database:
            known = database.execute("PRAGMA application_id").fetchone()
            sound = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return True  # `_locked` says why it cannot be opened
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # it quotes damaged pages
        return False
    return bool(known == (APPLICATION,) and sound == ("ok",))


def _locked(path: Path) -> sqlite3.Connection:
    """The database at a path, made if it is not there, with its write lock."""
    database = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            path.touch()
            before = path.stat().st_ino
            database = sqlite3.connect(path, timeout=0, isolation_level=None)
            database.execute("PRAGMA synchronous = EXTRA")
            database.execute("PRAGMA locking_mode = EXCLUSIVE")  # also between two transactions
            database.execute("BEGIN EXCLUSIVE")
            if path.exists() and path.stat().st_ino == before:
                return database
            database.close()  # another run ended just now, and deleted its journal
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        if database is not None:
            database.close()
        if isinstance(error, UnicodeDecodeError):
            raise damaged(path, error) from None
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_BUSY:
            raise _busy(path) from None
        if code == sqlite3.SQLITE_NOTADB:
            raise _no_journal(path) from None
        if code == sqlite3.SQLITE_CORRUPT:
            raise damaged(path, error) from None
        raise R18Error(f"cannot write '{path}': {error}; choose another --out") from error


def _busy(path: Path) -> UsageError:
    return UsageError(
        f"another process is writing '{path}'\n  wait for it, or choose another --out"
    )


def _check_ours(path: Path) -> None:
    """Raise `UsageError` for a file that is neither empty nor a journal, by its heading.

    SQLite would also play back or delete a file next to it that ends in `-journal`.
    """
    for file, known in ((path, _is_journal), (path.with_name(f"{path.name}-journal"), _is_undo)):
        try:
            with open_file(file, LIMIT) as stream:
                head = stream.read(100)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Refused as error:
            raise UsageError(f"'{file}': {error}; choose another --out") from None
        except OSError as error:
            raise R18Error(f"cannot write '{file}': {error}; choose another --out") from None
        if head and not known(head):
            raise _no_journal(file)


def _is_journal(head: bytes) -> bool:
    return head.startswith(b"SQLite format 3\0") and head[68:72] == APPLICATION.to_bytes(4, "big")


def _is_undo(head: bytes) -> bool:
    return head[:8] in (bytes.fromhex("d9d505f920a163d7"), bytes(8))


def _digest(*parts: str) -> str:
    """A digest of texts. SQLite does not notice a changed bit in a value; this does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _kept(row: Row) -> str:
    data = row.to_json()
    return json.dumps(data | {CHECK: _digest(json.dumps(data))})


def read_heading(
    database: sqlite3.Connection, path: Path, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a journal; raises `UsageError` if its identity is another, and what is raised
    for values that were changed: `sqlite3.Error`, `KeyError`, `TypeError`, `ValueError`.
    """
    ((then, text),) = database.execute("SELECT identity, facts FROM about")
    facts = dict(json.loads(text))
    about = facts.pop(CHECK, None)
    if about not in (None, _digest(then, json.dumps(facts))):
        raise ValueError("its heading was changed")
    _check_bound(facts.get("bound"))
    _check_same(path, dict(json.loads(then)), identity)
    return facts


def read_image(file: str, image: str) -> Row:
    """The row that `_kept` wrote; raises `ValueError` or `TypeError` for any other."""
    data = json.loads(image)
    check = data.pop(CHECK, None) if isinstance(data, dict) else None
    row = Row.from_json(data)
    if json.loads(file) != row.file or check not in (None, _digest(json.dumps(data))):
        raise ValueError(f"the row of {show(row.file)} was changed")
    return row


def _check_bound(value: object) -> None:
    number = type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]
    if value is not None and not number:
        raise ValueError(f"{show(value)} is no bound")


def read_times(backend: object, reference: object) -> Times:
    """The times of a batch; raises `ValueError` for anything but milliseconds."""
    for value in (backend, *([] if reference is None else [reference])):
        if not isinstance(value, float) or not 0 <= value < math.inf:
            raise ValueError(f"{show(value)} are no milliseconds")
    return Times(backend, reference)  # type: ignore[arg-type]


def _no_journal(path: Path) -> UsageError:
    return UsageError(
        f"'{path}' is no journal that this version of r18 wrote; choose another --out"
    )


def damaged(path: Path, why: Exception) -> DamagedJournal:
    """The error for a journal that cannot be read as it was written."""
    return DamagedJournal(
        f"the journal '{path}' is damaged: {plain(why)}\n"
        "  keep the results that are intact with --salvage, start over with --restart, or choose "
        "another --out"
    )


def _check_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UsageError` with every difference between a journal's identity and the one wanted."""
    different = [
        f"{name}: {_short(then.get(name))} there, {_short(now.get(name))} now{MEANS.get(name, '')}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if different:
        raise UsageError(
            f"'{path}' holds results of another evaluation; they do not mix\n  "
            + "\n  ".join(different)
            + "\n  ask for the same to go on, choose another --out, or drop them with --restart"
        )


MEANS = {"images_sha256": ": images were added, removed, renamed, or changed in size"}
"""What a difference says, where the name alone does not."""


def _short(value: object) -> str:
    """As messages show it: a digest by its beginning."""
    text = plain(value)
    return f"{text[:16]}…" if len(text) == 64 else text


def _flush_folder(folder: Path) -> None:
    """Flush the file's entry in its folder to the disk, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "FORMAT",
    "DamagedJournal",
    "Journal",
    "damaged",
    "open_journal",
    "read_heading",
    "read_image",
    "read_times",
]
