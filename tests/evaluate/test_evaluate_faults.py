"""Whatever happens to a run, nothing of the user's is destroyed, lost or duplicated."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from evaluate_support import (
    IDENTITY,
    cut_journal,
    facts,
    fill,
    here,
    image_set,
    numbered,
    photographs,
    request,
    rows,
    run,
    weights,
)
from r18.errors import R18Error, UsageError
from r18.evaluate.journal import open_journal
from r18.evaluate.rows import BatchRows
from r18.evaluate.run import Progress, evaluate, in_batches, journal_of
from r18.evaluate.salvage import salvage_journal
from r18.evaluate.sources import find_images
from r18.evaluate.tables import write_table
from support import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images", numbered(7))


def files(out: Path) -> list[str]:
    return [row["file"] for row in csv.DictReader(out.read_text().splitlines())]


def at(done: int, what: Callable[[], object]) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        if progress.done >= done:
            what()

    return tell


def stop() -> None:
    raise KeyboardInterrupt


def interrupted(folder: Path, out: Path, done: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folder, out, on_progress=at(done, stop))


# -- what is the user's --------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("suffix", ["", "-journal"])
def test_a_file_in_the_journals_place_stays(
    folder: Path, tmp_path: Path, restart: bool, suffix: str
) -> None:
    mine = tmp_path / f"t.csv.journal{suffix}"
    mine.write_text("my diary\n")
    with pytest.raises(UsageError, match="is no journal"):
        run(folder, tmp_path / "t.csv", restart=restart)
    assert mine.read_text() == "my diary\n"


def test_a_file_next_to_a_journal_stays(folder: Path, tmp_path: Path) -> None:
    """A file next to a journal is not touched; SQLite would play it back, or delete it."""
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    mine = tmp_path / "t.csv.journal-journal"
    mine.write_text("my diary\n")
    with pytest.raises(UsageError, match="is no journal"):
        run(folder, out)
    assert mine.read_text() == "my diary\n"
    mine.unlink()
    assert run(folder, out).resumed == 3


@pytest.mark.skipif(os.name == "nt", reason="a folder has no descriptor on Windows")
def test_a_new_journal_s_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new journal's folder is flushed, or after a power failure its name may be missing."""
    flushed: list[Path] = []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(Path(os.readlink(f"/dev/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", flush)
    fill(tmp_path / "t.journal", [rows(0, 2)])
    assert flushed == [tmp_path]
    fill(tmp_path / "t.journal", [rows(2, 2)])
    assert flushed == [tmp_path], "its name is there already"


def replaced(path: Path) -> None:
    """Replace an image by another of the same size and times."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_image_that_was_replaced_is_noticed_on_resume(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    replaced(folder / numbered(7)[1])
    with pytest.raises(UsageError, match=r"'image001.png': replaced by another image since"):
        run(folder, out)
    assert journal_of(out).exists()
    assert run(folder, out, restart=True).summary.images == 7


def test_an_image_that_was_only_touched_is_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    assert run(folder, out).resumed == 3


def test_an_image_that_is_replaced_meanwhile_is_noticed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    with pytest.raises(R18Error, match=r"'image000\.png': replaced by another image since"):
        run(folder, out, on_progress=at(7, lambda: replaced(folder / numbered(7)[0])))
    assert not out.exists()


def test_images_that_vanish_do_not_end_the_run_well(folder: Path, tmp_path: Path) -> None:
    """Images that vanish end the run with an error; only their own rows are missing."""
    out, kept = tmp_path / "t.csv", tmp_path / "kept"
    gone = [numbered(7)[index] for index in (3, 5, 6)]  # the one between them stays
    kept.mkdir()

    def remove() -> None:
        for name in gone:
            if (folder / name).exists():
                (folder / name).rename(kept / name)

    with pytest.raises(R18Error, match=r"3 photographs vanished .*'image003\.png'"):
        run(folder, out, on_progress=at(3, remove))
    assert not out.exists()
    for name in gone:
        (kept / name).rename(folder / name)
    done = run(folder, out)
    assert (done.resumed, done.summary.unreadable) == (4, 0)
    assert files(out) == numbered(7)


def test_images_that_vanish_when_all_are_done(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    first = folder / numbered(7)[0]
    with pytest.raises(R18Error, match="one photograph vanished"):
        run(folder, out, on_progress=at(7, lambda: first.unlink(missing_ok=True)))
    assert journal_of(out).exists()


# -- identity, not count -------------------------------------------------------------------------


class LastFirst:
    """An engine that finishes its batches in another order."""

    workers = None

    def __init__(self, folder: Path) -> None:
        self._here = here(request(), image_set(folder))
        self.running, self.bound, self.close = (
            self._here.running,
            self._here.bound,
            self._here.close,
        )

    def results(self, batches: Any) -> Iterator[BatchRows]:
        return self._here.results(list(reversed(batches)))


def test_batches_done_out_of_order_are_not_done_again(folder: Path, tmp_path: Path) -> None:
    images, out = image_set(folder), tmp_path / "t.csv"
    engine = LastFirst(folder)
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, images, request(), weights(), out, on_progress=at(4, stop))
    engine.close()
    with closing(sqlite3.connect(journal_of(out))) as database:
        done = [
            json.loads(file)
            for (file,) in database.execute("SELECT file FROM images ORDER BY place")
        ]
    assert done == numbered(7)[6:] + numbered(7)[3:6]
    assert run(folder, out).resumed == 4
    assert files(out) == numbered(7)
    run(folder, tmp_path / "whole.csv")
    assert out.read_text() == (tmp_path / "whole.csv").read_text()


def test_names_that_differ_in_case_only(tmp_path: Path) -> None:
    names = ["A.png", "a.PNG", "a.png", "b/A.png", "b/a.png"]
    folder = photographs(tmp_path / "images", names)
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{n},1\n" for n in names))
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    assert run(folder, out).resumed == 3
    assert files(out) == names


def test_a_name_written_in_two_ways_is_listed_twice(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", ["a.png"])
    (folder / "val.txt").write_text("a.png 1\n./a.png 1\n")
    with pytest.raises(UsageError, match=r"'./a.png' is listed twice"):
        find_images(folder, 10)


# -- two runs ------------------------------------------------------------------------------------

HOLD = """
import json
import sys
from pathlib import Path
from r18.evaluate.journal import open_journal
from r18.evaluate.rows import OK, BatchRows, Row
identity, facts = map(json.loads, sys.argv[2:])
with open_journal(Path(sys.argv[1]), identity, lambda: facts) as journal:
    for index in range(10_000):
        journal.append(BatchRows((Row(f"{index}.png", 1, OK, (1,), (1,), 0.5),)))
        if index == 20:
            print("on", flush=True)
        if index > 20 and index % 50 == 0 and Path(sys.argv[1] + ".stop").exists():
            break
"""


def test_two_runs_at_one_output(tmp_path: Path) -> None:
    """The journal's lock is held between transactions too."""
    path = tmp_path / "j"
    command = [sys.executable, "-c", HOLD, str(path), json.dumps(IDENTITY), json.dumps(facts())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "on\n"
        for _ in range(200):
            refused = pytest.raises(UsageError, match="another process is writing")
            with refused, open_journal(path, IDENTITY, facts):
                pass
        (tmp_path / "j.stop").touch()
        assert other.wait(60) == 0
    with open_journal(path, IDENTITY, facts) as journal:
        assert len(journal.rows) > 20


def test_a_run_that_begins_as_another_ends_does_not_repeat_it(folder: Path, tmp_path: Path) -> None:
    """A run that starts as another ends repeats nothing, though it saw no table and no journal."""
    out = tmp_path / "t.csv"
    images = image_set(folder)
    slow = here(request(), images)
    plain = slow.running

    def running() -> Any:
        run(folder, out)
        return plain()

    slow.running = running  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="results of an earlier evaluation"):
        evaluate(slow, images, request(), weights(), out)
    slow.close()
    assert files(out) == numbered(7)
    assert not journal_of(out).exists()


# -- the disk ------------------------------------------------------------------------------------


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Have writes beyond `nbytes` of any file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "j"
    kept = 0
    refused = pytest.raises(R18Error, match=r"cannot write .*\n  what it holds is kept")
    with refused, open_journal(path, IDENTITY, facts) as journal, full_disk(100_000):
        while True:
            journal.append(rows(kept, 10))
            kept += 10
    assert 0 < kept < 1000
    with open_journal(path, IDENTITY, facts) as journal:
        assert len(journal.rows) == kept
        journal.append(rows(kept, 10))
    with open_journal(path, IDENTITY, facts) as journal:
        assert list(journal.rows) == [f"{index}.png" for index in range(kept + 10)]


def test_a_disk_that_is_full_at_the_end_keeps_the_journal(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 7)
    with full_disk(300), pytest.raises(R18Error, match="cannot write"):
        write_table(out, rows(0, 20).rows, 0.5, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "t.csv.journal"]
    assert run(folder, out).resumed == 7


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.999])
def test_a_journal_cut_in_the_middle_is_refused_and_kept(tmp_path: Path, share: float) -> None:
    path = tmp_path / "j"
    cut = cut_journal(path, 200, share)
    with pytest.raises(UsageError, match="damaged"), open_journal(path, IDENTITY, facts):
        pass
    assert path.read_bytes() == cut


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.999])
def test_what_is_intact_of_a_cut_journal_is_salvaged(tmp_path: Path, share: float) -> None:
    path = tmp_path / "j"
    cut = cut_journal(path, 1000, share)
    with pytest.raises(UsageError, match="another evaluation"):
        salvage_journal(path, {**IDENTITY, "batch": 3})
    assert path.read_bytes() == cut
    count, aside = salvage_journal(path, IDENTITY) or (0, path)
    assert aside.read_bytes() == cut
    assert count > 1000 * (share - 0.15)
    with open_journal(path, IDENTITY, facts) as journal:
        assert not journal.new
        all_rows = {row.file: row for row in rows(0, 1000).rows}
        assert len(journal.rows) == count
        assert journal.rows.items() <= all_rows.items()
        assert journal.facts == facts()
        journal.append(rows(0, 1000))
        assert len(journal.rows) == 1000
    assert salvage_journal(path, IDENTITY) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j", "j.damaged"]


