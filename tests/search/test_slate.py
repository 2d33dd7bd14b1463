"""What a worker is doing, in a file that its parent reads."""

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


def test_the_last_entry_is_read_as_often_as_it_is_asked_for(file: Path) -> None:
    mine = Slate(file, create=True)
    theirs = Slate(file)
    assert mine.read() == (0, b"")
    for number, content in enumerate((b"one", b"", b"x" * MOST_NBYTES, b"four"), 1):
        assert theirs.write(number, content)
        assert mine.read() == mine.read() == (number, content)


def test_what_is_too_long_leaves_the_last(file: Path) -> None:
    slate = Slate(file, create=True)
    assert slate.write(1, b"before")
    assert not slate.write(2, b"x" * (MOST_NBYTES + 1))
    assert slate.read() == (1, b"before")


def test_of_a_spoiled_entry_the_one_before_is_read(file: Path) -> None:
    slate = Slate(file, create=True)
    slate.write(1, b"one")
    slate.write(2, b"two")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"two", b"tow"))
    assert slate.read() == (1, b"one")
    file.write_bytes(whole.replace(b"one", b"eno"))
    assert slate.read() == (2, b"two")


@pytest.mark.parametrize("content", [b"", b"\xff", b"\xff" * 100_000, b"\0" * 100_000])
def test_of_a_spoiled_slate_nothing_is_read_until_it_is_written_to(
    file: Path, content: bytes
) -> None:
    slate = Slate(file, create=True)
    slate.write(1, b"before")
    file.write_bytes(content)
    number, read = slate.read()
    assert read == b""
    assert number == 0
    assert slate.write(2, b"after")
    assert slate.read() == (2, b"after")


def test_a_slate_is_made_once(file: Path) -> None:
    Slate(file, create=True).close()
    with pytest.raises(FileExistsError):
        Slate(file, create=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_slate_on_a_full_disk_says_so() -> None:
    slate = Slate(Path("/dev/full"))
    assert not slate.write(1, b"anything")
    assert slate.read()[1] == b""


def write_and_die(file: Path) -> None:
    slate = Slate(file)
    for number in range(1000):
        slate.write(number + 1, b"%d" % number * 1000)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_what_a_killed_process_wrote_last_is_there_and_whole(file: Path) -> None:
    """A killed process's last entry is whole, as is every entry that is read while it writes."""
    slate = Slate(file, create=True)
    process = get_context("spawn").Process(target=write_and_die, args=(file,))
    process.start()
    numbers = [0]
    while process.is_alive():
        number, content = slate.read()
        assert content == (b"%d" % (number - 1) * 1000 if number else b"")
        if number:  # else both slots were being written to
            numbers.append(number)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert numbers == sorted(numbers)
    assert slate.read() == (1000, b"999" * 1000)
