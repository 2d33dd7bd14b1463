"""Compiled code on the disk: read only if it is what was written, and only from the user's folder.

Compiled code runs with the user's rights and is loaded without questions: damaged code aborts the
process, or computes something else. Each file begins with a SHA-256 digest of the rest. That finds
damage, not malice, so a folder that others could write to is not used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path

from r18.atomic import new_file
from r18.files import open_file

MOST_NBYTES = 1 << 30
"""The most bytes of a cached file; a kernel's have some hundred thousand."""
_DIGEST = 64
"""Characters of a digest."""

_refused: set[Path] = set()
"""Folders that are not used; each is named once."""


def load(path: Path) -> bytes | None:
    """The bytes that `store` wrote, or None: they are absent, damaged, or not the user's own.

    Warns of the last two.
    """
    if not _usable(path.parent):
        return None
    try:
        with open_file(path, MOST_NBYTES) as stream:
            foreign = _foreign(os.fstat(stream.fileno()))
            found = stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"the compiled code in '{path}' is not used, and compiled again: {error}")
        return None
    content = found[_DIGEST + 1 :]
    if foreign:
        _warn(f"the compiled code in '{path}' is not used, and compiled again: {foreign}")
    elif found[: _DIGEST + 1] != _digest(content):
        _warn(f"the compiled code in '{path}' is damaged, and compiled again")
    else:
        return content
    return None


def store(path: Path, content: bytes) -> None:
    """Write a file for `load`, whole or not at all; a cache that cannot be written costs time."""
    with suppress(OSError):
        _make(path.parent)
        if not _usable(path.parent):
            return
        with new_file(path) as draft:
            draft.touch(0o600)
            draft.write_bytes(_digest(content) + content)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _make(folder: Path) -> None:
    """Make a folder that only the user may enter, and those above it."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def _usable(folder: Path) -> bool:
    """Whether only the user can have written the folder's files; warns once if others can."""
    try:
        foreign = _foreign(folder.stat())
    except OSError:
        return False
    if foreign and folder not in _refused:
        _refused.add(folder)
        _warn(
            f"'{folder}' is not used to keep compiled code: {foreign}\n"
            "  make it yours alone (chmod go-w), or set R18_CACHE to a folder that is"
        )
    return not foreign


def _foreign(found: os.stat_result) -> str:
    """Why others can have written a file or folder; empty if only the user can."""
    if not hasattr(os, "geteuid"):  # Windows: a profile is its user's own
        return ""
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return ""


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


__all__ = ["load", "store"]
