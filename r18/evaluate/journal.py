"""What is done of an evaluation, on the disk after every batch: a killed run goes on from here.

Lines of JSON: a heading, which says what the results are of, then one line a batch. A line is
written in one piece and flushed to the disk, so all that a kill can leave is a last line that has
no end; it is cut off, and its images are done again. One process writes at a time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from r18.errors import R18Error, UsageError
from r18.evaluate.rows import BatchRows, Row, Times

KIND = "r18 evaluation"
FORMAT = 1


class Journal:
    """An open journal; see `open_journal`.

    facts: what was found out when it was begun, and holds for all of its results.
    rows:  by file. times: one a batch.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        self.times: list[Times] = []
        self._descriptor = descriptor
        self._discarded = False

    def append(self, batch: BatchRows) -> tuple[Row, ...]:
        """Keep a batch; returns the rows that are new.

        Of an image that is there already the first row stays: a batch that two workers did counts
        once. Raises `R18Error` when it cannot be written.
        """
        new = tuple(row for row in batch.rows if row.file not in self.rows)
        if new:
            batch = BatchRows(new, batch.times)
            self._write(batch.to_json())
            self._keep(batch)
        return new

    def discard(self) -> None:
        """Have it deleted when it is closed: what it holds is elsewhere now."""
        self._discarded = True

    def _keep(self, batch: BatchRows) -> None:
        self.rows |= {row.file: row for row in batch.rows}
        if batch.times is not None:
            self.times.append(batch.times)

    def _begin(self, identity: Mapping[str, Any], facts: Callable[[], dict[str, Any]]) -> None:
        try:
            self.facts = facts()
        except BaseException:
            if not os.fstat(self._descriptor).st_size:
                self.path.unlink()
            raise
        os.ftruncate(self._descriptor, 0)
        heading = {"journal": KIND, "format": FORMAT, "identity": identity, "facts": self.facts}
        self._write(heading)
        _flush_folder(self.path.parent)

    def _write(self, data: Mapping[str, Any]) -> None:
        line = (json.dumps(data, separators=(",", ":")) + "\n").encode("ascii")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise R18Error(
                f"cannot write '{self.path}': {error}\n"
                "  what it holds is kept: the same command goes on from there"
            ) from error

    def _read(self, identity: Mapping[str, Any]) -> bool:
        """Take in what is there, without a last line that has no end; False: nothing is."""
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)
        lines = text[:whole].splitlines()
        if not lines:
            return False
        heading = self._parsed(1, lines[0])
        if (heading.get("journal"), heading.get("format")) != (KIND, FORMAT):
            raise UsageError(
                f"'{self.path}' is no journal that this version of r18 wrote; choose another --out"
            )
        try:
            then, self.facts = heading["identity"], heading["facts"]
        except KeyError:
            raise self._damaged(1) from None
        _check_same(self.path, then, identity)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._keep(BatchRows.from_json(self._parsed(number, line)))
            except (KeyError, TypeError):
                raise self._damaged(number) from None
        return True

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            data = json.loads(line)
        except ValueError:
            raise self._damaged(number) from None
        if not isinstance(data, dict):
            raise self._damaged(number)
        return data

    def _damaged(self, number: int) -> UsageError:
        return UsageError(
            f"the journal '{self.path}' is damaged in line {number}\n"
            "  begin anew with --restart, or choose another --out"
        )


@contextmanager
def open_journal(
    path: Path,
    identity: Mapping[str, Any],
    facts: Callable[[], dict[str, Any]],
    *,
    restart: bool = False,
) -> Iterator[Journal]:
    """The journal at a path, begun or taken up again; folders above it are made.

    identity: what the results are of; plain data. A journal of anything else is not continued.
    facts:    called when a journal is begun.
    restart:  drop what is there.

    Raises `UsageError` for a journal of something else, a damaged one, or one that another process
    is writing; `R18Error` when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise R18Error(f"cannot write '{path}': {error}; choose another --out") from error
    journal = Journal(path, descriptor)
    try:
        if not _locked(descriptor):
            raise UsageError(
                f"another process is writing '{path}'\n  wait for it, or choose another --out"
            )
        if restart or not journal._read(identity):
            journal._begin(identity, facts)
        yield journal
        if journal._discarded and os.name != "nt":
            path.unlink()  # while it is still ours
    finally:
        os.close(descriptor)
    if journal._discarded and os.name == "nt":
        path.unlink()


def _check_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UsageError` with every difference between what a journal is of, and what is asked."""
    different = [
        f"{name}: {_short(then.get(name))} there, {_short(now.get(name))} now"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if different:
        raise UsageError(
            f"'{path}' holds results of another evaluation; they do not mix\n  "
            + "\n  ".join(different)
            + "\n  ask for the same to go on, choose another --out, or drop them with --restart"
        )


def _short(value: object) -> str:
    """As messages show it: a digest by its beginning."""
    text = str(value)
    return f"{text[:16]}…" if len(text) == 64 else text


def _locked(descriptor: int) -> bool:
    """Take the file for this process, until it ends or closes it; False when another has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 1 << 62, os.SEEK_SET)  # a byte that no line reaches
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks: nobody can tell
    return True


def _flush_folder(folder: Path) -> None:
    """Have the disk hold that the file is there, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["FORMAT", "Journal", "open_journal"]
