"""ZIP archives that are not trusted: few members, each read to its end.

A member's checksum is compared only when its end is reached, so every member is read to its end.
Faults raise `ValueError`, or whatever `zipfile` raises on hostile bytes.
"""

from __future__ import annotations

import zipfile
from io import BytesIO
from typing import IO

from r18.errors import plain

MOST_MEMBERS = 20_000
"""The most members; a ResNet-34's checkpoint with an optimizer's state has 900."""

_ENTRY = b"PK\x01\x02"
"""Before every entry of an archive's list of members, whatever the fields around it say."""


def open_archive(data: bytes) -> zipfile.ZipFile:
    """The archive in these bytes; its members have different names, and are stored or deflated."""
    if (count := data.count(_ENTRY)) > MOST_MEMBERS:
        raise ValueError(f"it has {count:,} members, at most {MOST_MEMBERS:,} are read")
    archive = zipfile.ZipFile(BytesIO(data))
    names: set[str] = set()
    for member in archive.infolist():
        if member.filename in names:
            raise ValueError(f"'{plain(member.filename)}' is in it twice")
        names.add(member.filename)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"'{plain(member.filename)}' is compressed in an unusual way")
    return archive


def read_exactly(stream: IO[bytes], nbytes: int) -> bytes:
    """The rest of a member: that many bytes and no more, with the right checksum."""
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise ValueError(f"it ends after {len(data):,} bytes of {nbytes:,}")
    if stream.read(1):  # at the end the checksum is compared
        raise ValueError(f"more follows its {nbytes:,} bytes")
    return data


__all__ = ["open_archive", "read_exactly"]
