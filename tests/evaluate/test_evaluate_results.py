"""Rows, the journal on disk, tables, the summary, decoding; no network runs here."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluate_support import IDENTITY, facts, fill, rows
from r18.errors import ImageError, R18Error, UsageError
from r18.evaluate.decode import Decoded, decoded
from r18.evaluate.journal import Journal, open_journal
from r18.evaluate.rows import NOT_FINITE, OK, UNREADABLE, BatchRows, Row, Times
from r18.evaluate.sources import Item
from r18.evaluate.summary import Accuracy, share, summarise
from r18.evaluate.tables import COLUMNS, check_target, record, write_table
from r18.images.preprocess import Preprocess

GOOD = Row("a.png", 3, OK, (3, 1, 2, 4, 5), (3, 1, 2, 5, 4), 2.5)
CLOSE = Row("b.png", 4, OK, (6, 4, 1, 2, 3), (4, 6, 1, 2, 3), 0.5)
WRONG = Row("c.png", 4, OK, (6, 4, 1, 2, 0), (4, 6, 1, 2, 3), 2.0)
BAD = Row("d.png", 4, UNREADABLE, error="d.png: truncated")
NAN = Row("e.png", None, NOT_FINITE, error="1 of 10 logits of the backend are not finite")
ROWS = (GOOD, CLOSE, WRONG, BAD, NAN)
BOUND = 0.3


# -- summary -----------------------------------------------------------------------------------


def test_a_summary() -> None:
    times = [Times(1.0, 4.0), Times(2.0, 4.0), Times(9.0, 3.0)]
    found = summarise(ROWS, times, BOUND)
    assert (found.images, found.unreadable, found.compared) == (5, 1, 4)
    assert (found.agree_top1, found.agree_top5) == (1, 2)
    assert (found.near_ties, found.decided) == (1, 3)
    assert found.changed == (WRONG, NAN)
    assert found.accuracy == Accuracy(3, 1, 3)
    assert found.reference_accuracy == Accuracy(3, 3, 3)
    assert (found.backend_ms, found.reference_ms, found.speedup) == (2.0, 4.0, 2.0)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["accuracy"] == {"images": 3, "top1": 1 / 3, "top5": 1.0}
    assert [row["file"] for row in data["changed"]] == ["c.png", "e.png"]


@pytest.mark.parametrize(("margin", "changed"), [(2 * BOUND, 0), (2.01 * BOUND, 1)])
def test_twice_the_bound_decides(margin: float, changed: int) -> None:
    row = Row("a", None, OK, (1, 0), (0, 1), margin)
    assert len(summarise([row], [], BOUND).changed) == changed


def test_a_summary_without_a_reference() -> None:
    alone = Row("a.png", 3, OK, (3, 1, 2, 4, 5))
    found = summarise([alone, BAD], [Times(1.0)], None)
    assert (found.compared, found.near_ties, found.changed) == (0, 0, ())
    assert (found.accuracy, found.reference_accuracy) == (Accuracy(1, 1, 1), None)
    assert (found.backend_ms, found.reference_ms, found.speedup) == (1.0, None, None)
    assert summarise([NAN], [], None).changed == (NAN,)


def test_nothing_at_all() -> None:
    found = summarise([BAD], [], 0.0)
    assert (found.images, found.compared, found.accuracy, found.backend_ms) == (1, 0, None, None)


def test_a_share_is_100_only_when_it_is_all() -> None:
    assert share(50_000, 50_000) == "100.00 %"
    assert share(49_999, 50_000) == "99.99 %"
    assert share(1, 3) == "33.33 %"


# -- journal -----------------------------------------------------------------------------------


def batches(*sizes: int) -> list[BatchRows]:
    """Batches of rows with names of their own."""
    made, count = [], 0
    for size in sizes:
        made.append(rows(count, size))
        count += size
    return made


def taken_up(path: Path) -> Journal:
    def never() -> dict[str, Any]:
        raise AssertionError("the journal was started again")

    with open_journal(path, IDENTITY, never) as journal:
        return journal


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down.journal"
    fill(path, [BatchRows(ROWS, Times(1.0, 0.1 + 0.2)), BatchRows((Row("\udcff", 1, OK, (1,)),))])
    journal = taken_up(path)
    assert tuple(journal.rows.values()) == (*ROWS, Row("\udcff", 1, OK, (1,)))
    assert journal.times == [Times(1.0, 0.1 + 0.2)]
    assert journal.facts == facts()


def test_an_image_is_kept_once(tmp_path: Path) -> None:
    first, second = batches(2, 2)
    other = Row(first.rows[0].file, 1, UNREADABLE, error="another answer")
    with open_journal(tmp_path / "j", IDENTITY, facts) as journal:
        assert journal.append(first) == first.rows
        assert journal.append(first) == ()
        assert journal.append(BatchRows((other, *second.rows))) == second.rows
    assert tuple(taken_up(tmp_path / "j").rows.values()) == (*first.rows, *second.rows)


def writer(path: Path, done: list[BatchRows], said: Connection) -> None:
    """Write batches, and report each one, in a process that will be killed."""
    with open_journal(path, IDENTITY, facts) as journal:
        for batch in done:
            journal.append(batch)
            said.send(len(batch.rows))


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 0.02))
def test_a_journal_killed_at_any_moment_goes_on_without_loss(
    tmp_path_factory: pytest.TempPathFactory, seconds: float
) -> None:
    """A killed journal has every batch that was kept, whole, and at most the one being written."""
    done = batches(*[2, 1, 3] * 20)
    path = tmp_path_factory.mktemp("journals") / "j"
    fork = get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=writer, args=(path, done, there))
    process.start()
    there.close()
    time.sleep(seconds)
    process.kill()
    process.join()
    kept = 0
    with suppress(EOFError):
        while here.poll():
            kept += here.recv()
    with open_journal(path, IDENTITY, facts) as journal:
        kept_rows = list(journal.rows.values())
        whole = [len([row for batch in done[:count] for row in batch.rows]) for count in range(61)]
        assert len(kept_rows) in whole
        assert whole.index(len(kept_rows)) - whole.index(kept) in (0, 1)
        assert len(journal.times) == whole.index(len(kept_rows))
        for batch in done:
            journal.append(batch)
    assert list(taken_up(path).rows.values()) == [row for batch in done for row in batch.rows]
    assert os.listdir(path.parent) == ["j"]


def test_an_empty_file_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "j").touch()
    fill(tmp_path / "j", batches(2))
    assert len(taken_up(tmp_path / "j").rows) == 2


def test_other_results_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, batches(2))
    before = path.read_bytes()
    other = {"weights_sha256": "b" * 64, "backend": "numpy"}
    with (
        pytest.raises(
            UsageError,
            match=r"another evaluation.*\n  weights_sha256: a{16}… there, b{16}… now\n.*--restart",
        ),
        open_journal(path, other, facts),
    ):
        pass
    assert path.read_bytes() == before
    with open_journal(path, other, facts, restart=True) as journal:
        assert journal.rows == {}
    assert b"b" * 64 in path.read_bytes()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path / "j", IDENTITY, facts),
        pytest.raises(UsageError, match="another process is writing"),
        open_journal(tmp_path / "j", IDENTITY, facts),
    ):
        pass
    taken_up(tmp_path / "j")


def test_a_journal_that_is_done_with_is_deleted(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j", IDENTITY, facts) as journal:
        journal.discard()
    assert list(tmp_path.iterdir()) == []


def test_facts_that_cannot_be_found_leave_nothing(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise UsageError("no device")

    with pytest.raises(UsageError, match="no device"), open_journal(tmp_path / "j", {}, fail):
        pass
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "j", batches(1))
    before = (tmp_path / "j").read_bytes()
    with (
        pytest.raises(UsageError, match="no device"),
        open_journal(tmp_path / "j", {}, fail, restart=True),
    ):
        pass
    assert (tmp_path / "j").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("UPDATE images SET image = 'no json' WHERE place = 1", "damaged: "),
        ("UPDATE images SET image = '[]' WHERE place = 1", "damaged: "),
        ("""UPDATE images SET image = '{"file": "x"}' WHERE place = 1""", "damaged: "),
        ("UPDATE times SET backend_ms = NULL", None),
        ("DELETE FROM about", "damaged: "),
        ("DROP TABLE times", "damaged: no such table: times"),
        ("PRAGMA user_version = 3", "no journal that this version of r18 wrote"),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, change: str, match: str | None) -> None:
    path = tmp_path / "j"
    fill(path, batches(1, 1))
    with closing(sqlite3.connect(path)) as database:
        if match is None:
            with pytest.raises(sqlite3.IntegrityError):
                database.execute(change)
            return
        database.execute(change)
        database.commit()
    before = path.read_bytes()
    with pytest.raises(UsageError, match=match):
        taken_up(path)
    assert path.read_bytes() == before
    with open_journal(path, IDENTITY, facts, restart=True) as journal:
        assert journal.rows == {}


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_journal_with_a_damaged_page_is_refused(tmp_path: Path, page: int) -> None:
    path = tmp_path / "j"
    fill(path, batches(40, 40))
    data = bytearray(path.read_bytes())
    start = 4096 * page + 100 * (page == 0)
    data[start : start + 50] = b"\xff" * 50
    path.write_bytes(data)
    with pytest.raises(UsageError, match="damaged"):
        taken_up(path)
    assert path.read_bytes() == data
    filled_anew = open_journal(path, IDENTITY, facts, restart=True)
    with filled_anew as journal:
        journal.append(batches(1)[0])
    assert len(taken_up(path).rows) == 1


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (x)")
        database.commit()


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text('{"name": "something else"}\n'),
        lambda path: path.write_text('{"journal":"r18 evaluation","format":1}\n'),
        lambda path: path.write_bytes(b"SQLite format 3\0"),
        lambda path: path.write_bytes(b"x"),
        foreign,
    ],
)
def test_another_file_is_no_journal(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "j"
    write(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="no journal that this version of r18 wrote"):
        taken_up(path)
    assert path.read_bytes() == before
    with pytest.raises(R18Error, match="cannot write"):
        taken_up(path / "below a file")
    refused = pytest.raises(UsageError, match="no journal that this version of r18 wrote")
    with refused, open_journal(path, IDENTITY, facts, restart=True):
        pass
    assert path.read_bytes() == before  # not even then: it is somebody's


# -- tables ------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, Any]]:
    """A table, parsed to the types of its columns."""
    parse: dict[str, Any] = {
        "string": str,
        "int32": int,
        "float64": float,
        "bool": {"true": True, "false": False}.__getitem__,
    }
    with path.open(encoding="utf-8", newline="") as stream:
        return [
            {
                name: value if kind == "string" else (parse[kind](value) if value else None)
                for (name, kind), value in zip(COLUMNS.items(), row.values(), strict=True)
            }
            for row in csv.DictReader(stream)
        ]


def test_csv_and_parquet_hold_the_same(tmp_path: Path) -> None:
    from pyarrow import parquet

    odd = Row('a "b",\n\udcff é.png', None, OK, (1, 2), (2, 1), 0.1 + 0.2)
    rows = [*ROWS, odd]
    about = {"identity": IDENTITY, "facts": facts()}
    for suffix in ("csv", "parquet"):
        write_table(tmp_path / f"t.{suffix}", rows, BOUND, about)
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.to_pylist() == read_csv(tmp_path / "t.csv") == [record(r, BOUND) for r in rows]
    assert [str(kind) for kind in table.schema.types] == [
        {"float64": "double"}.get(kind, kind) for kind in COLUMNS.values()
    ]
    assert json.loads(table.schema.metadata[b"r18"]) == about
    assert sorted(os.listdir(tmp_path)) == ["t.csv", "t.parquet"]


def test_a_record() -> None:
    found = record(CLOSE, BOUND)
    assert list(found) == list(COLUMNS)
    assert [found[f"backend_{place}"] for place in range(1, 6)] == [6, 4, 1, 2, 3]
    assert (found["agree_top1"], found["agree_top5"], found["near_tie"]) == (False, True, True)
    bad = record(BAD, BOUND)
    assert bad["error"] == "d.png: truncated"
    assert {bad[name] for name in ("backend_1", "margin", "agree_top1", "near_tie")} == {None}
    assert record(CLOSE, None)["agree_top1"] is None


def test_targets_are_checked_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"'.txt'; known are .csv and .parquet"):
        check_target(tmp_path / "t.txt")
    (tmp_path / "t.csv").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        check_target(tmp_path / "t.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs pyarrow.*\n.*r18\[evaluate\]"):
        check_target(tmp_path / "t.parquet")


# -- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_are_decoded_in_order_and_so_many_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    started: list[str] = []

    def decode(path: Path, config: Preprocess) -> Decoded:
        started.append(path.name)
        return ImageError(path.name) if path.name == "3" else np.full((1,), int(path.name))

    monkeypatch.setattr("r18.evaluate.decode.decode", decode)
    batches = [[Item(str(2 * index)), Item(str(2 * index + 1))] for index in range(4)]
    done = 0
    for batch, images in decoded(iter(batches), tmp_path, Preprocess(), threads=1, ahead=ahead):
        assert batch == batches[done]
        expected = [str(2 * done), str(2 * done + 1)]
        said = [str(i) if isinstance(i, ImageError) else str(i[0]) for i in images]
        assert said == expected
        done += 1
        assert len(started) <= min(8, 2 * (done + ahead))
    assert done == 4
    assert started == [str(index) for index in range(8)]
