"""Cached code is read back if it is intact; damaged code is rebuilt, with a warning."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from r18 import cache

CONTENT = bytes(range(256)) * 8
POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owners here")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the cache, in folders that `store` has made."""
    monkeypatch.setattr(cache, "_refused", set())
    path = tmp_path / "cache" / "kind" / "kernel.bin"
    cache.store(path, CONTENT)
    return path


def check_refused(path: Path, match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match):
        assert cache.load(path) is None
    cache.store(path, CONTENT)


def test_what_was_stored_is_loaded(kept: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(kept) == CONTENT
        assert cache.load(kept.with_name("absent")) is None
        assert cache.load(kept.parents[1] / "absent" / "absent") is None
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_damage_of_every_kind_is_found_and_mended(kept: Path) -> None:
    whole = kept.read_bytes()
    flipped = [bytearray(whole) for _ in range(4)]
    for changed, at in zip(flipped, (0, 64, 65, -1), strict=True):  # digest, line, content
        changed[at] ^= 1
    for damaged in (b"", whole[:10], whole[:64], whole[:-1], whole + b"x", *map(bytes, flipped)):
        kept.write_bytes(damaged)
        check_refused(kept, "is damaged, and compiled again")
        assert cache.load(kept) == CONTENT


def test_what_is_no_file_is_not_read(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)
    check_refused(kept, "is not used, and compiled again: .*FIFO")
    assert cache.load(kept) == CONTENT


@POSIX
def test_folders_are_the_users_own(kept: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in (kept.parent, kept.parents[1])}
    assert (modes, kept.stat().st_mode & 0o777) == ({0o700}, 0o600)


@POSIX
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(kept: Path, mode: int) -> None:
    kept.parent.chmod(mode)
    with pytest.warns(
        RuntimeWarning, match="other users may write to it\n .*chmod go-w.*R18_CACHE"
    ):
        assert cache.load(kept) is None
    other = kept.with_name("other.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each folder is named once
        cache.store(other, CONTENT)
        assert cache.load(kept) is None
    assert not other.exists()
    kept.parent.chmod(0o700)
    assert cache.load(kept) == CONTENT


@POSIX
def test_a_file_that_others_can_write_is_not_used(kept: Path) -> None:
    kept.chmod(0o620)
    check_refused(kept, "compiled again: other users may write to it")
    assert cache.load(kept) == CONTENT


@POSIX
def test_what_belongs_to_another_user_is_not_used(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match="it belongs to another user"):
        assert cache.load(kept) is None
    cache.store(kept.with_name("other.bin"), CONTENT)
    assert not kept.with_name("other.bin").exists()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "cache" / "kernel.bin"
    cache.store(path, CONTENT)
    assert cache.load(path) is None
