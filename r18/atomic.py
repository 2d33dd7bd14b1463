"""Files and folders that appear whole or not at all.

Contents are written to a hidden sibling of the target, flushed to the disk, and then renamed. An
error, or Ctrl-C, removes the sibling and leaves the target as it was. After a crash of the machine
a sibling named `.TARGET.….tmp` may stay; nothing reads it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from r18.errors import R18Error, UsageError
from r18.files import open_file

MOST_NAME = 200
"""The bytes of a target's name that are in the sibling's."""
MOST_LINKS = 40
"""The links in a row that a system follows."""


def check_folder(path: Path, option: str, *, writable: bool = True) -> None:
    """Raise `UsageError` where `path` is no folder and cannot become one: results would be lost.

    option: the user's, for the message. writable: whether it must be possible to write there.
    """
    if why := _no_folder(path, writable):
        raise UsageError(f"{option} {path}: {why}; name a folder, which may be new")


def check_file(path: Path, option: str) -> None:
    """Raise `UsageError` where no file could be written at `path`: results would be lost."""
    if path.is_dir():
        raise UsageError(f"{option} '{path}' is a folder; name a file in it")
    if is_stream(path):
        return
    if why := _no_folder(_followed(path).parent, writable=True):
        raise UsageError(f"cannot write '{path}': {why}; choose another place")


def holds_something(path: Path) -> bool:
    """Whether there is a file at `path` that a new one would replace, and it is not empty."""
    return not is_stream(path) and path.is_file() and path.stat().st_size > 0


def check_replaceable(
    path: Path,
    kind: str,
    known: Callable[[BufferedReader], bool],
    option: str = "",
    hint: str = "",
    error: type[R18Error] = UsageError,
) -> None:
    """Raise `error` for a file of something else, which a new file of this kind would destroy.

    kind: what is written, such as "page". known: whether an opened file is of this kind; it may
    raise `OSError` where that cannot be read. option: the user's, for the message. hint: its end.

    An empty file may be replaced. A pipe, a device or `/dev/stdout` is not replaced at all.
    """
    if not holds_something(path):
        return
    name = f"{option} '{path}'".lstrip()
    try:
        with open_file(path, sys.maxsize) as file:
            ours = known(file)
    except OSError as problem:
        raise error(f"{name} is there and cannot be read: {problem}; name another file") from None
    if not ours:
        raise error(f"{name} is no {kind}; name another file, or delete it{hint}")


def check_output(
    path: Path, option: str, kind: str, known: Callable[[BufferedReader], bool]
) -> None:
    """`check_file`, then `check_replaceable`: for a file that an option names."""
    check_file(path, option)
    check_replaceable(path, kind, known, option)


def _no_folder(path: Path, writable: bool) -> str:
    """Why `path` is no folder and cannot become one, or ''."""
    first = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not first.exists():
        return f"'{first}' is a link that leads nowhere"
    if not first.is_dir():
        return f"'{first}' is no folder"
    return f"'{first}' cannot be written" if writable and not os.access(first, os.W_OK) else ""


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yields a path to write; when the block ends, that file replaces `target` in one step.

    Folders above it are made. Raises `OSError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = _sibling(target)
    try:
        yield draft
        _flush(draft)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _flush(target.parent)


@contextmanager
def output_file(target: Path) -> Iterator[Path]:
    """`new_file` for a place that the user names.

    A link is followed. A pipe or a device, such as `/dev/stdout`, gets the contents when the block
    ends.
    """
    if not is_stream(target):
        with new_file(_followed(target)) as draft:
            yield draft
        return
    with tempfile.TemporaryDirectory(prefix="r18-") as folder:
        draft = Path(folder, target.name)
        yield draft
        with draft.open("rb") as written, target.open("ab") as stream:
            shutil.copyfileobj(written, stream)


def write_text(target: Path, text: str) -> None:
    """Write a text file, whole or not at all; folders above it are made.

    Raises `R18Error` where it cannot be written.
    """
    if target.is_dir():
        raise UsageError(f"'{target}' is a folder; name a file in it")
    try:
        with output_file(target) as draft:
            draft.write_text(text, "utf-8")
    except OSError as error:
        raise R18Error(f"cannot write '{target}': {error}; choose another place") from error


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill; when the block ends, it is renamed to `target`.

    An empty folder may be there already. With `overwrite` any folder may: it is renamed away, put
    back when the new one cannot take its place, and deleted afterwards, so that at every moment
    the old or the new one is on the disk whole; the caller decides whether it may be deleted.
    Folders above it are made. Raises `OSError`, also when `target` has appeared in the meantime.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = _sibling(target)
    draft.mkdir()
    try:
        yield draft
        for path in draft.rglob("*"):
            _flush(path)
        _flush(draft)
        if overwrite and target.exists():
            _replace(draft, target)
        else:
            if os.name == "nt" and target.is_dir():
                target.rmdir()  # POSIX replaces an empty folder itself
            os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _flush(target.parent)


def check_free(
    target: Path,
    kind: str,
    description: str,
    overwrite: bool,
    check: Callable[[Path], object],
    error: type[R18Error],
) -> None:
    """Raise `error` unless a folder of a kind may be written at `target`.

    It may where there is none, or an empty one; with `overwrite` also where there is one that holds
    `.bin` files and the file `description`, for which `check` raises no `R18Error`.
    """
    where = f"cannot write the {kind} '{target}'"
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise error(f"{where}: it is a file or a link; name a folder")
    if why := _no_folder(target.parent, writable=True):
        raise error(f"{where}: {why}; choose another place")
    held = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if not held:
        return
    foreign = [name for name in held if name != description and not name.endswith(".bin")]
    reason = ""
    if foreign or description not in held:
        reason = f"it holds '{(foreign or held)[0]}'"
    else:
        try:
            check(target / description)
        except R18Error as found:
            reason = str(found)
    if reason:
        raise error(
            f"{where}: it is no {kind}, {reason}\n  choose another folder, or empty this one"
        )
    if not overwrite:
        raise error(
            f"{where}: one is there already\n"
            "  replace it with --force (overwrite=True), or choose another folder"
        )


def _replace(draft: Path, target: Path) -> None:
    old = _sibling(target)
    try:
        os.rename(target, old)
        os.rename(draft, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def is_stream(path: Path) -> bool:
    """Whether `path` takes what is written and is no file to replace: a pipe, a device, a socket.

    So is what is open already, such as `/dev/stdout`, even if it is a file: `/proc` has its name.
    """
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)
        if path.is_relative_to("/proc"):
            return path.exists()
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    return path.exists() and not (path.is_file() or path.is_dir())


def _followed(path: Path) -> Path:
    """The place that a link leads to; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _sibling(target: Path) -> Path:
    """A new name in the same folder. File systems take names of at most 255 bytes."""
    name = os.fsencode(target.name)[:MOST_NAME].decode("utf-8", "ignore")
    return target.with_name(f".{name}.{secrets.token_hex(6)}.tmp")


def _flush(path: Path) -> None:
    """Flush a file to the disk; a folder too, where the system can (not on Windows)."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "check_file",
    "check_folder",
    "check_output",
    "check_replaceable",
    "holds_something",
    "is_stream",
    "new_file",
    "new_folder",
    "output_file",
    "write_text",
]