def test_rows_on_both_sides_of_a_bad_page_are_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, (rows(first, 10) for first in range(0, 1000, 10)))
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("PRAGMA page_size").fetchone()
        changed = "UPDATE images SET image = replace(image, '0.25', '0.75') WHERE place = 7"
        database.execute(changed)
        database.commit()
    data = bytearray(path.read_bytes())
    middle = len(data) // page // 2 * page
    data[middle : middle + page] = b"\xff" * page
    path.write_bytes(data)
    salvage_journal(path, IDENTITY)
    with open_journal(path, IDENTITY, facts) as journal:
        kept = set(journal.rows)
    assert {"0.png", "999.png"} <= kept
    assert "6.png" not in kept  # its digest is of another margin
    assert 900 < len(kept) < 999


def test_nothing_to_salvage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with pytest.raises(UsageError, match="no journal"):
        salvage_journal(path, IDENTITY)
    assert not path.exists()
    fill(path, [rows(0, 10)])
    path.write_bytes(path.read_bytes()[:-4096])
    path.with_name("j.damaged").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is there already"):
        salvage_journal(path, IDENTITY)
    assert path.with_name("j.damaged").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("table", "column", "old", "new"),
    [
        ("images", "image", '"backend": [1', '"backend": [7'),
        ("images", "image", '"margin": 0.25', '"margin": 0.75'),
        ("images", "file", '"3.png"', '"8.png"'),
        ("images", "image", '"label": 1', '"label": "1"'),
        ("images", "image", '"status": "ok"', '"status": "fine"'),
        ("about", "facts", "0.5", "0.7"),
        ("times", "backend_ms", "1.5", "-1.5"),
    ],
)
def test_a_changed_value_is_noticed(
    tmp_path: Path, table: str, column: str, old: str, new: str
) -> None:
    """A changed value in a journal with sound pages is noticed."""
    path = tmp_path / "j"
    fill(path, [rows(0, 5)])
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
        database.commit()
    with pytest.raises(UsageError, match="damaged"), open_journal(path, IDENTITY, facts):
        pass


