"""What a worker says it is at, in memory that its parent reads."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from r18_oracle.slate import MOST_NBYTES, Slate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "slate"


def test_the_newest_content_is_read_as_often_as_it_is_asked_for(file: Path) -> None:
    mine = Slate(file, create=True)
    theirs = Slate(file)
    assert mine.read() == (0, b"")
    for count, content in enumerate((b"one", b"", b"x" * MOST_NBYTES, b"four"), 1):
        assert theirs.write(content)
        assert mine.read() == mine.read() == (count, content)


def test_what_is_too_long_leaves_the_last(file: Path) -> None:
    slate = Slate(file, create=True)
    assert slate.write(b"before")
    assert not slate.write(b"x" * (MOST_NBYTES + 1))
    assert slate.read() == (1, b"before")


def test_a_spoiled_slate_is_read_within_its_bounds(file: Path) -> None:
    slate = Slate(file, create=True)
    slate.write(b"before")
    file.write_bytes(b"\xff" * file.stat().st_size)
    count, content = slate.read()
    assert count == 2**64 - 1
    assert len(content) == MOST_NBYTES


def test_a_slate_is_made_once(file: Path) -> None:
    Slate(file, create=True).close()
    with pytest.raises(FileExistsError):
        Slate(file, create=True)


def write_and_die(file: Path) -> None:
    slate = Slate(file)
    for number in range(1000):
        slate.write(b"%d" % number * 1000)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_what_a_killed_process_wrote_last_is_there_and_whole(file: Path) -> None:
    """Also whatever is read while it writes."""
    slate = Slate(file, create=True)
    process = get_context("spawn").Process(target=write_and_die, args=(file,))
    process.start()
    counts = [0]
    while process.is_alive():
        count, content = slate.read()
        assert content == (b"%d" % (count - 1) * 1000 if count else b"")
        counts.append(count)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert counts == sorted(counts)
    assert slate.read() == (1000, b"999" * 1000)
