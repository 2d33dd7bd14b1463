"""Files that appear whole or not at all, and targets that are no files: links, pipes, folders."""

from __future__ import annotations

import os
import threading
from io import BufferedReader
from pathlib import Path

import pytest

from r18.atomic import check_file, check_replaceable, new_file, write_text
from r18.errors import R18Error, UsageError
from support import output_of

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has neither links nor pipes as files")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def interrupted() -> None:
        with new_file(target) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@POSIX
@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    if there:
        real.write_text("old")
    link.symlink_to("real.txt")
    check_file(link, "--out")
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [link, real]


@POSIX
def test_a_pipe_gets_the_contents_and_stays(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    check_file(pipe, "--out")
    write_text(pipe, "whole")
    reader.join(60)
    assert got == ["whole"]
    assert pipe.is_fifo()


@POSIX
def test_standard_output_is_no_file_to_replace(tmp_path: Path) -> None:
    """Also where it is one, which is open already; nor are other names of open files."""
    code = (
        "from pathlib import Path; from r18.atomic import check_file, write_text;"
        "print('before', flush=True);"
        "[(check_file(Path(f), '--out'), write_text(Path(f), 'text\\n'))"
        " for f in ('/dev/stdout', '/dev/fd/1', '/proc/self/fd/1')]"
    )
    assert output_of(code).split() == ["before", "text", "text", "text"]
    whole = f"import os, sys; os.dup2(os.open({str(tmp_path / 'f')!r}, os.O_RDWR | os.O_CREAT), 1);"
    inode = tmp_path / "inode"
    output_of(f"{whole} import pathlib; {code}; pathlib.Path({str(inode)!r}).write_text("
              "str(os.fstat(1).st_ino))")  # fmt: skip
    assert (tmp_path / "f").stat().st_ino == int(inode.read_text())
    assert (tmp_path / "f").read_text() == "before\n" + 3 * "text\n"


def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    target = tmp_path / ("ö" * 125)
    write_text(target, "text")
    assert target.read_text() == "text"


def test_only_a_file_of_the_same_kind_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "f"

    def ours(opened: BufferedReader) -> bool:
        return opened.read() == b"ours"

    check_replaceable(file, "page", ours)
    for text in ("", "ours"):
        file.write_text(text)
        check_replaceable(file, "page", ours)
    file.write_text("mine")
    with pytest.raises(UsageError) as refused:
        check_replaceable(file, "page", ours, "--out")
    assert str(refused.value) == f"--out '{file}' is no page; name another file, or delete it"
    with pytest.raises(R18Error, match=r"^'.*f' is no page; .*delete it, or not$"):
        check_replaceable(file, "page", ours, hint=", or not", error=R18Error)

    def fails(opened: BufferedReader) -> bool:
        raise OSError("the disk is gone")

    with pytest.raises(UsageError, match="and cannot be read: the disk is gone; name another file"):
        check_replaceable(file, "page", fails)
    assert file.read_text() == "mine"


@POSIX
def test_a_stream_is_never_opened_to_see_what_it_holds(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/stdout")
    for stream in (pipe, link, Path("/dev/stdout"), Path("/dev/null")):
        check_replaceable(stream, "page", lambda file: False)


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    for refuse in (lambda: check_file(tmp_path, "--out"), lambda: write_text(tmp_path, "")):
        with pytest.raises(UsageError, match="is a folder; name a file in it"):
            refuse()
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    with pytest.raises(UsageError, match="file' is no folder; choose another place"):
        check_file(below, "--out")
    with pytest.raises(R18Error, match="choose another place"):
        write_text(below, "")