@pytest.mark.parametrize("times", [(-1.0, 1.0), (1.0, -1.0), (1.0, float("inf")), ("a", 1.0)])
def test_times_that_are_none_are_noticed(tmp_path: Path, times: tuple[Any, Any]) -> None:
    """Times that are not numbers are noticed, although a batch's times have no digest."""
    path = tmp_path / "t.journal"
    fill(path, [rows(0, 2), rows(2, 2)])
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE times SET backend_ms = ?, reference_ms = ? WHERE place = 2", times)
        database.commit()
    with pytest.raises(UsageError, match="are no milliseconds"):
        fill(path, [])


def test_a_journal_without_digests_goes_on(tmp_path: Path) -> None:
    """A journal without digests, as the first versions wrote, continues."""
    path = tmp_path / "j"
    fill(path, [rows(0, 5)])
    with closing(sqlite3.connect(path)) as database:
        for table, column in (("images", "image"), ("about", "facts")):
            for place, text in list(database.execute(f"SELECT rowid, {column} FROM {table}")):
                data = json.loads(text)
                del data["check"]
                data.pop("seen", None)
                database.execute(
                    f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (json.dumps(data), place)
                )
        database.commit()
    with open_journal(path, IDENTITY, facts) as journal:
        assert tuple(journal.rows.values()) == rows(0, 5).rows


# -- a scheduler that is killed ------------------------------------------------------------------

CLUSTER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


def test_a_killed_scheduler_loses_and_repeats_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from r18.evaluate.distributed import Cluster, connected

    monkeypatch.setattr("r18.evaluate.distributed.WAIT_FOR_WORKERS", 10)
    (tmp_path / "cluster.py").write_text(CLUSTER)
    images, out = image_set(folder), tmp_path / "t.csv"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "cluster.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with connected(address) as client:
                engine = Cluster(client, request(), images.folder)
                kill = at(3, lambda: os.killpg(process.pid, signal.SIGKILL))
                with pytest.raises(R18Error, match="what is done is kept"):
                    evaluate(engine, images, request(), weights(), out, on_progress=kill)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert journal_of(out).exists()
    assert run(folder, out).resumed >= 3
    assert files(out) == numbered(7)


def test_batches(folder: Path) -> None:
    assert [len(batch) for batch in in_batches(image_set(folder).items, 3)] == [3, 3, 1]
