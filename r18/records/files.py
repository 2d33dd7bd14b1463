"""Records as files: their names, and reading and writing them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from r18.atomic import write_text
from r18.backend import DeviceInfo
from r18.cpu import model_slug
from r18.errors import R18Error, UsageError, plain
from r18.files import JSON_LIMIT, read_object
from r18.records.kinds import KINDS, Record

FOLDER = Path("exports/records")
FORMAT = 1
REMEDY = "  move it out of the folder and make a new one: --record writes it"
"""The remedy for a record that cannot be used."""

Kind = TypeVar("Kind", bound=Record)


def slug(what: str, device: DeviceInfo) -> str:
    """The device in the file name of a record of `what` ("verify", "bench", ...).

    `DeviceInfo.slug`, which is `cpu` for every CPU. In a record of times it is the model of this
    machine's CPU, so that records of several models have a file each.
    """
    if device.kind == "cpu" and KINDS[what].times:
        return model_slug()
    return device.slug


def path_of(folder: Path, what: str, device: DeviceInfo) -> Path:
    """The path of the record of `what` on a device, which is this machine's; see `slug`."""
    return folder / f"{what}-{slug(what, device)}.json"


def load(path: Path, kind: type[Kind]) -> Kind | None:
    """The record in a file, checked as it is decoded; None where there is no file.

    Raises `UsageError` for a file that is damaged, or of another kind or format; the message names
    the file, the place in it and what is expected there.
    """
    try:
        # NOTE: msgspec rejects lone surrogates, which names of files may hold; json does not.
        data = read_object(path, JSON_LIMIT, UsageError)
    except FileNotFoundError:
        return None
    except (OSError, UsageError) as error:
        raise UsageError(f"cannot read the record '{path}': {error}\n{REMEDY}") from None
    what = kind.__struct_config__.tag
    if (data.get("record"), data.get("format")) != (what, FORMAT):
        raise UsageError(f"'{path}' is no {what} record that this version of r18 wrote\n{REMEDY}")
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        message = _located(data, kind, str(error))
        raise UsageError(
            f"the record '{path}' is damaged or of an older r18: {plain(message)}\n{REMEDY}"
        ) from None


def load_all(folder: Path, kind: type[Kind]) -> dict[str, Kind]:
    """Every device's record in a folder, by the device's slug; raises as `load`."""
    what = kind.__struct_config__.tag
    found = {path: load(path, kind) for path in sorted(folder.glob(f"{what}-*.json"))}
    return {path.stem.removeprefix(f"{what}-"): one for path, one in found.items() if one}


def write(path: Path, data: Record | dict[str, Any]) -> None:
    """Write a record, whole or not at all. Raises `R18Error` where it cannot be written."""
    plain = msgspec.to_builtins(data)
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def update(path: Path, kind: type[Kind], change: Callable[[Kind | None], Kind]) -> None:
    """Replace a record by what `change` makes of it, or of None where there is no file.

    Commands that do so at the same time take turns, so none loses what another has written. Raises
    as `load` and `write`.
    """
    with _locked(path.parent):
        write(path, change(load(path, kind)))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Other processes that ask for the folder wait. The lock goes with the process, and leaves no
    file behind. On Windows, which cannot lock a folder, it does nothing.
    """
    if fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise R18Error(f"cannot write to '{folder}': {error}; choose another place") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _located(data: Any, kind: type[Any], message: str) -> str:
    """The message of a `ValidationError` with keys in place of msgspec's `[...]`.

    Each table on the way is cut down to one entry at a time until only that entry gives the same
    message.
    """
    before, found, path = message.partition(" - at `$")
    if not found:
        return message
    place, table = "", data
    for step in re.findall(r"\.[^.[]+|\[[^\]]*\]", path.removesuffix("`")):
        if step != "[...]":
            key: Any = step[1:] if step[0] == "." else int(step[1:-1])
        else:
            entries = dict(table)
            for key, value in entries.items():
                table.clear()
                table[key] = value
                if _message(data, kind) == message:
                    break
            step = f"[{key!r}]"
        place, table = place + step, table[key]
    return f"{before} - at `${place}`"


def _message(data: Any, kind: type[Any]) -> str:
    try:
        msgspec.convert(data, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        return str(error)
    return ""


__all__ = [
    "FOLDER",
    "FORMAT",
    "REMEDY",
    "load",
    "load_all",
    "path_of",
    "slug",
    "update",
    "write",
]
